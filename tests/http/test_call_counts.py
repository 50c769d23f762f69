"""A chat with too many calls of tools is refused before any of them is parsed, over HTTP and gRPC alike."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.rpc.wire import chat_from_wire
from tandem.services.http.messages import messages
from tandem.speculation.chat import MAX_CALLS_OF_CHAT, MAX_TOOL_CALLS
from tandem.speculation.errors import InvalidField
from tandem.v1 import generation_pb2 as pb

UNREAD = {"function": "not even an object"}
"""A call that would be refused for itself if it were looked at."""


def of_http(counts: list[int]) -> Any:
    return messages("messages", [{"role": "assistant", "tool_calls": [UNREAD] * count} for count in counts])


def of_grpc(counts: list[int]) -> Any:
    calls = [pb.ToolCall(arguments="{")]
    return chat_from_wire(pb.ChatMessages(messages=[pb.ChatMessage(role="x", tool_calls=calls * n) for n in counts]))


@pytest.mark.parametrize("read", [of_http, of_grpc])
def test_too_many_calls_are_refused_unread(read: Any) -> None:
    with pytest.raises(InvalidField, match=rf"messages\[1\]\.tool_calls: 129 are above the limit of {MAX_TOOL_CALLS}"):
        read([1, 129])
    with pytest.raises(
        InvalidField, match=rf"messages: 1152 calls of tools are above the limit of {MAX_CALLS_OF_CHAT}"
    ):
        read([128] * 9)
    with pytest.raises(InvalidField) as found:
        read([128] * 8)
    assert "above the limit" not in str(found.value)
