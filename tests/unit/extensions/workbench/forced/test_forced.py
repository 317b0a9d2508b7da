"""Forced replay, against engines whose log probabilities are known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.cli.recorded_model import model_of
from penstock.extensions.workbench.forced.comparison import Compared, ComparedAnswer, Comparison, Figures, SkippedAnswer
from penstock.extensions.workbench.forced.grammar import Grammars
from penstock.extensions.workbench.forced.recorded import read_answer, recordings_in
from penstock.extensions.workbench.forced.scores import ForcedTurn, judged
from penstock.extensions.workbench.forced.turn import Turn
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.pipeline.errors import EngineFailed, InvalidPrompt
from penstock.pipeline.frames import TokenLogprob
from penstock.pipeline.recordings.comparison import common_prefix
from penstock.pipeline.recordings.format import FORMAT, Header, UnreadableRecording
from penstock.stages.models.chat.load import ChatOptions
from penstock.stages.models.chat.standalone import ModelFiles, load_from_files
from penstock.stages.models.harmony.vocabulary import RETURN, VOCABULARY_SIZE, load_encoding
from tests.support.paths import HARMONY, TINY_QWEN
from tests.support.table_engine import WORDS, TableEngine, recorded_turn, write_turns

MOST = 30
PROMPTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6)


def harmony() -> Vocabulary:
    return Vocabulary.of(load_encoding(), VOCABULARY_SIZE, "harmony", None)


async def compared(engine: TableEngine, *paths: Path, **options: Any) -> list[Compared]:
    comparison = Comparison(engine, harmony(), **options)
    return [each async for each in comparison.compared(recordings_in(paths))]


async def one(engine: TableEngine, path: Path, **options: Any) -> ComparedAnswer:
    (answer,) = await compared(engine, path, **options)
    assert isinstance(answer, ComparedAnswer)
    return answer


@given(st.integers(0, 99), st.floats(0, 3), PROMPTS)
async def test_first_change_is_the_first_difference_of_a_free_run(
    tmp_path_factory: pytest.TempPathFactory, seed: int, noise: float, prompt: list[int]
) -> None:
    recorded, free = (TableEngine(seed, by).greedy(prompt, MOST) for by in (0.0, noise))
    folder = write_turns(tmp_path_factory.mktemp("r") / "answer", recorded_turn(prompt, recorded))
    answer = await one(TableEngine(seed, noise), folder)
    same = common_prefix(recorded, free)
    expected = None if same == len(recorded) == len(free) else same
    found = answer.first_change
    assert (found and found[1]) == expected
    if expected is not None:
        assert answer.tokens[expected].first[0] == free[expected]


@given(st.integers(0, 99), PROMPTS)
async def test_engine_is_never_surprised_by_itself(
    tmp_path_factory: pytest.TempPathFactory, seed: int, prompt: list[int]
) -> None:
    engine = TableEngine(seed)
    turn = recorded_turn(prompt, engine.greedy(prompt, MOST))
    answer = await one(engine, write_turns(tmp_path_factory.mktemp("r") / "answer", turn))
    assert [(token.surprise, token.rank, token.has_changed) for token in answer.tokens] == [(0.0, 1, False)] * len(
        turn.tokens
    )


@given(st.integers(0, 99), st.floats(0.1, 3), PROMPTS, st.lists(st.sampled_from((*WORDS, 7)), min_size=1, max_size=9))
async def test_tokens_have_the_scores_of_the_engine(
    tmp_path_factory: pytest.TempPathFactory, seed: int, noise: float, prompt: list[int], tokens: list[int]
) -> None:
    was, now = TableEngine(seed), TableEngine(seed, noise)
    scores = [was.score((*prompt, *tokens[:at]), token, 0) for at, token in enumerate(tokens)]
    folder = write_turns(tmp_path_factory.mktemp("r") / "answer", recorded_turn(prompt, tokens, scores))
    answer = await one(now, folder)
    for at, token in enumerate(answer.tokens):
        expected = now.score((*prompt, *tokens[:at]), tokens[at], 5)
        assert (token.id, token.logprob, token.rank) == (tokens[at], expected.logprob, expected.rank)
        assert token.first == expected.top[0]
        assert token.surprise == expected.top[0][1] - expected.logprob
        assert token.shift == expected.logprob - scores[at].logprob
        assert token.has_changed == (token.rank != 1)


async def test_prompt_is_read_once_with_its_output(tmp_path: Path) -> None:
    engine = TableEngine()
    await one(engine, write_turns(tmp_path / "answer", recorded_turn([7, 8], [1000, RETURN], grammar=None)))
    (prompt,) = engine.prompts
    assert (prompt.token_ids, prompt.facts.sampling.max_tokens) == ((7, 8, 1000, RETURN), 1)


@pytest.mark.parametrize("at_once", [1, 3])
async def test_answers_come_in_the_order_of_their_files(tmp_path: Path, at_once: int) -> None:
    engine = TableEngine(together=asyncio.Barrier(at_once))
    names = [f"resp_{number}" for number in range(9)]
    for number, name in enumerate(names):
        prompt = [1000] * (9 - number)
        write_turns(tmp_path / name, recorded_turn(prompt, engine.greedy(prompt, MOST)))
    assert [each.name for each in await compared(engine, tmp_path, at_once=at_once)] == names
    assert engine.most_running == at_once


async def test_each_turn_has_its_own_prompt(tmp_path: Path) -> None:
    engine = TableEngine()
    turns = [recorded_turn(prompt, engine.greedy(prompt, MOST)) for prompt in ([1000], [1001, 1002, 1003])]
    answer = await one(engine, write_turns(tmp_path / "answer", *turns))
    assert [turn.turn.prompt.token_ids for turn in answer.turns] == [(1000,), (1001, 1002, 1003)]
    assert answer.first_change is None


# What cannot be compared


def masked(folder: Path) -> None:
    write_turns(folder, recorded_turn([1], [1000]), header=Header(FORMAT, "tiny", masked=True))


def without_tokens(folder: Path) -> None:
    write_turns(folder, recorded_turn([1], [1000]))
    (folder / "tokens.jsonl").unlink()


def of_another_server(folder: Path) -> None:
    folder.mkdir()
    (folder / "wire.jsonl").write_text('{"type":"Recording","format":2,"upstream":"http://127.0.0.1:8000"}\n')


def without_prompts(folder: Path) -> None:
    write_turns(folder, recorded_turn([1], [1000]))
    (folder / "prompt.jsonl").unlink()


def from_a_recording(folder: Path) -> None:
    write_turns(folder, recorded_turn([1], [1000]), header=Header(FORMAT, "tiny", answered_from="recordings"))
    (folder / "prompt.jsonl").unlink()


def cut(folder: Path) -> None:
    write_turns(folder, recorded_turn([1], [1000]))
    path = folder / "tokens.jsonl"
    path.write_text(path.read_text()[:-5])


def silent(folder: Path) -> None:
    write_turns(folder, recorded_turn([1], []))


def long(folder: Path) -> None:
    write_turns(folder, recorded_turn([1] * 8000, [1000] * 192))


def changed_by_a_stage(folder: Path) -> None:
    write_turns(folder, recorded_turn([1, 2], [1000]))
    other = write_turns(folder.with_name("other"), recorded_turn([1, 2, 3], [1000]))
    (other / "prompt.jsonl").rename(folder / "prompt.jsonl")


def of_a_chat_model(folder: Path) -> None:
    write_turns(folder, recorded_turn([1], [1000]), header=Header(FORMAT, "tiny", "chat"))


def unknown_token(folder: Path) -> None:
    write_turns(folder, recorded_turn([1], [VOCABULARY_SIZE]))


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (masked, "no texts were recorded (--no-record-texts)"),
        (without_tokens, "no tokens were recorded (tokens.jsonl)"),
        (of_another_server, "the server sent no tokens, or was not asked for them (--ask-for-tokens)"),
        (from_a_recording, "answered from a recording"),
        (without_prompts, "no prompts were recorded (prompt.jsonl)"),
        (cut, "the recording stops within this line: it is still being written, or was cut"),
        (silent, "the engine gave no tokens"),
        (long, "too long: 8192 tokens, where the engine's context holds 8192"),
        (changed_by_a_stage, "the engine read 2 tokens in turn 1, and prompt.jsonl has 3"),
        (of_a_chat_model, "the recorded model has a chat template, and the new one speaks Harmony"),
        (unknown_token, f"the new model has no token {VOCABULARY_SIZE}"),
    ],
)
async def test_recording_is_skipped_with_its_reason(tmp_path: Path, write: Callable[[Path], None], reason: str) -> None:
    write(tmp_path / "answer")
    engine = TableEngine()
    (skipped,) = await compared(engine, tmp_path / "answer")
    assert isinstance(skipped, SkippedAnswer)
    assert reason in skipped.reason
    assert not skipped.reason.startswith(("it ", "its "))  # recordings are counted by it: there may be several
    assert not engine.prompts


async def test_refused_prompt_is_skipped_and_a_failure_ends_the_comparison(tmp_path: Path) -> None:
    write_turns(tmp_path / "answer", recorded_turn([1], [1000]))
    (skipped,) = await compared(TableEngine(failure=InvalidPrompt("No.")), tmp_path)
    assert skipped == SkippedAnswer("answer", tmp_path / "answer", "refused by the engine: No.")
    with pytest.raises(EngineFailed):
        await compared(TableEngine(failure=EngineFailed("It broke.")), tmp_path)


def test_folder_without_recordings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRecording, match="there is no recording in or below this folder"):
        recordings_in([tmp_path])


def test_recordings_are_found_below_folders() -> None:
    found = recordings_in([HARMONY / "weather", HARMONY])
    assert found["weather"] == HARMONY / "weather"
    assert set(found.values()) == {path.parent for path in HARMONY.glob("*/tokens.jsonl")}


@pytest.mark.vllm
def test_tokens_must_spell_the_same_in_both_models(tmp_path: Path) -> None:
    header = Header(FORMAT, "tiny", "chat", str(TINY_QWEN))
    answer = read_answer("qwen", write_turns(tmp_path, recorded_turn([1000], [1001]), header=header))
    model = model_of(header)
    assert model.spelling is not None
    was, now = model.spelling(1000).decode(), load_encoding().decode([1000])
    other = Vocabulary.of(load_encoding(), VOCABULARY_SIZE, "chat", None)
    assert other.difference(answer) == f"token 1000 is {was!r} in the recorded model, and {now!r} in the new one"
    tokens = load_from_files(ModelFiles(str(TINY_QWEN)), ChatOptions()).vocabulary
    for source in (None, str(TINY_QWEN)):
        same = Vocabulary.of(tokens, 2**31, "chat", source)
        assert (same.size, same.difference(answer), same.note(header)) == (2048, "", "")


def test_unknown_vocabulary_is_noted() -> None:
    header = Header(FORMAT, "tiny", "chat")
    assert "does not say where its model is" in Vocabulary.of(load_encoding(), 9, "chat", None).note(header)


# Choices

A, B, C, D = WORDS[:4]


def scored(logprob: float, *top: tuple[int, float], rank: int = 99) -> TokenLogprob:
    return TokenLogprob(logprob, top, rank)


def judged_token(turn: Turn, score: TokenLogprob, allowed: set[int] | None = None, tie: float = 0.0) -> ForcedTurn:
    return judged(turn, [score], None if allowed is None else [allowed], tie)


def test_equal_log_probabilities_are_no_change() -> None:
    forced = judged_token(recorded_turn([1], [A]), scored(-1.0, (B, -1.0), (A, -1.0), rank=2))
    assert [(token.has_changed, token.rank, token.surprise) for token in forced.tokens] == [(False, 1, 0.0)]


@pytest.mark.parametrize(("tie", "has_changed"), [(0.0, True), (0.2, True), (0.3, False)])
def test_tie_bounds_what_counts_as_equal(tie: float, has_changed: bool) -> None:
    forced = judged_token(recorded_turn([1], [A]), scored(-1.25, (B, -1.0), (A, -1.25)), tie=tie)
    assert [token.has_changed for token in forced.tokens] == [has_changed]


SHAPED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"presence_penalty": 0.5},
    {"logit_bias": {5: 1.0}},
    {"min_tokens": 3},
    {"thinking_token_budget": 9},
]


@pytest.mark.parametrize("sampling", SHAPED)
def test_tokens_that_were_no_choice_are_left_out(sampling: dict[str, Any]) -> None:
    forced = judged_token(recorded_turn([1], [A], **sampling), scored(-3.0, (B, -0.1)))
    name = next(iter(sampling))
    assert forced.left_out == ("sampled, without top_logprobs" if name == "temperature" else f"shaped by {name}")
    assert [(token.has_changed, round(token.surprise, 6)) for token in forced.tokens] == [(None, 2.9)]


@pytest.mark.parametrize("sampling", SHAPED)
@pytest.mark.parametrize(("first", "has_changed"), [(B, False), (A, True), (C, True)])
def test_recorded_alternatives_show_the_choice(sampling: dict[str, Any], first: int, has_changed: bool) -> None:
    recorded = [scored(-3.0, (first, -0.1), (D, -0.9))]
    forced = judged_token(recorded_turn([1], [A], recorded, **sampling), scored(-3.0, (B, -0.1), (C, -0.5)))
    assert (forced.left_out, [token.has_changed for token in forced.tokens]) == ("", [has_changed])


def test_greedy_by_top_k_is_a_choice() -> None:
    forced = judged_token(recorded_turn([1], [A], temperature=1.0, top_k=1), scored(-0.1, (A, -0.1)))
    assert [token.has_changed for token in forced.tokens] == [False]


@pytest.mark.parametrize(
    ("allowed", "score", "has_changed", "first"),
    [
        ({A}, scored(-3.0, (B, -0.1), (A, -3.0)), False, A),
        ({A, C}, scored(-3.0, (B, -0.1), (C, -1.0), (A, -3.0)), True, C),
        ({A, C}, scored(-9.0, (B, -0.1), (C, -1.0)), True, C),
        ({A, D}, scored(-9.0, (B, -0.1), (C, -1.0)), None, A),  # D may be likelier than A
    ],
)
def test_only_tokens_that_the_grammar_allows_are_choices(
    allowed: set[int], score: TokenLogprob, has_changed: bool | None, first: int
) -> None:
    forced = judged_token(recorded_turn([1], [A], grammar="start: /a/"), score, allowed)
    assert [(token.has_changed, token.first[0]) for token in forced.tokens] == [(has_changed, first)]


def test_unknown_grammar_leaves_its_tokens_out() -> None:
    forced = judged_token(recorded_turn([1], [A], grammar="start: /a/"), scored(-3.0, (B, -0.1)))
    assert forced.left_out == "held to a grammar that cannot be followed here"
    assert [token.has_changed for token in forced.tokens] == [None]


def test_figures_leave_out_what_has_no_choice() -> None:
    chosen = judged_token(recorded_turn([1], [A]), scored(-3.0, (B, -1.0)))
    drawn = judged_token(recorded_turn([1], [A], [scored(-2.0)], temperature=1.0), scored(-3.5, (B, -0.5)))
    figures = Figures()
    figures.add(ComparedAnswer("x", Path(), Header(FORMAT), (chosen, drawn)))
    figures.add(SkippedAnswer("y", Path(), "because"))
    assert (figures.answers, figures.changed_answers, figures.tokens, figures.compared) == (1, 1, 2, 1)
    assert (figures.share, figures.mean_surprise, figures.worst_surprise) == (1.0, 2.0, 2.0)
    assert (figures.mean_shift, figures.worst_shift) == (-1.5, 1.5)
    assert dict(figures.left_out) == {"sampled, without top_logprobs": 1}
    assert dict(figures.skipped) == {"because": 1}


class Letters:
    """A vocabulary of the letters, and a mark."""

    def __init__(self) -> None:
        self.token_bytes: Sequence[bytes] = [bytes([97 + number]) for number in range(26)]
        self.token_texts: Mapping[int, str] = {}

    def mark(self, token: int) -> str | None:
        return "<end>" if token == 26 else None

    def is_special(self, token: int) -> bool:
        return token == 26

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(97 + token) for token in token_ids)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]


def test_grammar_is_followed_token_by_token() -> None:
    grammars = Grammars(Vocabulary.of(Letters(), 27, "chat", None))
    grammar = '%llguidance {}\nstart: ("a" | "b") "c" <[26]>'
    others = [range(30)] * 3
    assert grammars.allowed(grammar, (0, 2, 26), others, 25) == [frozenset(each) for each in ({0, 1}, {2}, {26})]
    assert grammars.allowed(grammar, (0, 3), others[:2], 25) is None
