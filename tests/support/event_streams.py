"""Runs of stages and pipelines, and checks of event streams by the invariant checker and the models of the SDK."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.pipeline.core import Pipeline, Stage, source_of
from penstock.pipeline.frames import EngineFrame, GenerationFinished, Prompt, TokenChunk, TokenLogprob
from penstock.pipeline.lifecycle.checker import StreamChecker, check
from penstock.pipeline.protocol.events import ResponseEvent, TerminalEvent, to_sse
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_request
from penstock.pipeline.protocol.response import Response
from penstock.services.engines.engine import Engine
from penstock.services.runs.run import RunRegistry
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.services.tools import Toolbox
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.normalize.normalize import NO_TOOLS
from penstock.stages.responses import harmony_stages, responses_pipeline

_sdk_event: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_our_event = msgspec.json.Decoder[ResponseEvent](ResponseEvent)


def harmony_pipeline(
    engine: Engine, store: Store | None = None, toolbox: Toolbox = NO_TOOLS
) -> Pipeline[CreateResponse, ResponseEvent]:
    """The whole pipeline of gpt-oss over an engine; without ``store`` it stores nothing."""
    runs = RunRegistry(store or Store(NullDatabase()))
    return responses_pipeline(harmony_stages(load_encoding()), engine, runs, toolbox)


async def run_request(pipeline: Pipeline[CreateResponse, ResponseEvent], body: dict[str, Any]) -> list[ResponseEvent]:
    """Run one request; check and return all of its events."""
    request = read_request(json.dumps(body).encode())
    async with pipeline.then("check", check).open(source_of([request])) as events:
        return checked([event async for event in events])


def checked(events: Iterable[ResponseEvent]) -> list[ResponseEvent]:
    """Check a whole stream against every invariant and the SDK's union of events; return its events."""
    stream, passed = StreamChecker(), []
    for event in events:
        stream.feed(event)
        body = json.loads(to_sse(event).decode().split("\n")[1].removeprefix("data: "))
        parsed = _sdk_event.validate_python(in_sdk_terms(body), strict=False)
        assert parsed.type == body["type"]
        passed.append(event)
    stream.finish()
    return passed


def in_sdk_terms(body: dict[str, Any]) -> dict[str, Any]:
    """Replace what the SDK's types lack: incomplete patch calls, and our reasons."""
    return {name: _in_sdk_terms(value) if name in ("item", "response") else value for name, value in body.items()}


def _in_sdk_terms(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type") == "apply_patch_call" and value["status"] == "incomplete":
        return {**value, "status": "completed"}
    if details := value.get("incomplete_details"):
        known = "max_output_tokens" if details["reason"] in ("max_tool_calls", "max_turns") else details["reason"]
        value = {**value, "incomplete_details": {"reason": known}}
    return {**value, "output": [*map(_in_sdk_terms, value["output"])]} if value.get("object") == "response" else value


def read_sse(body: bytes) -> list[ResponseEvent]:
    """Read the events of a whole SSE body; check its framing: LF only, event name equal to type, [DONE] at the end."""
    assert b"\r" not in body
    *frames, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = []
    for frame in frames:
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = _our_event.decode(data.removeprefix("data: "))
        assert name == f"event: {event.__struct_config__.tag}"
        events.append(event)
    return checked(events)


def event_of_json(body: dict[str, Any]) -> ResponseEvent:
    """Read one event, in the JSON of a socket's frame."""
    event: ResponseEvent = _our_event.decode(json.dumps(body))
    return event


def renumbered(frame: bytes, number: int) -> bytes:
    return re.sub(rb'(?<="sequence_number":)\d+', b"%d" % number, frame, count=1)


def final(events: Iterable[ResponseEvent]) -> Response:
    *_, last = events
    assert isinstance(last, TerminalEvent)
    return last.response


Frame = TypeVar("Frame")


async def run_stage(stage: Stage[Any, Any], frames: Iterable[Any]) -> list[Any]:
    return await run_pipeline(Pipeline.start("stage", stage), frames)


async def run_pipeline(pipeline: Pipeline[Any, Any], frames: Iterable[Any]) -> list[Any]:
    async with pipeline.open(source_of(frames)) as stream:
        return [frame async for frame in stream]


async def generate(engine: Engine, prompt: Prompt, *, pause: float = 0.0) -> list[EngineFrame]:
    frames = []
    async with engine.open(prompt) as stream:
        async for frame in stream:
            frames.append(frame)
            await asyncio.sleep(pause)
    return frames


def token_ids(frames: Iterable[Any]) -> list[int]:
    return [token for frame in frames if isinstance(frame, TokenChunk) for token in frame.token_ids]


def logprobs(frames: Iterable[Any]) -> list[TokenLogprob]:
    return [logprob for frame in frames if isinstance(frame, TokenChunk) for logprob in frame.logprobs]


def last(frames: list[EngineFrame]) -> GenerationFinished:
    assert isinstance(frames[-1], GenerationFinished)
    return frames[-1]
