"""Each way into the server runs each stage once, from its first line to its last: a stage at every junction says so."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import EngineOverloaded
from penstock.pipeline.frames import Prompt, ResolvedRequest
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.server import collect, pipeline
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.converse.tool_loop import Limits
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.normalize.normalize import Normalize
from penstock.stages.responses import harmony_stages
from tests.support.api_clients import JSON, wait_until
from tests.support.deciding_engine import DecidingEngine
from tests.support.live_server import bearer, live_server
from tests.support.paths import ROOT
from tests.support.server import PacedEngine, Server, running_server, script
from tests.support.socket_client import connected

Frame = TypeVar("Frame")

JUNCTIONS = (
    *("before normalize", "after normalize", "after summarize", "after render", "after generate"),
    *("after parse", "after converse", "after emit", "after persist"),
)
URL = "http://127.0.0.1:1"
CLIENT = bearer("the-key-of-a-client")


@dataclass
class Diary:
    """The frames that the stages at the junctions see, in order."""

    notes: list[tuple[str, str]] = field(default_factory=list)

    def install(self, whole: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        """Put a stage at each junction."""
        for junction in JUNCTIONS:
            side, _, anchor = junction.partition(" ")
            insert = whole.insert_before if side == "before" else whole.insert_after
            whole = insert(anchor, junction, partial(self._note, junction=junction))
        return whole

    async def _note(self, source: AsyncIterator[Frame], *, junction: str) -> AsyncGenerator[Frame, None]:
        def note(what: str) -> None:
            self.notes.append((junction, what))

        note("begins")
        try:
            async for frame in source:
                note(type(frame).__name__)
                yield frame
        except BaseException:
            note("is closed")
            raise
        note("ends")

    def at(self, junction: str) -> list[str]:
        """Return what the stage at a junction has seen."""
        return [what for each, what in self.notes if each == junction and what != "ResponseQueued"]

    def seen(self) -> dict[str, list[str]]:
        """Return what all stages have seen."""
        return {junction: self.at(junction) for junction in JUNCTIONS if self.at(junction)}

    def frames_in_order(self) -> list[tuple[str, str]]:
        """Return all frames and ends in their order."""
        return [note for note in self.notes if note[1] not in ("begins", "ResponseQueued")]


@asynccontextmanager
async def noted(diary: Diary, folder: Path, engine: Any = None, **options: Any) -> AsyncGenerator[Server[Any], None]:
    """Run a server with a stage at each junction."""
    async with live_server(engine or ScriptedEngine(script()), folder, edit=diary.install, **options) as served:
        yield served


async def once(diary: Diary, count: int = 1) -> None:
    """Wait until the stages of so many responses have ended: a task of its own may go on after the last event."""
    await wait_until(lambda: sum(what in ("ends", "is closed") for _, what in diary.notes) >= count * len(JUNCTIONS))


async def run_whole(whole: Pipeline[Any, Any]) -> None:
    async with whole.open(source_of([CreateResponse(input="Hi")])) as events:
        assert (await collect(events)).status == "completed"


@pytest.fixture
async def expected(tmp_path: Path) -> Diary:
    """What the stages of a pipeline that is opened as a whole see."""
    diary = Diary()
    async with running_server(ScriptedEngine(script()), tmp_path, edit=diary.install) as served:
        await run_whole(served.scheduler.pipeline)
    assert list(diary.seen()) == list(JUNCTIONS)
    return diary


async def posted(path: str, served: Server[Any], **body: Any) -> Any:
    """Post a body with the operator's key, and read the answer to its end."""
    async with served.client.post(served.url + path, json=body, headers={**JSON, **CLIENT}) as got:
        text = await got.text()
        assert got.status == 200, text
        return await got.json() if got.content_type == "application/json" else text


class FullEngine(ScriptedEngine):
    """An engine that counts how often it is asked."""

    asked = 0

    def open(self, prompt: Prompt) -> Any:
        self.asked += 1
        return super().open(prompt)


Way = Callable[[Server[Any]], Awaitable[object]]

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}


def way(path: str, **body: Any) -> Way:
    return partial(posted, path, **body)


async def over_a_socket(served: Server[Any], lane: str | None = None) -> None:
    async with connected(served, headers=CLIENT) as client:
        assert (await client.create(lane=lane, input="Hi")).status == "completed"


async def watched(served: Server[Any]) -> None:
    async with served.client.post(f"{served.url}/live/watch", json={"input": "Hi"}, headers=bearer()) as answer:
        assert "response.completed" in await answer.text()


async def in_a_conversation(served: Server[Any]) -> None:
    made = await posted("/v1/conversations", served)
    await posted("/v1/responses", served, input="Hi", conversation=made["id"], background=True, stream=True)


WAYS: dict[str, Way] = {
    "POST /v1/responses": way("/v1/responses", input="Hi"),
    "POST /v1/responses, stream": way("/v1/responses", input="Hi", stream=True),
    "POST /v1/responses, unstored": way("/v1/responses", input="Hi", store=False),
    "POST /v1/responses, background": way("/v1/responses", input="Hi", background=True),
    "POST /v1/responses, background stream": way("/v1/responses", input="Hi", background=True, stream=True),
    "POST /v1/responses, conversation": in_a_conversation,
    "POST /openresponses/v1/responses": way("/openresponses/v1/responses", input="Hi"),
    "POST /v1/chat/completions": way("/v1/chat/completions", **CHAT),
    "POST /v1/chat/completions, stream": way("/v1/chat/completions", **CHAT, stream=True),
    "POST /v1/messages": way("/v1/messages", **CHAT, model="tiny"),
    "POST /v1/messages, stream": way("/v1/messages", **CHAT, model="tiny", stream=True),
    "GET /v1/responses": over_a_socket,
    "GET /v1/responses, lane": partial(over_a_socket, lane="a"),
    "POST /live/watch": watched,
}
"""The ways in that make a response of the script."""

OTHER_OUTPUT: dict[str, Way] = {
    "POST /v1/completions": way("/v1/completions", prompt="Hi"),
    "POST /v1/completions, stream": way("/v1/completions", prompt="Hi", stream=True),
    "POST /v1/decisions": way(
        "/v1/decisions", input="Hi", questions=[{"type": "predicate", "instructions": "It greets."}]
    ),
    "POST /v1/responses/compact": way("/v1/responses/compact", input="Hi", model="tiny"),
}
"""The ways in whose model writes something else."""

COUNTING: dict[str, Way] = {
    "POST /v1/responses/input_tokens": way("/v1/responses/input_tokens", input="Hi"),
    "POST /openresponses/v1/responses/input_tokens": way("/openresponses/v1/responses/input_tokens", input="Hi"),
    "POST /v1/messages/count_tokens": way(
        "/v1/messages/count_tokens", messages=[{"role": "user", "content": "Hi"}], model="tiny"
    ),
    "POST /tokenize": way("/tokenize", prompt="Hi"),
    "POST /detokenize": way("/detokenize", tokens=[1, 2]),
}
"""The ways in that need the prompt alone: the stages after `render` do not run."""

NO_PIPELINE = frozenset(
    {
        "POST /v1/chat/completions/{completion_id}",
        "POST /v1/conversations",
        "POST /v1/conversations/{conversation_id}",
        "POST /v1/conversations/{conversation_id}/items",
        "POST /v1/responses/{response_id}/cancel",
        "POST /v1/rollouts/{session}/reward",
        "POST /ping",
    }
)
"""The routes that take a body, or begin something, and open no pipeline."""

OPENERS = {
    "api/dialect.py": "every dialect, to answer and to count tokens",
    "api/runs/opened.py": "every response of a server, through `normalize`",
    "api/runs/scheduler.py": "every response of a server, after `normalize`",
    "api/socket/connection.py": "GET /v1/responses",
    "api/dialects/responses/routes.py": "POST /v1/responses/compact, and the background",
    "extensions/workbench/live/live.py": "POST /live/watch",
    "extensions/batches/answering.py": "the lines of batches",
}
"""The modules of a server that open a pipeline, or prepare a response, with the ways that lead there."""


@pytest.mark.parametrize("name", WAYS)
async def test_each_stage_sees_a_response_once(name: str, expected: Diary, tmp_path: Path) -> None:
    diary = Diary()
    async with noted(diary, tmp_path / "other") as served:
        await WAYS[name](served)
        await once(diary)
    assert diary.seen() == expected.seen()
    assert diary.frames_in_order() == expected.frames_in_order()


@pytest.mark.parametrize("body", [{}, {"stream": True}], ids=["", "stream"])
async def test_each_stage_sees_a_detached_response_once(body: Any, expected: Diary, tmp_path: Path) -> None:
    diary = Diary()
    async with noted(diary, tmp_path / "other", detaches=True) as served:
        await posted("/v1/responses", served, input="Hi", **body)
        await once(diary)
    assert diary.frames_in_order() == expected.frames_in_order()


@pytest.mark.parametrize("name", OTHER_OUTPUT)
async def test_each_stage_sees_another_output_once(name: str, expected: Diary, tmp_path: Path) -> None:
    diary = Diary()
    async with noted(diary, tmp_path / "other", DecidingEngine(script())) as served:
        await OTHER_OUTPUT[name](served)
        await once(diary)
    assert {junction: (seen[0], seen[-1]) for junction, seen in diary.seen().items()} == dict.fromkeys(
        JUNCTIONS, ("begins", "ends")
    )
    for junction in JUNCTIONS[:4]:
        assert diary.at(junction) == expected.at(junction)


@pytest.mark.parametrize("name", COUNTING)
async def test_stages_through_render_see_a_prompt_that_is_counted_once(
    name: str, expected: Diary, tmp_path: Path
) -> None:
    diary = Diary()
    async with noted(diary, tmp_path / "other") as served:
        await COUNTING[name](served)
    assert diary.seen() == {junction: expected.at(junction) for junction in JUNCTIONS[:3]}


async def test_each_stage_of_an_embedded_pipeline_sees_a_response_once(expected: Diary, tmp_path: Path) -> None:
    diary = Diary()

    @asynccontextmanager
    async def start(_: object) -> AsyncGenerator[RunningEngine, None]:
        yield RunningEngine(ScriptedEngine(script()), harmony_stages(load_encoding()))

    settings = Settings(engine_arguments=[], store=str(tmp_path / "embedded.sqlite3"), sandbox=False)
    async with pipeline(settings, start) as whole:
        await run_whole(diary.install(whole))
    assert diary.seen() == expected.seen()


@pytest.mark.parametrize("has_stage", [False, True])
async def test_normalize_stays_open_only_for_a_stage_beside_it(
    has_stage: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An open stage takes memory; but a stage of the operator may have code to run when its response is over."""
    ended: list[bool] = []
    normalize = Normalize.__call__

    @wraps(normalize)
    async def noted(self: Normalize, source: AsyncIterator[CreateResponse]) -> AsyncGenerator[ResolvedRequest, None]:
        async for resolved in normalize(self, source):
            yield resolved
        ended.append(True)

    monkeypatch.setattr(Normalize, "__call__", noted)
    options: dict[str, Any] = {"edit": Diary().install} if has_stage else {}
    async with (
        running_server(ScriptedEngine(script()), tmp_path, **options) as served,
        await served.scheduler.prepare(CreateResponse(input="Hi")) as prepared,
    ):
        events = served.scheduler.run(prepared)
        await anext(events)
        assert bool(ended) is not has_stage
        assert (await collect(events)).status == "completed"
        assert ended == [True]


async def test_second_request_that_a_stage_makes_is_kept(tmp_path: Path) -> None:
    async def twice(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
        async for request in source:
            yield request
            yield request

    def edit(whole: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        return whole.insert_after("resolve", "twice", twice)

    async with (
        running_server(ScriptedEngine(script()), tmp_path, edit=edit) as served,
        await served.scheduler.prepare(CreateResponse(input="Hi")) as prepared,
    ):
        assert [each async for each in prepared.source(prepared.request)] == [prepared.request] * 2


async def test_routes_that_may_open_a_pipeline_are_known(tmp_path: Path) -> None:
    """A new route that takes a body fails here until the tables above have it."""
    async with noted(Diary(), tmp_path) as served:
        routes = {(each.method, each.resource.canonical) for each in served.api.app(1).router.routes() if each.resource}
    posts = {f"{method} {path}" for method, path in routes if method == "POST"}
    named = {name.partition(",")[0] for name in (*WAYS, *OTHER_OUTPUT, *COUNTING)} - {"GET /v1/responses"}
    assert {path.replace("/openresponses/v1", "/v1") for path in posts - named} <= named | NO_PIPELINE
    assert posts > named


def test_modules_that_open_a_pipeline_are_known() -> None:
    opens = re.compile(
        r"scheduler\.(prepare|queue|run|run_edited)\(|\.open\((handed_over|source|prepared\.source)|halfway\("
    )
    modules = [ROOT / "server.py", *(path for top in ("api", "extensions") for path in (ROOT / top).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)) for path in modules if opens.search(path.read_text())}
    commands = {path for path in found if path.startswith(("api/cli/", "extensions/workbench/"))}
    assert found - (commands - OPENERS.keys()) == OPENERS.keys()


# The queue of the background


@pytest.fixture
async def waiting(tmp_path: Path) -> AsyncGenerator[tuple[Diary, Server[Any]], None]:
    """A server in whose queue responses wait, as none runs."""
    diary = Diary()
    async with noted(diary, tmp_path, PacedEngine(script()), limit=0) as served:
        yield diary, served


async def test_queued_response_waits_in_front_of_the_engine(
    waiting: tuple[Diary, Server[Any]], expected: Diary
) -> None:
    diary, served = waiting
    queued = await posted("/v1/responses", served, input="Hi", background=True)
    assert queued["status"] == "queued"
    assert diary.at("after render") == ["begins", "Prompt"]
    assert [diary.at(junction) for junction in JUNCTIONS[4:]] == [["begins"]] * 5
    assert served.engine.prompts == []
    served.scheduler.background.slots.limit = 1
    served.scheduler.background.slots.grant()
    await once(diary)
    assert diary.frames_in_order() == expected.frames_in_order()


async def test_queued_response_beyond_the_open_ones_begins_when_its_turn_comes(
    waiting: tuple[Diary, Server[Any]], expected: Diary
) -> None:
    diary, served = waiting
    served.scheduler.background.most_open = 0
    await posted("/v1/responses", served, input="Hi", background=True)
    assert diary.seen() == {"before normalize": expected.at("before normalize")}
    served.scheduler.background.slots.limit = 1
    served.scheduler.background.slots.grant()
    await once(diary)
    assert diary.seen() == expected.seen()


@pytest.mark.parametrize("how", ["is cancelled", "is deleted", "server stops"])
async def test_stages_of_a_response_that_leaves_the_queue_are_closed(
    how: str, waiting: tuple[Diary, Server[Any]]
) -> None:
    diary, served = waiting
    queued = await posted("/v1/responses", served, input="Hi", background=True)
    path = f"{served.url}/v1/responses/{queued['id']}"
    if how == "is cancelled":
        await served.client.post(f"{path}/cancel", headers=CLIENT)
    elif how == "is deleted":
        await served.client.delete(path, headers=CLIENT)
    else:
        await served.scheduler.drain(0)
    await once(diary)
    assert [seen[-1] for seen in diary.seen().values()] == ["is closed"] * len(JUNCTIONS)
    background = served.scheduler.background
    assert (background.waiting, background.opening) == ({}, set())


async def test_next_server_runs_the_stages_after_normalize(expected: Diary, tmp_path: Path) -> None:
    before, after = Diary(), Diary()
    async with noted(before, tmp_path / "one", ScriptedEngine(script()), limit=0, url=URL) as served:
        await posted("/v1/responses", served, input="Hi", background=True)
    assert set(before.seen()["after render"]) == {"begins", "Prompt", "is closed"}
    async with noted(after, tmp_path / "one", url=URL):
        await wait_until(lambda: after.at("after persist")[-1:] == ["ends"])
    assert after.seen() == {junction: expected.at(junction) for junction in JUNCTIONS[1:]}


@pytest.mark.parametrize("body", [{"background": True}, {"background": True, "stream": True}, {}], ids=str)
async def test_wrong_prompt_is_refused_after_one_pass(body: dict[str, Any], tmp_path: Path) -> None:
    diary = Diary()
    async with noted(diary, tmp_path) as served:
        served.engine.context_length = 8192
        sent = {"input": "long " * 9_000, **body}
        headers = CLIENT
        async with served.client.post(f"{served.url}/v1/responses", json=sent, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "context_length_exceeded")
        assert not served.scheduler.runs.queued
    assert diary.at("before normalize") == ["begins", "CreateResponse", "is closed"]
    assert diary.at("after normalize") == ["begins", "ResolvedRequest", "is closed"]


@pytest.mark.parametrize("name", ["POST /v1/responses, background", "POST /v1/responses, background stream"])
async def test_full_engine_does_not_repeat_the_stages(name: str, expected: Diary, tmp_path: Path) -> None:
    diary = Diary()
    engine = FullEngine(Script(refusal=EngineOverloaded("Full.")))
    async with noted(diary, tmp_path / "other", engine, limits=Limits(retry_seconds=0.01)) as served:
        running = asyncio.ensure_future(WAYS[name](served))
        await wait_until(lambda: engine.asked > 2)
        engine.script = script()
        await running
        await once(diary)
    assert diary.frames_in_order() == expected.frames_in_order()


# Turns


async def test_turn_that_is_measured_for_a_compaction_runs_once(expected: Diary, tmp_path: Path) -> None:
    diary, talk = Diary(), [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    async with noted(diary, tmp_path / "other") as served:
        management = [{"type": "compaction", "compact_threshold": 10_000}]
        body = {"input": [*talk, {"role": "user", "content": "Hi"}], "context_management": management}
        await posted("/v1/responses", served, **body)
        await once(diary)
    assert diary.seen() == expected.seen()


async def test_turn_that_becomes_a_compaction_is_closed_before_the_engine(tmp_path: Path) -> None:
    diary, talk = Diary(), [{"role": "user", "content": "Hi " * 2000}, {"role": "assistant", "content": "Hello."}]
    async with noted(diary, tmp_path) as served:
        management = [{"type": "compaction", "compact_threshold": 1_000}]
        body = {"input": [*talk, {"role": "user", "content": "Hi"}], "context_management": management}
        await posted("/v1/responses", served, **body)
    one = ["begins", "ResolvedRequest"]
    assert diary.at("after normalize") == [*one, "ends"]
    assert diary.at("after summarize") == [*one, "is closed", *one, "ends", *one, "ends"]
    assert diary.at("after render") == ["begins", "Prompt", "ends"] * 2
