"""A chat with too many calls of tools is refused before any of them is parsed."""

from __future__ import annotations

import pytest

from tandem.services.http.messages import messages
from tandem.speculation.errors import InvalidField


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([1, 129], r"messages\[1\]\.tool_calls: 129 are above the limit of 128"),
        ([128] * 9, "messages: 1152 calls of tools are above the limit of 1024"),
        ([128] * 8, r"messages\[0\]\.tool_calls\[0\]"),
    ],
)
def test_too_many_calls_are_refused_unread(counts: list[int], said: str) -> None:
    unread = {"function": "not even an object"}
    with pytest.raises(InvalidField, match=said):
        messages("messages", [{"role": "assistant", "tool_calls": [unread] * count} for count in counts])
