from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import sqlite3
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr, ValidationError
from pydantic_settings import CliApp

from penstock.api.cli import serve as command
from penstock.api.cli.drawn import drawn
from penstock.api.cli.serve import main, serve
from penstock.api.http.auth import Keys
from penstock.api.settings import Settings
from penstock.api.start import backends
from penstock.api.start import serving as http
from penstock.api.start.assembly import RunningEngine, database, rehearsed, toolbox
from penstock.api.start.backends import over_http, planned, stages
from penstock.api.start.serving import stop_signals
from penstock.extensions.tools.mcp.builtin_tools import McpHost
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import CannotRun, CannotStart, EngineDead
from penstock.pipeline.logs import log_to_stderr, name_response
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.store.postgres import PostgresDatabase
from penstock.services.store.sqlite import SqliteDatabase
from penstock.services.tools import Toolbox
from penstock.services.web.ssrf import AllowedNetworks
from penstock.stages.models.chat.load import ChatOptions
from penstock.stages.models.harmony.vocabulary import encoding_on_demand
from penstock.stages.normalize.resolve import CacheSharing, Resolve
from penstock.stages.parse.chat.parse import ParseChat
from penstock.stages.render.chat.render import RenderChat
from penstock.stages.responses import harmony_stages
from tests.support.chat_families import load_model
from tests.support.fake_vllm import FakeVllm, running_fakes
from tests.support.paths import ROOT, TINY_QWEN
from tests.support.plugins import at_once
from tests.support.processes import free_port
from tests.support.sandboxes import available
from tests.support.server import ENDLESS, HELLO, script

HARMONY = harmony_stages(encoding_on_demand())
START = (ROOT / "docs/START.md").read_text()


def chosen(**settings: Any) -> Settings:
    return Settings(engine_arguments=[], **settings)


def pipeline_of(**settings: Any) -> Pipeline[Any, Any]:
    return at_once(rehearsed(chosen(**settings), RunningEngine(ScriptedEngine(), HARMONY)))


@pytest.mark.parametrize(("option", "place"), [("log_prompts", "render"), ("log_outputs", "emit")])
def test_prompts_and_outputs_are_logged_only_if_enabled(option: str, place: str) -> None:
    name = option.replace("_", " ")
    assert name not in str(pipeline_of())
    names = re.findall(r"log \w+|\w+", str(pipeline_of(**{option: True})))
    assert name in names[names.index(place) :]


@pytest.mark.parametrize(("shared", "salted"), [(False, False), (False, True), (True, False)])
def test_caches_are_shared_or_salted_only_if_enabled(shared: bool, salted: bool) -> None:
    resolve = pipeline_of(share_caches=shared, salt_caches=salted).stage("resolve")
    assert isinstance(resolve, Resolve)
    assert resolve.caches == CacheSharing(among_keys=shared, by_prompt_cache_key=salted)


# Tools


@asynccontextmanager
async def at_hand(settings: Settings) -> AsyncGenerator[Toolbox, None]:
    tools = await toolbox(settings, Keys())
    try:
        yield tools
    finally:
        await tools.close()


async def test_only_configured_tools_are_available() -> None:
    bare = await toolbox(chosen(sandbox=False), Keys())
    assert not bare.namespaces | bare.mcp.labels
    searching = chosen(sandbox=False, web_search="brave", web_search_key=SecretStr("k" * 20))
    async with at_hand(searching) as tools:
        assert tools.namespaces == {"browser"}


async def test_sandbox_works_here() -> None:
    await available("container")
    async with at_hand(chosen()) as tools:
        assert tools.namespaces == {"python", "container", "program"}


async def test_configured_server_replaces_a_built_in_tool(tmp_path: Path) -> None:
    config = tmp_path / "mcp.json"
    config.write_text('{"mcpServers": {"python": {"url": "http://127.0.0.1:9/mcp"}, "docs": {"command": "true"}}}')
    async with at_hand(chosen(mcp_config=config)) as tools:
        assert isinstance(tools.hosts["python"], McpHost)
        assert "docs" in tools.mcp.labels


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("web_search", "brave", "needs a key"),
        ("web_search", "altavista", "expected brave"),
        ("web_search", "searxng=", "expected brave"),
        ("allow_address", ["10.0.0.0/33"], "10.0.0.0/33"),
    ],
)
def test_unusable_tool_settings_are_refused(option: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate({"engine_arguments": [], option: value})


@pytest.mark.parametrize(
    ("variables", "arguments", "in_system"),
    [
        ({}, [], False),
        ({}, ["--harmony-system-instructions"], True),
        ({"VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": "1"}, [], True),
        ({"VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": "0"}, [], False),
        ({"VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": "1", "PENSTOCK_HARMONY_SYSTEM_INSTRUCTIONS": "0"}, [], False),
        ({"VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": "0"}, ["--harmony-system-instructions"], True),
    ],
)
def test_instructions_stand_where_the_operator_of_vllm_had_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], arguments: list[str], in_system: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = CliApp.run(Settings, cli_args=["tiny", *arguments])
    render: Any = stages(settings, None).render(4096)
    assert render.system_instructions is in_system


def test_switch_needs_no_value_and_unknown_options_go_to_vllm() -> None:
    chosen = CliApp.run(Settings, cli_args=["tiny", "--log-outputs", "--max-model-len", "8192", "--salt-caches"])
    assert (chosen.model, chosen.log_outputs, chosen.salt_caches) == ("tiny", True, True)
    assert chosen.engine_arguments == ["--max-model-len", "8192"]


def test_every_log_handler_names_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    log_to_stderr("INFO")
    assert root.level == logging.INFO
    assert all(name_response in handler.filters for handler in root.handlers)


@pytest.mark.parametrize(
    "option", [{"keep_alive": 0}, {"max_body_bytes": 0}, {"port": 99_999}, {"drain_timeout": -1}, {"max_background": 0}]
)
def test_senseless_numbers_are_refused(option: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({"engine_arguments": []} | option)


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("30d", 2_592_000), ("12h", 43_200), ("5m", 300), ("90s", 90), ("90", 90), ("1.5h", 5_400)],
)
def test_durations_may_have_units(duration: str, seconds: float) -> None:
    chosen = CliApp.run(Settings, cli_args=["tiny", "--store-ttl", duration, "--drain-timeout", duration])
    assert (chosen.store_ttl, chosen.drain_timeout) == (seconds, seconds)


@pytest.mark.parametrize("duration", ["soon", "-1", "1y", "nan", "inf", ""])
def test_malformed_duration_is_refused(duration: str) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({"engine_arguments": [], "stream_ttl": duration})


def test_store_is_a_file_or_a_database() -> None:
    assert isinstance(database("responses.sqlite3"), SqliteDatabase)
    for scheme in ("postgresql", "postgres"):
        assert isinstance(database(f"{scheme}://me@localhost/penstock"), PostgresDatabase)


def servers(path: Path) -> list[str]:
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute("select id from servers")]
    return []


WAIT = "Stopping: waiting up to 600 s for 1 running response; a second signal, such as Ctrl-C, ends the wait"


@pytest.mark.parametrize(("number", "line"), [(0, "Stopping: no response is running"), (1, WAIT)])
async def test_stopping_server_waits_for_its_responses_until_a_second_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, line: str
) -> None:
    stopped, hurried, up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def signals() -> tuple[asyncio.Event, asyncio.Event]:
        up.set()
        return stopped, hurried

    monkeypatch.setattr(command, "stop_signals", signals)
    monkeypatch.setattr(http, "tune_gc", list)
    port = free_port()
    settings = chosen(port=port, store=str(tmp_path / "store.sqlite3"), drain_timeout=600, sandbox=False)
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.001))
    with caplog.at_level(logging.INFO):
        serving = asyncio.create_task(serve(settings, lambda _: nullcontext(RunningEngine(engine, HARMONY))))
        await up.wait()
        async with aiohttp.ClientSession() as client:
            url, body = f"http://127.0.0.1:{port}/v1/responses", {"input": "Hi", "stream": True}
            answers = [await client.post(url, json=body) for _ in range(number)]
            stopped.set()
            done, _ = await asyncio.wait([serving], timeout=0.2 * number or None)
            assert bool(done) != bool(number)
            hurried.set()
            await serving
            for answer in answers:
                assert b"response.failed" in await answer.read()
    assert [each.getMessage() for each in caplog.records if "Stopping" in each.getMessage()] == [line]


@pytest.mark.parametrize("ends_with_it", [True, False])
async def test_server_ends_with_its_engine_if_it_is_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_with_it: bool
) -> None:
    stopped, up = asyncio.Event(), asyncio.Event()

    def signals() -> tuple[asyncio.Event, asyncio.Event]:
        up.set()
        return stopped, asyncio.Event()

    monkeypatch.setattr(command, "stop_signals", signals)
    monkeypatch.setattr(command, "LOOK", 0.01)
    monkeypatch.setattr(http, "tune_gc", list)
    port, store = free_port(), str(tmp_path / "store.sqlite3")
    settings = chosen(port=port, store=store, sandbox=False, exit_with_engine=ends_with_it)
    engine = ScriptedEngine(script(HELLO, error=EngineDead("The engine has died."), dies=True))
    serving = asyncio.create_task(serve(settings, lambda _: nullcontext(RunningEngine(engine, HARMONY))))
    await up.wait()
    async with aiohttp.ClientSession() as client:
        body = {"input": "Hi", "stream": True}
        async with client.post(f"http://127.0.0.1:{port}/v1/responses", json=body) as answer:
            assert b"response.failed" in await answer.read()
    done, _ = await asyncio.wait([serving], timeout=None if ends_with_it else 0.2)
    assert bool(done) == ends_with_it
    stopped.set()
    with pytest.raises(EngineDead, match="ends with it") if ends_with_it else nullcontext():
        await serving


async def test_second_signal_sets_another_event() -> None:
    first, second = stop_signals()
    assert (first.is_set(), second.is_set()) == (False, False)
    signal.raise_signal(signal.SIGTERM)
    await first.wait()
    assert not second.is_set()
    signal.raise_signal(signal.SIGINT)
    await second.wait()


async def test_server_with_a_taken_port_harms_no_other(tmp_path: Path) -> None:
    path, bound, loaded = tmp_path / "store.sqlite3", asyncio.Event(), asyncio.Event()
    arguments = ["tiny", "--store", str(path), "--port", str(free_port()), "--no-sandbox"]
    settings = CliApp.run(Settings, cli_args=arguments)

    @asynccontextmanager
    async def loading(_: Settings) -> AsyncGenerator[RunningEngine]:
        bound.set()
        await loaded.wait()
        yield RunningEngine(ScriptedEngine(), HARMONY)

    first = asyncio.create_task(serve(settings, loading))
    await bound.wait()
    async with asyncio.timeout(120):
        with pytest.raises(CannotStart, match="in use"):
            await serve(settings, lambda _: nullcontext(RunningEngine(ScriptedEngine(), HARMONY)))
        assert not servers(path)
        loaded.set()
        while not servers(path):
            await asyncio.sleep(0.02)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first


@pytest.mark.parametrize("store", ["mysql://db/penstock", "sqlite:///responses.db"])
def test_url_of_another_database_is_not_the_name_of_a_file(store: str) -> None:
    with pytest.raises(ValidationError, match="give the path of a file"):
        chosen(store=store)


# Models and engines


@pytest.mark.vllm
def test_chat_model_has_its_own_stages() -> None:
    settings = chosen(allow_address=["10.0.0.0/8"])
    pipeline = at_once(rehearsed(settings, RunningEngine(ScriptedEngine(), stages(settings, load_model()))))
    assert isinstance(render := pipeline.stage("render"), RenderChat)
    assert isinstance(pipeline.stage("parse"), ParseChat)
    assert render.images._allowed == AllowedNetworks.parse(["10.0.0.0/8"])


def test_chat_options_have_vllms_names() -> None:
    arguments = ["tiny", "--reasoning-parser", "qwen3", "--tool-call-parser=none", "--chat-template", "a.jinja"]
    arguments += ["--chat-template-content-format", "string", "--trust-request-chat-template"]
    arguments += ["--default-chat-template-kwargs", '{"enable_thinking": false}']
    settings = CliApp.run(Settings, cli_args=arguments)
    assert settings.chat == ChatOptions("qwen3", "none", "a.jinja", "string", {"enable_thinking": False}, True)
    assert settings.engine_arguments == []


def test_engine_urls_select_http_engines() -> None:
    settings = CliApp.run(Settings, cli_args=["--engine", "http://a:8001", "--engine", "https://b/vllm"])
    assert (settings.engine, settings.model) == (["http://a:8001", "https://b/vllm"], None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--engine", "http://a:8001", "--max-model-len", "8192"],
            "options of vLLM's engine belong to the engine's own server",
        ),
        (["--engine", "a:8001"], "a:8001 must begin with http"),
        (["--engine", "http://key@a:8001"], "begin with http:// or https://, and name a host, or be file.py:function"),
        (["--engine", "http://a", "--kv-events", "a:5557"], "a:5557 must have the form tcp://HOST:PORT or ipc://PATH"),
        (["--engine", "http://a", "--kv-events", "tcp://*:5557"], "must have the form tcp://HOST:PORT or ipc://PATH"),
        (["--engine", "http://a", "--engine", "http://b", "--kv-events", "tcp://a:1"], "1 addresses for 2 --engine"),
        (["--engine", "http://a", "--kv-events", "tcp://a:0"], "must have the form tcp://HOST:PORT or ipc://PATH"),
        (["--engine", "http://a", "--engine", "http://a/", *["--kv-events", "tcp://a:1"] * 2], "is named twice"),
        (["--kv-events", "tcp://a:5557"], "--kv-events: 1 addresses for 0 --engine"),
    ],
)
def test_senseless_engine_options_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        CliApp.run(Settings, cli_args=arguments)


async def test_kv_events_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", {"zmq": None}.__getitem__)
    settings = Settings(engine=["http://127.0.0.1:9"], kv_events=["tcp://127.0.0.1:9"])
    with pytest.raises(CannotStart, match=re.escape("pip install 'penstock-llm[kv-events]'")):
        async with over_http(settings):
            pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--record-if", "x:y"], "--record-if: 'x:y' is neither a rate between 0 and 1 nor the name of a header"),
        (["--port", "a", "--heartbeat", "b"], "--port: Input should be a valid integer"),
        (["--port", "a", "--heartbeat", "b"], "\n--heartbeat: expected a duration"),
        (
            ["--engine", "http://a", "--max-model-len", "5"],
            "options of vLLM's engine belong to the engine's own server",
        ),
    ],
)
def test_wrong_settings_are_named_by_their_options(arguments: list[str], message: str) -> None:
    with pytest.raises(CannotRun, match=re.escape(message)):
        main(arguments)


@pytest.mark.parametrize("option", ["--engine-key", "--engine-key=secret"])
def test_engine_key_on_the_command_line_is_refused(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line is visible to every process of the machine."""
    with pytest.raises(CannotRun, match="PENSTOCK_ENGINE_KEY"):
        main([option])


def test_missing_vllm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(CannotRun, match=r"pip install 'vllm.*', or name an engine elsewhere with --engine"):
        main(["tiny"])


async def test_http_engine_with_harmony_needs_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    engine = FakeVllm()
    async with running_fakes(engine):
        message, _, flow = (await drawn(chosen(engine=[engine.url]))).partition("\n\n")
    assert message == f"tiny speaks Harmony, and runs on vLLM at {engine.url}."
    assert flow in START


@pytest.mark.vllm
@pytest.mark.parametrize("model", [str(TINY_QWEN), None])
async def test_chat_model_of_an_http_engine_is_read_here(model: str | None) -> None:
    load_model()  # vLLM's imports warn
    engine = FakeVllm(markers=[1, 2, 3], root="/nowhere" if model else str(TINY_QWEN))
    async with running_fakes(engine):
        settings = chosen(engine=[engine.url], model=model)
        async with over_http(settings) as running:
            assert isinstance(running.model.parse, ParseChat)
            assert running.model.parse.chat.parsers.thinking == ("<think>", "</think>")
        assert "has a chat template, is read by the parsers qwen3 and hermes, and runs on" in await drawn(settings)


@pytest.mark.vllm
async def test_gpt_oss_without_a_tokenizer_speaks_harmony(tmp_path: Path) -> None:
    load_model()  # vLLM's imports warn
    config = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss"}))
    engine = FakeVllm(markers=None, root=str(tmp_path))
    async with running_fakes(engine), over_http(chosen(engine=[engine.url])) as running:
        assert running.model.encoding == "harmony"


@pytest.mark.vllm
async def test_generation_config_sets_defaults_of_gpt_oss(tmp_path: Path) -> None:
    load_model()  # vLLM's imports warn
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.3, "max_new_tokens": 20}')
    engine = FakeVllm(markers=None, root=str(tmp_path))
    async with running_fakes(engine), over_http(chosen(engine=[engine.url])) as running:
        assert running.model.traits.sampling == {"temperature": 0.3, "max_tokens": 20}


@pytest.mark.vllm
def test_operator_overrides_the_generation_config() -> None:
    load_model()  # vLLM's imports warn
    override = '--override-generation-config={"temperature": 0.1, "max_new_tokens": 7}'
    settings = CliApp.run(Settings, cli_args=[str(TINY_QWEN), override])
    sampling = planned(settings)[1].traits.sampling
    assert (sampling["temperature"], sampling["max_tokens"]) == (0.1, 7)


@pytest.mark.parametrize(
    ("options", "variable", "kinds"),
    [
        ([], None, None),
        (["--allow-tool", "code_interpreter", "--allow-tool", "web_search"], None, {"python", "browser"}),
        (["--allow-tool", "none"], "container", set()),
        ([], "container,code_interpreter", {"python", "container"}),
    ],
)
async def test_operator_decides_which_built_in_tools_clients_may_use(
    monkeypatch: pytest.MonkeyPatch, options: list[str], variable: str | None, kinds: set[str] | None
) -> None:
    if variable is not None:
        monkeypatch.setenv("VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS", variable)
    keys = Keys(given=["sk-alice-0123456789 tools=web_search"])
    tools = await toolbox(CliApp.run(Settings, cli_args=[*options, "--no-sandbox"]), keys)
    assert tools.access.of("any") == kinds
    assert tools.access.of(keys.owner("Bearer sk-alice-0123456789")) == frozenset({"browser"})
    await tools.close()


def test_unknown_tools_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"'bash' is not one of browser, .* and none"):
        chosen(allow_tool=["bash"])
