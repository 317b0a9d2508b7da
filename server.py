"""The composition root: settings -> engine, store -> pipeline -> HTTP server, and the ``penstock`` command.

Streaming and not streaming are two consumers of one pipeline.  The first event is taken before any header goes out, so
that whatever refuses a request is still an HTTP status; behind it, failures are events.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import uvloop
from aiohttp import web
from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliPositionalArg,
    CliUnknownArgs,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from pipeline.core import Pipeline
from pipeline.errors import (
    BodyTooLarge,
    EngineOverloaded,
    InvalidRequest,
    ResponseNotFound,
    StageError,
    UnsupportedParameter,
)
from pipeline.protocol.events import (
    DONE,
    KEEP_ALIVE,
    Delta,
    OutputItemDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    TerminalEvent,
    to_sse,
)
from pipeline.protocol.items import OutputItem
from pipeline.protocol.request import CreateResponse, read_request
from pipeline.protocol.response import Response
from pipeline.record import replay
from stages.emit.emit import failed_response
from stages.generate.engine import Engine
from stages.generate.vllm import start_vllm
from stages.harmony import load_encoding
from stages.persist.sqlite import SqliteStore
from stages.persist.store import ResponseStore
from stages.responses import harmony_responses

logger = logging.getLogger("penstock")

SSE_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold back 16 KB otherwise
}

_encode = msgspec.json.Encoder().encode


def _data_folder() -> Path:
    """Where a user's data lives: the XDG base directory rule."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "penstock"


class Settings(BaseSettings):
    """Serve MODEL. Options not named here go to vLLM as `vllm serve` takes them; write MODEL before them."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_",
        toml_file="penstock.toml",
        cli_prog_name="penstock serve",
        cli_kebab_case=True,
        cli_ignore_unknown_args=True,
        extra="forbid",
    )

    model: CliPositionalArg[str] = Field("openai/gpt-oss-20b", description="a Hugging Face id or a folder")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, description="port to listen on")
    store: Path = Field(
        default_factory=lambda: _data_folder() / "responses.sqlite3", description="the file that keeps responses"
    )
    max_body_bytes: int = Field(32 * 2**20, description="largest request body")
    keep_alive: float = Field(15.0, description="seconds of silence before a stream says that it lives")
    shutdown_timeout: float = Field(30.0, description="seconds that running streams get after SIGTERM")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    engine_arguments: CliUnknownArgs

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Command line over environment over ``penstock.toml`` in the working directory."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


# The HTTP edge


@dataclass(frozen=True)
class Api:
    """The routes, over one pipeline."""

    pipeline: Pipeline[CreateResponse, ResponseEvent]
    engine: Engine
    store: ResponseStore
    model: str
    keep_alive: float = 15.0

    def app(self, max_body_bytes: int = 32 * 2**20) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[errors_as_json], client_max_size=max_body_bytes)
        app.add_routes(
            [
                web.post("/v1/responses", self.create_response),
                web.get("/v1/responses/{response_id}", self.get_response),
                web.get("/v1/models", self.list_models),
                web.get("/health", self.health),
            ]
        )
        return app

    async def create_response(self, request: web.Request) -> web.StreamResponse:
        """Create a response, as a stream of events or as one object."""
        wanted = read_request(await request.read())
        async with self.pipeline.open(replay([wanted])) as stream, aclosing(whole(stream)) as events:
            first = await anext(events)
            if wanted.stream:
                return await self._stream(request, first, events)
            return _json(await _last_response(events))

    async def get_response(self, request: web.Request) -> web.Response:
        """Look a stored response up."""
        if request.query.get("stream") == "true":
            raise UnsupportedParameter("This server does not stream stored responses.", param="stream")
        response_id = request.match_info["response_id"]
        stored = await self.store.get(response_id)
        if stored is None:
            raise ResponseNotFound(response_id)
        return _json(stored.response)

    async def list_models(self, request: web.Request) -> web.Response:
        """Name the one model."""
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "penstock"}
        return _json({"object": "list", "data": [model]})

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine lives."""
        if self.engine.is_alive:
            return _json({"status": "ok"})
        return _json({"status": "engine dead"}, status=503)

    async def _stream(
        self, request: web.Request, first: ResponseEvent, events: AsyncIterator[ResponseEvent]
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers=SSE_HEADERS)
        await stream.prepare(request)
        async with _kept_alive(stream, self.keep_alive) as write:
            await write(to_sse(first))
            async for event in events:
                await write(to_sse(event))
            await write(DONE)
        await stream.write_eof()
        return stream


async def whole(events: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
    """``events``, with a terminal event at their end even if a stage behind ``emit`` breaks."""
    created: Response | None = None
    done: list[OutputItem] = []
    number = -1
    try:
        async for event in events:
            number = event.sequence_number
            yield event
            match event:
                case Delta():  # nearly every event
                    pass
                case ResponseCreated():
                    created = event.response
                case OutputItemDone():
                    done.append(event.item)
                case ResponseCompleted() | ResponseIncomplete() | ResponseFailed():
                    return
                case _:
                    pass
    except Exception as error:
        if created is None:
            raise
        logger.exception("Response %s met a bug behind emit", created.id)
        failed = failed_response(created, error, output=tuple(done))
        yield ResponseFailed(sequence_number=number + 1, response=failed)


async def _last_response(events: AsyncIterator[ResponseEvent]) -> Response:
    async for event in events:
        if isinstance(event, TerminalEvent):
            return event.response
    raise RuntimeError("the stream ended without a terminal event")


Write: TypeAlias = Callable[[bytes], Awaitable[None]]


@asynccontextmanager
async def _kept_alive(stream: web.StreamResponse, period: float) -> AsyncGenerator[Write, None]:
    """A way to write to ``stream`` that also writes a comment after each ``period`` of silence, in seconds."""
    loop = asyncio.get_running_loop()
    written_at = loop.time()

    async def write(data: bytes) -> None:
        nonlocal written_at
        written_at = loop.time()
        await stream.write(data)

    async def break_silence() -> None:
        while True:
            silence = loop.time() - written_at
            if silence >= period:
                await write(KEEP_ALIVE)
            await asyncio.sleep(period - silence if silence < period else period)

    breaking = asyncio.create_task(break_silence())
    try:
        yield write
    finally:
        breaking.cancel()


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error with OpenAI's error body, as long as no header is out."""
    try:
        return await handler(request)
    except StageError as error:
        return _error(error)
    except web.HTTPRequestEntityTooLarge:
        return _error(BodyTooLarge(f"The body is over this server's limit of {request.client_max_size} bytes."))
    except web.HTTPException as error:
        return _error_body(error.status, error.reason, "invalid_request_error", None, None)
    except ConnectionResetError:
        logger.debug("A client left in the middle of its stream")
        raise
    except Exception:
        logger.exception("%s %s met a bug", request.method, request.path)
        return _error_body(500, "Internal error. The server's log has more.", "server_error", None, "server_error")


def _error(error: StageError) -> web.Response:
    if not isinstance(error, InvalidRequest):
        logger.warning("%s", error.message, exc_info=error.__cause__)
    answer = _error_body(error.status, error.message, error.type, error.param, error.code)
    if isinstance(error, EngineOverloaded):
        answer.headers["Retry-After"] = "1"
    return answer


def _error_body(status: int, message: str, kind: str, param: str | None, code: str | None) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "param": param, "code": code}}, status=status)


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=_encode(body), status=status, content_type="application/json")


# The command


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as closing:
        store = SqliteStore(settings.store)
        closing.push_async_callback(store.close)
        engine = start_vllm(settings.model, settings.engine_arguments)
        closing.push_async_callback(engine.close)
        pipeline = harmony_responses(engine.model, engine, load_encoding(), store)
        api = Api(pipeline, engine, store, engine.model, settings.keep_alive)
        runner = web.AppRunner(
            api.app(settings.max_body_bytes),
            handler_cancellation=True,  # off by default: a client that left would keep the engine busy
            shutdown_timeout=settings.shutdown_timeout,
            access_log=None,
        )
        await runner.setup()
        closing.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, settings.host, settings.port).start()
        gc.collect()
        gc.freeze()
        print(greeting(settings, engine.model), flush=True)
        await stopped.wait()
        logger.info("Stopping: running streams get %g s", settings.shutdown_timeout)


def greeting(settings: Settings, model: str) -> str:
    """What a new user may try first."""
    body = json.dumps({"model": model, "input": "Say hello.", "stream": True})
    url = f"http://{settings.host}:{settings.port}/v1"
    return (
        f"Serving {model} at {url}. Try:\n\n  curl -N {url}/responses -H 'Content-Type: application/json' -d '{body}'\n"
    )


def main() -> None:
    """Run ``penstock serve [MODEL] [options]``."""
    if sys.argv[1:2] != ["serve"]:
        sys.exit("usage: penstock serve [MODEL] [options]\n\nTry: penstock serve --help")
    settings = CliApp.run(Settings, cli_args=sys.argv[2:])
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    uvloop.run(serve(settings))


if __name__ == "__main__":  # vLLM spawns workers, which import this module again
    main()
