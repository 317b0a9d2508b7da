from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.api.http.auth import Keys
from penstock.pipeline.errors import EngineFailed, EngineOverloaded
from penstock.pipeline.frames import (
    GenerationFinished,
    GenerationStarted,
    Prompt,
    ResponseStarted,
    TokenChunk,
    TokenLogprob,
)
from penstock.pipeline.protocol.events import DONE, Delta, to_sse
from penstock.pipeline.recordings.format import source_of_recording
from penstock.pipeline.recordings.sampling import Condition
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.token_masking import WithoutTexts, harmony_words
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support import server
from tests.support.api_clients import wait_until
from tests.support.event_streams import harmony_pipeline, read_sse
from tests.support.fixture_cases import Case, check_conversation, check_events, check_turns
from tests.support.stores import open_store

PLAIN = {"request.json", "conversation.jsonl", "prompt.jsonl", "tokens.jsonl", "parsed.jsonl", "events.jsonl"}
WHOLE = PLAIN | {"response.json"}
REQUEST: dict[str, Any] = {"model": "tiny", "input": "Say hello.", "temperature": 0}


async def replayed(folder: Path, stage: str, source: str) -> bytes:
    """The bytes that a client gets if a recording is replayed from ``stage``."""
    async with open_store(str(folder.parent / "replay.sqlite3")) as store:
        pipeline = harmony_pipeline(ScriptedEngine(), store)
        async with pipeline.from_stage(stage).open(source_of_recording(server.read_stage(folder, source))) as events:
            return b"".join([to_sse(event) async for event in events]) + DONE


@pytest.mark.parametrize("text", [server.HELLO, server.CALL, server.COUNT], ids=["hello", "call", "count"])
async def test_recording_replays_to_the_same_bytes(tmp_path: Path, text: str) -> None:
    engine = ScriptedEngine(server.script(text, chunk_size=3))
    async with server.recording_server(engine, tmp_path / "recorded") as served:
        seen = await served.stream({**REQUEST, "tools": [server.WEATHER]})
    folder = server.only_recording(tmp_path / "recorded")
    assert server.recorded_files(folder) == WHOLE
    for stage, source in (("parse", "generate"), ("emit", "parse"), ("persist", "emit")):
        assert await replayed(folder, stage, source) == seen


async def test_recording_passes_the_tests_of_fixtures(tmp_path: Path) -> None:
    engine = ScriptedEngine(server.script(server.CALL, chunk_size=4), models=("tiny",))
    async with server.recording_server(engine, tmp_path / "recorded") as served:
        tool = {**server.WEATHER, "unknown": {"key": 1}}
        await served.stream(
            {**REQUEST, "tools": [tool], "metadata": {"a": "b"}, "text": {"verbosity": "low", "more": 1}}
        )
    copied = shutil.copytree(server.only_recording(tmp_path / "recorded"), tmp_path / "any_name")
    case = Case(copied, regen=False)
    async with open_store(str(tmp_path / "responses.sqlite3")) as store:
        await check_conversation(case, store, None)
        await check_turns(case, None)
        await check_events(case, store, "parsed.jsonl")


async def test_every_kind_of_response_is_recorded(tmp_path: Path) -> None:
    async with server.recording_server(ScriptedEngine(server.script()), tmp_path / "r", detaches=True) as served:
        _, once = await served.post({**REQUEST, "store": False})
        _, detached = await served.post(REQUEST)
        _, queued = await served.post({**REQUEST, "background": True})
        await served.wait_for_end(queued["id"])
    for response in (once, detached, queued):
        folder = tmp_path / "r" / response["id"]
        assert server.recorded_files(folder) == WHOLE
        assert json.loads((folder / "response.json").read_bytes())["status"] == "completed"
        assert not server.read_stage(folder, "emit").end.abandoned


async def test_refused_or_counted_request_leaves_no_recording(tmp_path: Path) -> None:
    engine = ScriptedEngine(Script(refusal=EngineOverloaded("full")))
    async with server.recording_server(engine, tmp_path) as served:
        assert (await served.post(REQUEST))[0] == 503
        assert (await served.post({**REQUEST, "include": ["nothing"]}))[0] == 400
        assert (await served.post(REQUEST, "/v1/responses/input_tokens"))[0] == 200
    assert not server.recorded_folders(tmp_path)


async def test_engine_failure_is_recorded(tmp_path: Path) -> None:
    engine = ScriptedEngine(server.script(server.COUNT, error=EngineFailed("the engine broke")))
    async with server.recording_server(engine, tmp_path / "r") as served:
        seen = await served.stream(REQUEST)
    folder = server.only_recording(tmp_path / "r")
    for stage in ("generate", "parse"):
        failure = server.read_stage(folder, stage).end.failure
        assert failure is not None
        assert (failure.error, failure.message) == ("EngineFailed", "the engine broke")
    assert server.read_stage(folder, "emit").end.failure is None
    assert json.loads((folder / "response.json").read_bytes())["status"] == "failed"
    assert await replayed(folder, "parse", "generate") == seen


async def test_abandoned_response_is_recorded(tmp_path: Path) -> None:
    engine = ScriptedEngine(server.script(server.ENDLESS, endless=True, latency=0.01))
    async with server.recording_server(engine, tmp_path) as served:
        async with served.client.post(f"{served.url}/v1/responses", json={**REQUEST, "stream": True}) as answer:
            await answer.content.readany()
        await served.wait_until_idle()
    folder = server.only_recording(tmp_path)
    assert server.recorded_files(folder) == PLAIN
    assert all(server.read_stage(folder, stage).end.abandoned for stage in ("generate", "parse", "emit"))


async def test_cancelled_response_is_recorded(tmp_path: Path) -> None:
    engine = ScriptedEngine(server.script(server.ENDLESS, endless=True, latency=0.01))
    async with server.recording_server(engine, tmp_path) as served:
        streaming = asyncio.create_task(served.stream(REQUEST))
        await wait_until(lambda: engine.running)
        (run,) = served.scheduler.runs
        await served.scheduler.cancel(run)
        await streaming
    folder = server.only_recording(tmp_path)
    assert server.read_stage(folder, "generate").frames[-1] == GenerationFinished(
        "cancelled", cached_tokens=0, duration=0.0
    )
    assert json.loads((folder / "response.json").read_bytes())["status"] == "cancelled"


async def test_stopped_server_leaves_complete_files(tmp_path: Path) -> None:
    engine = ScriptedEngine(server.script(server.ENDLESS, endless=True, latency=0.01))
    async with server.recording_server(engine, tmp_path) as served:
        streaming = asyncio.create_task(served.stream(REQUEST))
        await wait_until(lambda: engine.running)
        await served.scheduler.drain(0)
        await streaming
    folder = server.only_recording(tmp_path)
    assert server.read_stage(folder, "generate").end.failure or server.read_stage(folder, "generate").end.abandoned


async def test_turns_of_a_response_share_a_file(tmp_path: Path) -> None:
    lost = '<|channel|>analysis to=browser.search code<|message|>{"query": "height"}<|call|>'
    turns = (server.script(lost), server.script())
    async with server.recording_server(ScriptedEngine(server.script(), turns=turns), tmp_path / "r") as served:
        seen = await served.stream(REQUEST)
    folder = server.only_recording(tmp_path / "r")
    assert server.recorded_files(folder) == WHOLE | {"conversed.jsonl"}
    for stage, kind in (("render", Prompt), ("generate", GenerationStarted), ("parse", GenerationStarted)):
        assert sum(isinstance(frame, kind) for frame in server.read_stage(folder, stage).frames) == 2
    assert await replayed(folder, "emit", "converse") == seen


async def test_only_named_junctions_are_recorded(tmp_path: Path) -> None:
    engine = ScriptedEngine(server.script())
    async with server.recording_server(engine, tmp_path, recorder={"after": ("generate",)}) as served:
        await served.post(REQUEST)
    assert server.recorded_files(server.only_recording(tmp_path)) == {"tokens.jsonl"}


async def test_header_of_the_request_decides_if_it_is_recorded(tmp_path: Path) -> None:
    condition = Condition.parse("x-record=yes")
    taken: dict[str, Any] = {"recorder": {"condition": condition}, "recorded_if": condition}
    async with server.recording_server(ScriptedEngine(server.script()), tmp_path, **taken) as served:
        for headers in ({}, {"x-record": "no"}, {"X-Record": "yes"}):
            async with served.client.post(f"{served.url}/v1/responses", json=REQUEST, headers=headers) as answer:
                last = await answer.json()
    folder = server.only_recording(tmp_path)
    assert folder.name == last["id"]
    assert server.read_stage(folder, "normalize").frames[0].facts.origin.recorded is False


SECRETS = ("owner", "canary-salt", "canary-trace", "canary-token", "canary-path", "k" * 20)


async def test_secrets_are_never_recorded(tmp_path: Path) -> None:
    key = "k" * 20
    tool = {
        "type": "mcp",
        "server_label": "wiki",
        "server_url": "https://127.0.0.1:9/canary-path?key=canary-path",
        "authorization": "canary-token",
        "require_approval": "never",
        "more": "canary-token",
    }
    body = {**REQUEST, "cache_salt": "canary-salt", "tools": [tool], "stream": True, "api_key": "canary-token"}
    body["tool_choice"] = {"type": "allowed_tools", "mode": "auto", "tools": [tool]}
    headers = {"Authorization": f"Bearer {key}", "traceparent": "canary-trace"}
    engine = ScriptedEngine(server.script())
    async with (
        server.recording_server(engine, tmp_path, keys=Keys(given=[key])) as served,
        served.client.post(f"{served.url}/v1/responses", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200
        await answer.read()
    folder = server.only_recording(tmp_path)
    assert server.recorded_files(folder) == WHOLE | {"conversed.jsonl"}
    assert isinstance(server.read_stage(folder, "converse").frames[0], ResponseStarted)
    written = b"".join(path.read_bytes() for path in folder.iterdir()).decode()
    owner = Keys(given=[key]).owner(f"Bearer {key}")
    assert [secret for secret in (*SECRETS[1:], owner, '"owner"') if secret in written] == []


async def test_recordings_belong_to_their_user(tmp_path: Path) -> None:
    async with server.recording_server(ScriptedEngine(server.script()), tmp_path / "r") as served:
        await served.post(REQUEST)
    folder = server.only_recording(tmp_path / "r")
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder, tmp_path / "r")} == {0o700}


async def test_header_has_model_and_versions(tmp_path: Path) -> None:
    async with server.recording_server(ScriptedEngine(server.script(latency=0.01)), tmp_path) as served:
        await served.post(REQUEST)
    recorded = server.read_stage(server.only_recording(tmp_path), "generate")
    assert (recorded.header.model, recorded.header.source) == ("tiny", server.RECORDING_HEADER.source)
    assert recorded.header.recorded_at is not None
    times = [timed.at for timed in recorded.timed if timed.at is not None]
    assert len(times) == len(recorded.timed)
    assert times == sorted(times)
    assert times[-1] > 0.05


async def test_slow_disk_cuts_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow = {"pause": 60.0, "most_waiting": 20}
    async with server.recording_server(ScriptedEngine(server.script(server.COUNT)), tmp_path, recorder=slow) as served:
        assert (await served.post(REQUEST))[1]["status"] == "completed"
    assert "too slow" in caplog.text
    last = (server.only_recording(tmp_path) / "tokens.jsonl").read_bytes().splitlines()[-1]
    assert json.loads(last)["type"] == "TokenChunk"


async def test_recording_may_be_deleted_at_any_time(tmp_path: Path) -> None:
    engine = server.PacedEngine(server.script(server.COUNT), initial=20)
    async with server.recording_server(engine, tmp_path, recorder={"pause": 0.01}) as served:
        streaming = asyncio.create_task(served.post(REQUEST))
        await wait_until(lambda: server.recorded_folders(tmp_path))
        folder = server.only_recording(tmp_path)
        while folder.exists():  # the files are written meanwhile
            shutil.rmtree(folder, ignore_errors=True)
        engine.say_all()
        assert (await streaming)[1]["status"] == "completed"
        _, other = await served.post(REQUEST)
    assert server.only_recording(tmp_path).name == other["id"]


async def test_many_responses_leave_nothing_open(tmp_path: Path) -> None:
    engine = ScriptedEngine(server.script(chunk_size=8))
    async with server.recording_server(engine, tmp_path) as served:
        await served.post(REQUEST)
        before = psutil.Process().num_fds()
        for number in range(60):
            request = served.client.post(f"{served.url}/v1/responses", json={**REQUEST, "stream": True})
            async with request as answer:
                if number % 3:
                    await answer.read()
        await served.wait_until_idle()
        assert psutil.Process().num_fds() < before + 10
    assert len(server.recorded_folders(tmp_path)) == 61
    assert all(server.read_stage(folder, "emit").end for folder in server.recorded_folders(tmp_path))


CANARY = "quokka"

TALKATIVE = server.HELLO.replace("greeting", CANARY).replace("Hello", CANARY)


async def test_redacted_recording_has_no_text(tmp_path: Path) -> None:
    body = {
        "model": "tiny",
        "instructions": f"{CANARY} one",
        "input": [
            {"role": "user", "content": f"{CANARY} two"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": CANARY}]},
            {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": f'{{"{CANARY}": 1}}'},
            {"type": "function_call_output", "call_id": "c", "output": CANARY},
        ],
        "tools": [
            {
                **server.WEATHER,
                "description": CANARY,
                "parameters": {"type": "object", "properties": {CANARY: {"enum": [CANARY]}}},
            },
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": CANARY}},
        ],
        "metadata": {CANARY: CANARY},
        "user": CANARY,
        "safety_identifier": CANARY,
        "prompt_cache_key": CANARY,
        "stop": [CANARY + "s"],
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 20,
        "enable_response_messages": True,
    }
    logprob = TokenLogprob(-0.5, tuple((token, -1.0) for token in load_encoding().encode(f" {CANARY}")))
    engine = ScriptedEngine(Script(load_encoding().encode_markup(TALKATIVE), logprobs=[logprob]))
    without = {"redact": lambda _: WithoutTexts(harmony_words)}
    async with server.recording_server(engine, tmp_path / "r", recorder=without) as served:
        seen = await served.stream(body)
    assert CANARY.encode() in seen
    folder = server.only_recording(tmp_path / "r")
    assert server.recorded_files(folder) == WHOLE - {"request.json"}
    assert [path.name for path in folder.iterdir() if CANARY in path.read_text()] == []
    spelled = [
        frame.token_ids for frame in server.read_stage(folder, "generate").frames if isinstance(frame, TokenChunk)
    ]
    assert "xxxxxx!" in load_encoding().decode([token for ids in spelled for token in ids])
    assert CANARY not in load_encoding().decode(server.read_stage(folder, "render").frames[0].token_ids)
    again = await replayed(folder, "parse", "generate")
    assert [type(event) for event in read_sse(again) if not isinstance(event, Delta)] == [
        type(event) for event in read_sse(seen) if not isinstance(event, Delta)
    ]
