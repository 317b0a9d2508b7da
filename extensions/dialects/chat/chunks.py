"""The chunks of a stream of Chat Completions.

See https://platform.openai.com/docs/api-reference/chat/streaming.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.api.dialect import failure
from penstock.api.http.chunks import IDS, TEXT, Around, Broken, TextChunk, around
from penstock.api.http.wire import UsageSoFar
from penstock.pipeline.hot_path import join, on_the_way
from penstock.pipeline.protocol import events, items
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.generations import Generation, IdList, WeightSpan
from penstock.pipeline.protocol.items import Logprob
from penstock.pipeline.protocol.response import Response, Usage
from penstock.services.usage import Taken, Tally

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter"]

BETWEEN = "\n\n"
"""The text between two messages, or two thoughts, of one answer: a chat has only one of each."""


class FunctionDelta(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A piece of a call of a function: its name comes once."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CustomDelta(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A piece of a call of a custom tool: its name comes once."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class CallDelta(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A piece of the call at ``index``."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class UrlCitation(msgspec.Struct, frozen=True):
    """The page that a part of the content cites."""

    start_index: int
    end_index: int
    url: str
    title: str


class AnnotationDelta(msgspec.Struct, frozen=True):
    """The annotation at ``index``, without which openai-python reads no list."""

    index: int
    url_citation: UrlCitation
    type: Literal["url_citation"] = "url_citation"


class Delta(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A piece of a message.  Thoughts have two names, since clients read either."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    tool_calls: tuple[CallDelta, ...] | UnsetType = UNSET
    annotations: tuple[AnnotationDelta, ...] | UnsetType = UNSET


class Logprobs(msgspec.Struct, frozen=True, gc=False):
    """The tokens of a piece of content."""

    content: tuple[Logprob, ...]
    refusal: None = None


class ChoiceDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of the choice at ``index``; ``stop_reason``, ``token_ids`` and ``weight_versions`` are vLLM's.

    The last piece has the ``generations`` if they are several, as their prompts and versions are then not those of one.
    """

    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    weight_versions: tuple[WeightSpan, ...] | UnsetType = UNSET
    generations: tuple[Generation, ...] | UnsetType = UNSET


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Details of the tokens of the prompt."""

    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Details of the generated tokens."""

    reasoning_tokens: int
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class ChatUsage(msgspec.Struct, frozen=True):
    """The tokens of a completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> ChatUsage:
        """Return the usage of a response as that of a completion."""
        return cls(
            usage.input_tokens,
            completion_tokens=usage.output_tokens,
            total_tokens=usage.total_tokens,
            prompt_tokens_details=PromptTokensDetails(usage.input_tokens_details.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(usage.output_tokens_details.reasoning_tokens),
        )


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One event of a stream.  The last one, with the ``usage``, has no choice; the first one may have the prompt."""

    id: str
    created: int
    model: str
    choices: tuple[ChoiceDelta, ...]
    usage: ChatUsage | UnsetType | None = UNSET
    prompt_token_ids: IdList | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: None = None


class DeltaChunk(TextChunk, frozen=True, gc=False):
    """A chunk whose delta is a text, without log probabilities: nearly every one."""

    is_thought: bool

    @property
    def delta(self) -> Delta:
        """The delta."""
        return _thought_delta(self.text) if self.is_thought else Delta(content=self.text)


ChatEvent: TypeAlias = DeltaChunk | Chunk | Broken


def _thought_delta(text: str) -> Delta:
    return Delta(reasoning=text, reasoning_content=text)


@on_the_way
@dataclass(frozen=True)
class Chunks:
    """The stage that rewrites the events of a response as chunks; it is made for each form of a stream.

    ``usage`` adds the last chunk, and ``lists_usage`` the null in all others that OpenAI has then, or the usage
    ``so_far``.  With a ``tally``, the chunks have the tokens that it keeps, and log probabilities of all of them.
    """

    usage: bool = True
    lists_usage: bool = False
    so_far: UsageSoFar | None = None
    tally: Tally | None = None

    async def __call__(self, source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ChatEvent, None]:
        """Rewrite the events of one response."""
        writer = ChunkWriter(self.usage, None if self.lists_usage else UNSET, so_far=self.so_far, tally=self.tally)
        join(rewrite=writer.feed)
        async for event in source:
            for chunk in writer.feed(event):
                yield chunk


class ChunkWriter:
    """State machine, one per response."""

    def __init__(
        self,
        adds_usage: bool,
        no_usage: UnsetType | None,
        so_far: UsageSoFar | None = None,
        tally: Tally | None = None,
    ) -> None:
        self._adds_usage = adds_usage
        self._no_usage = no_usage
        self._so_far = so_far
        self._tally = tally
        self._taken = None if tally is None else Taken(tally)
        self._id = self._model = ""
        self._created = 0
        self._gives_more = so_far is not None
        """True if the chunks have more than a text and the ids of its tokens."""
        self._around_text = self._around_thought = Around(())
        self._content = 0
        """Characters of the content so far."""
        self._message_began_at = 0
        """The position of the latest message in the content."""
        self._annotations = -1
        self._is_next_message = self._is_next_thought = False
        self._has_thought = False
        self._calls = -1

    def feed(self, event: ResponseEvent) -> Iterable[ChatEvent]:
        """Take an event, and return the chunks that follow from it."""
        kind = type(event)  # nearly every event is of the first two kinds, and isinstance takes longer
        if kind is events.OutputTextDelta:
            return (self._text(cast("events.OutputTextDelta", event)),)
        if kind is events.ReasoningTextDelta:
            return (self._thought(cast("events.ReasoningTextDelta", event).delta),)
        return self._rare(event)

    def _text(self, event: events.OutputTextDelta) -> DeltaChunk | Chunk:
        """Take a piece of a message."""
        delta = event.delta
        if self._is_next_message:
            self._is_next_message = False
            if self._content:
                delta = BETWEEN + delta
            self._message_began_at = self._content + len(delta) - len(event.delta)
        self._content += len(delta)
        if event.logprobs or self._gives_more:
            return self._chunk(Delta(content=delta), event.logprobs)
        return DeltaChunk(self._around_text, delta, self._taken.next() if self._taken else UNSET, False)

    def _rare(self, event: ResponseEvent) -> Iterator[ChatEvent]:
        match event:
            case events.ReasoningSummaryTextDelta(delta=delta):
                yield self._thought(delta)
            case events.RefusalDelta(delta=delta):
                yield self._chunk(Delta(refusal=delta))
            case events.OutputItemAdded(item=item):
                yield from self._begin(item)
            case events.FunctionCallArgumentsDelta(delta=delta):
                yield self._call(CallDelta(self._calls, function=FunctionDelta(arguments=delta)))
            case events.CustomToolCallInputDelta(delta=delta):
                yield self._call(CallDelta(self._calls, custom=CustomDelta(input=delta)))
            case events.OutputTextAnnotationAdded(annotation=annotation):
                yield from self._annotated(annotation)
            case events.ResponseCreated(response=response):
                yield self._first(response)
            case events.ResponseCompleted() | events.ResponseIncomplete() | events.ResponseFailed():
                yield from self._end(event.response)
            case _:
                pass

    def _first(self, response: Response) -> Chunk:
        self._id, self._created, self._model = completion_id(response.id), response.created_at, response.model
        first = self._chunk(Delta(role="assistant", content=""))
        self._gives_more |= self._taken is not None and self._taken.are_scored
        prompt = self._tally.prompt if self._tally else UNSET
        return replace(first, prompt_token_ids=prompt)

    def _thought(self, delta: str) -> DeltaChunk | Chunk:
        """Take a piece of a thought."""
        if self._is_next_thought and self._has_thought:
            delta = BETWEEN + delta
        self._is_next_thought, self._has_thought = False, True
        if self._gives_more:
            return self._chunk(_thought_delta(delta))
        return DeltaChunk(self._around_thought, delta, self._taken.next() if self._taken else UNSET, True)

    def _begin(self, item: items.OutputItem) -> Iterator[Chunk]:
        match item:
            case items.Message():
                self._is_next_message = True
                self._around_text = self._around(Delta(content=TEXT))
            case items.Reasoning():
                self._is_next_thought = True
                self._around_thought = self._around(_thought_delta(TEXT))
            case items.FunctionCall(call_id=call_id, name=name):
                self._calls += 1
                function = FunctionDelta(name, "")
                yield self._call(CallDelta(self._calls, call_id, "function", function))
            case items.CustomToolCall(call_id=call_id, name=name):
                self._calls += 1
                yield self._call(CallDelta(self._calls, call_id, "custom", custom=CustomDelta(name, "")))
            case _:
                pass  # work of this server, which a chat does not show

    def _annotated(self, annotation: Mapping[str, Any]) -> Iterator[Chunk]:
        if annotation.get("type") == "url_citation":
            start, end = (annotation[name] + self._message_began_at for name in ("start_index", "end_index"))
            citation = UrlCitation(start, end, annotation["url"], annotation["title"])
            self._annotations += 1
            yield self._chunk(Delta(annotations=(AnnotationDelta(self._annotations, citation),)))

    def _end(self, response: Response) -> Iterator[ChatEvent]:
        if response.status in ("failed", "cancelled"):
            yield Broken.by(failure(response))
            return
        chunk = self._chunk(Delta())
        ended: dict[str, Any] = {"finish_reason": finish_reason(response), "stop_reason": response.stop_reason}
        match response.generations or ():
            case [only]:
                ended["weight_versions"] = only.weight_versions
            case several:
                ended["generations"] = several or UNSET
        yield replace(chunk, choices=(replace(chunk.choices[0], **ended),))
        if self._adds_usage and response.usage:
            yield Chunk(self._id, self._created, self._model, (), usage=ChatUsage.of(response.usage))

    def _call(self, delta: CallDelta) -> Chunk:
        return self._chunk(Delta(tool_calls=(delta,)))

    def _chunk(self, delta: Delta, logprobs: Sequence[Logprob] = ()) -> Chunk:
        token_ids: Sequence[int] | UnsetType = UNSET
        if self._taken is not None:
            token_ids, logprobs = self._taken.next_scored()
        listed = Logprobs(tuple(logprobs)) if logprobs else None
        return self._of(ChoiceDelta(0, delta, listed, token_ids=token_ids))

    def _around(self, delta: Delta) -> Around:
        return around(self._of(ChoiceDelta(0, delta, token_ids=IDS if self._taken else UNSET)))

    def _of(self, choice: ChoiceDelta) -> Chunk:
        return Chunk(self._id, self._created, self._model, (choice,), usage=self._usage)

    @property
    def _usage(self) -> ChatUsage | UnsetType | None:
        """The usage in a chunk that is not the last one."""
        usage = self._so_far() if self._so_far else None
        return self._no_usage if usage is None else ChatUsage.of(usage)


def completion_id(response_id: str) -> str:
    """Return the id of the completion that a response is."""
    return f"chatcmpl-{response_id.removeprefix('resp_')}"


def finish_reason(response: Response) -> FinishReason:
    """Return why a response ended.

    A call that the model left open cannot be made, so the answer is as one that was cut.  As at OpenAI, a call of the
    tool that ``tool_choice`` names is no ``tool_calls``.
    """
    match response.incomplete_details:
        case None:
            calls = [item for item in response.output if isinstance(item, items.FunctionCall | items.CustomToolCall)]
            if any(call.status != "completed" for call in calls):
                return "length"
            choice = response.tool_choice
            is_named = isinstance(choice, dict) and choice.get("type") in ("function", "custom")
            return "tool_calls" if calls and not is_named else "stop"
        case details:
            return "content_filter" if details.reason == "content_filter" else "length"


async def choices(source: AsyncIterator[tuple[int, ChatEvent]]) -> AsyncGenerator[ChatEvent, None]:
    """Make one stream of several completions of one prompt: each is the choice at its position.

    The prompt counts once.
    """
    first: Chunk | None = None
    usages: dict[int, ChatUsage] = {}
    async for position, event in source:
        match event:
            case Broken():
                yield event
                return
            case DeltaChunk(delta=delta, token_ids=token_ids):
                if first is None:
                    raise RuntimeError("a text came before the chunk that begins its choice")
                choice = ChoiceDelta(position, delta, token_ids=token_ids)
                yield replace(first, choices=(choice,), prompt_token_ids=UNSET)
            case Chunk(usage=ChatUsage() as usage, choices=()):
                usages[position] = usage
            case Chunk():
                first = first or event
                own = tuple(replace(choice, index=position) for choice in event.choices)
                yield replace(event, id=first.id, created=first.created, choices=own)
    if first and usages:
        yield replace(
            first, choices=(), prompt_token_ids=UNSET, usage=_total([usage for _, usage in sorted(usages.items())])
        )


def _total(usages: Sequence[ChatUsage]) -> ChatUsage:
    first = usages[0]
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    reasoning_tokens = sum(usage.completion_tokens_details.reasoning_tokens for usage in usages)
    return ChatUsage(
        first.prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=first.prompt_tokens + completion_tokens,
        prompt_tokens_details=first.prompt_tokens_details,
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens),
    )
