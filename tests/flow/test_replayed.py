"""``penstock serve --engine replay:DIR``: a real server that answers from recordings, without vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.api.cli.drawn import drawn
from penstock.api.cli.replayer import replay_of
from penstock.api.settings import Settings
from penstock.extensions.workbench.conformance.report import UNRECORDED
from penstock.pipeline.frames import GenerationFinished, TokenChunk, TokenFrame
from penstock.pipeline.plugins import load
from penstock.pipeline.recordings.format import FORMAT, End, Failure, Header, line, read_frames, read_header
from tests.support.api_clients import openai_client
from tests.support.paths import FIXTURES
from tests.support.server_process import ServerProcess, exit_status, penstock, run_penstock, serving_process

HARMONY = FIXTURES / "harmony"
CASES = sorted(folder.name for folder in HARMONY.glob("*/"))

NAMES = ("id", "call_id", "caller_id", "container_id", "approval_request_id")
"""The fields whose values are derived from the response's own id."""


@asynccontextmanager
async def replayed(folder: Path, where: Path, *options: str) -> AsyncGenerator[ServerProcess, None]:
    """A server of the recordings in ``folder``, in a process that cannot import vLLM."""
    arguments = ("serve", "--engine", f"replay:{folder}")
    async with serving_process(penstock, arguments, str(where / "responses.sqlite3"), where, *options) as server:
        yield server
        await server.kill(signal.SIGTERM)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess, None]:
    async with replayed(HARMONY, tmp_path_factory.mktemp("replayed")) as served:
        yield served


pytestmark = pytest.mark.asyncio(loop_scope="module")


def request_of(name: str) -> dict[str, Any]:
    """A recorded request without ``stream``."""
    request: dict[str, Any] = json.loads((HARMONY / name / "request.json").read_text())
    return {key: value for key, value in request.items() if key != "stream"}


def response_of(name: str) -> dict[str, Any]:
    response: dict[str, Any] = json.loads((HARMONY / name / "response.json").read_text())
    return response


def comparable(response: dict[str, Any]) -> Any:
    """A response without its ids, times and model name."""
    kept = {
        key: value for key, value in response.items() if key not in ("created_at", "completed_at", "model", "store")
    }
    return _nameless(kept)


def _nameless(part: Any) -> Any:
    match part:
        case dict():
            return {key: _nameless(value) for key, value in part.items() if key not in NAMES}
        case list():
            return list(map(_nameless, part))
        case _:
            return part


def response_in(event: Any) -> Any:
    return event.response


# Recorded requests


@pytest.mark.parametrize("name", CASES)
async def test_recording_is_requested_by_its_name(server: ServerProcess, name: str) -> None:
    status, response = await server.post(request_of(name) | {"model": name})
    assert status == 200, response
    assert comparable(response) == comparable(response_of(name))


async def test_calls_of_a_recording_need_no_tools_in_a_request_that_names_it(server: ServerProcess) -> None:
    """The page of the server sends such requests."""
    status, response = await server.post({"model": "weather", "input": "Who are you?"})
    assert status == 200
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]


async def test_request_gets_its_recorded_answer(server: ServerProcess) -> None:
    by_request = defaultdict(list)
    for name in CASES:
        by_request[json.dumps(request_of(name), sort_keys=True)].append(name)
    for request, names in by_request.items():
        recorded = sorted(json.dumps(comparable(response_of(name)), sort_keys=True) for name in names)
        answers = [(await server.post(json.loads(request)))[1] for _ in names]
        assert sorted(json.dumps(comparable(response), sort_keys=True) for response in answers) == recorded


async def test_openai_python_streams_recordings(server: ServerProcess) -> None:
    async with openai_client(server.url) as client:
        stream = await client.responses.create(model="tiny-gpt-oss", input="Say hello.", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        again = await client.responses.retrieve(response_in(events[-1]).id)
    assert again.output_text == response_in(events[-1]).output_text


async def test_concurrent_requests_do_not_mix(server: ServerProcess) -> None:
    answers = await asyncio.gather(*(server.post(request_of(name) | {"model": name}) for name in CASES))
    assert [comparable(answer) for _, answer in answers] == [comparable(response_of(name)) for name in CASES]


async def test_models_are_recorded_models_and_names(server: ServerProcess) -> None:
    _, models = await server.get("/v1/models")
    assert [model["id"] for model in models["data"]] == ["tiny-gpt-oss", *CASES]
    assert {model["max_model_len"] for model in models["data"]} == {None}


# Other requests


async def test_unrecorded_request_is_refused(server: ServerProcess) -> None:
    status, answer = await server.post({"model": "tiny-gpt-oss", "input": "Say hello!!"})
    assert (status, answer["error"]["code"]) == (400, "not_recorded")
    problem = r"No recording answers this request\. Of \d+ recordings, the closest is "
    assert re.search(problem, answer["error"]["message"])
    assert "Say hello." in answer["error"]["message"]


@pytest.mark.parametrize(("check", "says_little"), [("responses.history", True), ("responses.models", False)])
async def test_conformance_says_that_the_server_answers_from_recordings(
    server: ServerProcess, check: str, says_little: bool, tmp_path: Path
) -> None:
    arguments = ("conformance", f"{server.url}/v1", "--dialect", "responses", "--only", check)
    ended = await asyncio.to_thread(run_penstock, tmp_path, dict(os.environ), *arguments)
    assert ended.status == int(says_little)
    assert (ended.out.splitlines()[-1] == UNRECORDED) == says_little


async def test_other_tools_make_another_request(server: ServerProcess) -> None:
    tool = {"type": "function", "name": "unheard_of", "parameters": {"type": "object", "properties": {}}}
    status, answer = await server.post({"model": "tiny-gpt-oss", "input": "Say hello.", "tools": [tool]})
    assert status == 400
    assert "its tools are none, and here they are unheard_of" in answer["error"]["message"]


async def test_background_responses_are_replayed(server: ServerProcess) -> None:
    status, _ = await server.post({"model": "tiny-gpt-oss", "input": "Unheard of.", "background": True})
    assert status == 400
    async with openai_client(server.url) as client:
        stream = await client.responses.create(model="tiny-gpt-oss", input="Say hello.", background=True, stream=True)
        made = response_in(await anext(stream)).id
        await stream.close()
        rest = [event async for event in await client.responses.retrieve(made, stream=True, starting_after=0)]
    assert rest[0].sequence_number == 1
    assert rest[-1].type == "response.completed"


@pytest.mark.parametrize(
    ("folder", "request_shown"),
    [
        (HARMONY, {"model": "tiny-gpt-oss", "input": "Hello!"}),
        (HARMONY / "weather", {"model": "weather", "input": "Tell me your plan, then check Madrid."}),
    ],
)
async def test_first_request_to_try_fits_a_recording(
    folder: Path, request_shown: dict[str, str], tmp_path: Path
) -> None:
    async with replayed(folder, tmp_path, "--record", str(tmp_path / "recorded")) as server:
        body = json.loads(re.findall(r" -d '(.*)'", server.log.read_text())[0])
        assert body == request_shown | {"stream": True}
        status, answer = await server.post(body | {"stream": False})
    assert (status, answer["status"]) == (200, "completed")


# Speed, order and failures


def recorded(folder: Path, chunks: int, name: str = "tiny-gpt-oss", at: str | None = None) -> None:
    """A recording of ``chunks`` tokens, a tenth of a second apart."""
    started, *_ = read_frames(HARMONY / "greeting" / "tokens.jsonl", TokenFrame)
    frames = [started, *[TokenChunk((token,)) for token in (200005, 17196, 200008)], *[TokenChunk((40,))] * chunks]
    frames.append(GenerationFinished("stop", cached_tokens=0, duration=0.0))
    folder.mkdir(parents=True)
    header = Header(FORMAT, name, recorded_at=at)
    lines = [line(frame, number / 10) for number, frame in enumerate(frames)]
    end = line(End(len(lines)))
    (folder / "tokens.jsonl").write_bytes(b"".join((line(header), *lines, end)))


async def test_replay_at_recorded_speed_can_be_cancelled(tmp_path: Path) -> None:
    recorded(tmp_path / "recordings" / "slow", chunks=600)
    async with replayed(tmp_path / "recordings", tmp_path, "--replay-speed", "1x") as server:
        async with openai_client(server.url) as client:
            stream = await client.responses.create(model="slow", input="Whatever.", stream=True)
            made = response_in(await anext(stream)).id
            async for event in stream:
                if event.type == "response.output_text.delta":
                    await client.responses.cancel(made)
                    break
            rest = [event async for event in stream]
        assert rest[-1].type == "response.incomplete"
        assert response_in(rest[-1]).status == "cancelled"
        assert 0 < len(response_in(rest[-1]).output_text) < 600


async def test_answers_come_in_the_order_of_recording(tmp_path: Path) -> None:
    for name, day, chunks in (("a", 3, 1), ("b", 1, 2), ("c", 2, 3)):
        recorded(tmp_path / "recordings" / name, chunks, at=f"2026-01-0{day}T00:00:00Z")
    async with replayed(tmp_path / "recordings", tmp_path) as server:
        answers = [await server.post(request_of("greeting")) for _ in range(4)]
        assert [len(answer["output"][0]["content"][0]["text"]) for _, answer in answers] == [2, 3, 1, 2]


async def test_failures_are_replayed(tmp_path: Path) -> None:
    refused, broken = tmp_path / "recordings" / "refused", tmp_path / "recordings" / "broken"
    for folder, frames, error in ((refused, 0, "EngineOverloaded"), (broken, 3, "EngineFailed")):
        recorded(folder, 5)
        (folder / "conversation.jsonl").write_bytes((HARMONY / "greeting" / "conversation.jsonl").read_bytes())
        lines = (folder / "tokens.jsonl").read_bytes().splitlines(keepends=True)[: 1 + frames]
        end = line(End(frames, failure=Failure(error, "It was too much.")))
        (folder / "tokens.jsonl").write_bytes(b"".join(lines) + end)
    async with replayed(tmp_path / "recordings", tmp_path) as server:
        status, answer = await server.post({"model": "refused", "input": "Hello."})
        assert (status, answer["error"]["message"]) == (503, "It was too much.")
        status, answer = await server.post({"model": "broken", "input": "Hello."})
        assert (answer["status"], answer["error"]["message"]) == ("failed", "It was too much.")


async def test_chat_recordings_need_no_vllm(tmp_path: Path) -> None:
    async with replayed(FIXTURES / "chat", tmp_path) as server:
        for name in ("tiny_qwen_thinking_off", "qwen3_two_calls", "kimi_k2_cut_in_thought"):
            request = json.loads((FIXTURES / "chat" / name / "request.json").read_text())
            _, response = await server.post({**request, "model": name, "stream": False})
            recorded = json.loads((FIXTURES / "chat" / name / "response.json").read_text())
            assert comparable(response) == comparable(recorded)


COUNTING = """
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from penstock.pipeline.frames import TokenFrame

async def count(source: AsyncIterator[TokenFrame]) -> AsyncGenerator[TokenFrame, None]:
    async for frame in source:
        print("counted", type(frame).__name__, file=sys.stderr)
        yield frame

def install(pipeline):
    return pipeline.insert_after("generate", "count", count)
"""


async def test_plugin_stages_see_recorded_frames(tmp_path: Path) -> None:
    stage = tmp_path / "counting.py"
    stage.write_text(COUNTING)
    async with replayed(HARMONY / "greeting", tmp_path, "--with", f"{stage}:install") as server:
        await server.post(request_of("greeting"))
    frames = read_frames(HARMONY / "greeting" / "tokens.jsonl", TokenFrame)
    counted = [entry for entry in server.log.read_text().splitlines() if entry.startswith("counted")]
    assert counted == [f"counted {type(frame).__name__}" for frame in frames]


SIGNING = """
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from pydantic import BaseModel, SecretStr
from penstock.pipeline.frames import ItemDelta, ParsedFrame

class Settings(BaseModel):
    by: str
    key: SecretStr

async def sign(source: AsyncIterator[ParsedFrame], by: str) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield ItemDelta(f"{frame.text} ({by})") if isinstance(frame, ItemDelta) else frame

def install(pipeline, settings: Settings):
    return pipeline.insert_after("parse", "sign", partial(sign, by=settings.by))
"""


def penstock_in(folder: str, *arguments: str) -> None:
    os.chdir(folder)
    penstock(*arguments)


@pytest.mark.parametrize("frontends", ["1", "2"])
async def test_stages_get_their_settings_from_the_file(tmp_path: Path, frontends: str) -> None:
    (tmp_path / "signing.py").write_text(SIGNING)
    (tmp_path / "penstock.toml").write_text(
        'with = ["signing.py:install"]\n[stages.signing]\nby = "Ann"\nkey = "xyzzy"\n'
    )
    served = (str(tmp_path), "serve", "--engine", f"replay:{HARMONY / 'greeting'}", "--log-level", "DEBUG")
    store = str(tmp_path / "responses.sqlite3")
    async with serving_process(penstock_in, served, store, tmp_path, "--frontends", frontends) as server:
        _, answer = await server.post(request_of("greeting"))
    assert "(Ann)" in answer["output"][-1]["content"][0]["text"]
    assert "xyzzy" not in server.log.read_text()


async def test_stages_that_recorded_answers_do_not_pass_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("greeting", "served_python"):
        shutil.copytree(HARMONY / name, tmp_path / name)
    stage = tmp_path / "counting.py"
    stage.write_text(COUNTING)
    engine = {"engine_arguments": [], "engine": [f"replay:{tmp_path}"]}
    settings = Settings.model_validate({**engine, "with": [f"{stage}:install"], "log_prompts": True})
    lines = (await drawn(settings)).splitlines()[2:]
    assert {line.split()[0]: line.partition("  (")[2] for line in lines} == {
        "normalize": "",
        **dict.fromkeys(("recall", "read", "resolve"), ""),
        "converse": "",
        "summarize": "runs only to count input tokens)",
        "render": "runs only to count input tokens)",
        "log": "does not run)",
        "generate": "does not run)",
        "count": "runs for 1 of 2 recordings)",
        "parse": "runs for 1 of 2 recordings)",
        "emit": "",
        "persist": "",
    }
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "The stage 'log prompts' does not run",
        "The stage 'count' runs for 1 of 2 recordings",
    ]
    commands = [record.message.partition("and in penstock ")[2] for record in caplog.records]
    assert commands == [
        "replay FOLDER --from render --with ..., if no tools ran",
        "replay FOLDER/tokens.jsonl --to count --with ...",
    ]
    tokens = tmp_path / "served_python" / "tokens.jsonl"
    replay = await replay_of(tokens, upto="count", install=load([f"{stage}:install"]))
    assert replay.trace.after("count").frames == list(read_frames(tokens, TokenFrame))


async def test_recordings_of_replays_can_be_replayed(tmp_path: Path) -> None:
    names = ("greeting", "function_call_result", "logprobs", "served_python", "served_mcp", "cut_in_final")
    async with replayed(HARMONY, tmp_path, "--record", str(tmp_path / "recorded")) as server:
        for name in names:
            await server.post(request_of(name) | {"model": name})
    headers = [read_header(path) for path in (tmp_path / "recorded").glob("*/events.jsonl")]
    assert {(header.source, header.answered_from, *header.versions) for header in headers} == {
        (None, str(HARMONY), "python", "penstock")
    }
    async with replayed(tmp_path / "recorded", tmp_path) as server:
        for name in names:
            _, response = await server.post(request_of(name) | {"model": name})
            assert comparable(response) == comparable(response_of(name))


# The start


async def test_truncated_recordings_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    for name, cut in (("no_end", -1), ("whole", None), ("half_a_line", -2)):
        recorded(folder / name, 1)
        tokens = folder / name / "tokens.jsonl"
        lines = tokens.read_bytes().splitlines(keepends=True)
        tokens.write_bytes(b"".join(lines[:cut]) + (lines[-1][:9] if cut == -2 else b""))
    async with replayed(folder, tmp_path) as server:
        status, _ = await server.post(request_of("greeting"))
        assert status == 200
        _, models = await server.get("/v1/models")
    assert [model["id"] for model in models["data"]] == ["tiny-gpt-oss", "whole"]
    in_the_middle, behind = [entry for entry in server.log.read_text().splitlines() if "left out" in entry]
    assert "half_a_line/tokens.jsonl:7: the recording stops within this line" in in_the_middle
    assert "no_end/tokens.jsonl:7: the recording has no end after this line" in behind


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({}, "recordings: there is no recording here"),
        ({"tokens.jsonl": b"hello\n"}, "tokens.jsonl:1: this is no recording: it does not begin with a header"),
        (
            {"tokens.jsonl": line(Header(FORMAT, encoding="chat")) + line(End(0))},
            "the answer cannot be read from this alone",
        ),
        ({"tokens.jsonl": line(Header(FORMAT)) + line(End(0))}, "so its request is unknown"),
    ],
)
async def test_folder_without_recordings_ends_the_start(tmp_path: Path, files: dict[str, bytes], part: str) -> None:
    folder = tmp_path / "recordings"
    (folder / "one").mkdir(parents=True)
    for name, data in files.items():
        (folder / "one" / name).write_bytes(data)
    arguments = ("serve", "--engine", f"replay:{folder}", "--print-pipeline", "--store", str(tmp_path / "store"))
    assert await exit_status(tmp_path / "log", penstock, *arguments) == 2
    assert part in (tmp_path / "log").read_text()
