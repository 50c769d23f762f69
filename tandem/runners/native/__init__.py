"""Runs Llama-family decoders on the CPU, in C++; a token has the same bits in every step shape."""


class NativeUnavailable(ValueError):
    """Native steps are unavailable for this model or machine; the message says why."""


class LibraryMissing(NativeUnavailable):
    """This CPU has no library and no compiler that makes one; the message says how to get one."""
