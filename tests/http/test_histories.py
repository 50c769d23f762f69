"""What public SDKs send on the second turn of an agent, recorded from them, is served as it is.

Each message went through the SDK as an answer; `of a model that thinks`: the answer had `reasoning_content`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.site import CHAT, Site, at_door
from tests.support import REPOSITORY

HISTORIES: dict[str, list[dict[str, Any]]] = json.loads((REPOSITORY / "tests/http/histories.json").read_text("utf-8"))
SHORT = {"max_tokens": 2, "max_completion_tokens": None}
SHOWN = {"stream": False, "stream_options": None, "return_token_ids": True}


@pytest.mark.parametrize("sdk", HISTORIES)
@at_door(length=2048)
async def test_a_history_is_served_as_the_sdk_sends_it_and_shown_to_the_model(site: Site, sdk: str) -> None:
    for body in HISTORIES[sdk]:
        answer = await site.post(CHAT, {**body, **SHORT})
        assert answer.status_code == 200, answer.text
        answer = await site.post(CHAT, {**body, **SHORT, **SHOWN})
        shown = bytes(answer.json()["prompt_token_ids"]).decode()
        texts = ["weather in Paris?", '{"name": "weather", "arguments": {"city": "Paris"}}', "sunny in Paris"]
        if body["messages"][-1]["role"] == "user":
            texts += ["It is sunny", "And now?"]
        places = [shown.find(text) for text in texts]
        assert places == sorted(places) and places[0] >= 0, shown
