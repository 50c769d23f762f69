"""How a step runs: the Runner protocol and its implementations."""
