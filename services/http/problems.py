"""Errors of requests over HTTP. services/errors.py gives each its status."""

from __future__ import annotations


class NoSuchPath(Exception):
    """Nothing is served at this path."""


class NoSuchModel(Exception):
    """The request names a model that is not served here."""


class WrongMethod(Exception):
    """The path is served to another method."""


class NotJson(Exception):
    """The body says that it is something else than JSON, or packed as this server does not read it."""


class BodyTooLarge(Exception):
    """The body is larger than the server's limit."""

    @classmethod
    def of(cls, most: int) -> BodyTooLarge:
        return cls(f"the body is larger than this server's limit of {most} bytes (max_message_bytes)")


class BodyLate(Exception):
    """The body did not arrive in time."""
