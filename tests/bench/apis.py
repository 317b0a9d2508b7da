"""The APIs over which servers are measured, and how each is asked something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tests.bench.wire import RESPONSES as RESPONSES_PATH

CHAT, RESPONSES, MESSAGES, COMPLETIONS = "Chat Completions", "Responses", "Messages", "Completions"

MOST = 100_000
"""Tokens of an answer, for APIs that want a number."""


class Api(NamedTuple):
    """The path of an API, and how it is asked something."""

    path: str
    asking: Callable[[str], Mapping[str, Any]]


def _messages(text: str) -> Mapping[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": MOST}


APIS: Mapping[str, Api] = {
    CHAT: Api("/v1/chat/completions", _messages),
    RESPONSES: Api(RESPONSES_PATH, lambda text: {"input": text}),
    MESSAGES: Api("/v1/messages", _messages),
    COMPLETIONS: Api("/v1/completions", lambda text: {"prompt": text, "max_tokens": MOST}),
}
