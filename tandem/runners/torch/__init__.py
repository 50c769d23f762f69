"""Runs transformers modules with a slot KV cache, on cpu, cuda and neuron."""
