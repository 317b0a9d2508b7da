"""Each turn of a conversation is known as such at every server of a store, so that it can go to the same engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from itertools import cycle
from typing import Any

import pytest

from penstock.services.engines.affinity import SESSION_HEADER, conversation_of, is_new
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.server import ScriptedServer, running_server, script
from tests.support.socket_client import connected

TURNS = 4

Servers = list[ScriptedServer]


@pytest.fixture
async def servers(store_at: str) -> AsyncGenerator[Servers, None]:
    """Two servers of one store."""
    async with AsyncExitStack() as closing:
        yield [await closing.enter_async_context(running_server(ScriptedEngine(script()), store_at)) for _ in range(2)]


def conversations(servers: Servers) -> set[str]:
    """The conversations that the engines have read."""
    return {conversation_of(prompt.facts) for server in servers for prompt in server.engine.prompts}


def new(servers: Servers) -> int:
    return sum(is_new(prompt.facts) for server in servers for prompt in server.engine.prompts)


async def ended_response(server: ScriptedServer, **body: Any) -> dict[str, Any]:
    status, answer = await server.post(body)
    assert status == 200
    return dict(answer) if not body.get("background") else await server.wait_for_end(answer["id"])


@pytest.mark.parametrize("background", [False, True])
async def test_chain_and_its_forks_are_one_conversation(servers: Servers, *, background: bool) -> None:
    first = await ended_response(servers[0], input="Hi")
    for fork in range(2):
        last = first
        for turn, server in zip(range(TURNS), cycle(servers)):
            sent = {"input": f"Fork {fork}, turn {turn}", "instructions": f"Turn {turn}", "background": background}
            last = await ended_response(server, **sent, previous_response_id=last["id"])
    assert len(conversations(servers)) == new(servers) == 1
    await ended_response(servers[1], input="Hello")
    assert len(conversations(servers)) == new(servers) == 2


async def test_conversation_that_is_sent_again_is_the_chain(servers: Servers) -> None:
    sent: list[Any] = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    first = await ended_response(servers[0], input=sent)
    for turn, server in zip(range(TURNS), cycle(servers)):
        output = [{key: value for key, value in item.items() if key != "id"} for item in first["output"]]
        sent += [*output, {"role": "user", "content": f"Turn {turn}"}]
        await ended_response(server, input=sent, store=False)
    await ended_response(servers[0], input="Go on", previous_response_id=first["id"])
    assert len(conversations(servers)) == new(servers) == 1


async def test_stored_conversation_is_known_by_its_id(servers: Servers) -> None:
    path = await servers[0].create_conversation()
    name = path.rpartition("/")[2]
    for server in servers * 2:
        await ended_response(server, input="Hi", conversation=name)
    assert conversations(servers) == {name}
    assert new(servers) == 1


@pytest.mark.parametrize("joined", [{"prompt_cache_key": "ours"}, {"session_id": "ours"}])
async def test_client_joins_conversations_by_a_key(servers: Servers, joined: dict[str, str]) -> None:
    for number, server in enumerate(servers):
        first = await ended_response(server, input=f"Hi {number}", **joined)
        await ended_response(server, input="Go on", previous_response_id=first["id"], **joined)
    assert conversations(servers) == {"ours"}
    assert new(servers) == 2


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/v1/completions", {"prompt": "Hi"}),
    ],
)
async def test_header_joins_requests_of_every_api(servers: Servers, path: str, body: dict[str, Any]) -> None:
    for server in servers:
        async with server.client.post(f"{server.url}{path}", json=body, headers={SESSION_HEADER: "ours"}) as answer:
            assert answer.status == 200, await answer.text()
    assert conversations(servers) == {"ours"}


@pytest.mark.parametrize("given", [[], "Hi", [{"role": "developer", "content": "Be kind."}]])
@pytest.mark.parametrize("store", [False, True])
async def test_prepared_response_is_continued_where_it_was_read(servers: Servers, given: Any, *, store: bool) -> None:
    async with connected(servers[0]) as client:
        last = await client.create(input=given, instructions="Rhyme.", generate=False, store=store)
        for turn in range(TURNS):
            last = await client.create(input=f"Turn {turn}", store=store, previous_response_id=last.id)
    if store:
        await ended_response(servers[1], input="Go on", previous_response_id=last.id)
    assert len(conversations(servers)) == 1


async def test_same_beginning_is_one_conversation_until_the_first_output(servers: Servers) -> None:
    """They share the prompt up to there."""
    greeting = {"role": "assistant", "content": "How can I help?"}
    for number, question in enumerate(["Sing.", "Rhyme."]):
        asked = [greeting, {"role": "user", "content": question}]
        await ended_response(servers[0], input=asked)
        await ended_response(servers[1], input=[*asked, greeting, {"role": "user", "content": "Go on."}])
        assert len(conversations(servers)) == number + 1
