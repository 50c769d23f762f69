"""Logs one line per finished request: method, cost, status; content only with --log_prompts."""

from __future__ import annotations

import logging
import time
from typing import Any

from google.protobuf import text_format

from tandem.services.calls import Call, CallObserver
from tandem.services.security.callers import caller
from tandem.services.sessions.table import Session

log = logging.getLogger("tandem.request")
prompts = logging.getLogger("tandem.prompts")


class RequestLog(CallObserver):
    """Logs Generate calls, sessions and failures at INFO, other calls at DEBUG."""

    def __init__(self, role: str) -> None:
        self._role = role

    def ended(self, call: Call) -> None:
        failed = call.code not in ("OK", "CANCELLED")
        loud = failed or call.method.endswith("/Generate")
        level = logging.INFO if loud else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        fields = {"role": self._role, "method": call.method, "status": call.code, **call.done}
        fields["seconds"] = round(call.seconds, 4)
        if failed:
            fields |= {"reason": call.reason, "error": call.message}
        log.log(level, "%s", _line(fields), extra={"fields": fields})

    def session_ended(self, session: Session, how: str) -> None:
        stats, adapter = session.stats, session.request.adapter
        if not session.opened:
            return
        fields: dict[str, Any] = {"role": self._role, "method": "session", "status": how}
        fields |= {"prompt_tokens": session.prompt_length, "output_tokens": stats.accepted + stats.rounds}
        fields |= {name: getattr(stats, name) for name in ("rounds", "drafted", "accepted")}
        fields |= {"adapter": adapter} if adapter else {}
        fields["seconds"] = round(time.perf_counter() - session.started, 4)
        log.info("%s", _line(fields), extra={"fields": fields, "request_id": session.request_id})


def _line(fields: dict[str, Any]) -> str:
    # target TargetVerifier/Generate: OK, length, 5 prompt tokens, 20 output tokens, ...
    parts = [f"{fields['role']} {fields['method']}: {fields['status']}"]
    if fields.get("finish_reason"):
        parts.append(fields["finish_reason"].replace("_", " "))
    parts += [f"adapter {fields['adapter']}"] if "adapter" in fields else []
    if "drafted" in fields:
        parts.append(f"{fields['prompt_tokens']} prompt tokens")
        parts.append(f"{fields['output_tokens']} output tokens")
        parts += [f"{fields['rounds']} rounds"] if "rounds" in fields else []
        parts.append(f"{fields['accepted']} of {fields['drafted']} draft tokens accepted")
    parts.append(f"{fields['seconds']:.3f} s")
    why = fields.get("error") or fields.get("reason")
    return ", ".join(parts) + (f": {why}" if why else "")


class PromptLog(CallObserver):
    """Logs complete requests and replies."""

    def received(self, call: Call, message: Any, size: int | None) -> None:
        if message is not None:
            self._log(call, "asked", message)

    def replied(self, call: Call, request: Any, reply: Any, seconds: float) -> None:
        self._log(call, "answered", reply)

    def _log(self, call: Call, what: str, message: Any) -> None:
        name = call.path.rpartition("/")[2]
        if getattr(message, "next_steps", ()):  # each of them is a reply of its own
            first = type(message)()
            first.CopyFrom(message)
            first.ClearField("next_steps")
            message = first
        text = text_format.MessageToString(message, as_one_line=True, as_utf8=True)
        prompts.info("%s of %s %s: %s", name, caller() or "anonymous", what, text)
