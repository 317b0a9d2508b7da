"""Settings without an effect: nothing that an operator sets is ignored in silence."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock.api.settings import Settings
from penstock.api.settings.effects import Answering
from penstock.api.start.assembly import RunningEngine
from penstock.api.start.backends import start
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.plugins import WrongPlugin
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.server import pipeline, running
from tests.support.fake_vllm import FakeVllm, running_fakes
from tests.support.paths import HARMONY, ROOT

EXAMPLES = ROOT / "tests" / "examples"
TOOL = f"{EXAMPLES / 'a_tool_of_your_own.py'}:warehouse"
CHAT = f"{EXAMPLES / 'chat_endpoint.py'}:engine"

BY_PROGRAM = frozenset(
    {
        *("host", "port", "frontends", "max_body_bytes", "drain_timeout", "peer_url", "metrics_port", "print_pipeline"),
        *("exit_with_engine", "model_file", "model_groups"),
        *("live", "audit_bytes", "audit_files"),
        "rollouts_after",
        *("batch_reserve", "batch_beside", "batch_priority", "batch_at_once", "batch_ttl", "ledger_ttl"),
        *("verbose", "log_level", "log_format", "engine_arguments", "api_key_file", "stale_after", "unserved_after"),
    }
)
"""Settings that the commands, the program around the pipeline or a store read, or that others are made of."""

ELSEWHERE_USED: dict[Answering, frozenset[str]] = {
    Answering.OVER_HTTP: frozenset({"engine_wait", "model"}),
    Answering.OWN: frozenset({"engine_wait", "engine_key", "tool_strict_level"}),
    Answering.TEXTS: frozenset({"engine_key"}),
    Answering.RECORDINGS: frozenset({"sandbox"}),
}
"""Settings that a request reads, a full engine, or an engine of the operator's own, and one that only takes away."""


class Watched(Settings):
    """Settings that know which of them were read."""

    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        Watched.seen.add(name)
        return super().__getattribute__(name)


@asynccontextmanager
async def chosen(answering: Answering, **options: Any) -> AsyncGenerator[Settings, None]:
    """Yield the settings of an engine of that kind, with ``options``."""
    vllm = FakeVllm()
    async with running_fakes(vllm):
        engine = {
            Answering.RECORDINGS: f"replay:{HARMONY / 'greeting'}",
            Answering.OWN: f"{EXAMPLES / 'echo_engine.py'}:engine",
            Answering.TEXTS: f"{EXAMPLES / 'chat_endpoint.py'}:engine",
            Answering.OVER_HTTP: vllm.url,
        }[answering]
        model = "tiny" if answering is Answering.TEXTS else None
        yield Watched(**{"model": model, "engine": [engine], "store": "none", "sandbox": False} | options)


@pytest.fixture(autouse=True)
def _endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_URL", "http://127.0.0.1:9/v1")


NOWHERE = "http://127.0.0.1:9"

ELSEWHERE = [each for each in Answering if each is not Answering.HERE]


@pytest.mark.parametrize("answering", ELSEWHERE)
async def test_each_setting_is_read_or_known_to_have_no_effect(answering: Answering, tmp_path: Path) -> None:
    """Settings that others need are made as well, so that whatever may have an effect is read."""
    for_others: dict[str, Any] = {"record": tmp_path / "recorded", "log_outputs": True, "engine_places": 1}
    for_others["shadow"] = [NOWHERE]
    async with chosen(answering, **for_others) as settings:
        Watched.seen.clear()
        async with running(settings):
            unread = Settings.model_fields.keys() - Watched.seen
    assert unread - BY_PROGRAM - ELSEWHERE_USED[answering] <= answering.unused


@pytest.mark.parametrize("answering", ELSEWHERE)
async def test_settings_without_an_effect_are_named_at_the_start(
    answering: Answering, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mcp.json").write_text('{"mcpServers": {}}')
    values: dict[str, Any] = {
        "replay_speed": 2.0,
        "engine_places": 3,
        "engine_wait": 5,
        "engine_key": "k" * 20,
        "kv_events": ["tcp://127.0.0.1:9"],
        "hints": True,
        "shadow": [NOWHERE],
        "shadow_share": 0.5,
        "shadow_key": "k" * 20,
        "vllm": {"max-model-len": 99},
        "reasoning_parser": "none",
        "tool_call_parser": "none",
        "chat_template": "{{ messages }}",
        "default_chat_template_kwargs": {"thinking": True},
        "trust_request_chat_template": True,
        "harmony_system_instructions": True,
        "mcp_config": tmp_path / "mcp.json",
        "tool": [TOOL],
        "allow_tool": ["warehouse"],
        "allow_address": ["10.0.0.0/8"],
        "tool_timeout": 5,
        "max_turns": 5,
        "share_caches": True,
        "salt_caches": True,
        "leave_out_tool": ["shell"],
    }
    async with chosen(answering, **values) as settings, running(settings):
        pass
    [line] = [record.message for record in caplog.records if record.message.startswith("No effect, as ")]
    named = line.rpartition(": ")[2].split(", ")
    shown = {"vllm": "[vllm]", "engine_key": "PENSTOCK_ENGINE_KEY", "shadow_key": "PENSTOCK_SHADOW_KEY"}
    wanted = values.keys() & answering.unused
    assert sorted(named) == sorted(shown.get(name, f"--{name.replace('_', '-')}") for name in wanted)
    assert answering.reason in line


@pytest.mark.parametrize("answering", ELSEWHERE)
async def test_nothing_is_named_without_settings(answering: Answering, caplog: pytest.LogCaptureFixture) -> None:
    async with chosen(answering) as settings, running(settings):
        pass
    assert "No effect" not in caplog.text


async def test_tool_that_no_recording_has_is_refused_with_the_reason() -> None:
    body = {"input": "Hi", "tools": [{"type": "mcp", "server_label": "warehouse", "require_approval": "never"}]}
    request = CreateResponse.model_validate(body)
    message = "This server knows no MCP server 'warehouse': recordings answer here, and no tools run."
    async with chosen(Answering.RECORDINGS, tool=[TOOL]) as settings, pipeline(settings) as responses:
        with pytest.raises(InvalidRequest) as refused:
            async with responses.open(source_of([request])) as events:
                await anext(events)
    assert (refused.value.message, refused.value.param) == (message, "tools[0].server_label")


async def test_wrong_tool_ends_the_start_before_the_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("def bare(settings): return object()\n")
    started: list[Settings] = []

    @asynccontextmanager
    async def start_engine(settings: Settings) -> AsyncGenerator[RunningEngine, None]:
        started.append(settings)
        async with start(settings) as engine:
            yield engine

    async with chosen(Answering.OWN, tool=[f"{tmp_path / 'bare.py'}:bare"]) as settings:
        with pytest.raises(WrongPlugin, match="the method session of object is missing"):
            async with running(settings, start_engine):
                pass
    assert not started
