from __future__ import annotations

from itertools import product

import pytest

from tests.oracles.conversations import TURNS, generated, recorded, traits
from tests.oracles.rendering import Explanation, explanations

KNOWN = {"*", *traits(), *(name for name, _ in recorded())}


@pytest.mark.parametrize("explanation", explanations(), ids=lambda each: each.reason)
def test_explanation_names_conversations(explanation: Explanation) -> None:
    assert {*explanation.traits} <= KNOWN
    assert explanation.same_as in {"", *traits()}


def test_reasons_are_told_apart() -> None:
    named = [
        (each.reason, trait, template)
        for each in explanations()
        for trait, template in product(each.traits, each.templates)
    ]
    assert len(named) == len(set(named))


def test_generated_conversations_are_those_of_the_seed() -> None:
    one, other = (list(generated([*TURNS], "seed", 5)) for _ in range(2))
    assert one == other
    assert [name for name, _ in one] != [name for name, _ in generated([*TURNS], "another", 5)]


def test_ids_of_calls_occur_once_in_a_generated_conversation() -> None:
    for _, body in generated(["two calls", "calls in a row"], "seed", 20):
        ids = [call["id"] for message in body["messages"] for call in message.get("tool_calls", ())]
        assert len(ids) == len(set(ids))
