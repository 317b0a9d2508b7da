"""A request leaves nothing in memory: its objects are freed as it ends, without the garbage collector."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import pytest

from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.pipeline.errors import EngineFailed
from penstock.services.engines.scripted import Script, ScriptedEngine
from tests.support.api_clients import Json
from tests.support.chat_families import load_model
from tests.support.mcp_servers import stdio_server
from tests.support.paths import PRODUCT, ROOT
from tests.support.server import (
    CALL,
    WEATHER,
    PacedEngine,
    PacedServer,
    ScriptedServer,
    recording_server,
    running_server,
    script,
)
from tests.support.socket_client import connected
from tests.support.tool_servers import (
    CODE_TOOL,
    answer_markup,
    call_markup,
    mcp_tool,
    play_turns,
    python_markup,
    respond,
    tool_server,
)

AnyServer = TypeVar("AnyServer", bound=ScriptedServer)
Visit: TypeAlias = Callable[[AnyServer], Awaitable[object]]

VISITS = 3

FOLDERS = tuple(f"{ROOT / name}/" for name in PRODUCT)
"""The folders with the code of the product."""

RESPONSES, CHAT, MESSAGES, COMPLETIONS = "/v1/responses", "/v1/chat/completions", "/v1/messages", "/v1/completions"
SAID = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "json_schema", "name": "s", "schema": {"type": "object"}}
TOOLS = [WEATHER, {**WEATHER, "name": "deferred", "defer_loading": True}, {"type": "tool_search"}]

REQUESTS: dict[str, tuple[str, Json]] = {
    "text": (RESPONSES, {"input": "Hi"}),
    "unstored": (RESPONSES, {"input": "Hi", "store": False}),
    "instructions": (RESPONSES, {"input": SAID, "instructions": "Be kind.", "text": {"format": SCHEMA}}),
    "large": (RESPONSES, {"input": SAID * 500, "truncation": "auto"}),
    "functions": (RESPONSES, {"input": "Hi", "tools": TOOLS}),
    "compaction": (RESPONSES, {"input": SAID * 9, "context_management": [{"type": "compaction"}]}),
    "chat": (CHAT, {"model": "tiny", "messages": SAID}),
    "Messages": (MESSAGES, {"model": "tiny", "messages": SAID, "max_tokens": 90}),
    "completion": (COMPLETIONS, {"model": "tiny", "prompt": "Hi", "max_tokens": 90}),
    "unknown model": (RESPONSES, {"input": "Hi", "model": "none"}),
    "wrong type": (RESPONSES, {"input": 5}),
    "wrong chat": (CHAT, {"model": "tiny", "messages": [{}]}),
    "unknown response": (RESPONSES, {"input": "Hi", "previous_response_id": "resp_none"}),
}
"""Requests that are answered or refused, by name; each is also sent for a stream."""


@contextmanager
def uncollected() -> Iterator[Counter[str]]:
    """Count the objects of this project that only the collector can free at the end of the block, by type."""
    found = Counter[str]()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect(0)  # only what the block has made: all else is in an older generation, and long to search
        found.update(name for each in gc.garbage if (name := _own_name(each)))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _own_name(value: object) -> str | None:
    """Return the name of an object of this project, or of a function or frame of its code; None for all others."""
    for code in (getattr(value, name, None) for name in ("__code__", "f_code", "gi_code", "ag_code", "cr_code")):
        if code is not None and code.co_filename.startswith(FOLDERS):
            return str(code.co_qualname)
    kind = type(value)
    return kind.__qualname__ if kind.__module__.startswith("penstock.") else None


async def left_by(served: AnyServer, visit: Visit[AnyServer]) -> Counter[str]:
    """Return what some visits leave; one goes before them, as it may fill caches."""
    await visit(served)
    await served.wait_until_idle()
    with uncollected() as found:
        for _ in range(VISITS):
            await visit(served)
        await served.wait_until_idle()
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REQUESTS)
async def test_request_leaves_nothing_to_the_collector(tmp_path: Path, name: str, stream: bool) -> None:
    path, body = REQUESTS[name]

    async def visit(served: PacedServer) -> None:
        async with served.client.post(served.url + path, json={**body, "stream": stream}) as answer:
            assert await answer.read()

    async with running_server(PacedEngine(script()), tmp_path) as served:
        assert await left_by(served, visit) == {}


async def cancelled(served: PacedServer) -> None:
    served.engine.hold(1)
    response_id = await served.start_background()
    await served.cancel(response_id)
    assert (await served.wait_for_end(response_id))["status"] == "cancelled"


async def left(served: PacedServer) -> None:
    served.engine.hold(3)
    async with served.open_stream() as stream:
        await stream.response_id()


async def resumed(served: PacedServer) -> None:
    async with served.open_stream({"background": True}) as stream:
        response_id = await stream.response_id()
    assert await served.replay(response_id)


async def continued(served: PacedServer) -> None:
    _, first = await served.post({"input": "Hi"})
    status, second = await served.post({"input": "And?", "previous_response_id": first["id"]})
    assert (status, second["status"]) == (200, "completed")


async def in_a_conversation(served: PacedServer) -> None:
    path = await served.create_conversation()
    await served.post({"input": "Hi", "conversation": path.rpartition("/")[2]})
    await served.delete(path)


async def deleted(served: PacedServer) -> None:
    _, answer = await served.post({"input": "Hi"})
    assert (await served.delete(f"{RESPONSES}/{answer['id']}"))[0] == 200


async def over_a_socket(served: PacedServer) -> None:
    async with connected(served) as client:
        await client.create(input="Hi")
        await client.create(input="And?")


async def failed(served: PacedServer) -> None:
    served.engine.script = script(error=partial(EngineFailed, "It broke."))  # frames of its traceback hold the script
    _, answer = await served.post({"input": "Hi"})
    assert answer["error"]


async def with_a_call(served: PacedServer) -> None:
    served.engine.script = script(CALL)
    _, answer = await served.post({"input": "Hi", "tools": [WEATHER]})
    assert answer["output"][-1]["type"] == "function_call"


@pytest.mark.parametrize(
    "visit",
    [cancelled, left, resumed, continued, in_a_conversation, deleted, over_a_socket, failed, with_a_call],
    ids=lambda visit: visit.__name__,
)
async def test_response_leaves_nothing_to_the_collector(tmp_path: Path, visit: Visit[PacedServer]) -> None:
    async with running_server(PacedEngine(script()), tmp_path) as served:
        assert await left_by(served, visit) == {}


CHAT_TURNS = {
    "text": "<think>\n\n</think>\n\nHello!",
    "thought": "<think>\nA greeting.\n</think>\n\nHello!",
    "call": '<think>\n\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
}
"""The turns of a model with a chat template, by kind."""


@pytest.mark.parametrize("kind", CHAT_TURNS)
async def test_chat_model_leaves_nothing_to_the_collector(tmp_path: Path, kind: str) -> None:
    model = load_model()
    turn = Script((*model.vocabulary.encode(CHAT_TURNS[kind]), model.vocabulary.marks["<|im_end|>"]))

    async def visit(served: ScriptedServer) -> None:
        await served.stream({"input": "Hi", "tools": [WEATHER]})

    async with running_server(ScriptedEngine(turn), tmp_path, model=model) as served:
        assert await left_by(served, visit) == {}


async def test_recorder_leaves_nothing_to_the_collector(tmp_path: Path) -> None:
    async def visit(served: ScriptedServer) -> None:
        await served.stream({"input": "Hi"})

    async with recording_server(ScriptedEngine(script()), tmp_path / "recorded") as served:
        assert await left_by(served, visit) == {}


TURNS: dict[str, tuple[list[str], Json]] = {
    "search for tools": (
        [call_markup("functions.tool_search", {"query": "weather"}), answer_markup()],
        {"tools": TOOLS},
    ),
    "call without a tool": ([call_markup("functions.none", {}), answer_markup()], {}),
    "call of a server": ([call_markup("docs.echo", {"text": "hello"}), answer_markup()], {"tools": [mcp_tool()]}),
    "code": ([python_markup("print(1)"), answer_markup()], {"tools": [CODE_TOOL]}),
}
"""The turns of a model that calls tools, and the request."""


@pytest.mark.parametrize("name", TURNS)
async def test_calls_leave_nothing_to_the_collector(tmp_path: Path, sandbox: Sandbox, name: str) -> None:
    turns, body = TURNS[name]

    async def visit(served: ScriptedServer) -> None:
        play_turns(served.engine, *turns)
        assert (await respond(served, "stream", body)).response["status"] == "completed"

    async with tool_server(tmp_path, turns, servers={"docs": stdio_server()}, sandbox=sandbox) as served:
        assert await left_by(served, visit) == {}
