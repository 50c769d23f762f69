"""Runs Llama-family decoders on the CPU, in C++; a token has the same bits in every step shape."""


class NativeUnavailable(ValueError):
    """Native steps are unavailable for this model or machine; the message says why."""


class LibraryMissing(NativeUnavailable):
    """Native steps could run this model, but this CPU has no library; the message says how to get one."""
