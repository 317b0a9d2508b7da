"""A `vllm serve` is recorded: its traffic is sent to penstock, and its tokens are compared and parsed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from penstock.extensions.workbench.against import compared
from penstock.pipeline.recordings.format import read_header
from penstock.pipeline.recordings.wire import WireBody, WireEvent
from tests.support.paths import TINY_QWEN
from tests.support.processes import PATIENCE, free_port, running_process
from tests.support.tiny_engine import ARGUMENTS
from tests.support.wiretaps import recorded_server, wire_recordings

HELLO: Any = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--reasoning-parser=qwen3")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """A ``vllm serve`` of the tiny Qwen."""
    url = f"http://127.0.0.1:{free_port()}"
    named = [each for each in ARGUMENTS if "model-name" not in each]
    command: list[str | Path] = [Path(sys.executable).with_name("vllm"), "serve", TINY_QWEN, *named, *PARSERS]
    command += ["--served-model-name=tiny-qwen", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    with running_process(command, f"{url}/health", tmp_path_factory.mktemp("vllm") / "serve.log"):
        yield url


async def record(upstream: str, folder: Path) -> None:
    """Record five answers of a server, in two dialects, as streams and as bodies."""
    async with (
        recorded_server(upstream, folder) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude,
    ):
        asked: Any = {"model": "tiny-qwen", "max_tokens": 100}
        greedy = asked | {"temperature": 0}
        for messages, more in ((HELLO, {"stream_options": {"include_usage": True}}), (WEATHER, {"tools": TOOLS})):
            options: Any = more
            stream: Any = await client.chat.completions.create(messages=messages, stream=True, **greedy, **options)
            assert [chunk async for chunk in stream]
        whole = await client.chat.completions.create(messages=HELLO, **greedy)
        assert "Hello" in (whole.choices[0].message.content or "")
        async with claude.messages.stream(messages=HELLO, **asked) as events:
            await events.get_final_message()
        tool: Any = {"name": "get_weather", "input_schema": SCHEMA}
        message = await claude.messages.create(messages=WEATHER, tools=[tool], **asked)
        assert message.stop_reason == "tool_use"


async def test_traffic_of_vllm_is_recorded_and_compared_with_penstock(url: str, tmp_path: Path) -> None:
    folder, serve = tmp_path / "recordings", f"http://127.0.0.1:{free_port()}"
    await record(url, folder)
    recordings = wire_recordings(folder)
    assert [each.header.dialect for each in recordings] == ["chat"] * 3 + ["messages"] * 2
    assert all(each.header.left_out == () for each in recordings)
    assert recordings[0].frames[-1] == WireEvent(text="[DONE]")
    assert sum(isinstance(each.frames[-1], WireBody) for each in recordings) == 2

    command: list[str | Path] = [Path(sys.executable).with_name("penstock"), "serve", "--engine", url]
    command += ["--port", serve.rpartition(":")[2], "--store", tmp_path / "store.sqlite3"]
    with running_process(command, f"{serve}/health", tmp_path / "penstock.log"):
        rows = await compared(folder, serve, "")
        assert [row for row in await compared(folder, url, "") if row.problem] == []
    assert [row.problem for row in rows] == [""] * 5
    texts = [each.problem for row in rows for each in row.found if each.what == "text"]
    assert texts
    assert all(there == here.strip() for here, there in map(sides, texts))  # only white space differs


def sides(problem: str) -> tuple[str, str]:
    """The two texts of a difference, without quotes."""
    here, there = problem.partition(": ")[2].split(" != ")
    return here.strip("'").replace("\\n", "\n"), there.strip("'")


async def test_same_vllm_gives_the_same_events(url: str, tmp_path: Path) -> None:
    await record(url, tmp_path / "recordings")
    rows = await compared(tmp_path / "recordings", url, "")
    greedy = [row for row in rows if row.dialect == "chat"]
    assert [row for row in greedy if not row.is_same] == []


async def record_tokens(upstream: str, folder: Path) -> None:
    """Record four greedy answers with their tokens, a sampled one, and one of Messages, which has none."""
    async with (
        recorded_server(upstream, folder, asks_for_tokens=True) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude,
    ):
        limited: Any = {"model": "tiny-qwen", "max_tokens": 100}
        greedy = limited | {"temperature": 0}
        for messages, more in ((HELLO, {"stream_options": {"include_usage": True}}), (WEATHER, {"tools": TOOLS})):
            options: Any = more
            stream: Any = await client.chat.completions.create(messages=messages, stream=True, **greedy, **options)
            assert [chunk async for chunk in stream]
        await client.chat.completions.create(messages=HELLO, logprobs=True, **greedy)
        await client.completions.create(prompt="Say hello.", **greedy)
        await client.chat.completions.create(messages=HELLO, seed=1, **limited)
        await claude.messages.create(messages=HELLO, **limited)


def test_tokens_of_vllm_are_compared_and_parsed(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    asyncio.run(record_tokens(url, folder))
    recordings = sorted(folder.iterdir())
    assert [(each / "tokens.jsonl").exists() for each in recordings] == [True] * 5 + [False]
    header = read_header(recordings[0] / "tokens.jsonl")
    assert (header.encoding, header.source) == ("chat", str(TINY_QWEN))

    command: list[str | Path] = [
        Path(sys.executable).with_name("penstock"),
        "compare",
        folder,
        "--engine",
        url,
        "--json",
    ]
    lines = subprocess.run(command, capture_output=True, check=True, text=True, timeout=PATIENCE).stdout.splitlines()
    *answers, figures = map(json.loads, lines)
    assert (figures["answers"], figures["changed"], figures["vocabulary_not_checked"]) == (5, 0, {})
    assert figures["compared"] == sum(each["tokens"] for each in answers[:4]) > 20
    assert list(figures["left_out"]) == ["sampled, without top_logprobs"]
    assert list(figures["skipped"].values()) == [1]

    command = [Path(sys.executable).with_name("penstock"), "replay", recordings[1]]
    shown = subprocess.run(command, capture_output=True, check=True, text=True, timeout=PATIENCE)
    assert "penstock: " not in shown.stderr
    assert "function call · get_weather" in shown.stdout
    assert '{"city":"Paris"}' in shown.stdout.replace(" ", "")
