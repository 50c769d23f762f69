"""Errors of requests over HTTP. services/errors.py gives each its status."""

from __future__ import annotations


class NoSuchPath(Exception):
    """Nothing is served at this path."""


class NoSuchModel(Exception):
    """The request names a model that is not served here."""


class WrongMethod(Exception):
    """The path is served to another method."""


class NotJson(Exception):
    """The body says that it is something else than JSON."""


class BodyTooLarge(Exception):
    """The body is larger than the server's limit."""


class BodyLate(Exception):
    """The body did not arrive in time."""
