"""vLLM's parameters over each dialect: each has its effect, or is refused by its name; none is passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.pipeline.protocol.generations import WeightSpan
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.server import running_server, script

USER = [{"role": "user", "content": "Hi"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 9},
    "/v1/messages": {"model": "tiny", "messages": USER, "max_tokens": 9},
}
PARAMETERS: dict[str, Any] = {
    "allowed_token_ids": [5, 6],
    "bad_words": ["a"],
    "cache_salt": "k3q9",
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "length_penalty": 2,
    "logit_bias": {"5": -100},
    "logprob_token_ids": [5],
    "min_p": 0.1,
    "min_tokens": 3,
    "n": 2,
    "presence_penalty": 0.5,
    "priority": 3,
    "prompt_logprobs": 0,
    "repetition_penalty": 1.5,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "return_weight_versions": True,
    "seed": 7,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop_token_ids": [5],
    "structured_outputs": {"choice": ["a", "b"]},
    "thinking_token_budget": 5,
    "top_k": 5,
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}
IN_EACH = ("cache_salt", "top_k", "vllm_xargs", "watermarking")
"""Those that vLLM has in every API."""


@pytest.mark.parametrize("path", DIALECTS)
async def test_parameter_of_vllm_has_its_effect_or_is_refused(tmp_path: Path, path: str) -> None:
    engine = ScriptedEngine(script(weights=(WeightSpan("a", 0, 99),)))
    async with running_server(engine, tmp_path) as served:
        plain = await _asked(served, path, {})
        verdicts = {name: await _asked(served, path, {name: value}) for name, value in PARAMETERS.items()}
    silent = [name for name, verdict in verdicts.items() if verdict == plain]
    assert silent == []
    unnamed = [name for name, verdict in verdicts.items() if isinstance(verdict, str) and name not in verdict]
    assert unnamed == []
    assert [name for name in IN_EACH if isinstance(verdicts[name], str)] == []


async def _asked(served: Any, path: str, more: dict[str, Any]) -> Any:
    """Return what the engine gets for a request and what the client gets, or the message of the error."""
    before = len(served.engine.prompts)
    status, answer = await served.post({**DIALECTS[path], **more}, path)
    if status == 400:
        return answer["error"]["message"]
    assert status == 200
    prompts = served.engine.prompts[before:]
    names = ("text", "token_ids", "weight_versions")
    texts = [[choice.get(name) for name in names] for choice in answer.get("choices", ())]
    facts = [prompt.facts for prompt in prompts]
    given = [
        (msgspec.to_builtins(each.sampling), each.scheduling.cache_salt, each.scheduling.priority) for each in facts
    ]
    return given, [prompt.grammar for prompt in prompts], texts, answer.get("generations")
