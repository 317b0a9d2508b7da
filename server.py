"""The composition root: settings -> engine, store -> pipeline -> HTTP server, and the ``penstock`` command."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
from asyncio import Event, get_running_loop
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Literal

import uvloop
from aiohttp import web
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliPositionalArg,
    CliSuppress,
    CliUnknownArgs,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from api.app import Api
from api.keys import UnusableKeys, load_keys
from pipeline.core import Pipeline
from pipeline.errors import StageError
from pipeline.logs import FORMAT, name_response
from pipeline.protocol.events import ResponseEvent
from pipeline.protocol.request import CreateResponse
from stages.generate.engine import Engine
from stages.generate.vllm import UnknownModel, start_vllm
from stages.harmony import ClobberedInstall, load_encoding
from stages.log import log_outputs
from stages.normalize.normalize import Normalize
from stages.persist.sqlite import SqliteStore
from stages.persist.store import ResponseStore
from stages.render.grammar import WARM_UP
from stages.responses import harmony_responses

logger = logging.getLogger("penstock")

LAST_WORDS = 5.0
"""Seconds in which responses that were stopped send and store their end."""


def _data_folder() -> Path:
    """Where a user's data lives: the XDG base directory rule."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "penstock"


class Settings(BaseSettings):
    """Serve MODEL. Options not named here go to vLLM's engine; write MODEL before them."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_",
        toml_file="penstock.toml",
        cli_prog_name="penstock serve",
        cli_kebab_case=True,
        cli_ignore_unknown_args=True,
        cli_implicit_flags=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    model: CliPositionalArg[str] = Field("openai/gpt-oss-20b", description="a Hugging Face id or a folder")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on")
    store: Path = Field(
        default_factory=lambda: _data_folder() / "responses.sqlite3", description="the file that keeps responses"
    )
    api_key_file: Path | None = Field(None, description="a file of API keys, one in a line; else PENSTOCK_API_KEYS")
    api_keys: CliSuppress[Annotated[str | tuple[str, ...] | None, NoDecode]] = Field(None, repr=False)
    max_body_bytes: int = Field(32 * 2**20, gt=0, description="largest request body")
    keep_alive: float = Field(15.0, gt=0, description="seconds of silence before a stream says that it lives")
    shutdown_timeout: float = Field(20.0, ge=0, description="seconds that running responses get after SIGTERM")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_outputs: bool = Field(False, description="log what the model says, reasoning included")
    salt_caches: bool = Field(False, description="share the engine's prefix cache only within one prompt_cache_key")
    engine_arguments: CliUnknownArgs

    @field_validator("engine_arguments")
    @classmethod
    def _one_model(cls, arguments: list[str]) -> list[str]:
        if any(argument.split("=")[0] == "--model" for argument in arguments):
            raise ValueError("name the model without --model, ahead of all options")
        return arguments

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


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    keys = load_keys(settings.api_key_file, settings.api_keys)
    async with AsyncExitStack() as closing:
        listening = closing.enter_context(_bound(settings.host, settings.port))
        store = SqliteStore(settings.store)
        closing.push_async_callback(store.close)
        engine = start_vllm(settings.model, settings.engine_arguments)
        closing.push_async_callback(engine.close)
        await engine.warm_up(WARM_UP)
        pipeline = assembled(settings, engine.models, engine, store)
        api = Api(pipeline, engine, store, engine.models, settings.keep_alive, keys=keys)
        runner = web.AppRunner(
            api.app(settings.max_body_bytes),
            handler_cancellation=True,  # off by default: a client that left would keep the engine busy
            shutdown_timeout=1,
            access_log=None,
        )
        await runner.setup()
        closing.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listening).start()
        gc.collect()
        gc.freeze()
        print(greeting(settings, engine.models[0]), flush=True)
        await _signal_to_stop()
        logger.info("Stopping: running responses get %g s", settings.shutdown_timeout)
        await api.admission.finish(settings.shutdown_timeout)
        await engine.stop()
        await api.admission.finish(LAST_WORDS)


def assembled(
    settings: Settings, models: tuple[str, ...], engine: Engine, store: ResponseStore
) -> Pipeline[CreateResponse, ResponseEvent]:
    """The pipeline, as the settings want it."""
    pipeline = harmony_responses(models, engine, load_encoding(), store)
    if settings.salt_caches:
        pipeline = pipeline.replace("normalize", Normalize(store, models, salt_caches=True))
    return pipeline.after("emit", "log", log_outputs) if settings.log_outputs else pipeline


def log_to_stderr(level: str) -> None:
    """Write the log, each line of which names the response that it is about."""
    logging.basicConfig(level=level, format=FORMAT)
    for handler in logging.getLogger().handlers:
        handler.addFilter(name_response)


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has its address before the model is loaded, and takes no connection until the server starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    return listening


async def _signal_to_stop() -> None:
    stopped = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


def greeting(settings: Settings, model: str) -> str:
    """What a new user may try first."""
    body = json.dumps({"model": model, "input": "Say hello.", "stream": True})
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{settings.port}/v1"
    return (
        f"Serving {model} at {url}. Try:\n\n  curl -N {url}/responses -H 'Content-Type: application/json' -d '{body}'\n"
    )


def main() -> None:
    """Run ``penstock serve [MODEL] [options]``."""
    if sys.argv[1:2] != ["serve"]:
        sys.exit("usage: penstock serve [MODEL] [options]\n\nTry: penstock serve --help")
    if any(argument.split("=")[0] in {"--api-key", "--api-keys"} for argument in sys.argv):
        sys.exit("penstock: a command line shows its keys to all processes: use --api-key-file or PENSTOCK_API_KEYS")
    # Until the server is up, SIGTERM unwinds the start.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        settings = CliApp.run(Settings, cli_args=sys.argv[2:])
        log_to_stderr(settings.log_level)
        uvloop.run(serve(settings))
    except ValidationError as error:
        sys.exit("\n".join(f"penstock: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()))
    except (OSError, SettingsError, StageError, UnknownModel, UnusableKeys, ClobberedInstall) as error:
        sys.exit(f"penstock: {error}")


if __name__ == "__main__":  # vLLM spawns workers, which import this module again
    main()
