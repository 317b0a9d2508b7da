"""Servers in process: a real `AppRunner` on a real socket over a scripted engine, and its scripts and recordings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import aiohttp
from aiohttp import web

from penstock.api.app import Api
from penstock.api.cli.command_line import read_settings
from penstock.api.dialect import Dialect
from penstock.api.dialects.named import spoken
from penstock.api.http.auth import Keys
from penstock.api.http.connections import ConnectionCounts, Runner
from penstock.api.http.origins import Origins
from penstock.api.http.proxies import Proxies
from penstock.api.peers import Membership, Peers
from penstock.api.resources.resources import ServerParts, opened
from penstock.api.runs.scheduler import Scheduler
from penstock.api.settings import Settings
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.pipeline.recordings.format import FILES, FORMAT, Header, Recording, read_recording
from penstock.pipeline.recordings.recorder import Recorder
from penstock.pipeline.recordings.sampling import ALWAYS, Condition
from penstock.services.engines.engine import Engine
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.prompts import Prompts
from penstock.services.runs.run import RunRegistry
from penstock.services.sealing import Sealer
from penstock.services.store.database import Database
from penstock.services.store.heartbeats import STALE
from penstock.services.store.store import Store
from penstock.services.tools import Toolbox
from penstock.services.web.image_cache import ImageCache
from penstock.stages.converse.tool_loop import Limits
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.normalize.normalize import NO_TOOLS
from penstock.stages.responses import (
    DEFAULT_LIMITS,
    aliasing,
    chat_stages,
    harmony_stages,
    prompting,
    responses_pipeline,
    sealing,
)
from tests.support.api_clients import USER_MESSAGE, ApiClient, Json, wait_until
from tests.support.stores import database_at

AnyEngine = TypeVar("AnyEngine", bound=Engine)
Engine_co = TypeVar("Engine_co", bound=Engine, covariant=True)

DIALECTS = spoken()
DEFAULTS = read_settings([])
BASES = tuple(dict.fromkeys(dialect.base for dialect in DIALECTS))
"""The base URLs of a server."""


@dataclass
class Server(ApiClient, Generic[Engine_co]):
    engine: Engine_co
    api: Api
    store: Store
    connections: ConnectionCounts
    parts: ServerParts

    @property
    def scheduler(self) -> Scheduler:
        return self.api.scheduler

    async def wait_until_idle(self: Server[ScriptedEngine]) -> None:
        await wait_until(lambda: self.engine.running == 0)

    def prompt_text(self: Server[ScriptedEngine], number: int = -1) -> str:
        return load_encoding().decode(self.engine.prompts[number].token_ids)


@asynccontextmanager
async def running_server(
    engine: AnyEngine,
    where: Path | str | Database,
    *,
    model: ChatModel | None = None,
    url: str = "",
    heartbeat: float = 2.0,
    stale: float = STALE,
    keep_alive: float = 15.0,
    max_body_bytes: int = 100_000,
    keys: Keys | None = None,
    peers: Peers | None = None,
    edit: Any = lambda pipeline: pipeline,
    toolbox: Toolbox = NO_TOOLS,
    limits: Limits = DEFAULT_LIMITS,
    recorded_if: Condition = ALWAYS,
    origins: Origins | None = None,
    metrics_key: str = "",
    proxies: Proxies | None = None,
    dialects: tuple[Dialect, ...] = DIALECTS,
    aliases: Mapping[str, str] | None = None,
    resources: Sequence[str] = (),
    settings: Settings | None = None,
    sees_images: bool = False,
    **options: Any,
) -> AsyncGenerator[Server[AnyEngine], None]:
    """Serve for the length of the block, over SQLite in a folder, a value of ``--store``, or any database.

    Only ``resources`` and the prompts know the ``settings``.  The model is gpt-oss unless a chat model is given.
    ``edit`` may change the pipeline, as plug-ins do, the caller closes ``toolbox``, and ``options`` go to `Scheduler`.
    An earlier server with the same ``url`` is declared dead.  With ``sees_images``, the model counts as one that does.
    """
    if isinstance(where, Path):
        where = str(where / "responses.sqlite3")
    store = Store(database_at(where) if isinstance(where, str) else where, stale)
    await store.open()
    runs = RunRegistry(store)
    stages = chat_stages(model, ImageCache()) if model else harmony_stages(load_encoding())
    if sees_images:
        stages = replace(stages, traits=replace(stages.traits, sees_images=True))
    prompts = Prompts((settings or DEFAULTS).prompts)
    responses = sealing(responses_pipeline(stages, engine, runs, toolbox, limits), Sealer([await store.secret("seal")]))
    responses = prompting(aliasing(responses, aliases or {}), prompts)
    peers = peers or Peers()
    async with AsyncExitStack() as closing:
        closing.push_async_callback(store.close)
        pipeline = edit(responses)
        if isinstance(pipeline, AbstractAsyncContextManager):
            pipeline = await closing.enter_async_context(pipeline)
        scheduler = Scheduler(
            pipeline,
            engine,
            runs,
            store,
            aliases=aliases or {},
            traits_of=stages.traits_of,
            sees_images=lambda _: stages.traits.sees_images,
            tools_of=toolbox.usable,
            **options,
        )
        keys = keys or Keys()
        keys.remembered = store.words_of
        parts = ServerParts(
            settings or DEFAULTS,
            scheduler=scheduler,
            tools=toolbox,
            peers=peers,
            prompts=prompts,
            keys=keys,
            dialects=dialects,
        )
        api = Api(
            scheduler,
            keep_alive,
            keys,
            peers,
            recorded_if,
            origins or Origins(),
            metrics_key=metrics_key,
            dialects=dialects,
            resources=await closing.enter_async_context(opened(parts, resources)),
            proxies=proxies or Proxies(),
        )
        runner = Runner(api.app(max_body_bytes))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        own = f"http://{host}:{port}"
        membership = Membership(
            store.servers, url or own, scheduler.recovery.recover, scheduler.release_lost, heartbeat, stale
        )
        await closing.enter_async_context(membership)
        closing.push_async_callback(runner.cleanup)
        closing.push_async_callback(scheduler.drain, 0)
        client = await closing.enter_async_context(aiohttp.ClientSession())
        yield Server(own, client, engine=engine, api=api, store=store, connections=runner.counts, parts=parts)


@dataclass
class PacedEngine(ScriptedEngine):
    """A scripted engine that a test can hold: it then generates only as many chunks as the test allows."""

    initial: float = inf
    """Chunks that each response may generate at once."""
    allowed: dict[str, float] = field(default_factory=dict)
    """Chunks that single responses may generate, by id, in place of ``initial``."""

    def hold(self, initial: int = 0) -> None:
        """Limit responses that begin from now on to ``initial`` chunks."""
        self.initial = initial

    def say(self, count: float) -> None:
        """Allow ``count`` more chunks to every running response."""
        for run in self._runs:
            self.allowed[run.response_id] = self._limit(run) + count
            run.woken.set()

    def finish(self, response_id: str) -> None:
        self.allowed[response_id] = inf
        for run in self._runs:
            run.woken.set()

    def say_all(self) -> None:
        self.initial = inf
        self.say(inf)

    async def _frames(self, script: Script, prompt: Prompt, run: Any) -> AsyncGenerator[EngineFrame, None]:
        async with aclosing(super()._frames(script, prompt, run)) as frames:
            for number in count():
                while number >= self._limit(run) and not (run.is_cancelled or self.is_stopping):
                    run.woken.clear()
                    await run.woken.wait()
                if (frame := await anext(frames, None)) is None:
                    return
                yield frame

    def _limit(self, run: Any) -> float:
        return self.allowed.get(run.response_id, self.initial)


ScriptedServer: TypeAlias = Server[ScriptedEngine]
PacedServer: TypeAlias = Server[PacedEngine]
HELLO = "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"

CALL = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
    ' <|constrain|>json<|message|>{"city":"Paris"}<|call|>'
)

COUNT = (
    "<|channel|>analysis<|message|>Let me count.<|end|><|start|>assistant<|channel|>final<|message|>"
    + " ".join(map(str, range(1, 100)))
    + "<|return|>"
)

ENDLESS = "<|channel|>final<|message|>" + "la " * 50

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


CONVERSATION_ITEMS: list[Json] = [
    USER_MESSAGE,
    {"role": "assistant", "id": "msg_mine", "phase": "commentary", "content": [{"type": "refusal", "refusal": "No."}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "rain"},
    {"type": "custom_tool_call", "call_id": "d", "name": "say", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "x"}]},
    {"type": "additional_tools", "role": "developer", "tools": [WEATHER]},
]
"""One item of each kind that a conversation takes."""


async def completed_response(server: Server[Any], **body: Any) -> Json:
    """Create a response, which completes, and return it."""
    status, answer = await server.post(body)
    assert status == 200
    assert answer["status"] == "completed"
    return dict(answer)


def script(text: str = HELLO, **options: Any) -> Script:
    """A script of ``text``, which may hold markers."""
    return Script(load_encoding().encode_markup(text), **options)


RECORDING_HEADER = Header(FORMAT, source=".cache/tiny", versions={"penstock": "0"})


@asynccontextmanager
async def recording_server(
    engine: Engine, folder: Path, *, recorder: dict[str, Any] | None = None, **options: Any
) -> AsyncGenerator[Server[Any], None]:
    """Serve and record for the length of the block; after it all recordings are complete."""
    taps = Recorder(folder, **{"described": RECORDING_HEADER, **(recorder or {})})
    options = {"edit": taps.tapped, "closing": taps.closing} | options
    try:
        async with running_server(engine, str(folder.with_name(f"{folder.name}.sqlite3")), **options) as served:
            yield served
        assert not taps.folders
    finally:
        await taps.close()


def recorded_folders(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def only_recording(folder: Path) -> Path:
    (response,) = recorded_folders(folder)
    return response


def read_stage(response: Path, stage: str) -> Recording:
    name, junction = FILES[stage]
    return read_recording(response / name, junction)


def recorded_files(response: Path) -> set[str]:
    return {path.name for path in response.iterdir()}
