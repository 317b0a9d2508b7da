"""Faults of the Decisions API, by the check that has to find them."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.api_clients import Json
from tests.support.faulty_server import Fault, deep, in_body, lose, put, refused, with_status
from tests.unit.extensions.workbench.conformance.shared_faults import REFUSALS


def in_answer(change: Callable[[Json], object]) -> Fault:
    """Change each answer."""
    return in_body(lambda body: [change(answer) for answer in body.get("answers", ())] and None)


def reversed_(field: str) -> Callable[[Json], None]:
    return lambda body: body[field].reverse()


UNREAD = in_body(put(usage={"input_tokens": 5, "output_tokens": 1, "total_tokens": 6}))
SHARES: list[Fault] = [
    in_answer(lose("probabilities")),
    in_answer(reversed_("probabilities")),
    in_answer(deep("probabilities", 0, "probability", value=0.9)),
    in_answer(deep("probabilities", 0, "probability", value=-0.5)),
    in_answer(lambda answer: answer["probabilities"].pop() and None),
    in_answer(put(confidence=2)),
]
PREDICATES = in_answer(put(type="predicate", probability=0.5))
FAULTS: dict[str, list[Fault]] = {
    "decisions.object": [
        in_body(reversed_("answers")),
        in_body(lambda body: body["answers"].pop() and None),
        in_body(lose("model")),
        in_answer(put(name="greets")),
        in_answer(lose("name")),
        in_answer(put(type="boolean")),
        with_status(500, when=200),
    ],
    "decisions.usage": [
        in_body(lose("usage")),
        in_body(deep("usage", "total_tokens", value=1)),
        in_body(deep("usage", "input_tokens_details", value=None)),
    ],
    "decisions.predicate": [
        *(in_answer(put(probability=value)) for value in (1.5, -0.5, None)),
        in_answer(put(type="choice", choice="a", confidence=1, probabilities=[])),
    ],
    "decisions.choice": [
        *SHARES,
        PREDICATES,
        in_answer(put(choice="a greeting")),
        in_answer(put(choice="True")),
        in_answer(deep("probabilities", 1, "value", value="true")),
    ],
    "decisions.score": [
        *SHARES,
        PREDICATES,
        in_answer(put(score=7)),
        in_answer(deep("probabilities", 0, "value", value=1)),
        in_answer(deep("probabilities", 0, "label", value="polite")),
    ],
    "decisions.input": [UNREAD, refused(lambda body: isinstance(body["input"], list))],
    "decisions.instructions": [UNREAD, refused(lambda body: isinstance(body["questions"][0]["instructions"], list))],
    "decisions.bad_question": REFUSALS,
}
