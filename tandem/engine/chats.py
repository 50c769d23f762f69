"""Renders chats by the model's template."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.checkpoints.tokenizers import ChatTokenizer, Tokenizer
from tandem.speculation.chat import ChatMessage
from tandem.speculation.types import InvalidField


def chat_tokens(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> list[int]:
    """Token ids of a chat, up to the assistant's next turn. Raises InvalidField."""
    if not isinstance(tokenizer, ChatTokenizer):
        raise InvalidField("messages", "this server's tokenizer renders no chats")
    shown = [each.for_template for each in messages]
    try:
        text = tokenizer.render(shown, add_generation_prompt=True, tools=None)
    except ValueError as error:
        raise InvalidField("messages", str(error)) from None
    return tokenizer.tokens(text, special=False)


def chat_length(messages: Sequence[ChatMessage]) -> int:
    """Characters of a chat; each message counts as some."""
    return sum(16 + each.length for each in messages)
