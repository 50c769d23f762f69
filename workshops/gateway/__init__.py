"""Starts the gateway for OpenAI clients, smg, in front of servers (docs/openai.md)."""
