"""The base of the parsers: the stage, its hot path for plain text, and the frames that open calls."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeAlias

from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import ItemDelta, ParsedFrame, TokenChunk, TokenFrame, TokenLogprob
from penstock.pipeline.hot_path import join
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.protocol.generations import Generation, WeightSpan
from penstock.pipeline.protocol.items import Logprob
from penstock.pipeline.protocol.pieces import numbers_in_json
from penstock.pipeline.tasks import apart
from penstock.pipeline.yield_point import YieldPoint
from penstock.services.engines.weights import spans
from penstock.services.usage import Tallies, Tally, TurnTokens
from penstock.stages.models.opened_calls import CallOpened
from penstock.stages.parse.text import StopStrings, TokenVocabulary, finite, reported

MANY_TOKENS = 32
"""Tokens of a chunk from which on other tasks get turns while it is read: a few of them may be an item."""

LONG_TOKENS = 2**15
"""Tokens of a prompt that are written as JSON apart from the event loop."""

TextReader: TypeAlias = Callable[[TokenFrame], ItemDelta | None]

Opening: TypeAlias = frames.ReasoningOpened | frames.MessageOpened | CallOpened


@dataclass(frozen=True)
class ParseStage(ABC):
    """The pipeline stage around a parser for the models of one kind; ``tallies`` count the tokens that it reads."""

    tallies: Tallies = field(default_factory=Tallies, kw_only=True, compare=False, repr=False)

    async def __call__(self, source: AsyncIterator[TokenFrame]) -> AsyncGenerator[ParsedFrame, None]:
        """Parse one generation, or several in a row."""
        parser: TurnParser | None = None
        feed_text: TextReader = _no_text
        tally = Tally()
        async for frame in source:
            delta = feed_text(frame)  # hot path: see `penstock.pipeline.core`
            if delta is not None:
                yield delta
                continue
            if isinstance(frame, frames.GenerationStarted):
                parser = await self._begin(frame)
                feed_text = _no_text if parser.keeps_logprobs else parser.feed_text
                join(read=feed_text)
                tally = self.tallies.of(frame.facts.response_id)
                tally.begin(parser, lists_turns=frame.facts.wants_raw_messages)
                if frame.facts.wants_token_ids or frame.facts.wants_weight_versions:
                    tally.keep(parser, await _prompt_of(frame))
                yield frame
            elif parser is None:
                raise InvariantBroken("a turn begins with GenerationStarted: a stage has lost it")
            else:
                rest, feed = _rest_after(frame), parser.feed
                for parsed in await asyncio.to_thread(tuple, feed(frame)) if parser.is_slow(frame) else feed(frame):
                    yield parsed
                    if rest is not None:
                        await rest()
                if isinstance(frame, frames.GenerationFinished):
                    tally.end()

    @property
    @abstractmethod
    def vocabulary(self) -> TokenVocabulary:
        """The vocabulary of the tokens that it reads."""

    def vocabulary_of(self, model: str) -> TokenVocabulary | None:
        """Return the vocabulary of a model that it reads, by a name that is served."""
        return self.vocabulary

    @abstractmethod
    async def _begin(self, started: frames.GenerationStarted) -> TurnParser: ...


def sees_tokens(pipeline: Pipeline[Any, Any]) -> bool:
    """Return True if the parser of a pipeline reads tokens."""
    return "parse" in pipeline.names() and isinstance(pipeline.stage("parse"), ParseStage)


def vocabulary_of(pipeline: Pipeline[Any, Any], model: str) -> TokenVocabulary | None:
    """Return the vocabulary that the parser of a pipeline reads of a model; None if it reads no tokens."""
    parse = pipeline.stage("parse") if sees_tokens(pipeline) else None
    return parse.vocabulary_of(model) if isinstance(parse, ParseStage) else None


def _rest_after(frame: TokenFrame) -> YieldPoint | None:
    """Return a yield point for the reader of a long chunk, which may hold many items."""
    return YieldPoint() if isinstance(frame, TokenChunk) and len(frame.token_ids) > MANY_TOKENS else None


async def _prompt_of(started: frames.GenerationStarted) -> Raw | UnsetType:
    """Return the tokens of the prompt as JSON, if the answer shall have them."""
    if not started.facts.wants_token_ids:
        return UNSET
    return await apart(len(started.prompt) > LONG_TOKENS, numbers_in_json, started.prompt)


def _no_text(frame: TokenFrame) -> ItemDelta | None:
    """Leave a frame to `TurnParser.feed`."""
    return None


class TurnParser(ABC):
    """The base of the state machines: each parses one generation, after its `GenerationStarted`."""

    def __init__(self, vocabulary: TokenVocabulary, started: frames.GenerationStarted) -> None:
        self._spelling = vocabulary
        self._facts = started.facts
        self._sampling = started.facts.sampling
        self._wants_logprobs = self._sampling.logprobs is not None
        """False for those that the engine may have reported for a recording alone."""
        self.keeps_logprobs = self._wants_logprobs and started.facts.wants_token_ids
        """True if the answer shall have the log probability of each token, in messages or not."""
        self._logprobs: list[TokenLogprob] = []
        self._weights: tuple[WeightSpan, ...] = ()
        self._stopped_by = ""
        """The stop string that ended the turn; the engine may still generate."""
        self._prompt_tokens = started.prompt_tokens
        self._cached_tokens = 0
        self._plain_texts: Mapping[int, str] | None = None
        """The tokens whose text is passed on unchanged in the present state; None if there are none."""
        self._tokens = array("i")  # 4 bytes per token; a list would keep the int objects alive, about 40 bytes each
        self._add_token = self._tokens.append
        self._reasoning_tokens = 0
        self.repairs: tuple[frames.Repair, ...] = ()
        """The repairs while no item was open."""

    def feed_text(self, frame: TokenFrame) -> ItemDelta | None:
        """Return the delta for a chunk of plain text; None for any other frame, which `feed` has to read.

        Nearly every chunk takes this hot path.  It is one function and returns a single frame, because an extra call
        or loop would be noticeable at every token.
        """
        texts, add = self._plain_texts, self._add_token
        if texts is None or type(frame) is not TokenChunk:
            return None
        text = ""
        try:
            for token in frame.token_ids:
                text += texts[token]
                add(token)
        except KeyError:  # a special token, part of a character, or text that the parser has to look at
            for _ in takewhile(texts.__contains__, frame.token_ids):
                self._tokens.pop()
            return None
        return ItemDelta(text)

    def feed(self, frame: frames.EngineFrame) -> Iterator[ParsedFrame]:
        """Take one frame and return the frames that follow from it."""
        self._cached_tokens = frame.cached_tokens or self._cached_tokens
        self._prompt_tokens = frame.prompt_tokens or self._prompt_tokens
        if not isinstance(frame, TokenChunk):
            self._weights = frame.weights
            return self._finish(frame)
        if self._is_stopped:
            return iter(())
        if self.keeps_logprobs:
            self._logprobs += frame.logprobs
        return self._read(frame)

    def is_slow(self, frame: frames.EngineFrame) -> bool:
        """Return True if a frame may take so long to read that other responses would wait for it."""
        return False

    def tokens_so_far(self) -> TurnTokens:
        """Return the tokens of the turn until now, as its `TurnFinished` would count them.

        Tokens that a parser holds back are not reasoning yet.
        """
        reasoning = self._reasoning_tokens + self._open_reasoning_tokens
        return TurnTokens(self._prompt_tokens, self._cached_tokens, len(self._tokens), reasoning)

    def token_ids(self, start: int) -> list[int]:
        """Return the tokens of the turn until now, from ``start`` on."""
        return self._tokens[start:].tolist()

    def logprobs(self, start: int) -> Sequence[Logprob]:
        """Return the log probabilities of the same tokens; empty if none are kept."""
        if not self.keeps_logprobs:
            return ()
        kept = zip(self._tokens[start:], self._logprobs[start:], strict=False)
        return [reported(self._spelling, token, logprob) for token, logprob in kept]

    def generation(self) -> Generation:
        """Return the turn until now, without its prompt."""
        found, count = Generation(), len(self._tokens)
        if self._facts.wants_token_ids:
            found = replace(found, token_ids=numbers_in_json(self._tokens[:count].tolist()))
        if self.keeps_logprobs and len(self._logprobs) >= count:  # an engine may give none
            numbers = [finite(each.logprob) for each in self._logprobs[:count]]
            found = replace(found, logprobs=numbers_in_json(numbers))
        if self._facts.wants_weight_versions and self._weights:
            found = replace(found, weight_versions=spans(self._weights, count))
        return found

    @property
    def _is_stopped(self) -> bool:
        return bool(self._stopped_by)

    @property
    @abstractmethod
    def _open_reasoning_tokens(self) -> int:
        """The tokens of reasoning that are not in `_reasoning_tokens` yet."""

    @abstractmethod
    def _read(self, chunk: TokenChunk) -> Iterator[ParsedFrame]: ...

    @abstractmethod
    def _finish(self, finished: frames.GenerationFinished) -> Iterator[ParsedFrame]: ...

    def _stop_strings(self, opening: Opening) -> StopStrings | None:
        """Return what cuts the text of an item at the stop strings of the request, which are for messages alone."""
        if not self._sampling.stop or not isinstance(opening, frames.MessageOpened):
            return None
        return StopStrings(self._sampling.stop, self._has_min_tokens)

    def _has_min_tokens(self) -> bool:
        return self._sampling.min_tokens is UNSET or len(self._tokens) > self._sampling.min_tokens

    def _turn_finished(
        self, finished: frames.GenerationFinished, raw_messages: frames.RawMessages | None
    ) -> frames.TurnFinished:
        return frames.TurnFinished(
            reason="stop" if self._is_stopped else finished.reason,
            cached_tokens=finished.cached_tokens,
            output_tokens=len(self._tokens),
            reasoning_tokens=self._reasoning_tokens,
            duration=finished.duration,
            raw_messages=raw_messages,
            prompt_tokens=finished.prompt_tokens,
            stop_reason=self._stop_reason(finished),
            repairs=self.repairs,
        )

    def _stop_reason(self, finished: frames.GenerationFinished) -> str | int | None:
        if self._is_stopped:
            return self._stopped_by
        stops = self._sampling.stop_token_ids or ()
        ends_at_stop = finished.reason == "stop" and self._tokens and self._tokens[-1] in stops
        return self._tokens[-1] if ends_at_stop else None


def grammar_broken() -> EngineFailed:
    """Return the error for a turn that ends at a point where its grammar does not allow that."""
    return EngineFailed("The engine could not hold the model to the grammar of this request to its end.")
