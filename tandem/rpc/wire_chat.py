"""Converts chat messages to protobuf and back."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.speculation.chat import MAX_MESSAGES, ChatMessage, ToolCall, check_call_counts
from tandem.speculation.errors import InvalidField
from tandem.v1 import generation_pb2 as pb


def chat_to_wire(messages: Sequence[ChatMessage]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=map(_message_to_wire, messages))


def _message_to_wire(message: ChatMessage) -> pb.ChatMessage:
    calls = [pb.ToolCall(id=each.id, name=each.name, arguments=each.arguments) for each in message.tool_calls]
    return pb.ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
    )


def texts_of(chat: pb.ChatMessages) -> str:
    _check_counts(chat)
    texts = [(each.role, each.content, each.name, each.tool_call_id) for each in chat.messages]
    calls = [(call.id, call.name, call.arguments) for each in chat.messages for call in each.tool_calls]
    return "".join(text for some in (*texts, *calls) for text in some)


def chat_from_wire(chat: pb.ChatMessages) -> tuple[ChatMessage, ...]:
    _check_counts(chat)
    return tuple(_message_from_wire(i, message) for i, message in enumerate(chat.messages))


def _check_counts(chat: pb.ChatMessages) -> None:
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidField("messages", f"{len(chat.messages)} are above the limit of {MAX_MESSAGES}")
    check_call_counts([len(each.tool_calls) for each in chat.messages])


def _message_from_wire(i: int, message: pb.ChatMessage) -> ChatMessage:
    try:
        calls = tuple(ToolCall(each.id, each.name, each.arguments) for each in message.tool_calls)
        return ChatMessage(message.role, message.content, message.name, calls, message.tool_call_id)
    except InvalidField as error:
        raise InvalidField(f"messages[{i}].{error.field}", error.fault) from None
