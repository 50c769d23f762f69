"""Formats log lines as text or JSON with request ids; never prompts or tokens."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from tandem.rpc.request_context import current

FORMATS = ("text", "json")
_GRPC = "grpc._cython.cygrpc"
_CALLER_LEFT = "ExecuteBatchError raised in core"  # grpc.aio logs it, with a traceback, for callers that disconnect


def set_up(log_format: str, debug: bool = False, rank: int = 0) -> None:
    """Logs to stderr, labelled with a `rank` above 0. Raises ValueError."""
    if log_format not in FORMATS:
        raise ValueError(f"log_format: {log_format!r} is not one of {', '.join(FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(rank) if log_format == "json" else TextFormatter(rank))
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler])
    logging.getLogger(_GRPC).addFilter(drop_disconnect_errors)


def drop_disconnect_errors(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_CALLER_LEFT)


class TextFormatter(logging.Formatter):
    """time level logger: [rank] message [request id]"""

    def __init__(self, rank: int = 0) -> None:
        label = f"[rank {rank}] " if rank else ""
        super().__init__(f"%(asctime)s %(levelname)s %(name)s: {label}%(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        # Quoted input must neither forge log lines nor control the terminal.
        request_id = _request_id(record)
        line = printable(super().formatMessage(record), None)
        return f"{line} [{printable(request_id, None)}]" if request_id else line

    def formatException(self, ei: Any) -> str:
        # Indented, so that no traceback line looks like a log entry.
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {printable(line, None)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """One object per line, with the record's `fields`."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._rank:
            line["rank"] = self._rank
        request_id = _request_id(record)
        if request_id:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _request_id(record: logging.LogRecord) -> str | None:
    said: str | None = getattr(record, "request_id", None)
    request = current()
    return said or (request.id if request else None)


MAX_BYTES = 600
"""A status has its message three times, and all trailing metadata must fit in 8 KiB."""
_CUT = " ..."


def printable(text: str, most: int | None = MAX_BYTES) -> str:
    """Escapes unprintable characters and truncates to `most` bytes of UTF-8; None: no limit."""
    if most is not None and len(text) > most:
        text = text[: most + 1]  # escaping only lengthens it, and the text may be megabytes long
    if not text.isprintable():
        text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    if most is None or len(text.encode()) <= most:
        return text
    return text.encode()[: most - len(_CUT)].decode(errors="ignore") + _CUT
