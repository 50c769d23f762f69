"""Runs decoders of the Llama family on the CPU, in C++; a token has the same bits in every step shape."""


class NativeUnavailable(ValueError):
    """Native steps are unavailable for this model or machine; the message says why."""


class LibraryMissing(NativeUnavailable):
    """The model could run in native steps, if there were a library for this CPU; the message says how to get it."""
