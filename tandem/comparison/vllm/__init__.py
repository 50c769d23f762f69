"""vLLM as the engine of a comparison: its OpenAI servers as targets, with its own drafts and with ours."""
