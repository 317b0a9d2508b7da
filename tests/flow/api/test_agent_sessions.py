"""The session of a request: the client's own id, or that of its coding agent, at every door."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.api.http.agent_sessions import AGENTS
from penstock.api.peers import OF_BODIES
from penstock.pipeline.frames import Origin, RequestFacts, ResponseStarted
from penstock.pipeline.recordings.redaction import without_secrets
from penstock.services.engines.affinity import SESSION_HEADER, conversation_of, session_id
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.server import ScriptedServer, running_server, script
from tests.support.socket_client import connected
from tests.support.stored_responses import facts

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hi"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/completions": {"prompt": "Hi"},
}
LONG = "s" * 257


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ScriptedServer]:
    async with running_server(ScriptedEngine(script()), tmp_path) as found:
        yield found


async def asked(
    served: ScriptedServer, headers: Mapping[str, str], path: str = "/v1/responses", **body: Any
) -> RequestFacts:
    """Return the facts that the engine gets of a request with these headers."""
    sent = {**BODIES[path], **body}
    async with served.client.post(f"{served.url}{path}", json=sent, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    return served.engine.prompts[-1].facts


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("header", [SESSION_HEADER, *AGENTS])
async def test_header_names_the_session(served: ScriptedServer, header: str, path: str) -> None:
    assert (await asked(served, {header: "one"}, path)).origin.session == "one"
    assert (await asked(served, {header.upper(): "one"}, path)).origin.session == "one"
    assert header in OF_BODIES


@pytest.mark.parametrize("header", [SESSION_HEADER, *AGENTS])
async def test_header_of_the_handshake_names_the_session(served: ScriptedServer, header: str) -> None:
    async with connected(served, headers={header: "one"}) as client:
        await client.create(input="Hi")
    assert served.engine.prompts[-1].facts.origin.session == "one"


async def test_own_id_precedes_that_of_the_agent(served: ScriptedServer) -> None:
    agents = {header: f"agent {number}" for number, header in enumerate(AGENTS)}
    assert (await asked(served, agents)).origin.session == "agent 0"
    assert (await asked(served, {**agents, SESSION_HEADER: "own"})).origin.session == "own"
    assert (await asked(served, {**agents, SESSION_HEADER: "own"}, session_id="body")).origin.session == "body"
    assert not (await asked(served, {})).origin.session


async def test_session_of_an_agent_does_not_choose_the_engine(served: ScriptedServer) -> None:
    """Its subagents have other prompts."""
    plain = await asked(served, {})
    of_agent = await asked(served, dict.fromkeys(AGENTS, "one"))
    assert (conversation_of(of_agent), session_id(of_agent)) == (conversation_of(plain), session_id(plain))
    assert conversation_of(await asked(served, {SESSION_HEADER: "own"})) == "own"


@pytest.mark.parametrize("given", [LONG, "tab\tin it"])
async def test_id_that_cannot_be_shown_becomes_a_digest(served: ScriptedServer, given: str) -> None:
    first, again, other = [
        (await asked(served, {}, session_id=each)).origin.session for each in (given, given, f"{given}2")
    ]
    assert first == again != other
    assert len(first) == 32
    assert (await asked(served, {}, session_id=LONG[1:])).origin.session == LONG[1:]


def test_recordings_have_the_session() -> None:
    begun = ResponseStarted(facts(origin=Origin(session="one", request_id="secret")))
    assert without_secrets(begun)["facts"]["origin"] == {"session": "one"}
