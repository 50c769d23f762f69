"""HTTP for OpenAI clients, served by the server process itself (docs/openai.md)."""
