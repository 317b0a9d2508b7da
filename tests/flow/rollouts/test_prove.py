"""``penstock rollouts --prove`` as its users run it, with an engine whose log probabilities are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import CommandResult, RunCommand
from tests.support.table_engine import ENGINES, TableEngine, recorded_turn, write_turns

EXACT = """\
session                                  path   tokens  written   proved      off     mean    worst
resp_0                                      0       14       12       12        0  0.00000   0.0000
resp_drawn                                  0        3        2        0        0        -        -

exact: 12 tokens of 2 paths within 0.5 nats
difference: 0.000000 nats on average, 0.0000 at worst
left out: 2 tokens: sampled, and recorded without log probabilities
"""
OFF = """\
session                                  path   tokens  written   proved      off     mean    worst
resp_0                                      0       14       12       12        1  0.22358   0.7378
resp_drawn                                  0        3        2        0        0        -        -

off: 1 of 12 tokens of 2 paths by more than 0.5 nats
the first: session resp_0, path 0, resp_0, turn 1, token 2 (index 2): '.lrr[ं]ecick...' was -1.5965, and is -2\
.3343 now; the likeliest is 'ec' at -1.5038
difference: 0.223583 nats on average, 0.7378 at worst
left out: 2 tokens: sampled, and recorded without log probabilities
"""


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Recordings of the table engine: a session whose second turn extends the first, and a drawn answer."""
    (tmp_path / "engines.py").write_text(ENGINES)
    was, folder = TableEngine(3), tmp_path / "recordings"
    prompt = [1000]
    for number in range(2):
        output = was.greedy(prompt, 6)
        scores = [was.score((*prompt, *output[:at]), token, 0) for at, token in enumerate(output)]
        write_turns(folder / f"resp_{number}", recorded_turn(prompt, output, scores, id=f"resp_{number}"))
        prompt = [*prompt, *output, 1001]
    write_turns(folder / "resp_drawn", recorded_turn([1002], [1003, 1004], id="resp_drawn", temperature=1.0))
    return folder


def prove(penstock: RunCommand, recordings: Path, engine: str, *options: object) -> CommandResult:
    named = engine if "/" in engine else f"{recordings.parent / 'engines.py'}:{engine}"
    return penstock("rollouts", recordings, "--prove", "--engine", named, *options)


def test_engine_that_made_them_finds_them_exact(penstock: RunCommand, recordings: Path) -> None:
    ended = prove(penstock, recordings, "same")
    assert (ended.status, ended.out.decode()) == (0, EXACT)


def test_engine_that_is_off_is_status_1_with_the_token(penstock: RunCommand, recordings: Path) -> None:
    ended = prove(penstock, recordings, "noisy")
    assert (ended.status, ended.out.decode()) == (1, OFF)
    assert prove(penstock, recordings, "noisy", "--tolerance", 9).status == 0


def test_paths_are_proved_and_written(penstock: RunCommand, recordings: Path, tmp_path: Path) -> None:
    ended = prove(penstock, recordings, "noisy", "-o", tmp_path / "out.jsonl")
    assert (ended.status, ended.out.decode()) == (1, OFF)
    rows = (tmp_path / "out.jsonl").read_text().splitlines()
    ended = prove(penstock, recordings, "noisy", "-o", "-")
    assert (ended.status, ended.out.decode().splitlines()) == (1, rows)
    assert ended.err.startswith(OFF)


def test_nothing_proved_is_status_2(penstock: RunCommand, recordings: Path) -> None:
    ended = prove(penstock, recordings, "same", "--session", "resp_drawn")
    assert (ended.status, ended.err) == (2, "penstock: nothing could be proved\n")
    assert "left out: 2 tokens: sampled, and recorded without log probabilities" in ended.out.decode()


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ("same", ("--session", "none"), "there is no session none"),
        ("same", ("--port", 8000), "--port: of penstock serve, and without effect on a proof"),
        ("same", ("--tolerance", -1), "-1 is not a number from 0 on"),
        ("broken", (), "It broke."),
        ("blind", (), "this engine reports no log probabilities of prompts (scores_prompts)"),
    ],
)
def test_mistake_is_status_2(
    penstock: RunCommand, recordings: Path, engine: str, options: tuple[object, ...], words: str
) -> None:
    ended = prove(penstock, recordings, engine, *options)
    assert ended.status == 2
    assert words in ended.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prove",), "--prove and --engine need each other"),
        (("--engine", "http://127.0.0.1:9", "-o", "-"), "--prove and --engine need each other"),
        (("-o", "-", "--max-model-len", 8), "--max-model-len: there is no such option"),
        ((), "required: -o/--out, or --prove"),
    ],
)
def test_options_that_lack_others_are_refused(
    penstock: RunCommand, recordings: Path, options: tuple[object, ...], words: str
) -> None:
    ended = penstock("rollouts", recordings, *options)
    assert (ended.status, words in ended.err) == (2, True)
