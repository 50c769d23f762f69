"""What stands before smg refuses by name what smg would drop."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.services.http.fields import FIELDS, Kind
from tandem.speculation.types import InvalidField
from tandem.workshops.gateway.front import PASSED, check
from tests.http.site import HELLO
from tests.http.test_fields import SERVED, WITH

BESIDE = {"seed": 7, "stream_options": {"include_usage": True}, "prompt": "hello"}
"""Values that smg takes, where it does not take those of a server's own port."""


def asking(name: str) -> tuple[str, dict[str, Any]]:
    """A request with a value of a served field."""
    of = "chat" if "chat" in FIELDS[name].of else "completions"
    prompt = {"messages": HELLO} if of == "chat" else {"prompt": "hello"}
    return of, {"model": "toy", **prompt, "max_tokens": 3, **WITH.get(name, {}), name: BESIDE.get(name, SERVED[name])}


def test_every_served_field_is_passed_on_or_refused_by_its_name() -> None:
    for name in SERVED:
        assert FIELDS[name].kind is Kind.SERVED
        of, body = asking(name)
        if name in PASSED:
            check(of, body)
        else:
            with pytest.raises(InvalidField, match=f"^{name}: the gateway's router, smg, does not pass it on"):
                check(of, body)


@pytest.mark.parametrize(
    ("of", "more", "named"),
    [
        ("completions", {"logprobs": 1}, "logprobs: the gateway's router"),
        ("chat", {"seed": 2**31}, "seed: 2147483648 has more than smg's 32 bits"),
        ("chat", {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options: continuous"),
        ("chat", {"min_tokens": 2}, "min_tokens: "),
        ("chat", {"prompt_logprobs": 1}, "prompt_logprobs: "),
        ("chat", {"temprature": 1}, "temprature: unknown field of chat; did you mean temperature"),
    ],
)
def test_what_smg_would_drop_is_refused(of: str, more: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidField, match=named):
        check(of, {**asking("n" if of == "chat" else "echo")[1], **more})


def test_what_smg_has_itself_is_passed_on() -> None:
    check("chat", {"messages": HELLO, "regex": "[ab]", "ebnf": 'start: "a"'})
