"""Decisions of real engines: their probabilities are those of the labels as next tokens of the prompt."""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any

import pytest

from penstock.extensions.dialects.decisions.labels import labels_of
from penstock.pipeline.frames import GenerationFinished, Prompt
from penstock.pipeline.tap import Tap
from penstock.services.engines.vllm import VllmEngine
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.engine_requests import ON_SHARED_ENGINE, ChatEngine, prompt, sampled, stoppable
from tests.support.event_streams import generate, logprobs
from tests.support.server import Server, running_server

pytestmark = ON_SHARED_ENGINE

NOISE = 0.02
"""The difference between the probabilities of a token in two runs, as another batch computes in another order."""

TICKET = "I was charged twice for the same order. Please refund one of the charges today. " * 40
TEAMS = [{"value": "billing"}, {"value": "technical", "description": "faults of the app"}, {"value": True}]
LEVELS = [{"label": "low"}, {"label": "middle"}, {"label": "high"}]
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "The customer asks for a refund.", "name": "refund"},
    {"type": "choice", "instructions": "Which team?", "choices": TEAMS},
    {"type": "score", "instructions": "How urgent is it?", "levels": LEVELS},
]
BODY = {"input": TICKET, "questions": QUESTIONS}


@pytest.fixture(params=["gpt-oss", "qwen"])
def asked(request: pytest.FixtureRequest) -> tuple[VllmEngine, ChatModel | None]:
    if request.param == "gpt-oss":
        return request.getfixturevalue("engine"), None
    chat: ChatEngine = request.getfixturevalue("model")
    return chat.engine, chat.chat


def shares(answer: dict[str, Any]) -> list[float]:
    if answer["type"] == "predicate":
        return [answer["probability"], 1 - answer["probability"]]
    return [each["probability"] for each in answer["probabilities"]]


async def decided(served: Server[VllmEngine], body: dict[str, Any]) -> dict[str, Any]:
    status, decision = await served.post(body, "/v1/decisions")
    assert status == 200, decision
    return dict(decision)


async def likelihood(served: Server[VllmEngine], tokens: tuple[int, ...], label: int) -> float:
    """Return the probability of a token after others, as a plain request for the prompt's own shows it."""
    body = {"prompt": [*tokens, label], "max_tokens": 0, "echo": True, "logprobs": 0, "cache_salt": "alone"}
    status, echoed = await served.post(body, "/v1/completions")
    assert status == 200, echoed
    return exp(echoed["choices"][0]["logprobs"]["token_logprobs"][-1])


async def test_probabilities_are_those_of_the_labels_after_the_prompt(
    asked: tuple[VllmEngine, ChatModel | None], tmp_path: Path
) -> None:
    engine, chat = asked
    vocabulary = chat.vocabulary if chat else load_encoding()
    prompts, generated = Tap(), Tap()

    def tapped(pipeline: Any) -> Any:
        return pipeline.insert_after("render", "prompts", prompts).insert_after("generate", "generated", generated)

    async with running_server(stoppable(engine), tmp_path, model=chat, edit=tapped) as served:
        decision = await decided(served, BODY)
        read: dict[str, Prompt] = {vocabulary.decode(each.token_ids): each for each in prompts.frames}
        for question, answer in zip(QUESTIONS, decision["answers"], strict=True):
            [wanted] = [each for text, each in read.items() if question["instructions"] in text]
            labels = labels_of(vocabulary, len(shares(answer)))
            alone = [
                sum([await likelihood(served, wanted.token_ids, token) for token in label.tokens]) for label in labels
            ]
            assert shares(answer) == pytest.approx([each / sum(alone) for each in alone], abs=NOISE)
    assert [sum(shares(each)) for each in decision["answers"]] == pytest.approx([1, 1, 1])
    score = decision["answers"][2]
    assert score["score"] == pytest.approx(sum(value * share for value, share in enumerate(shares(score))))
    assert decision["usage"]["input_tokens"] == sum(len(each.token_ids) for each in read.values())
    cached = [frame.cached_tokens for frame in generated.frames if isinstance(frame, GenerationFinished)]
    assert all(cached[1:3]) or chat is None  # the window of a gpt-oss slides over less than a block of the CPU
    assert decision["usage"]["input_tokens_details"]["cached_tokens"] == sum(cached[:3])


async def test_order_of_chosen_tokens_does_not_matter(engine: VllmEngine) -> None:
    labels = [token for label in labels_of(load_encoding(), 100) for token in label.tokens]
    found = []
    for chosen in (labels, labels[::-1]):
        wanted = sampled(prompt("Choose.", max_tokens=1), logprobs=0, logprob_token_ids=tuple(chosen))
        [token] = logprobs(await generate(engine, wanted))
        found.append({label: dict(token.top)[label] for label in labels})
    assert found[0] == pytest.approx(found[1], abs=NOISE)


@pytest.mark.parametrize("count", [2, 64, 65, 255])
async def test_question_has_up_to_255_choices(engine: VllmEngine, tmp_path: Path, count: int) -> None:
    choices = [{"value": f"option {number}"} for number in range(count)]
    body = {"input": "Hi", "questions": [{"type": "choice", "instructions": "Which?", "choices": choices}]}
    async with running_server(stoppable(engine), tmp_path) as served:
        decision = await decided(served, body)
    [answer] = decision["answers"]
    assert sum(shares(answer)) == pytest.approx(1)
    assert all(share > 0 for share in shares(answer))
    assert [each["value"] for each in answer["probabilities"]] == [choice["value"] for choice in choices]
    assert answer["confidence"] == max(shares(answer))
