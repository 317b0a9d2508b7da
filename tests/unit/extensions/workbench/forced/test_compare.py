"""``penstock compare`` as its users run it, with an engine whose log probabilities are known."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from penstock.api.cli.__main__ import main
from penstock.extensions.workbench.forced.comparison import SkippedAnswer
from penstock.extensions.workbench.forced.table import Table
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.pipeline.frames import TokenLogprob
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.fake_vllm import FakeVllm, running_fakes
from tests.support.processes import CommandResult
from tests.support.table_engine import ENGINES, TableEngine, recorded_turn, write_turns

SAME = """\
answer        tokens compared  changed    share surprise    worst    shift  first change
resp_0            20       20        0     0.0%    0.000    0.000        -
resp_1             1        1        0     0.0%    0.000    0.000        -
resp_2            11       11        0     0.0%    0.000    0.000        -
resp_3            20       20        0     0.0%    0.000    0.000        -
resp_drawn         2        0        0        -        -        -   -1.677  left out: sampled, without top_logprobs
resp_events  skipped: no tokens were recorded (tokens.jsonl)

0 of 5 answers changed, at 0 of 52 tokens (0.00%)
surprise: 0.0000 on average, 0.000 at worst
shift: -1.6770 on average, 2.730 at worst
left out: 2 tokens sampled, without top_logprobs
skipped: 1 recording: no tokens were recorded (tokens.jsonl)
"""
NOISY = """\
answer        tokens compared  changed    share surprise    worst    shift  first change
resp_0            20       20       10    50.0%    0.291    1.735        -  token 1: 'rr' -> 'ater'
resp_1             1        1        0     0.0%    0.000    0.000        -
resp_2            11       11        2    18.2%    0.037    0.211        -  token 6: ' one' -> 'vel'
resp_3            20       20        5    25.0%    0.100    0.663        -  token 1: '.l' -> 'iss'
resp_drawn         2        0        0        -        -        -   -1.776  left out: sampled, without top_logprobs
resp_events  skipped: no tokens were recorded (tokens.jsonl)

3 of 5 answers changed, at 17 of 52 tokens (32.69%)
surprise: 0.1581 on average, 1.735 at worst
shift: -1.7759 on average, 2.805 at worst
left out: 2 tokens sampled, without top_logprobs
skipped: 1 recording: no tokens were recorded (tokens.jsonl)

The tokens that surprise most:
   1.735  resp_0, token 20: 'ج voidick voidج oneं...[ater]' -> 'vel' (rank 6)
   0.830  resp_0, token 2: 'rr[ं]ecick...' -> 'ec' (rank 4)
"""

Compare: TypeAlias = Callable[..., CommandResult]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """The command with recordings of the table engine, and an engine that its file has."""
    (tmp_path / "engines.py").write_text(ENGINES)
    was = TableEngine(3)
    for number in range(4):
        prompt = [1000 + number]
        write_turns(tmp_path / "recorded" / f"resp_{number}", recorded_turn(prompt, was.greedy(prompt, 20)))
    drawn = recorded_turn([1004], [1005, 1006], [TokenLogprob(-2.0), TokenLogprob(-1.5)], temperature=1.0)
    write_turns(tmp_path / "recorded" / "resp_drawn", drawn)
    (tmp_path / "recorded" / "resp_events").mkdir()
    (tmp_path / "recorded" / "resp_events" / "events.jsonl").write_text('{"type":"Recording","format":2}\n')
    monkeypatch.chdir(tmp_path)

    def run(engine: str, *options: object) -> CommandResult:
        named = engine if "/" in engine else f"engines.py:{engine}"
        monkeypatch.setattr("sys.argv", ["penstock", "compare", "recorded", "--engine", named, *map(str, options)])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        written = capsys.readouterr()
        return CommandResult(status, written.out.encode(), written.err)

    return run


def test_same_engine_changes_nothing(compare: Compare) -> None:
    ended = compare("same", "--most-changed", 0, "--worst-surprise", 0)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.decode() == SAME


@pytest.mark.io
async def test_server_of_another_make_is_refused_without_a_version_of_vllm(compare: Compare) -> None:
    fake = FakeVllm(make="sglang", scale_out=False, tells_ids=False)
    async with running_fakes(fake):
        ended = await asyncio.to_thread(compare, fake.url)
    assert (ended.status, ended.out) == (2, b"")
    assert f"--engine: The server at {fake.url} is not `vllm serve`: it returns no token ids." in ended.err
    assert "scores_prompts" in ended.err
    assert "0.10" not in ended.err


@pytest.mark.parametrize("name", ["resp_1", f"resp_{'1' * 32}", f"resp_{'1' * 32}-small", f"day/{'1' * 80}/resp_1"])
def test_name_of_an_answer_is_never_cut(name: str, tmp_path: Path) -> None:
    table = Table(Vocabulary.of(load_encoding(), 1, "harmony", None), [name])
    assert (
        table.line(SkippedAnswer(name, tmp_path, "broken")) == f"{name:{min(48, max(6, len(name)))}}  skipped: broken"
    )


def test_table_shows_what_another_engine_changes(compare: Compare) -> None:
    ended = compare("noisy", "--worst", 2)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.decode() == NOISY


@pytest.mark.parametrize(
    ("options", "exceeded"),
    [
        (("--most-changed", 0.5), ""),
        (("--most-changed", 0.01), "--most-changed 0.01 is exceeded: "),
        (("--worst-surprise", 9), ""),
        (("--worst-surprise", 0.1), "--worst-surprise 0.1 is exceeded: "),
        (("--worst-shift", 99), ""),
        (("--worst-shift", 0.001), "--worst-shift 0.001 is exceeded: "),
    ],
)
def test_exceeded_limit_is_status_1_and_named(compare: Compare, options: tuple[object, ...], exceeded: str) -> None:
    ended = compare("noisy", *options)
    assert ended.status == bool(exceeded)
    assert ("is exceeded" in ended.out.decode()) == bool(exceeded)
    assert exceeded in ended.out.decode().splitlines()[-1]
    *_, summary = map(json.loads, compare("noisy", "--json", *options).out.decode().splitlines())
    assert [line.startswith(exceeded) for line in summary["exceeded"]] == [True] * bool(exceeded)


def test_json_has_all_tokens_and_the_figures(compare: Compare) -> None:
    lines = [json.loads(line) for line in compare("noisy", "--json").out.decode().splitlines()]
    assert [line["type"] for line in lines] == ["answer"] * 5 + ["skipped", "summary"]
    tokens = [token for line in lines[:5] for turn in line["turns"] for token in turn["tokens"]]
    summary = lines[-1]
    assert summary["tokens"] == len(tokens)
    assert summary["changed"] == sum(token["changed"] is True for token in tokens)
    assert summary["compared"] == sum(token["changed"] is not None for token in tokens)
    for token in tokens:
        assert token["surprise"] == pytest.approx(token["first"]["logprob"] - token["logprob"])


def test_failing_engine_is_one_line(compare: Compare) -> None:
    ended = compare("broken")
    assert (ended.status, ended.err) == (2, "penstock: It broke.\n")


@pytest.mark.parametrize(
    ("engine", "options", "mistake"),
    [
        ("swapped", (), "gave a wrong type: "),
        ("raising", (), "raised ValueError: It broke. "),
        ("late", ("--run-on",), "raised ValueError: It broke. "),
    ],
)
def test_mistake_of_an_engine_is_one_line_as_in_a_server(
    compare: Compare, engine: str, options: tuple[str, ...], mistake: str
) -> None:
    ended = compare(engine, *options)
    assert ended.status == 2
    assert ended.err.startswith(f"penstock: the engine, in stage 'generate', {mistake}")
    assert "table_engine.py:" in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("blind", "this engine reports no log probabilities of prompts (scores_prompts)"),
        ("missing", "missing"),
    ],
)
def test_engine_that_cannot_compare_is_refused(compare: Compare, engine: str, words: str) -> None:
    ended = compare(engine)
    assert (ended.status, ended.out) == (2, b"")
    assert words in ended.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--port", 8000), "--port: of penstock serve, and without effect on a comparison"),
        (("--max-model-len", 8), "options of vLLM's engine have no effect on an engine of your own"),
        (("--most-changed", -1), "-1 is not a number from 0 on"),
        (("--at-once", 0), "0 is not a number from 1 on"),
    ],
)
def test_wrong_option_is_refused(compare: Compare, options: tuple[object, ...], words: str) -> None:
    ended = compare("same", *options)
    assert (ended.status, ended.out) == (2, b"")
    assert words in ended.err


@pytest.mark.vllm
def test_wrong_folder_of_a_model_ends_before_it_is_loaded(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.extensions.workbench.forced.engines.start_shown", None)
    for folder, problem in (("./nowhere", "there is no such folder\n"), ("./recorded", "there are no weights in ")):
        ended = compare(folder)
        assert (ended.status, ended.out) == (2, b"")
        assert f": {problem}" in ended.err
        assert len(ended.err.splitlines()) == 1


@pytest.mark.io
def test_server_that_does_not_answer_is_not_waited_for(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.extensions.workbench.forced.engines.ENGINE_WAIT", 0.1)
    ended = compare("http://127.0.0.1:9")
    assert (ended.status, ended.out) == (2, b"")
    assert "No engine answers" in ended.err


def test_nothing_compared_is_no_success(compare: Compare, tmp_path: Path) -> None:
    for number in range(4):
        shutil.rmtree(tmp_path / "recorded" / f"resp_{number}")
    shutil.rmtree(tmp_path / "recorded" / "resp_drawn")
    ended = compare("same")
    reason = "1 recording: no tokens were recorded (tokens.jsonl)"
    assert (ended.status, ended.out, ended.err) == (2, b"", f"penstock: nothing can be compared: {reason}.\n")


def test_sampled_recordings_are_refused_before_an_engine_starts(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recordings alone decide it, and to load a model takes minutes."""
    for number in range(4):
        shutil.rmtree(tmp_path / "recorded" / f"resp_{number}")
    shutil.rmtree(tmp_path / "recorded" / "resp_drawn")
    write_turns(tmp_path / "recorded" / "resp_drawn", recorded_turn([1004], [1005, 1006], temperature=1.0))
    monkeypatch.setattr("penstock.extensions.workbench.forced.engines.start_shown", None)
    ended = compare("same")
    assert (ended.status, ended.out) == (2, b"")
    assert "1 recording: sampled, without top_logprobs" in ended.err
    assert ended.err.endswith(". Record requests with top_logprobs: 1, or with temperature 0.\n")
