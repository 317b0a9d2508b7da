"""The scores of an answer, taken apart: the same ones as of the whole answer, whatever its texts contain."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.frames import TokenLogprob
from penstock.services.engines import http_scores
from penstock.services.engines.http_scores import prompt_logprobs, separated
from tests.support.examples import examples

TEXTS = st.text('{}[]",:\\1a\n', max_size=12) | st.sampled_from(['}},{"1":', "}},{", '"prompt_logprobs":', "}}],"])
SCORES = st.builds(lambda logprob, text: {"logprob": logprob, "decoded_token": text}, st.floats(-9, 0), TEXTS)
POSITIONS = st.lists(st.dictionaries(st.integers(0, 99), SCORES, min_size=1, max_size=3), max_size=6)


def answer(positions: list[Any], text: str, *, in_choice: bool) -> dict[str, Any]:
    scores = {"prompt_logprobs": [None, *positions]}
    choice: dict[str, Any] = {"text": text, **(scores if in_choice else {}), "token_ids": [1], "stop_reason": text}
    return {"id": text, "choices": [choice], **({} if in_choice else scores), "kv_transfer_params": {"a": {"b": {}}}}


def expected(position: dict[int, Any]) -> TokenLogprob:
    likeliest = sorted(position.items(), key=lambda pair: -pair[1]["logprob"])
    return TokenLogprob(
        next(iter(position.values()))["logprob"], tuple((token, score["logprob"]) for token, score in likeliest[:2])
    )


@examples(100)
@given(POSITIONS, TEXTS, st.booleans(), st.sampled_from([(",", ":"), (", ", ": ")]), st.integers(1, 300))
def test_scores_are_those_of_the_whole_answer(
    positions: list[Any], text: str, in_choice: bool, separators: tuple[str, str], window: int
) -> None:
    whole = answer(positions, text, in_choice=in_choice)
    body = json.dumps(whole, separators=separators, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_scores, "_WINDOW", window)
        scores = separated(body)
    assert prompt_logprobs(scores, 2) == tuple(map(expected, positions))
    rest = msgspec.json.decode(scores.rest)
    assert rest | {"prompt_logprobs": 0, "choices": 0} == json.loads(body) | {"prompt_logprobs": 0, "choices": 0}
    assert [each["token_ids"] for each in rest["choices"]] == [[1]]
    assert len(scores.between) == max(0, len(positions) - 2)


def test_answer_with_too_much_beside_its_scores_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_scores, "LARGEST_REST", 100)
    body = json.dumps(answer([{1: {"logprob": -1.0}}], "x" * 100, in_choice=True)).encode()
    with pytest.raises(ValueError, match="beside its scores"):
        separated(body)
