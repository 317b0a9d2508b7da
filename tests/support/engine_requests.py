"""Prompts for the real engine, and requests for the whole pipeline over it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import Prompt, Sampling, Scheduling, with_facts
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.items import Message, OutputItem, Reasoning
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import read_frames
from penstock.services.engines.engine import Engine
from penstock.services.engines.vllm import VllmEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.services.tools import Toolbox
from penstock.services.web.image_cache import ImageCache
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.normalize.normalize import NO_TOOLS
from penstock.stages.responses import chat_stages, responses_pipeline
from tests.support.event_streams import final, harmony_pipeline, run_request
from tests.support.fixture_cases import HARMONY_CASES
from tests.support.processes import PATIENCE


def prompt(text: str, name: str = "greeting", max_tokens: int | None = 200) -> Prompt:
    recorded: Prompt
    (recorded,) = read_frames(HARMONY_CASES[0].parent / name / "prompt.jsonl", Prompt)
    head = load_encoding().decode(recorded.token_ids).split("<|start|>user")[0]
    tokens = load_encoding().encode_markup(f"{head}<|start|>user<|message|>{text}<|end|><|start|>assistant")
    wanted = msgspec.structs.replace(recorded, token_ids=tuple(tokens))
    return with_facts(wanted, sampling=Sampling(0.0, 1.0, max_tokens))


def sampled(wanted: Prompt, **sampling: Any) -> Prompt:
    return with_facts(wanted, sampling=msgspec.structs.replace(wanted.facts.sampling, **sampling))


def scheduled(wanted: Prompt, **scheduling: Any) -> Prompt:
    return with_facts(wanted, scheduling=Scheduling(**scheduling))


def adapted(wanted: Prompt) -> Prompt:
    return with_facts(wanted, response=msgspec.structs.replace(wanted.facts.response, model="nonsense"))


async def respond(engine: VllmEngine, question: str, /, toolbox: Toolbox = NO_TOOLS, **body: Any) -> Response:
    """Run a question through the whole pipeline and check every event; greedy and short unless ``body`` differs."""
    pipeline = harmony_pipeline(engine, toolbox=toolbox)
    return final(await run_request(pipeline, {"input": question, "temperature": 0, "max_output_tokens": 400} | body))


def rename(wanted: Prompt, response_id: str) -> Prompt:
    return with_facts(wanted, response=msgspec.structs.replace(wanted.facts.response, id=response_id))


def stoppable(engine: VllmEngine) -> VllmEngine:
    """A copy of the engine for a test that stops it; other tests still need the original."""
    return replace(engine, _running=set(), _stopping=asyncio.Event())


async def until_idle(engine: VllmEngine) -> None:
    async with asyncio.timeout(PATIENCE):
        while engine.llm.get_num_unfinished_requests():
            await asyncio.sleep(0.01)


@dataclass
class EngineStats:
    """A stat logger of vLLM's front end: it keeps the statistics that the scheduler sends with every step."""

    running: int = 0
    waiting: int = 0
    generated: int = 0
    """Tokens generated since the engine started."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self, scheduler: Any, iteration: Any, **_: object) -> None:
        if scheduler is not None:
            self.running, self.waiting = scheduler.num_running_reqs, scheduler.num_waiting_reqs
        if iteration is not None:
            self.generated += iteration.num_generation_tokens
        self._changed.set()

    def log(self) -> None:
        """Write nothing."""

    def record_admission_rejection(self, reason: str) -> None:
        """Count nothing."""

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the statistics meet a condition."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def spoken(item: OutputItem) -> str:
    return item.text if isinstance(item, Message | Reasoning) else ""


def answer(response: Response) -> str:
    item = response.output[-1]
    assert isinstance(item, Message)
    return item.text


WEATHER_TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


ON_SHARED_ENGINE = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn
]
"""Marks of tests that await an engine of the session."""

HELLO = "Hello! How can I help you today?"


@dataclass(frozen=True)
class ChatEngine:
    engine: VllmEngine
    chat: ChatModel

    def pipeline(self, store: Store) -> Pipeline[CreateResponse, ResponseEvent]:
        return responses_pipeline(chat_stages(self.chat, ImageCache()), self.engine, RunRegistry(store))

    async def respond(self, question: str, /, *, thinking: bool | None = None, **body: Any) -> Response:
        """Ask one question and check every event of the response; greedy unless ``body`` differs."""
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        return await respond_chat(self.engine, self.chat, question, **body)


async def respond_chat(
    engine: Engine, chat: ChatModel, question: str, /, toolbox: Toolbox = NO_TOOLS, **body: Any
) -> Response:
    """Ask ``engine`` one question and check every event of the response; greedy unless ``body`` differs."""
    pipeline = responses_pipeline(chat_stages(chat, ImageCache()), engine, RunRegistry(Store(NullDatabase())), toolbox)
    return final(await run_request(pipeline, {"input": question, "temperature": 0, "max_output_tokens": 400} | body))
