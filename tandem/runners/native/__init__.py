"""Decoders of the Llama family on the CPU, in C++: every token has the same bits in every shape of step."""


class NativeUnavailable(ValueError):
    """Native steps cannot be had for this model on this machine; the message says why."""
