"""`penstock batch`: each line of a file gets one result, whatever is wrong with it and whatever ends the command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.extensions.batches import command
from penstock.extensions.batches.command import Job, answered
from penstock.extensions.batches.line_files import results_file
from penstock.pipeline.errors import CannotRun, EngineDead, EngineFailed, EngineOverloaded
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages
from tests.support.paths import ROOT
from tests.support.processes import PATIENCE, RunCommand, wait_for
from tests.support.server import script

ECHO = f"{ROOT}/tests/examples/echo_engine.py:engine"

Results = list[dict[str, Any]]


def line(custom_id: str, text: str = "Hi", url: str = "/v1/chat/completions", **changed: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    given = {"input": text} if url == "/v1/responses" else {"messages": [message], "max_tokens": 100}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "echo", **given, **changed}}


def written(folder: Path, lines: Iterable[Any]) -> Path:
    file = folder / "in.jsonl"
    file.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return file


def results(out: Path) -> Results:
    return [json.loads(each) for each in out.read_text().splitlines()]


def ids(found: Results) -> list[str]:
    return [each["custom_id"] for each in found]


def texts(found: Results) -> dict[str, str]:
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in found}


def test_lines_of_several_apis_get_their_answers(penstock: RunCommand, tmp_path: Path) -> None:
    lines = [
        line("chat", "One"),
        line("messages", "Two", "/v1/messages"),
        line("responses", "Three", "/v1/responses", store=False),
    ]
    out = tmp_path / "out.jsonl"
    ended = penstock("batch", written(tmp_path, lines), "-o", out, "--engine", ECHO)
    assert ended.status == 0, ended.err
    assert "3 results in" in ended.err
    bodies = {each["custom_id"]: each["response"]["body"] for each in results(out)}
    assert bodies["chat"]["choices"][0]["message"]["content"] == "One"
    assert bodies["messages"]["content"][-1]["text"] == "Two"
    assert bodies["responses"]["output"][-1]["content"][0]["text"] == "Three"
    assert {(each["response"]["status_code"], each["error"]) for each in results(out)} == {(200, None)}
    assert len({each["id"] for each in results(out)} | {each["response"]["request_id"] for each in results(out)}) == 6


WRONG: dict[str, tuple[Any, int, str]] = {
    "no JSON": ('{"custom_id": "x"', 400, "Line 2: "),
    "no request": ('{"requests": []}', 400, "Line 2: Object missing required field `custom_id`"),
    "the same custom_id": (line("first", "Ho"), 400, "Line 2: line 1 has the same custom_id."),
    "another URL": (line("x", url="/v1/models"), 400, "'/v1/models' is none of /v1/chat/completions, "),
    "another model": (line("x", model="unknown"), 404, "unknown"),
    "a stream": (line("x", stream=True), 400, "stream"),
    "a wrong value": (line("x", temperature="hot"), 400, "temperature"),
    "too long": (line("x", "word " * 200_000), 400, "maximum context length"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_line_gets_an_error_and_the_others_their_answers(name: str, penstock: RunCommand, tmp_path: Path) -> None:
    wrong, status, message = WRONG[name]
    out = tmp_path / "out.jsonl"
    ended = penstock("batch", written(tmp_path, [line("first"), wrong, line("last")]), "-o", out, "--engine", ECHO)
    assert ended.status == 1
    assert "3 results in" in ended.err
    assert "1 of them an error" in ended.err
    refused = [each for each in results(out) if each["error"]]
    assert [each["response"]["body"] for each in refused] == [None]
    assert refused[0]["response"]["status_code"] == status
    assert message in refused[0]["error"]["error"]["message"]
    assert texts([each for each in results(out) if not each["error"]]) == {"first": "Hi", "last": "Hi"}


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_empty_file_needs_no_engine(text: str, penstock: RunCommand, tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(text)
    ended = penstock("batch", file, "-o", out, "--engine", "http://127.0.0.1:1")
    assert (ended.status, out.read_text()) == (0, "")
    assert "0 results" in ended.err


def test_results_are_in_the_order_of_the_lines_on_request(penstock: RunCommand, tmp_path: Path) -> None:
    """The first line takes longest by far."""
    lines = [line(f"{number}", "word " * (2_000 if number == 0 else 1), max_tokens=5_000) for number in range(400)]
    out = tmp_path / "out.jsonl"
    ended = penstock("batch", "-i", written(tmp_path, lines), "-o", out, "--in-order", "--engine", ECHO)
    assert ended.status == 0, ended.err
    assert ids(results(out)) == [f"{number}" for number in range(400)]


def test_second_run_goes_on_with_the_lines_that_have_no_result(penstock: RunCommand, tmp_path: Path) -> None:
    lines = [line(f"{number}", f"Text {number}") for number in range(20)]
    file, out = written(tmp_path, [*lines[:10], "{", *lines[10:]]), tmp_path / "out.jsonl"
    arguments = ("batch", file, "-o", out, "--engine", ECHO)
    assert penstock(*arguments).status == 1
    whole = out.read_bytes().splitlines(keepends=True)
    kept = b"".join(whole[:8])
    out.write_bytes(kept + whole[8][:-9])
    assert penstock(*arguments).status == 1
    assert out.read_bytes().startswith(kept)
    assert Counter(ids(results(out))) == Counter(["", *(each["custom_id"] for each in lines)])
    once = out.read_bytes()
    ended = penstock("batch", file, "-o", out, "--engine", "http://127.0.0.1:1")
    assert (ended.status, out.read_bytes()) == (1, once)
    written(tmp_path, [*lines, line("more", "More")])
    assert penstock(*arguments).status == 1
    assert texts([each for each in results(out) if not each["error"]])["more"] == "More"
    assert len(results(out)) == 22


def test_file_of_other_results_is_refused(penstock: RunCommand, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert penstock("batch", written(tmp_path, [line("a")]), "-o", out, "--engine", ECHO).status == 0
    ended = penstock("batch", written(tmp_path, [line("a", "Ho")]), "-o", out, "--engine", ECHO)
    assert ended.status == 2
    assert "out.jsonl has the results of other requests: name another file as OUT" in ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "-o"),
        (["-o", "out.jsonl"], "name FILE, the file of requests"),
        (["in.jsonl", "-i", "in.jsonl", "-o", "out.jsonl"], "name FILE, the file of requests"),
        (["missing.jsonl", "-o", "out.jsonl"], "missing.jsonl"),
        (["http://h/in.jsonl", "-o", "out.jsonl"], "curl"),
        (["in.jsonl", "-o", "in.jsonl"], "line 1 is no result"),
        (["in.jsonl", "-o", "out.jsonl", "--in-oder"], "--in-order"),
        (["in.jsonl", "-o", "out.jsonl", "--enginee", "http://h"], "--engine"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(
    arguments: Sequence[str], message: str, penstock: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, [line("a")])
    monkeypatch.chdir(tmp_path)
    ended = penstock("batch", *arguments)
    assert ended.status == 2
    assert message in ended.err
    assert not Path("out.jsonl").exists() or not Path("out.jsonl").read_bytes()


# In a process of its own

SLOW = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT / "tests" / "examples")!r})
from echo_engine import EchoEngine

class Slow(EchoEngine):
    models, places, most_prompts = ("echo",), 4, None

    async def _generate(self, prompt):
        async for frame in super()._generate(prompt):
            await asyncio.sleep(0.01)
            yield frame

def engine(settings):
    return Slow()
"""


def started(
    folder: Path, file: Path | str, out: Path | str, stdin: int | None = None, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    (folder / "slow_engine.py").write_text(SLOW)
    penstock = Path(sys.executable).with_name("penstock")
    command = [str(penstock), "batch", str(file), "-o", str(out), "--engine", f"{folder}/slow_engine.py:engine"]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)


def count(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def has(out: Path, most: int) -> bool:
    return count(out) >= most


def test_killed_runs_leave_one_result_for_each_line(tmp_path: Path) -> None:
    """The first line takes three seconds, before which no run ends."""
    said = {f"{number}": f"Text {number}" for number in range(100)} | {"0": "Text" + " word" * 300}
    lines = [line(name, text, max_tokens=1_000) for name, text in said.items()]
    file, out = written(tmp_path, lines), tmp_path / "out.jsonl"
    for most in (5, 50):
        with started(tmp_path, file, out) as process:
            wait_for(partial(has, out, most))
            process.kill()
    assert count(out) < len(lines)
    with started(tmp_path, file, out) as process:
        assert process.wait(PATIENCE) == 0
    assert texts(results(out)) == said
    assert len(results(out)) == 100


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_command_which_says_how_to_go_on(number: signal.Signals, tmp_path: Path) -> None:
    file, out = written(tmp_path, [line(f"{number}") for number in range(200)]), tmp_path / "out.jsonl"
    with started(tmp_path, file, out) as process:
        wait_for(partial(has, out, 5))
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    done = count(out)
    assert f"{200 - done} lines left: the same command goes on".encode() in err
    assert len({*ids(results(out))}) == done


def test_standard_streams_have_requests_and_results_alone(tmp_path: Path) -> None:
    lines = [line("a", "One"), line("b", "Two")]
    given = written(tmp_path, lines).read_bytes()
    with started(tmp_path, "-", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        out, err = process.communicate(given, timeout=PATIENCE)
    assert process.returncode == 0, err
    assert texts([json.loads(each) for each in out.splitlines()]) == {"a": "One", "b": "Two"}


# Engines that fail


class Failing(ScriptedEngine):
    """An engine that refuses prompts as often as it is told, and may die."""

    refusals: int = 0
    error: Exception = EngineOverloaded("It is full.")
    dies: bool = False

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        if self.refusals:
            self.refusals -= 1
            self.is_alive = not self.dies
            raise self.error
        async with super().open(prompt) as frames:
            yield frames


async def run(engine: Failing, folder: Path, number: int = 3) -> Results:
    """Answer some lines with an engine, and return the results, also if it fails."""

    @asynccontextmanager
    async def start(_: Settings) -> AsyncGenerator[RunningEngine, None]:
        yield RunningEngine(engine, harmony_stages(load_encoding()))

    lines = [line(f"{each}", model=engine.models[0]) for each in range(number)]
    out = folder / "out.jsonl"
    with written(folder, lines).open("rb") as file, results_file(str(out)) as found:
        job = Job(file, found, 10**6)
        job.count(str(out))
        await answered(job, command.alone(Settings(engine_arguments=[]), keeps_store=False), start)
    return results(out)


async def test_refused_line_runs_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "PAUSES", (0.01, 0.01))
    engine = Failing(script())
    engine.refusals = 1
    assert [each["error"] for each in await run(engine, tmp_path)] == [None] * 3


@pytest.mark.parametrize("dies", [True, False])
async def test_engine_that_cannot_go_on_leaves_the_lines_for_later(
    dies: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "PAUSES", (0.01, 0.01))
    engine = Failing(script())
    engine.refusals, engine.dies = 10**6, dies
    if dies:
        engine.error = EngineDead("The engine has died.")
    with pytest.raises(CannotRun, match=r"the engine cannot go on: .*(has died|is full)"):
        await run(engine, tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    engine.refusals, engine.is_alive = 0, True
    assert len(await run(engine, tmp_path)) == 3


async def test_error_of_one_line_is_its_result(tmp_path: Path) -> None:
    engine = Failing(script())
    engine.refusals, engine.error = 1, EngineFailed("It failed.")
    statuses = Counter(each["response"]["status_code"] for each in await run(engine, tmp_path))
    assert statuses == {200: 2, 500: 1}
