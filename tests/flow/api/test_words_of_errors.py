"""Clients act on a prompt that is too long by words of its error: they compact, or take a larger model.

``tests/live/clients/test_errors.py`` asks real clients; these patterns are those of clients that it does not install.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.services.engines.scripted import ScriptedEngine
from tests.support.server import running_server, script
from tests.support.socket_client import connected

PATTERNS = {
    "litellm": "this model's maximum context length is",
    "langchain": "prompt is too long",
    "pi, opencode": r"prompt is too long|maximum context length is \d+ tokens",
    "inspect-ai, crewai, pydantic-ai": "maximum context length",
}
LONG = "long " * 3000
USER = [{"role": "user", "content": LONG}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/responses", {"input": LONG, "background": True}),
    ("/openresponses/v1/responses", {"input": LONG}),
]


def assert_known(error: Any) -> None:
    assert error["code"] == "context_length_exceeded"
    for client, pattern in PATTERNS.items():
        assert re.search(pattern, error["message"].lower()), client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_prompt_that_is_too_long_is_refused_in_known_words(
    tmp_path: Path,
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    async with running_server(ScriptedEngine(script(), context_length=2000), tmp_path) as served:
        status, answer = await served.post({**body, "stream": stream}, path)
    assert status == 400
    assert_known(answer["error"])


async def test_a_socket_refuses_it_in_the_same_words(tmp_path: Path) -> None:
    async with (
        running_server(ScriptedEngine(script(), context_length=2000), tmp_path) as served,
        connected(served) as client,
    ):
        await client.send(input=LONG)
        assert_known((await client.frame())["error"])


async def test_messages_refuses_it_in_the_words_of_anthropic(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script(), context_length=2000), tmp_path) as served:
        status, answer = await served.post({"model": "tiny", "max_tokens": 9, "messages": USER}, "/v1/messages")
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert re.fullmatch(r"prompt is too long: \d+ tokens > \d+ maximum", answer["error"]["message"])
