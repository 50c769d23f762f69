"""Decoders of the Llama family on the CPU, in C++: every token has the same bits in every shape of step."""
