"""Logs one line per finished request: method, cost, status; never prompts or outputs."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from tandem.rpc.request_context import current
from tandem.rpc.wire_sessions import drafted_in
from tandem.services.layers import Call
from tandem.services.observability.calls import CallObserver, end_of
from tandem.services.security.identity import caller
from tandem.services.sessions.table import Session, SessionKey

log = logging.getLogger("tandem.request")

_MAX_SESSIONS = 4096  # a session that is closed while it opens would otherwise stay in the table for ever

_COUNTS = ("prompt_tokens", "output_tokens", "rounds", "drafted", "accepted")


@dataclass(slots=True)
class _Tally:
    request_id: str
    prompt_tokens: int
    started: float = field(default_factory=time.perf_counter)
    output_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    adapter: str = ""


class RequestLog(CallObserver):
    """Logs Generate calls, sessions and failures at INFO, other calls at DEBUG."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._completions: dict[int, dict[str, Any]] = {}
        self._sessions: dict[SessionKey, _Tally] = {}

    def replied(self, call: Call, request: Any, reply: Any, seconds: float) -> None:
        method = call.method.rpartition("/")[2]
        if method == "Generate":
            if done := end_of(reply):
                done |= _adapted(_adapter_of(request))
                self._completions[id(call)] = _with(self._completions.get(id(call)), done)
        elif method == "OpenSession":
            opened = _Tally(call.request_id, request.prompt_length, adapter=request.adapter)
            self._sessions.setdefault(_key(request), opened)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
        elif method in ("Verify", "VerifyStream"):
            tally = self._sessions.get(_key(request))
            if tally and not (reply.stale or reply.replayed):
                tally.rounds += 1
                tally.drafted += drafted_in(request, reply)
                tally.accepted += reply.accepted
                tally.output_tokens += len(reply.token_ids)

    def ended(self, call: Call) -> None:
        done = self._completions.pop(id(call), None)
        failed = call.code not in ("OK", "CANCELLED")
        loud = failed or call.method.endswith("/Generate")
        level = logging.INFO if loud else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        fields: dict[str, Any] = {"role": self._role, "method": call.method, "status": call.code}
        if done is not None:
            fields |= done
        fields["seconds"] = round(call.seconds, 4)
        if failed:
            fields |= {"reason": call.reason, "error": call.message}
        log.log(level, "%s", _line(fields), extra={"fields": fields})

    def session_ended(self, session: Session, how: str) -> None:
        tally = self._sessions.pop(session.session_id, None)
        if tally is None:  # its opening failed
            return
        fields: dict[str, Any] = {"role": self._role, "method": "session", "status": how}
        fields |= {name: getattr(tally, name) for name in _COUNTS} | _adapted(tally.adapter)
        fields["seconds"] = round(time.perf_counter() - tally.started, 4)
        log.info("%s", _line(fields), extra={"fields": fields, "request_id": tally.request_id})


def _key(request: Any) -> SessionKey:
    return SessionKey(caller(), request.session_id)


def _adapter_of(request: Any) -> str:
    # Over HTTP the context has the adapter.
    if "generation" in request.DESCRIPTOR.fields_by_name:
        return str(request.generation.adapter)
    asked = current()
    return asked.adapter if asked else ""


def _adapted(adapter: str) -> dict[str, str]:
    # A server's own adapter name is safe to log.
    return {"adapter": adapter} if adapter else {}


def _with(choices: dict[str, Any] | None, choice: dict[str, Any]) -> dict[str, Any]:
    if choices is None:
        return choice
    return choice | {name: choices[name] + choice[name] for name in ("output_tokens", "drafted", "accepted")}


def _line(fields: dict[str, Any]) -> str:
    # target TargetVerifier/Generate: OK, length, 5 prompt tokens, 20 output tokens, ...
    said = [f"{fields['role']} {fields['method']}: {fields['status']}"]
    if fields.get("finish_reason"):
        said.append(fields["finish_reason"].replace("_", " "))
    said += [f"adapter {fields['adapter']}"] if "adapter" in fields else []
    if "drafted" in fields:
        said.append(f"{fields['prompt_tokens']} prompt tokens")
        said.append(f"{fields['output_tokens']} output tokens")
        said += [f"{fields['rounds']} rounds"] if "rounds" in fields else []
        said.append(f"{fields['accepted']} of {fields['drafted']} draft tokens accepted")
    said.append(f"{fields['seconds']:.3f} s")
    why = fields.get("error") or fields.get("reason")
    return ", ".join(said) + (f": {why}" if why else "")
