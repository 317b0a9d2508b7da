"""The probabilities of answers, made of the log probabilities that responses report."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from math import exp, inf, log
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.dialects.decisions.answers import (
    ChoiceAnswer,
    Decision,
    Folding,
    LabelRead,
    PredicateAnswer,
    ScoreAnswer,
    in_order,
    label_reads,
)
from penstock.extensions.dialects.decisions.body import Asked
from penstock.extensions.dialects.decisions.labels import LETTERS, Label
from penstock.extensions.dialects.decisions.questions import Question
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.items import Logprob, TopLogprob
from penstock.pipeline.protocol.params.items import message
from penstock.pipeline.protocol.response import ErrorDetails, InputTokensDetails, OutputTokensDetails, Usage
from tests.support.stored_responses import stored_response

LABELS = [Label(text, ()) for text in LETTERS[:255]]
USAGE = Usage(10, InputTokensDetails(4), 1, OutputTokensDetails(0), 11)


def question(**fields: Any) -> Question:
    made: Question = msgspec.convert({"instructions": "?", **fields}, Question)
    return made


def choices(*values: str | bool) -> Question:
    return question(type="choice", choices=[{"value": value} for value in values])


async def decision(questions: Sequence[Question], *parts: tuple[int, dict[str, float]], **more: float) -> Decision:
    """The decision of the questions at some positions, each with the log probabilities that a response was asked for.

    Each response reports ``more``, too.
    """
    asked = [Asked(at, message("user", ""), (), [Label(text, ()) for text in found]) for at, found in parts]
    reads = [LabelRead(more | found, "tiny", USAGE) for _, found in parts]
    return await Folding(questions, LABELS, asked)(source_of(reads))


@given(st.lists(st.floats(-2000, 0), min_size=2, max_size=255))
async def test_probabilities_are_shares_of_those_of_all_options(logprobs: list[float]) -> None:
    values = [str(at) for at in range(len(logprobs))]
    found = dict(zip(LETTERS, logprobs, strict=False))
    [answer] = (await decision([choices(*values)], (0, found))).answers
    assert isinstance(answer, ChoiceAnswer)
    shares = [each.probability for each in answer.probabilities]
    assert sum(shares) == pytest.approx(1)
    assert answer.confidence == max(shares)
    assert answer.choice == values[shares.index(max(shares))]
    best = max(logprobs)
    for share, logprob in zip(shares, logprobs, strict=True):
        assert share == pytest.approx(exp(logprob - best) * max(shares), abs=1e-12)


async def test_options_of_one_question_may_come_from_several_requests() -> None:
    values = [str(at) for at in range(4)]
    parts = {"A": log(0.1), "B": log(0.2)}, {"C": log(0.3), "D": log(0.2)}
    yes_or_no = {"A": -inf, "B": 0.0}
    questions = [choices(*values), question(type="predicate")]
    made = await decision(questions, (0, parts[0]), (0, parts[1]), (1, yes_or_no), B=log(0.1), C=log(0.1))
    first, second = made.answers
    assert isinstance(first, ChoiceAnswer)
    assert isinstance(second, PredicateAnswer)
    assert [each.probability for each in first.probabilities] == pytest.approx([0.125, 0.25, 0.375, 0.25])
    assert second.probability == 0
    usage = made.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.total_tokens) == (30, 12, 33)


async def test_score_is_the_value_to_be_expected() -> None:
    levels = [{"label": label} for label in ("low", "middle", "high")]
    found = {"A": log(0.2), "B": log(0.2), "C": log(0.4)}
    [answer] = (await decision([question(type="score", levels=levels, name="u")], (0, found))).answers
    assert isinstance(answer, ScoreAnswer)
    assert (answer.score, answer.confidence) == pytest.approx((1.25, 0.5))
    assert answer.name == "u"
    assert [(each.value, each.label) for each in answer.probabilities] == [(0, "low"), (1, "middle"), (2, "high")]


async def test_answer_without_any_probability_is_a_fault_of_the_engine() -> None:
    with pytest.raises(EngineFailed):
        await decision([question(type="predicate")], (0, {"A": -inf, "B": -inf}), Z=-1.0)


def delta(*top: tuple[str, float]) -> events.OutputTextDelta:
    alternatives = tuple(TopLogprob(token, tuple(token.encode()), logprob) for token, logprob in top)
    logprob = Logprob("A", (65,), -1.0, alternatives)
    return events.OutputTextDelta(0, "msg_1", 0, 0, "A", (logprob,))


async def read(*deltas: events.OutputTextDelta) -> LabelRead:
    response = msgspec.structs.replace(stored_response("resp_1").response, usage=USAGE)
    stream: list[ResponseEvent] = [*deltas, events.ResponseIncomplete(1, response)]
    [found] = [each async for each in label_reads(source_of(stream))]
    return found


async def test_tokens_of_a_label_add_up_and_later_text_counts_for_nothing() -> None:
    found = await read(delta(("A", log(0.1)), (" A", log(0.2)), ("B", -2000.0), ("C", -inf)), delta(("A", 0.0)))
    assert {text: exp(logprob) for text, logprob in found.logprobs.items()} == pytest.approx({"A": 0.3, "B": 0, "C": 0})
    assert found.usage == USAGE


async def test_failed_response_is_an_error() -> None:
    response = stored_response("resp_1").response
    failed = msgspec.structs.replace(response, status="failed", error=ErrorDetails("server_error", "It broke."))
    with pytest.raises(EngineFailed, match="It broke"):
        await anext(label_reads(source_of([events.ResponseFailed(1, failed)])))


async def test_reads_come_in_the_order_of_their_requests() -> None:
    one, two = LabelRead({"A": 0.0}, "tiny", USAGE), LabelRead({"B": 0.0}, "tiny", USAGE)

    async def arriving() -> AsyncGenerator[tuple[int, LabelRead], None]:
        yield 1, two
        yield 0, one

    assert [each async for each in in_order(arriving())] == [one, two]
