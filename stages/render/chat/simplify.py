"""Simplify a conversation for templates that require user and assistant to take turns.

Some templates accept only one message of instructions, at the start.  Some refuse two user messages in a row, or call
ids in another form than their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

from penstock.stages.models.chat.model import ChatMessage

_ID_LENGTH = 9


def simplified(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with all instructions in one, consecutive messages of one side merged, and short call ids.

    Short ids are Mistral's form: 9 letters or digits.
    """
    instructions = [message["content"] for message in messages if message["role"] == "system"]
    plain: list[ChatMessage] = [{"role": "system", "content": "\n\n".join(instructions)}] if instructions else []
    for message in messages:
        if message["role"] == "system":
            continue
        last = plain[-1] if plain else None
        if last and last["role"] == message["role"] == "user":
            plain[-1] = {**last, "content": _joined(last["content"], message["content"])}
        elif last and last["role"] == message["role"] == "assistant" and not last.get("tool_calls"):
            plain[-1] = {**last, **message, "content": _joined(last["content"] or "", message["content"] or "")}
        else:
            plain.append(_with_short_ids(message))
    return plain


def _joined(first: str | list[Any], second: str | list[Any]) -> str | list[Any]:
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    return [*_parts(first), *_parts(second)]


def _parts(content: str | list[Any]) -> Iterable[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_short_ids(message: ChatMessage) -> ChatMessage:
    if calls := message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": _short(call["id"])} for call in calls]}
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short(message["tool_call_id"])}
    return message


def _short(call_id: str) -> str:
    if len(call_id) == _ID_LENGTH and call_id.isalnum():
        return call_id
    return sha256(call_id.encode()).hexdigest()[:_ID_LENGTH]
