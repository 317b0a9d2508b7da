"""Decisions over a real socket, with OpenAI's own client, and an engine whose log probabilities are known."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from math import exp
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec import UNSET

from penstock.pipeline.frames import EngineFrame, GenerationFinished, Prompt, TokenChunk, TokenLogprob
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import openai_client
from tests.support.server import running_server

PATH = "/v1/decisions"


def test_x():
    pass


async def test_first(tmp_path: Path) -> None:
    engine = ScriptedEngine(Script((32,), logprobs=(TokenLogprob(-0.1, ((32, -0.1), (33, -2.0))),)))
    async with running_server(engine, tmp_path) as served, openai_client(served.url) as sdk:
        d = await sdk.decisions.create(model="tiny", input="I was charged twice.", questions=[
            {"type": "predicate", "instructions": "The customer is angry.", "name": "angry"},
            {"type": "choice", "instructions": "Team?", "choices": [{"value": "billing"}, {"value": True, "description": "yes"}]},
            {"type": "score", "instructions": "Urgency?", "levels": [{"label": "low"}, {"label": "high"}]},
            ])
        print(d.model_dump_json(indent=1))
        print(served.prompt_text())
        print(engine.prompts[-1].facts.sampling)
        print(await served.post({"input": "x", "questions": [{"type": "choice", "instructions": "a", "choices": [{"value": "a"}, {"value": "a"}]}]}, PATH))
        print(await served.post({"input": "x", "questions": [{"type": "choice", "instructions": "a", "choices": [{"value": "a"}]}]}, PATH))
        print(await served.post({"input": "x", "questions": []}, PATH))
        print(await served.post({"input": "x", "questions": [{"type": "choic"}]}, PATH))
        print(await served.post({"input": "x", "joint": True, "questions": [{"type": "predicate", "instructions": "i", "foo": 1}]}, PATH))
        print(await served.post({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "foo": 1}]}], "questions": [{"type": "predicate", "instructions": "i"}]}, PATH))
        print(await served.post({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,xx"}]}], "questions": [{"type": "predicate", "instructions": "i"}]}, PATH))
        print(await served.post({"input": [{"type": "function_call_output", "call_id": "x", "output": "u"}], "questions": [{"type": "predicate", "instructions": "i"}]}, PATH))
        print(await served.post({"input": "x", "stream": True, "questions": [{"type": "predicate", "instructions": "i"}]}, PATH))
        print(await served.post({}, PATH))
        print(await served.post({"input": "x", "joint": True, "questions": [{"type": "predicate", "instructions": "i"}]}, PATH))
