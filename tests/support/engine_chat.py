"""A chat model on the real engine, and requests to it through the whole pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.core import Pipeline
from pipeline.protocol.events import ResponseEvent
from pipeline.protocol.request import CreateResponse
from pipeline.protocol.response import Response
from stages.chat.model import ChatModel
from stages.generate.engine import Engine
from stages.generate.vllm import VllmEngine
from stages.persist.database import Nowhere
from stages.persist.live import LiveResponses
from stages.persist.store import Store
from stages.responses import chat_responses
from tests.support.event_streams import final, run

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HELLO = "Hello! How can I help you today?"


@dataclass(frozen=True)
class Model:
    """The engine, and what is to be known of its model."""

    engine: VllmEngine
    chat: ChatModel

    def pipeline(self, store: Store) -> Pipeline[CreateResponse, ResponseEvent]:
        return chat_responses(self.engine.models, self.engine, self.chat, LiveResponses(store))

    async def respond(self, question: str, /, *, thinking: bool | None = None, **body: Any) -> Response:
        """The answer to one question, every event of it checked; greedy unless ``body`` says otherwise."""
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        return await respond(self.engine, self.chat, question, **body)


async def respond(engine: Engine, chat: ChatModel, question: str, /, **body: Any) -> Response:
    """The answer that ``engine`` gives, every event of it checked; greedy unless ``body`` says otherwise."""
    pipeline = chat_responses(engine.models, engine, chat, LiveResponses(Store(Nowhere())))
    return final(await run(pipeline, {"input": question, "temperature": 0, "max_output_tokens": 400} | body))
