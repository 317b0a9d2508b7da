"""Generations of a real engine: their log probabilities are those that it gives the same tokens as a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.services.engines.vllm import VllmEngine
from tests.support import engine_requests
from tests.support.server import Server, running_server

pytestmark = engine_requests.ON_SHARED_ENGINE

ASKED: Any = {"return_token_ids": True, "return_weight_versions": True, "temperature": 0}
BODIES: dict[str, Any] = {
    "/v1/responses": {"input": "Say hello.", "include": ["message.output_text.logprobs"]},
    "/v1/messages": {"max_tokens": 200, "messages": [{"role": "user", "content": "Say hello."}], "logprobs": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say hello."}], "logprobs": True},
}


async def test_engine_gives_the_tokens_again_the_same_log_probabilities(engine: VllmEngine, tmp_path: Path) -> None:
    async with running_server(engine_requests.stoppable(engine), tmp_path) as served:
        for path, body in BODIES.items():
            status, answer = await served.post({**body, **ASKED, "model": engine.models[0]}, path)
            assert status == 200, answer
            prompt, written, logprobs, versions = _generation(answer)
            assert len(written) == len(logprobs) == answer["usage"].get("output_tokens", len(written))
            assert [versions[0]["start"], versions[-1]["end"]] == [0, len(written)]
            assert logprobs == pytest.approx(await _scored(served, prompt, written), abs=1e-2)


def _generation(answer: Any) -> tuple[list[int], list[int], list[float], Any]:
    if "choices" in answer:
        (choice,) = answer["choices"]
        scores = [each["logprob"] for each in choice["logprobs"]["content"]]
        return answer["prompt_token_ids"], choice["token_ids"], scores, choice["weight_versions"]
    (one,) = answer["generations"]
    return one["prompt_token_ids"], one["token_ids"], one["logprobs"], one["weight_versions"]


async def _scored(served: Server[VllmEngine], prompt: list[int], written: list[int]) -> list[float]:
    body = {"prompt": [*prompt, *written], "echo": True, "max_tokens": 0, "logprobs": 0}
    status, answer = await served.post({**body, "model": served.engine.models[0]}, "/v1/completions")
    assert status == 200, answer
    scores: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return scores[len(prompt) :]
