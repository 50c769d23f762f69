"""Logs complete requests and replies (--log_prompts), the only log of content."""

from __future__ import annotations

import logging
from typing import Any

from google.protobuf import text_format

from tandem.services.layers import Call, Layer
from tandem.services.security.identity import caller

log = logging.getLogger("tandem.prompts")


class PromptLayer(Layer):
    sees_messages = True

    def received(self, call: Call, message: Any, size: int | None) -> None:
        if message is not None:
            _log(call, "asked", message)

    def replied(self, call: Call, reply: Any) -> None:
        _log(call, "answered", reply)


def _log(call: Call, what: str, message: Any) -> None:
    name = call.path.rpartition("/")[2]
    text = text_format.MessageToString(message, as_one_line=True, as_utf8=True)
    log.info("%s of %s %s: %s", name, caller() or "anonymous", what, text)
