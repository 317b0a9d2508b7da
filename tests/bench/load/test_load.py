"""The load generator: its arithmetic, and its command against a real server."""

from __future__ import annotations

import asyncio
import re
import sys
from array import array
from collections import Counter
from itertools import islice, pairwise
from math import isnan
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.services.engines.scripted import ScriptedEngine
from tests.bench.load.__main__ import main
from tests.bench.load.client import Client, Events, Sample
from tests.bench.load.figures import CORES, LAG, Result, result
from tests.bench.load.plan import Plan, arrivals, drawn
from tests.bench.load.running import PAUSE, Load
from tests.bench.load.talk import Talk
from tests.support.api_clients import wait_until
from tests.support.paths import ROOT
from tests.support.processes import free_port
from tests.support.server import CALL, ENDLESS, running_server, script
from tests.support.server_process import running_process

CALLED: dict[str, Any] = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"}


def plan(url: str = "http://localhost", **options: Any) -> Plan:
    return Plan(url=url, **options)


def sample(*deltas: float, outcome: str = "completed", tokens: int = 0, **fields: Any) -> Sample:
    usage = {"input_tokens": 10, "output_tokens": tokens or len(deltas)}
    ended = max(deltas, default=0.0)
    return Sample(0.0, deltas=array("d", deltas), ended=ended, outcome=outcome, response={"usage": usage}, **fields)


def figures(*samples: Sample) -> dict[str, float | None]:
    return result(plan(), "tiny", samples, 2.0, {}).figures


def read(file: Path) -> Result:
    return msgspec.json.decode(file.read_bytes(), type=Result)


# Arithmetic


def test_figures_of_a_run() -> None:
    found = figures(
        sample(0.1, 0.2, 0.3),
        sample(0.5, 0.7, outcome="incomplete", tokens=5),
        sample(0.3, outcome="cancelled"),
        sample(1.0, 9.0, is_slow=True),
        sample(outcome="429 rate_limit_exceeded"),
    )
    wanted = {"requests": 5, "requests/s": 2.5, "read slowly": 1, "output tokens/s": 5.5, "input tokens/s": 25}
    wanted |= {"ms first token, p50": 300, "ms between deltas, p50": 100, "ms of a request, p50": 500}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_run_without_answers_has_no_times() -> None:
    assert isnan(figures(sample(outcome="timeout"))["ms first token, p99"] or 0)


@pytest.mark.parametrize(
    ("cores", "lag", "begin"), [(0.5, 5.0, None), (0.95, 5.0, "The generator took 95%"), (0.1, 50.0, "Other programs")]
)
def test_saturated_generator_is_a_warning(cores: float, lag: float, begin: str | None) -> None:
    warning = result(plan(), "tiny", [], 1.0, {CORES: cores, LAG: lag}).warning
    assert warning is None if begin is None else warning and warning.startswith(begin)


# What is drawn


def test_same_seed_gives_the_same_arrivals() -> None:
    first, again, other = (list(islice(arrivals(50, seed), 5000)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == first
    assert first[-1] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize(
    ("size", "middle"),
    [("200", 200), ("uniform:100,400", 250), ("normal:200,20", 200), ("lognormal:200,0.8", 200), ("exp:200", 139)],
)
def test_sizes_have_their_median(size: str, middle: float) -> None:
    random = Random(0)
    assert median(drawn(size, random) for _ in range(5000)) == pytest.approx(middle, rel=0.1)


@pytest.mark.parametrize("size", ["", "many", "gauss:1,2", "uniform:1", "200,300", "0", "exp:0"])
def test_wrong_size_is_refused(size: str) -> None:
    with pytest.raises(ValidationError):
        plan(prompt=size)


def test_wrong_options_are_named() -> None:
    with pytest.raises(SystemExit, match=r"^--prompt: Value error, expected 200, .*\n--cancel: Input should be less"):
        main("http://localhost", "--prompt", "many", "--cancel", "2")


def test_conversation_depends_on_seed_and_number_alone() -> None:
    talks = [Talk(plan(seed=seed), number) for seed, number in ((1, 1), (1, 1), (1, 2), (2, 1))]
    bodies = [str(talk.body("tiny")) for talk in talks]
    assert bodies[0] == bodies[1]
    assert len(set(bodies)) == 3


def test_groups_share_their_prefix() -> None:
    options = plan(shared_prefix=30, groups=3)
    prefixes = [Talk(options, number).body("tiny")["instructions"] for number in range(50)]
    assert (len(set(prefixes)), {len(prefix.split()) for prefix in prefixes}) == (3, {30})


# What is sent


def test_history_is_sent_again() -> None:
    talk = Talk(plan(turns=2), 0)
    first = talk.body("tiny")["input"]
    answer = {"type": "message", "role": "assistant", "content": "Yes."}
    assert talk.goes_on({"id": "resp_1", "output": [answer]})
    second = talk.body("tiny")
    assert (second["input"][:2], len(second["input"]), second["store"]) == ([*first, answer], 3, False)
    assert not talk.goes_on({})


def test_stored_history_is_referred_to() -> None:
    talk = Talk(plan(turns=2, history="stored"), 0)
    assert "previous_response_id" not in talk.body("tiny")
    assert talk.goes_on({"id": "resp_1"})
    second = talk.body("tiny")
    assert (second["previous_response_id"], len(second["input"]), second["store"]) == ("resp_1", 1, True)


def test_output_of_a_call_is_sent_before_the_next_turn() -> None:
    talk = Talk(plan(tools=2), 0)
    assert [tool["name"] for tool in talk.body("tiny")["tools"]] == ["get_weather", "look_up_2"]
    cut = CALLED | {"status": "incomplete"}
    assert talk.goes_on({"output": [CALLED, cut]})
    _, call, output = talk.body("tiny")["input"]
    assert (call, output["type"], output["call_id"]) == (CALLED, "function_call_output", "call_1")
    assert not talk.goes_on({})


# What is read


@given(cuts=st.lists(st.integers(0, 60)), newline=st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_split_wherever_blocks_end(cuts: list[int], newline: bytes) -> None:
    events = [b"event: a\ndata: {}", b": keep-alive", b"data: [DONE]"]
    stream = b"".join(event.replace(b"\n", newline) + 2 * newline for event in events)
    bounds = [0, *sorted(cuts), len(stream)]
    reader = Events()
    blocks = [stream[begin:end] for begin, end in pairwise(bounds)]
    assert [event for block in blocks for event in reader.feed(block)] == events


@pytest.mark.parametrize("name", ["event: {}\n", ""])
def test_stream_is_read_with_names_of_events_and_without(name: str) -> None:
    read = Sample(0.0)
    for at, (kind, rest) in enumerate(
        [
            ("response.created", '"response":{"id":"r"}'),
            ("response.output_text.delta", '"delta":"x"'),
            ("response.function_call_arguments.delta", '"delta":"{"'),
            ("response.output_text.done", '"text":"x"'),
            ("response.completed", '"response":{"id":"r","status":"incomplete","usage":{"output_tokens":7}}'),
        ]
    ):
        read.record(f'{name.format(kind)}data: {{"type":"{kind}",{rest}}}'.encode(), at)
    read.record(b"data: [DONE]", 9)
    assert (list(read.deltas), read.outcome) == ([1.0, 2.0], "incomplete")
    assert read.response["usage"] == {"output_tokens": 7}


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (b'event: error\ndata: {"type":"error","code":"server_error"}', "error server_error"),
        (b'event: error\ndata: {"type":"error","error":{"type":"too_slow"}}', "error too_slow"),
        (b'data: {"error":{"code":404}}', "error 404"),
        (
            b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"code":"engine_dead"}}}',
            "response.failed engine_dead",
        ),
    ],
)
def test_failed_stream_is_counted_by_its_code(event: bytes, outcome: str) -> None:
    read = Sample(0.0)
    read.record(event, 1.0)
    assert read.outcome == outcome


# Against a server


def test_generator_runs_without_penstock() -> None:
    files = [path for path in Path(__file__).parent.glob("*.py") if path != Path(__file__)]
    assert not [path.name for path in files if re.search(r"^(from|import) penstock", path.read_text(), re.MULTILINE)]


async def put_load(url: str, *options: str) -> str:
    """Run the command, and return what it writes."""
    command = (sys.executable, "-m", "tests.bench.load", url, *options)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def outcomes(wanted: Plan) -> Counter[str]:
    async with Client.opened(wanted) as client:
        load = Load(wanted, client)
        await load.run()
    return Counter(sample.outcome for sample in load.samples)


def total(found: Result, tokens: str) -> float:
    return (found.figures[f"{tokens} tokens/s"] or 0) * (found.figures["seconds"] or 0)


async def test_command_loads_a_server_and_reports(tmp_path: Path) -> None:
    store, kept = str(tmp_path / "store.sqlite3"), tmp_path / "load.json"
    plain = ("--requests", "16", "--streams", "8", "--prompt", "20", "--output", "20", "--json", str(kept))
    async with running_process(store, tmp_path, "slow") as server:
        await put_load(server.url, *plain, "--name", "plain")
        first = read(kept)
        mixed = ("--turns", "3", "--history", "stored", "--cancel", "0.3", "--slow", "0.3", "--slow-bytes", "20000")
        output = await put_load(server.url, *plain, *mixed, "--beside", str(kept), "--name", "mixed")
        second = read(kept)
    assert first.outcomes == {"incomplete": 16}
    assert total(first, "output") == pytest.approx(16 * 20)
    assert (sum(second.outcomes.values()), set(second.outcomes)) == (16, {"incomplete", "cancelled"})
    assert second.outcomes["cancelled"] >= 2 <= (second.figures["read slowly"] or 0)
    assert total(second, "input") / second.outcomes["incomplete"] > total(first, "input") / 16
    assert all(text in output for text in ("plain", "mixed", "ms first token, p99", "cancelled"))


async def test_rate_and_seconds_bound_a_run(tmp_path: Path) -> None:
    kept, store = tmp_path / "load.json", str(tmp_path / "store.sqlite3")
    async with running_process(store, tmp_path, "brisk") as server:
        await put_load(server.url, "--rate", "30", "--seconds", "1", "--seed", "3", "--json", str(kept))
    due = [at for at in islice(arrivals(30, 3), 100) if at < 1]
    assert read(kept).outcomes == {"completed": len(due)}


async def test_calls_are_answered_and_refusals_counted(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script(CALL)), tmp_path) as served:
        assert await outcomes(plan(url=served.url, streams=1, tools=1, requests=3)) == {"completed": 3}
        calls = [served.prompt_text(number).count("functions.get_weather to=assistant") for number in range(3)]
        assert calls == [0, 1, 2]
        assert await outcomes(plan(url=served.url, model="other", requests=2)) == {"404 model_not_found": 2}


async def test_cancelled_streams_end_at_the_server(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.001))
    async with running_server(engine, tmp_path) as served:
        wanted = plan(url=served.url, cancel=1, requests=5, output="200")
        assert await outcomes(wanted) == {"cancelled": 5}
        await wait_until(lambda: engine.aborted == 5)


async def test_request_without_an_end_times_out(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.001))
    async with running_server(engine, tmp_path) as served:
        assert await outcomes(plan(url=served.url, requests=2, output="100000", timeout=2)) == {"timeout": 2}
        await wait_until(lambda: engine.aborted == 2)


async def test_stream_pauses_after_a_failure() -> None:
    wanted = plan(url=f"http://127.0.0.1:{free_port()}", model="m", streams=2, seconds=1.5 * PAUSE)
    found = await outcomes(wanted)
    assert found.keys() == {"ClientConnectorError"}
    assert 2 <= found.total() <= 4


async def test_stopped_load_closes_its_streams(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.001))
    async with running_server(engine, tmp_path) as served:
        wanted = plan(url=served.url, streams=3, seconds=600, output="100000")
        async with Client.opened(wanted) as client:
            load = Load(wanted, client)
            running = asyncio.create_task(load.run())
            await wait_until(lambda: engine.running == 3)
            load.stop()
            await running
        await wait_until(lambda: engine.aborted == 3)
        assert load.samples == []
