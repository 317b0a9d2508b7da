"""Running on: what a client would have got from another engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.workbench.forced.comparison import ComparedAnswer, Comparison, Figures
from penstock.extensions.workbench.forced.recorded import recordings_in
from penstock.extensions.workbench.forced.run_on import LEAST, ReadItem, compared_items, read_items, run_on
from penstock.extensions.workbench.forced.turn import Turn
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.pipeline.frames import GenerationFinished, GenerationStarted, Prompt, TokenChunk, TokenFrame
from penstock.pipeline.recordings.format import read_frames
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE, load_encoding
from penstock.stages.parse.harmony.parse import ParseHarmony
from tests.support.paths import HARMONY
from tests.support.processes import RunCommand
from tests.support.table_engine import ENGINES, WORDS, TableEngine, recorded_turn, write_turns

PARSE = ParseHarmony(load_encoding())
VOCABULARY = Vocabulary.of(load_encoding(), VOCABULARY_SIZE, "harmony", None)
MOST = 30


def turn_of(case: str, **changes: Any) -> Turn:
    frames = list(read_frames(HARMONY / case / "tokens.jsonl", TokenFrame))
    prompt: Prompt = next(read_frames(HARMONY / case / "prompt.jsonl", Prompt))
    started = frames[0]
    assert isinstance(started, GenerationStarted)
    tokens = [token for frame in frames if isinstance(frame, TokenChunk) for token in frame.token_ids]
    return Turn(1, prompt, started, changes.get("tokens", tuple(tokens)), (), frames[-1])


async def items_of(turn: Turn, text: str) -> tuple[ReadItem, ...]:
    return await read_items(PARSE, turn, tuple(load_encoding().encode_markup(text)), "stop")


CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}<|call|>"


@pytest.mark.parametrize(
    ("recorded", "new", "verdict", "difference"),
    [
        ("<|channel|>final<|message|>Hi.<|return|>", "<|channel|>final<|message|>Hi.<|return|>", "same items", ""),
        (
            "<|channel|>final<|message|>Hi.<|return|>",
            "<|channel|>final<|message|>Hi!<|return|>",
            "text differs",
            "'Hi.' -> 'Hi!'",
        ),
        (
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
            "<|channel|>analysis<|message|>Oh<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
            "thoughts differ",
            "'Hm' -> 'Oh'",
        ),
        (
            CALL.format('{"city": "Paris"}'),
            CALL.format('{"city": "Rome"}'),
            "call differs",
            'get_weather {"city": "Paris"} -> {"city": "Rome"}',
        ),
        (CALL.format('{"city": "Paris"}'), CALL.format('{ "city":"Paris" }'), "same items", ""),
        (
            CALL.format('{"city": "Paris"}'),
            "<|channel|>final<|message|>It rains.<|return|>",
            "call differs",
            "no get_weather",
        ),
        (
            "<|channel|>final<|message|>It rains.<|return|>",
            CALL.format('{"city": "Paris"}'),
            "call differs",
            "also get_weather",
        ),
    ],
)
async def test_what_differs_for_a_client_is_found(recorded: str, new: str, verdict: str, difference: str) -> None:
    turn = turn_of("weather")
    found = compared_items(await items_of(turn, recorded), await items_of(turn, new))
    assert found == (verdict, difference)


def test_another_tool_is_another_call() -> None:
    was, now = ReadItem("FunctionCall", "f", "{}"), ReadItem("FunctionCall", "g", "{}")
    assert compared_items([was], [now]) == ("call differs", "f -> g")


ITEMS = st.builds(
    ReadItem, st.sampled_from(["Message", "Reasoning", "FunctionCall"]), st.sampled_from("fg"), st.sampled_from("ab")
)


@given(st.lists(ITEMS, max_size=4), st.lists(ITEMS, max_size=4))
def test_verdict_is_the_same_from_both_sides(one: list[ReadItem], other: list[ReadItem]) -> None:
    verdict, difference = compared_items(one, other)
    assert compared_items(other, one)[0] == verdict
    assert (verdict == "same items") == (not difference)
    assert compared_items(one, one) == ("same items", "")


@given(st.integers(0, 40), st.floats(0.1, 1), st.lists(st.sampled_from(WORDS), min_size=1, max_size=4))
async def test_engine_runs_on_as_it_would_have_answered(
    tmp_path_factory: pytest.TempPathFactory, seed: int, noise: float, prompt: list[int]
) -> None:
    engine = TableEngine(seed, noise)
    folder = tmp_path_factory.mktemp("r") / "answer"
    write_turns(folder, recorded_turn(prompt, TableEngine(seed).greedy(prompt, MOST)))
    comparison = Comparison(engine, VOCABULARY, parse=PARSE)
    (answer,) = [each async for each in comparison.compared(recordings_in([folder]))]
    assert isinstance(answer, ComparedAnswer)
    if answer.first_change is None:
        assert answer.run_on is None
    else:
        assert answer.run_on is not None
        assert answer.run_on.since == answer.first_change[1]
        assert answer.run_on.tokens == tuple(engine.greedy(prompt, len(answer.run_on.tokens)))


async def test_grammar_begins_with_the_output() -> None:
    turn, engine = turn_of("weather"), TableEngine()
    assert turn.prompt.grammar
    found = await run_on(engine, PARSE, turn, 5, "resp_1", engine.open)
    assert (found.since, engine.prompts[-1].token_ids) == (0, turn.prompt.token_ids)
    assert engine.prompts[-1].grammar == turn.prompt.grammar
    assert found.new[-1].kind == "Failure"  # the table does not keep to the grammar


@pytest.mark.parametrize(
    ("finished", "limit"), [(GenerationFinished("stop", 0, 0.0), LEAST), (GenerationFinished("length", 0, 0.0), 2)]
)
async def test_run_is_bounded(finished: GenerationFinished, limit: int) -> None:
    recorded = recorded_turn([1], [1000, 1001, 1002], temperature=1.0)
    engine = TableEngine()
    await run_on(
        engine, PARSE, Turn(1, recorded.prompt, recorded.started, recorded.tokens, (), finished), 1, "x", engine.open
    )
    sampling = engine.prompts[-1].facts.sampling
    assert (sampling.max_tokens, sampling.temperature) == (limit, 0.0)


def run(penstock: RunCommand, tmp_path: Path, *options: object) -> Sequence[str]:
    (tmp_path / "engines.py").write_text(ENGINES)
    was = TableEngine(3)
    folder = write_turns(tmp_path / "r" / "answer", recorded_turn([1000], was.greedy([1000], 20)))
    ended = penstock("compare", folder, "--engine", f"{tmp_path}/engines.py:noisy", "--run-on", *options)
    assert (ended.status, ended.err) == (0, "")
    return ended.out.decode().splitlines()


def test_command_shows_what_running_on_changes(penstock: RunCommand, tmp_path: Path) -> None:
    lines = run(penstock, tmp_path, "--most-calls-changed", 0)
    assert "; text differs: " in lines[1]
    assert "run on: 1 text differs" in lines
    answer, summary = map(json.loads, run(penstock, tmp_path, "--json"))
    assert answer["run_on"]["verdict"] == "text differs"
    assert summary["run_on"] == {"text differs": 1}


def test_limit_of_calls_needs_running_on(penstock: RunCommand, tmp_path: Path) -> None:
    ended = penstock("compare", tmp_path, "--engine", "x", "--most-calls-changed", 0)
    assert (ended.status, ended.err) == (2, "penstock: --most-calls-changed needs --run-on\n")


def test_share_of_changed_calls_counts_answers() -> None:
    figures = Figures(answers=4)
    figures.verdicts["call differs"] = 1
    assert figures.calls_share == 0.25
