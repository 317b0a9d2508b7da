"""The completion that the chunks of a stream add up to.

See https://platform.openai.com/docs/api-reference/chat/object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.api.dialect import failed
from penstock.api.http.chunks import Broken
from penstock.extensions.dialects.chat.chunks import (
    CallDelta,
    ChatEvent,
    ChatUsage,
    ChoiceDelta,
    Chunk,
    Delta,
    DeltaChunk,
    FinishReason,
    Logprobs,
    UrlCitation,
)
from penstock.pipeline.protocol.generations import Generation, IdList, WeightSpan
from penstock.pipeline.protocol.items import Logprob


class Annotation(msgspec.Struct, frozen=True):
    """A mark on a part of the content."""

    url_citation: UrlCitation
    type: Literal["url_citation"] = "url_citation"


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a call; ``arguments`` is the model's text, valid JSON or not."""

    name: str
    arguments: str


class CalledCustomTool(msgspec.Struct, frozen=True):
    """The custom tool of a call."""

    name: str
    input: str


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call for the client to run."""

    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustomTool | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, frozen=True):
    """The message of the model."""

    content: str | None
    refusal: str | None
    annotations: tuple[Annotation, ...]
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[Call, ...] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"


class Choice(msgspec.Struct, frozen=True):
    """One of the answers to one prompt."""

    index: int
    message: ChatAnswer
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    weight_versions: tuple[WeightSpan, ...] | UnsetType = UNSET
    generations: tuple[Generation, ...] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """A whole answer."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: ChatUsage | UnsetType
    prompt_token_ids: IdList | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: None = None


@dataclass
class _Growing:
    """A choice, growing by its deltas."""

    texts: dict[str, list[str]] = field(default_factory=lambda: {"content": [], "reasoning": [], "refusal": []})
    annotations: list[Annotation] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    calls: list[list[CallDelta]] = field(default_factory=list)
    last: ChoiceDelta | None = None
    token_ids: list[int] | UnsetType = UNSET

    def add(self, choice: ChoiceDelta) -> None:
        delta = choice.delta
        for name, texts in self.texts.items():
            if text := getattr(delta, name):
                texts.append(text)
        self.annotations += [Annotation(each.url_citation) for each in delta.annotations or ()]
        self.logprobs += choice.logprobs.content if choice.logprobs else ()
        for call in delta.tool_calls or ():
            if call.index == len(self.calls):
                self.calls.append([])
            self.calls[call.index].append(call)
        self.last = choice
        self.take(choice.token_ids)

    def take(self, token_ids: Sequence[int] | UnsetType) -> None:
        if token_ids is not UNSET:
            self.token_ids = self.token_ids or []
            self.token_ids += token_ids

    def whole(self, index: int) -> Choice:
        text = {name: "".join(texts) for name, texts in self.texts.items()}
        has_more = bool(self.calls or text["refusal"])
        thought = text["reasoning"] or UNSET
        message = ChatAnswer(
            text["content"] or (None if has_more else ""),
            refusal=text["refusal"] or None,
            annotations=tuple(self.annotations),
            reasoning=thought,
            reasoning_content=thought,
            tool_calls=tuple(map(_whole_call, self.calls)) or UNSET,
        )
        logprobs, ended = (
            Logprobs(tuple(self.logprobs)) if self.logprobs else None,
            self.last or ChoiceDelta(0, Delta()),
        )
        return Choice(
            index,
            message=message,
            logprobs=logprobs,
            finish_reason=ended.finish_reason,
            stop_reason=ended.stop_reason,
            token_ids=self.token_ids,
            weight_versions=ended.weight_versions,
            generations=ended.generations,
        )


def _whole_call(deltas: Sequence[CallDelta]) -> Call:
    first = deltas[0]
    functions = [delta.function for delta in deltas if delta.function is not UNSET]
    customs = [delta.custom for delta in deltas if delta.custom is not UNSET]
    call = Call(str(first.id), "custom" if customs else "function")
    if customs:
        text = "".join(custom.input or "" for custom in customs)
        return replace(call, custom=CalledCustomTool(str(customs[0].name), text))
    text = "".join(function.arguments or "" for function in functions)
    return replace(call, function=CalledFunction(str(functions[0].name), text))


async def completion(source: AsyncIterator[ChatEvent]) -> ChatCompletion:
    """Return the completion that chunks add up to; raise the error of one that failed."""
    choices: dict[int, _Growing] = {}
    usage: ChatUsage | UnsetType = UNSET
    prompt: IdList | UnsetType = UNSET
    chunk: Chunk | None = None
    async for event in source:
        match event:
            case Broken(error=error):
                raise failed(error.code, error.message)
            case DeltaChunk(text=text, is_thought=is_thought, token_ids=token_ids):
                choices[0].texts["reasoning" if is_thought else "content"].append(text)
                choices[0].take(token_ids)
            case Chunk():
                chunk, usage, prompt = event, event.usage or usage, prompt or event.prompt_token_ids
                for choice in event.choices:
                    choices.setdefault(choice.index, _Growing()).add(choice)
    if chunk is None:
        raise RuntimeError("a response ended without an event")
    whole = tuple(growing.whole(index) for index, growing in sorted(choices.items()))
    return ChatCompletion(
        chunk.id,
        created=chunk.created,
        model=chunk.model,
        choices=whole,
        usage=usage,
        prompt_token_ids=prompt,
    )
