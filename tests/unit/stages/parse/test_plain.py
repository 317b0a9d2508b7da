"""Plain text: whatever the chunks and the vocabulary, the text of a raw prompt's output is that of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import GenerationFinished, GenerationStarted, TokenChunk, TokenLogprob
from penstock.pipeline.lifecycle.checker import StreamChecker
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.items import Logprob
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.stages.emit.emit import Emit
from penstock.stages.models.harmony.vocabulary import END, RETURN, START, load_encoding
from penstock.stages.parse.harmony.parse import ParseHarmony
from penstock.stages.parse.plain import TOKENS_AT_ONCE
from tests.support.frames import raw_started

ENCODING = load_encoding()
BYTES = [token for token in range(1000) if token not in ENCODING.token_texts]
"""Tokens that are parts of characters."""

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
TOKENS = st.lists(st.one_of(st.integers(0, 5000), st.sampled_from([*BYTES, START, END, RETURN])), max_size=20)
PROMPT = (START, 1, 2, 3)
AS_SENT = ENCODING.decode(PROMPT[1:])
"""The prompt without the token that the vocabulary has put before it."""


@dataclass
class Read:
    """The text that a client gets of an output."""

    text: str
    logprobs: list[Logprob]
    end: frames.TurnFinished
    deltas: int


def split(tokens: list[int], cuts: Iterable[int]) -> Iterator[list[int]]:
    places = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    return (tokens[start:end] for start, end in pairwise(places))


def score(token: int) -> float:
    """A log probability of a token's own."""
    return -token / 1e6


def scored(tokens: Iterable[int], top: int = 0) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(score(token), ((token, score(token)),)[:top]) for token in tokens)


def read(
    begun: GenerationStarted,
    tokens: list[int],
    cuts: Iterable[int] = (),
    reason: frames.FinishReason = "stop",
) -> Read:
    """What the stage makes of tokens in chunks; the events pass the invariant checker."""
    top = begun.facts.sampling.logprobs
    chunks = [TokenChunk(tuple(part), () if top is None else scored(part, top)) for part in split(tokens, cuts)]
    if chunks and top is not None:
        chunks[0] = replace(chunks[0], prompt_logprobs=scored(begun.prompt[1:], top))
    given: list[frames.TokenFrame] = [begun, *chunks, GenerationFinished(reason, 0, 0.0)]

    async def run() -> tuple[list[frames.ParsedFrame], list[Any]]:
        async with Pipeline.start("parse", ParseHarmony(ENCODING)).open(source_of(given)) as parsed:
            seen = [frame async for frame in parsed]
        async with Pipeline.start("emit", Emit()).open(source_of(seen)) as emitted:
            return seen, [event async for event in emitted]

    parsed, events = asyncio.run(run())
    checker = StreamChecker()
    for event in events:
        if isinstance(event, ResponseEvent):
            checker.feed(event)
    checker.finish()
    deltas = [frame for frame in parsed if isinstance(frame, frames.ItemDelta)]
    [end] = [frame for frame in parsed if isinstance(frame, frames.TurnFinished)]
    return Read(
        "".join(delta.text for delta in deltas), [each for delta in deltas for each in delta.logprobs], end, len(deltas)
    )


def text_of(tokens: Iterable[int], *, shows: bool) -> str:
    marks = ((token, ENCODING.mark(token)) for token in tokens)
    spelled = (ENCODING.token_bytes[token] if mark is None else mark.encode() * shows for token, mark in marks)
    return b"".join(spelled).decode(errors="replace")


@given(TOKENS, st.sets(st.integers(1, 20)), st.booleans(), st.booleans())
@example([BYTES[0], END, BYTES[1]], set(), True, True)
def test_text_is_that_of_the_tokens_in_any_chunks(tokens: list[int], cuts: set[int], shows: bool, scores: bool) -> None:
    begun = raw_started(RawPrompt("x", shows_special=shows), logprobs=1 if scores else None)
    got = read(begun, tokens, cuts)
    assert got.text == text_of(tokens, shows=shows)
    assert (got.end.output_tokens, got.end.reasoning_tokens, got.end.reason) == (len(tokens), 0, "stop")
    assert [each.logprob for each in got.logprobs] == [score(token) for token in tokens if scores]


@given(TEXTS, st.sets(st.integers(1, 20)), st.text("ab ", min_size=1, max_size=3), st.booleans())
@example("a b", {1}, " b", True)
def test_stop_texts_cut_the_output_and_not_the_prompt(text: str, cuts: set[int], stop: str, scores: bool) -> None:
    output = f"{text}ba ab"
    prompt = tuple(ENCODING.encode(stop))
    begun = raw_started(RawPrompt(stop, echoes=True), prompt, stop=(stop,), logprobs=0 if scores else None)
    got = read(begun, ENCODING.encode(output), cuts)
    at = output.find(stop)
    assert got.text == stop + (output if at < 0 else output[:at])
    assert got.end.stop_reason == (None if at < 0 else stop)


def test_prompt_of_tokens_is_repeated_with_its_marks() -> None:
    got = read(raw_started(RawPrompt(token_ids=PROMPT, echoes=True), PROMPT, logprobs=1), [5, RETURN])
    assert got.text == text_of([*PROMPT], shows=True) + text_of([5], shows=False)
    assert [each.token for each in got.logprobs] == [ENCODING.decode([token]) for token in (*PROMPT, 5, RETURN)]
    assert [each.logprob for each in got.logprobs] == [0.0, *(score(token) for token in (*PROMPT[1:], 5, RETURN))]
    assert [bytes(each.bytes).decode() for each in got.logprobs][-2:] == [ENCODING.decode([5]), ""]


def test_prompt_of_text_is_repeated_as_it_was_sent() -> None:
    """A vocabulary may add a token at its beginning, which no client has sent."""
    got = read(raw_started(RawPrompt(AS_SENT, echoes=True), PROMPT, logprobs=1), [5])
    assert got.text == AS_SENT + text_of([5], shows=False)
    assert got.logprobs[0].bytes == ()


@pytest.mark.parametrize("scores", [True, False])
def test_output_is_left_out_if_only_the_prompt_is_wanted(scores: bool) -> None:
    raw = RawPrompt(AS_SENT, echoes=True, generates=False)
    got = read(raw_started(raw, PROMPT, logprobs=1 if scores else None), [5], reason="length")
    assert (got.text, got.end.output_tokens, got.end.reason) == (AS_SENT, 0, "length")
    assert len(got.logprobs) == (len(PROMPT) if scores else 0)


def test_scores_of_a_long_prompt_come_in_pieces() -> None:
    prompt = tuple(range(2 * TOKENS_AT_ONCE + 1))
    got = read(raw_started(RawPrompt(text_of(prompt, shows=True), echoes=True), prompt, logprobs=1), [5])
    assert (len(got.logprobs), got.deltas) == (len(prompt) + 1, 4)


def test_engine_without_scores_of_the_prompt_fails() -> None:
    begun = raw_started(RawPrompt(AS_SENT, echoes=True), PROMPT, logprobs=1)

    async def run() -> None:
        chunk = TokenChunk((5,), scored((5,)))
        async with Pipeline.start("parse", ParseHarmony(ENCODING)).open(source_of([begun, chunk])) as parsed:
            async for _ in parsed:
                pass

    with pytest.raises(EngineFailed, match="no log probabilities of the prompt"):
        asyncio.run(run())


def test_nothing_written_is_no_message() -> None:
    got = read(raw_started(RawPrompt("x")), [RETURN])
    assert (got.text, got.deltas) == ("", 0)
