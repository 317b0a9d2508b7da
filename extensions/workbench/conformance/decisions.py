"""Checks of the Decisions API."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isclose
from typing import Any, TypeAlias, TypeVar

import msgspec

from penstock.extensions.workbench.conformance.check import Doubt, Violation, check, fits, must, should
from penstock.extensions.workbench.conformance.client import LONG, PREDICATE, Json, Talk, check_read, user
from penstock.extensions.workbench.conformance.errors import problem
from penstock.extensions.workbench.conformance.shapes import Cached, Reasoned

CREATE = "OpenAI: API reference, create a decision"
ROUNDED = 0.01
"""The difference by which probabilities that a server rounds may miss their sum."""
CHOICE: Json = {
    "type": "choice",
    "instructions": "What does the text ask for?",
    "choices": [{"value": "true", "description": "a poem"}, {"value": True, "description": "a greeting"}],
}
SCORE: Json = {
    "type": "score",
    "instructions": "How polite is the text?",
    "levels": [{"label": "rude"}, {"label": "neutral"}, {"label": "polite"}],
}


class Predicate(msgspec.Struct, tag_field="type", tag="predicate"):
    """The answer to a predicate."""

    name: str | None
    probability: float


class ChoiceShare(msgspec.Struct):
    """The probability of a choice."""

    value: str | bool
    probability: float


class Chosen(msgspec.Struct, tag_field="type", tag="choice"):
    """The answer to a choice."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceShare]


class LevelShare(msgspec.Struct):
    """The probability of a level."""

    value: int
    label: str
    probability: float


class Scored(msgspec.Struct, tag_field="type", tag="score"):
    """The answer to a score."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelShare]


class Declined(msgspec.Struct, tag_field="type", tag="refusal"):
    """A question that the model did not answer."""

    name: str | None


class DecisionUsage(msgspec.Struct):
    """The usage of a decision."""

    input_tokens: int
    input_tokens_details: Cached
    output_tokens: int
    output_tokens_details: Reasoned
    total_tokens: int


Answer: TypeAlias = Predicate | Chosen | Scored | Declined
Kind = TypeVar("Kind", Predicate, Chosen, Scored)


class Decision(msgspec.Struct):
    """A decision."""

    model: str
    answers: list[Answer]
    usage: DecisionUsage


async def decision(talk: Talk, *questions: Json, **fields: Any) -> Decision:
    """Return a decision about questions."""
    asked = fields | ({"questions": questions} if questions else {})
    found = fits(Decision, await talk.ask(**asked), "the decision")
    if any(isinstance(answer, Declined) for answer in found.answers):
        raise Doubt("the model declined to answer")
    return found


async def answer_to(talk: Talk, question: Json, kind: type[Kind]) -> Kind:
    """Return the answer to one question, which has to be of a kind."""
    [answer] = (await decision(talk, question)).answers
    if not isinstance(answer, kind):
        raise Violation("the answer is not of the type of its question")
    return answer


def check_shares(shares: Sequence[float]) -> None:
    """Check the probabilities of all options of a question."""
    must(all(0 <= share <= 1 for share in shares), f"a probability is not between 0 and 1: {shares}")
    must(isclose(fsum(shares), 1, abs_tol=ROUNDED), f"the probabilities add up to {fsum(shares)}")


def is_same(one: object, other: object) -> bool:
    """Return True for equal values of one type: a boolean is no text, and no number."""
    return type(one) is type(other) and one == other


@check("decisions", area="objects", source=CREATE, core=True)
async def decisions_object(talk: Talk) -> None:
    """A decision has an answer for each question, in their order, with its type and its name."""
    questions = [SCORE, PREDICATE | {"name": "greets"}, CHOICE]
    found = await decision(talk, *questions)
    kinds = [msgspec.to_builtins(answer)["type"] for answer in found.answers]
    must(kinds == ["score", "predicate", "choice"], f"the types of the answers are {kinds}")
    names = [answer.name for answer in found.answers]
    must(names == [None, "greets", None], f"the names of the answers are {names}")


@check("decisions", area="objects", source=CREATE, core=True)
async def decisions_usage(talk: Talk) -> None:
    """An answer has its usage, whose total is the sum of its parts."""
    usage = (await decision(talk)).usage
    must(usage.total_tokens == usage.input_tokens + usage.output_tokens, "total_tokens is not the sum")
    must(usage.input_tokens > 0, "the prompt has no tokens")


@check("decisions", area="objects", source=CREATE, core=True)
async def decisions_predicate(talk: Talk) -> None:
    """A predicate has a probability between 0 and 1."""
    probability = (await answer_to(talk, PREDICATE, Predicate)).probability
    must(0 <= probability <= 1, f"it is {probability}")


@check("decisions", area="objects", source=CREATE, core=True)
async def decisions_choice(talk: Talk) -> None:
    """A choice is the likeliest one, whose probabilities have the values of the request, booleans too."""
    answer = await answer_to(talk, CHOICE, Chosen)
    check_shares([each.probability for each in answer.probabilities])
    pairs = zip([each.value for each in answer.probabilities], ("true", True), strict=True)
    must(all(is_same(*pair) for pair in pairs), "the values are not those of the request")
    best = max(each.probability for each in answer.probabilities)
    likeliest = [each.value for each in answer.probabilities if each.probability == best]
    must(any(is_same(answer.choice, value) for value in likeliest), f"the choice is {answer.choice!r}")
    must(0 <= answer.confidence <= 1, "confidence is not between 0 and 1")


@check("decisions", area="objects", source=CREATE, core=True)
async def decisions_score(talk: Talk) -> None:
    """A score is the value to be expected, and its probabilities have the levels, counted from 0."""
    answer = await answer_to(talk, SCORE, Scored)
    levels = [(each.value, each.label) for each in answer.probabilities]
    must(levels == [(0, "rude"), (1, "neutral"), (2, "polite")], f"the levels are {levels}")
    shares = [each.probability for each in answer.probabilities]
    check_shares(shares)
    expected = fsum(value * share for value, share in enumerate(shares))
    must(0 <= answer.score <= len(shares) - 1, f"the score is {answer.score}")
    should(isclose(answer.score, expected, abs_tol=ROUNDED * len(shares)), f"it is {answer.score}, not {expected}")
    must(0 <= answer.confidence <= 1, "confidence is not between 0 and 1")


@check("decisions", area="objects", source=CREATE, core=True)
async def decisions_input(talk: Talk) -> None:
    """An input may have messages of all roles, texts and JSON in parts, and calls with their outputs."""
    text, data = {"type": "input_text", "text": LONG}, {"type": "input_json", "data": {"text": LONG}}
    call = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Paris"}'}
    said = [{"role": "system", "content": "Be brief."}, user("Say hello.")]
    inputs: dict[str, list[Json]] = {
        "a part with a text": [{"role": "user", "content": [text]}],
        "a part with JSON": [{"role": "user", "content": [data]}],
        "an answer": [{"role": "assistant", "content": LONG}, user("Again.")],
        "an output": [call, {"type": "function_call_output", "call_id": call["call_id"], "output": LONG}],
    }
    for name, items in inputs.items():
        check_read((await decision(talk, input=[*said, *items])).usage.input_tokens, name)


@check("decisions", area="objects", source=CREATE, core=True)
async def decisions_instructions(talk: Talk) -> None:
    """Instructions may have parts with texts and JSON, too."""
    parts = [{"type": "input_text", "text": "It is polite:"}, {"type": "input_json", "data": {"text": LONG}}]
    found = await decision(talk, PREDICATE | {"instructions": parts})
    check_read(found.usage.input_tokens, "a part of the instructions")


@check("decisions", area="errors", source=CREATE, core=True)
async def decisions_bad_question(talk: Talk) -> None:
    """No question, one of an unknown type, and one choice or equal choices are 400s."""
    same: Json = CHOICE | {"choices": [{"value": "a"}, {"value": "a"}]}
    for questions in ([], [PREDICATE | {"type": "no_such_type"}], [CHOICE | {"choices": [{"value": "a"}]}], [same]):
        problem(await talk.try_ask(questions=questions), 400, 422)
