"""The proof of paths, against engines whose log probabilities are known."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.rollouts.paths import NO_LOGPROB, PathTurn, TokenPath
from penstock.extensions.rollouts.proof import BEYOND, HELD, SAMPLED, Proof, ProvedPath
from penstock.extensions.rollouts.proof_table import ProofTable
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.pipeline.errors import InvalidPrompt
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE, load_encoding
from tests.support.table_engine import MODEL, WORDS, TableEngine

Turns = Sequence[tuple[Sequence[int], Sequence[int]]]
"""The tokens that each turn reads, and those that it writes."""

TWO_TURNS: Turns = (([7, 8], [1000, 1001, 1002]), ([9], [1003, 1004]))

TURNS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=4,
)


def path_of(engine: TableEngine, turns: Turns, *, shared: int = 0, is_scored: bool = True, **fields: Any) -> TokenPath:
    """The path of turns that an engine has written; an earlier path has the first ``shared`` ones."""
    tokens, mask, logprobs, written = array("I"), bytearray(), array("f"), list[PathTurn]()
    for number, (read, output) in enumerate(turns):
        begin = len(tokens) + len(read)
        for token, is_written in (*((token, False) for token in read), *((token, True) for token in output)):
            is_trained = is_written and number >= shared
            score = engine.score(tokens, token, 0).logprob
            logprobs.append(score if is_trained and is_scored else NO_LOGPROB)
            mask.append(is_trained)
            tokens.append(token)
        turn: dict[str, Any] = {"sampling": {"temperature": 1.0}} | fields
        written.append(
            PathTurn(
                f"resp_{number}",
                number=1,
                read_from=begin - len(read),
                begin=begin,
                end=len(tokens),
                is_trained=number >= shared,
                at=0.0,
                model=MODEL,
                **turn,
            )
        )
    return TokenPath("s", "", 0, token_ids=tokens, mask=mask, logprobs=logprobs, turns=tuple(written))


def harmony() -> Vocabulary:
    return Vocabulary.of(load_encoding(), VOCABULARY_SIZE, "harmony", None)


async def proved(engine: TableEngine, path: TokenPath, tolerance: float = 1e-4) -> ProvedPath:
    [found] = [each async for each in Proof(engine, harmony(), tolerance).proved([path])]
    assert found.path is path
    return found


@given(st.integers(0, 99), TURNS, st.integers(0, 2))
async def test_engine_finds_its_own_paths_exact(seed: int, turns: Turns, shared: int) -> None:
    engine = TableEngine(seed)
    path = path_of(engine, turns, shared=shared)
    figures = (await proved(engine, path)).figures
    assert (figures.proved, figures.off, figures.left_out) == (path.mask.count(1), 0, {})
    assert figures.worst < 1e-5  # a path has four bytes for each


@given(st.integers(0, 99), st.floats(0.1, 3), TURNS, st.floats(0, 2), st.integers(0, 2))
async def test_figures_are_those_of_the_differences(
    seed: int, noise: float, turns: Turns, tolerance: float, shared: int
) -> None:
    path, now = path_of(TableEngine(seed), turns, shared=shared), TableEngine(seed, noise)
    found = await proved(now, path, tolerance)
    differences = {
        at: now.score(path.token_ids[:at], path.token_ids[at], 0).logprob - path.logprobs[at]
        for at, is_written in enumerate(path.mask)
        if is_written
    }
    off = [at for at, difference in differences.items() if abs(difference) > tolerance]
    figures, first = found.figures, found.first_off
    assert (figures.proved, figures.off) == (len(differences), len(off))
    assert figures.total == pytest.approx(sum(map(abs, differences.values())))
    assert figures.worst == max(map(abs, differences.values()), default=0.0)
    assert (first and first.at) == (off[0] if off else None)
    if first:
        assert first.turn.begin <= first.at < first.turn.end
        assert first.now - path.logprobs[first.at] == differences[first.at]
        assert first.first == now.score(path.token_ids[: first.at], 0, 1).top[0]


@pytest.mark.parametrize("noise", [0.0, 2.0])
async def test_first_choices_need_no_log_probabilities(noise: float) -> None:
    was, prompt = TableEngine(3), [1000, 1001]
    path = path_of(was, [(prompt, was.greedy(prompt, 20))], is_scored=False, sampling={"temperature": 0.0})
    found = await proved(TableEngine(3, noise), path)
    assert (found.figures.proved, found.figures.mean) == (path.mask.count(1), None)
    assert (found.figures.off > 0, found.first_off is not None) == (noise > 0, noise > 0)


@pytest.mark.parametrize(
    ("fields", "is_scored", "left_out"),
    [
        ({}, False, {SAMPLED: 5}),
        ({"sampling": {"temperature": 0.0, "presence_penalty": 1.0}}, False, {SAMPLED: 5}),
        ({"sampling": {"temperature": 0.0}, "is_held": True}, False, {HELD: 5}),
        ({"sampling": {"temperature": 2.0, "presence_penalty": 1.0}}, True, {}),
    ],
)
async def test_tokens_that_prove_nothing_are_counted(
    fields: Mapping[str, Any], is_scored: bool, left_out: Mapping[str, int]
) -> None:
    figures = (await proved(TableEngine(), path_of(TableEngine(), TWO_TURNS, is_scored=is_scored, **fields))).figures
    assert (figures.proved, figures.off, figures.left_out) == (5 - sum(left_out.values()), 0, left_out)


@pytest.mark.parametrize(("shift", "proved_tokens", "off"), [(0.0, 5, 0), (0.5, 4, 0), (-0.5, 5, 1)])
async def test_grammar_makes_no_token_less_likely(shift: float, proved_tokens: int, off: int) -> None:
    """So a token that was likelier is not known to be off, and one that was less likely is."""
    path = path_of(TableEngine(), TWO_TURNS, is_held=True)
    path.logprobs[3] += shift
    figures = (await proved(TableEngine(), path)).figures
    assert (figures.proved, figures.off, figures.left_out[HELD]) == (proved_tokens, off, 5 - proved_tokens)


async def test_tokens_beyond_the_context_are_left_out() -> None:
    for length, left_out in ((9, {}), (8, {BEYOND: 1}), (4, {BEYOND: 4}), (2, {BEYOND: 5})):
        engine = TableEngine(context_length=length)
        found = await proved(engine, path_of(engine, TWO_TURNS))
        assert (found.figures.proved, found.figures.left_out) == (5 - sum(left_out.values()), left_out)
        assert all(len(prompt.token_ids) < length for prompt in engine.prompts)


async def test_path_that_no_engine_can_read_is_left_out() -> None:
    unknown = path_of(TableEngine(), [([7], [VOCABULARY_SIZE])])
    reason = f"the engine has no token {VOCABULARY_SIZE}"
    assert (await proved(TableEngine(), unknown)).figures.left_out == {reason: 1}
    refusing = TableEngine(failure=InvalidPrompt("Too much.", param="input"))
    found = await proved(refusing, path_of(TableEngine(), TWO_TURNS))
    assert found.figures.left_out == {"refused by the engine: Too much.": 5}


async def test_tokens_of_other_weights_are_counted() -> None:
    spans = (WeightSpan("1", 0, 1), WeightSpan("2", 1, 3))
    for now, counted in (("2", {("1", "2"): 2}), ("3", {("1", "3"): 2, ("2", "3"): 3}), ("", {})):
        found = await proved(TableEngine(weights=now), path_of(TableEngine(), TWO_TURNS, weights=spans))
        assert found.figures.versions == counted


async def test_model_of_a_path_is_asked_by_its_name() -> None:
    engine = TableEngine(models=("base", MODEL))
    await proved(engine, path_of(engine, TWO_TURNS))
    assert [prompt.facts.model for prompt in engine.prompts] == [MODEL]


async def test_table_names_the_first_token_that_is_off() -> None:
    engine, now = TableEngine(3), TableEngine(3, 0.4, weights="8")
    paths = [path_of(engine, TWO_TURNS, weights=(WeightSpan("7", 0, 9),)), path_of(engine, TWO_TURNS, is_scored=False)]
    table = ProofTable(harmony(), 0.4)
    lines = [
        table.head,
        *[table.line(each) async for each in Proof(now, harmony(), 0.4).proved(paths)],
        *table.end(),
    ]
    assert "\n".join(lines) == TABLE


TABLE = """\
session                                  path   tokens  written   proved      off     mean    worst
s                                           0        8        5        5        3  0.60314   0.9311
s                                           0        8        5        0        0        -        -

off: 3 of 5 tokens of 2 paths by more than 0.4 nats
the first: session s, path 0, resp_0, turn 1, token 1 (index 2): '()[.l] onevel*' was -2.9311, and i\
s -3.8285 now; the likeliest is ' void' at -1.2924
difference: 0.603140 nats on average, 0.9311 at worst
left out: 5 tokens: sampled, and recorded without log probabilities
weights: the version 7 wrote 5 tokens, and the engine has 8 now"""
