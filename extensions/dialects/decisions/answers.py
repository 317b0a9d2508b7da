"""The answers of a decision, and the probabilities that they are made of.

See https://platform.openai.com/docs/api-reference/decisions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, inf, log1p

import msgspec
from msgspec import UNSET

from penstock.api.dialect import failure
from penstock.extensions.dialects.decisions.body import Asked
from penstock.extensions.dialects.decisions.labels import Label
from penstock.extensions.dialects.decisions.questions import (
    ChoiceQuestion,
    DecisionLevel,
    PredicateQuestion,
    Question,
    ScoreQuestion,
)
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.response import Response, Usage


class PredicateAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="predicate"):
    """The probability that a statement is true."""

    name: str | None
    probability: float


class ChoiceProbability(msgspec.Struct, frozen=True):
    """The probability of a choice."""

    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="choice"):
    """The likeliest choice, with its probability as the ``confidence``, and the probabilities of all."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: tuple[ChoiceProbability, ...]


class ScoreProbability(msgspec.Struct, frozen=True):
    """The probability of a level; its ``value`` is its place on the scale, from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="score"):
    """The value that is to be expected, the probability of the likeliest one, and the probabilities of all."""

    name: str | None
    score: float
    confidence: float
    probabilities: tuple[ScoreProbability, ...]


class DecisionInputDetails(msgspec.Struct, frozen=True):
    """Details of the tokens of the prompts; nothing is counted for what an engine keeps of them."""

    cached_tokens: int
    cache_write_tokens: int = 0


class DecisionOutputDetails(msgspec.Struct, frozen=True):
    """Details of the generated tokens; the model does not think."""

    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct, frozen=True):
    """The tokens of all questions together, each of which has a prompt of its own."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    output_tokens: int
    output_tokens_details: DecisionOutputDetails
    total_tokens: int


class Decision(msgspec.Struct, frozen=True):
    """The answers, in the order of the questions."""

    model: str
    answers: tuple[PredicateAnswer | ChoiceAnswer | ScoreAnswer, ...]
    usage: DecisionUsage


class LabelRead(msgspec.Struct, frozen=True):
    """The end of the response to one request: the log probabilities of labels, by their texts."""

    logprobs: Mapping[str, float]
    model: str
    usage: Usage | None


async def label_reads(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[LabelRead, None]:
    """Rewrite the events of a response to one, its last; raise the error of one that failed, which ends all others."""
    logprobs = dict[str, float]()
    async for event in source:
        match event:
            case events.OutputTextDelta(logprobs=(first, *_)) if not logprobs:
                for label in first.top_logprobs:
                    text = label.token.strip()
                    logprobs[text] = _either(logprobs.get(text, -inf), label.logprob)
            case events.ResponseCompleted() | events.ResponseIncomplete() | events.ResponseFailed():
                yield _read(event.response, logprobs)
            case _:
                pass


def _either(one: float, other: float) -> float:
    """Return the log probability of either of two tokens of a label."""
    more, less = max(one, other), min(one, other)
    return more + log1p(exp(less - more)) if more > -inf else more


def _read(response: Response, logprobs: Mapping[str, float]) -> LabelRead:
    if response.status in ("failed", "cancelled"):
        raise failure(response)
    return LabelRead(logprobs, response.model, response.usage)


async def in_order(source: AsyncIterator[tuple[int, LabelRead]]) -> AsyncGenerator[LabelRead, None]:
    """Yield the ends of several responses in the order of their requests."""
    found = {position: read async for position, read in source}
    for _, read in sorted(found.items()):
        yield read


@dataclass(frozen=True)
class Folding:
    """Makes a decision of the ends of its responses; ``asked`` has the request of each."""

    questions: Sequence[Question] = ()
    labels: Sequence[Label] = ()
    asked: Sequence[Asked] = ()

    async def __call__(self, source: AsyncIterator[LabelRead]) -> Decision:
        """Return the decision."""
        reads = [read async for read in source]
        found = [dict[str, float]() for _ in self.questions]
        for asked, read in zip(self.asked, reads, strict=True):
            for label in asked.labels:  # the token that was sampled may be one of another request's label
                found[asked.question][label.text] = read.logprobs.get(label.text, -inf)
        answers = (self._answer(*pair) for pair in zip(self.questions, found, strict=True))
        return Decision(reads[0].model, tuple(answers), _total([read.usage for read in reads if read.usage]))

    def _answer(self, question: Question, found: Mapping[str, float]) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
        name = None if question.name is UNSET else question.name
        shares = _shares([found[label.text] for label in self.labels[: len(question.options)]])
        confidence = max(shares)
        match question:
            case PredicateQuestion():
                return PredicateAnswer(name, shares[0])
            case ChoiceQuestion(choices=choices):
                values = [choice.value for choice in choices]
                pairs = tuple(map(ChoiceProbability, values, shares))
                return ChoiceAnswer(name, values[shares.index(confidence)], confidence, pairs)
            case ScoreQuestion(levels=levels):
                score = fsum(value * share for value, share in enumerate(shares))
                return ScoreAnswer(name, score, confidence, tuple(_scored(levels, shares)))


def _scored(levels: Sequence[DecisionLevel], shares: Sequence[float]) -> Iterator[ScoreProbability]:
    for value, (level, share) in enumerate(zip(levels, shares, strict=True)):
        yield ScoreProbability(value, level.label, share)


def _shares(logprobs: Sequence[float]) -> Sequence[float]:
    """Return the probabilities as shares of their sum; raises `EngineFailed` if there are none."""
    most = max(logprobs)
    if most == -inf:
        raise EngineFailed("The engine reported no log probabilities of the options.")
    weights = [exp(each - most) for each in logprobs]
    total = fsum(weights)
    return [each / total for each in weights]


def _total(usages: Sequence[Usage]) -> DecisionUsage:
    read, written = sum(each.input_tokens for each in usages), sum(each.output_tokens for each in usages)
    cached = sum(each.input_tokens_details.cached_tokens for each in usages)
    return DecisionUsage(
        input_tokens=read,
        input_tokens_details=DecisionInputDetails(cached),
        output_tokens=written,
        output_tokens_details=DecisionOutputDetails(),
        total_tokens=read + written,
    )
