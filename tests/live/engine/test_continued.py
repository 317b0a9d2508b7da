"""Continuing on the real engine: the next prompt begins with the tokens in the prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from penstock.pipeline.protocol.items import FunctionCall
from penstock.pipeline.tap import Tap
from penstock.services.engines.vllm import VllmEngine
from tests.support.engine_requests import ON_SHARED_ENGINE
from tests.support.event_streams import final, harmony_pipeline, run_request, token_ids
from tests.support.stores import open_store

pytestmark = ON_SHARED_ENGINE

Frame = TypeVar("Frame")

WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


async def test_prompt_after_a_call_is_cached(engine: VllmEngine, tmp_path: Path) -> None:
    body: dict[str, Any] = {"input": "What is the weather in Paris?", "tools": [WEATHER], "tool_choice": "required"}
    body |= {"instructions": "word " * 300, "temperature": 0, "max_output_tokens": 400}
    prompts, generated = Tap(), Tap()
    async with open_store(str(tmp_path / "responses.sqlite3")) as store:
        pipeline = harmony_pipeline(engine, store)
        pipeline = pipeline.insert_after("render", "prompts", prompts).insert_after("generate", "generated", generated)
        called = final(await run_request(pipeline, body))
        seen = (*prompts.frames[0].token_ids, *token_ids(generated.frames))
        call = called.output[-1]
        assert isinstance(call, FunctionCall)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 °C"}
        answered = final(await run_request(pipeline, body | {"previous_response_id": called.id, "input": [output]}))
    assert prompts.frames[1].token_ids[: len(seen)] == seen
    assert answered.usage is not None
    block = engine.llm.vllm_config.cache_config.block_size
    read = len(prompts.frames[0].token_ids)
    assert answered.usage.input_tokens_details.cached_tokens >= read // block * block > 0
