"""A backend of texts: any server with a chat completions endpoint that streams.

CHAT_URL=https://api.example/v1 CHAT_KEY=... penstock serve MODEL --engine chat_endpoint.py:engine
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp

from penstock.api.settings import Settings
from penstock.pipeline import errors, frames
from penstock.pipeline.protocol.items import images_of
from penstock.pipeline.protocol.tools import Toolset
from penstock.stages.models.chat.functions import functions
from penstock.stages.models.chat.names import ToolNames, text_argument
from penstock.stages.models.opened_calls import call_of
from penstock.stages.parse.chat.unwrap import Unwrapped
from penstock.stages.render.chat.messages import MessageContext, chat_conversation
from penstock.stages.render.item_texts import split

LONGEST_LINE = 2**22
REASONS: Mapping[str, frames.FinishReason] = {"length": "length", "content_filter": "content_filter"}
REASONING, REFUSAL, MESSAGE = frames.ReasoningOpened(), frames.RefusalOpened(), frames.MessageOpened()


class Turn:
    """Turns the chunks of one completion into the frames of one turn."""

    def __init__(self, names: ToolNames) -> None:
        self._names = names
        self._began = monotonic()
        self._open: object = None  # the opening of the open item, or the index of its call
        self._argument: Unwrapped | None = None
        self._reason = ""
        self._usage: dict[str, Any] = {}

    def feed(self, chunk: dict[str, Any]) -> Iterator[frames.ParsedFrame]:
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices", ())[:1]:
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning") or delta.get("reasoning_content")  # the field has two names
            texts = ((REASONING, thought), (REFUSAL, delta.get("refusal")), (MESSAGE, delta.get("content")))
            for opening, text in texts:
                if text:
                    yield from self._enter(opening, opening)
                    yield frames.ItemDelta(text)
            for call in delta.get("tool_calls") or ():
                yield from self._call(call["index"], call.get("function") or {})
            self._reason = choice.get("finish_reason") or self._reason

    def _call(self, index: int, function: dict[str, Any]) -> Iterator[frames.ParsedFrame]:
        if self._open != index:
            if not function.get("name"):
                raise errors.EngineFailed("The endpoint wrote several calls at once.")
            tool = self._names.tool(function["name"])
            yield from self._enter(index, call_of(tool) if tool else frames.FunctionCallOpened(function["name"]))
            argument = text_argument(tool) if tool else None
            self._argument = Unwrapped(argument) if argument else None
        text = function.get("arguments") or ""
        if text := self._argument.feed(text) if self._argument else text:
            yield frames.ItemDelta(text)

    def _enter(self, key: object, opening: frames.ItemOpened) -> Iterator[frames.ParsedFrame]:
        """Open an item, unless it is open."""
        if self._open != key:
            yield from self._leave(complete=True)
            self._open = key
            yield opening

    def _leave(self, *, complete: bool) -> Iterator[frames.ParsedFrame]:
        if self._open is not None:
            if self._argument and (text := self._argument.flush(cut=not complete)):
                yield frames.ItemDelta(text)
            yield frames.ItemClosed(complete)
        self._open = self._argument = None

    def end(self) -> Iterator[frames.ParsedFrame]:
        if not self._reason:
            raise errors.EngineFailed("The endpoint broke off its answer.")
        reason = REASONS.get(self._reason, "stop")
        yield from self._leave(complete=reason == "stop")
        yield frames.TurnFinished(
            reason,
            cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            output_tokens=self._usage.get("completion_tokens", 0),
            reasoning_tokens=(self._usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0,
            duration=monotonic() - self._began,
            prompt_tokens=self._usage.get("prompt_tokens"),
        )


@dataclass
class ChatEndpoint:
    client: aiohttp.ClientSession
    models: tuple[str, ...]
    context_length: int = 131_072
    is_alive: bool = True
    is_stopping: bool = field(default=False, init=False)

    async def answer(self, source: AsyncIterator[frames.ResolvedRequest]) -> AsyncGenerator[frames.ParsedFrame, None]:
        async for request in source:
            if self.is_stopping:
                raise errors.ServerStopping
            names = ToolNames(request.facts.tools)
            async with self._completion(body(request, names)) as answered:
                yield frames.GenerationStarted(request.facts, prompt_tokens=0)
                turn = Turn(names)
                async for chunk in chunks(answered):
                    for frame in turn.feed(chunk):
                        yield frame
                for frame in turn.end():
                    yield frame

    @asynccontextmanager
    async def _completion(self, sent: dict[str, Any]) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Send a request; leaving the block closes the connection, which ends the completion."""
        try:
            answered = await self.client.post("chat/completions", json=sent)
        except aiohttp.ClientError as error:
            raise errors.EngineDead("The endpoint cannot be reached.") from error
        async with answered:
            if answered.status != 200:
                raise refusal(answered.status, await answered.text())
            yield answered

    async def cancel(self, response_id: str) -> bool:
        return False  # the server then closes `answer`

    async def stop(self) -> None:
        self.is_stopping = True

    async def close(self) -> None:
        await self.client.close()


async def chunks(answered: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    try:
        async for line in answered.content:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                chunk = json.loads(data)
                if "error" in chunk:
                    raise errors.EngineFailed(message_in(chunk))
                yield chunk
    except (aiohttp.ClientError, ValueError) as error:
        raise errors.EngineFailed("The endpoint broke off its answer.") from error


def refusal(status: int, text: str) -> errors.StageError:
    try:
        message = message_in(json.loads(text))
    except ValueError:
        message = f"The endpoint answered with status {status}."
    if status in (429, 503):
        return errors.EngineOverloaded(message)
    if status in (401, 403) or status >= 500:
        return errors.EngineFailed(message)
    return errors.InvalidPrompt(message)


def message_in(error: Any) -> str:
    error = error.get("error", error) if isinstance(error, dict) else error
    return str(error.get("message", error) if isinstance(error, dict) else error)


def body(request: frames.ResolvedRequest, names: ToolNames) -> dict[str, Any]:
    facts, sampling = request.facts, request.facts.sampling
    if sampling.logprobs is not None:
        raise errors.UnsupportedParameter("This model gives no log probabilities.", param="top_logprobs")
    if facts.structured:
        raise errors.UnsupportedParameter("This model takes text.format alone.", param="structured_outputs")
    values = {
        "model": facts.model,
        "messages": messages(request, names),
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_completion_tokens": sampling.max_tokens,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "reasoning_effort": facts.response.reasoning.effort,
        "response_format": response_format(facts.response.text.get("format") or {}),
        **tools(facts.tools, names),
    }
    return {name: value for name, value in values.items() if value is not None}


def messages(request: frames.ResolvedRequest, names: ToolNames) -> list[dict[str, Any]]:
    instructions, items = split(request)
    images = {image.url: image.url for item in items for image in images_of(item)}
    layout = chat_conversation(instructions, items, MessageContext(request, names, images, stops=()))
    return [sendable(message) for message in layout.messages]


def sendable(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message for the wire: a template takes more than the endpoint."""
    sent = {name: value for name, value in message.items() if name in ("role", "content", "tool_call_id")}
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": str(call["function"]["arguments"])}}
            for call in calls
        ]
    return sent


def tools(toolset: Toolset, names: ToolNames) -> dict[str, Any]:
    callable_names = {names.of(tool) for tool in toolset.callable}
    shown = [one for one in functions(toolset, names) if one["function"]["name"] in callable_names]
    return {"tools": shown, "tool_choice": toolset.choice, "parallel_tool_calls": toolset.parallel} if shown else {}


def response_format(form: Mapping[str, Any]) -> dict[str, Any] | None:
    match form:
        case {"type": "json_schema", **schema}:
            known = {name: value for name, value in schema.items() if value is not None}
            return {"type": "json_schema", "json_schema": known}
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case _:
            return None


@asynccontextmanager
async def engine(settings: Settings) -> AsyncGenerator[ChatEndpoint, None]:
    if not settings.model or "CHAT_URL" not in os.environ:
        raise errors.CannotStart("give MODEL, the model's name at the endpoint, and set CHAT_URL")
    url, key = os.environ["CHAT_URL"].rstrip("/") + "/", os.environ.get("CHAT_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout, read_bufsize=LONGEST_LINE) as client:
        yield ChatEndpoint(client, (settings.model,))
