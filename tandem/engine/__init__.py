"""From requests to steps: generator, sequences, KV slots, batcher."""
