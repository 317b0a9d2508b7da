"""The chunks of a stream of Completions, and the completion that they add up to.

See https://platform.openai.com/docs/api-reference/completions/object.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.api.dialect import failed, failure
from penstock.api.http.chunks import IDS, TEXT, Around, Broken, TextChunk, around
from penstock.api.http.wire import UsageSoFar
from penstock.pipeline.hot_path import join, on_the_way
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.generations import IdList, WeightSpan
from penstock.pipeline.protocol.items import Logprob
from penstock.pipeline.protocol.response import Response, Usage
from penstock.pipeline.yield_point import YieldPoint
from penstock.services.usage import Taken, Tally

FinishReason: TypeAlias = Literal["stop", "length", "content_filter"]


class Logprobs(msgspec.Struct, frozen=True, gc=False):
    """The tokens of a text, each with its log probability, its alternatives and itself, and its place in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The continuation at ``index``, or a piece of it; the fields from ``stop_reason`` on are vLLM's."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    prompt_token_ids: IdList | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    weight_versions: tuple[WeightSpan, ...] | UnsetType = UNSET


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Details of the tokens of the prompts."""

    cached_tokens: int


class CompletionUsage(msgspec.Struct, frozen=True):
    """The tokens of a completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> CompletionUsage:
        """Return the usage of a response as that of a completion."""
        cached = PromptTokensDetails(usage.input_tokens_details.cached_tokens)
        return cls(usage.input_tokens, usage.output_tokens, usage.total_tokens, cached)


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One event of a stream, or the whole of it.  The last event, with the ``usage``, has no choice."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: CompletionUsage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: None = None


class ChoiceChunk(TextChunk, frozen=True, gc=False):
    """A chunk that has the text of a choice, and nothing else of its own: nearly every one."""

    first: Chunk
    """A chunk of the same stream, without a choice."""
    index: int = 0


CompletionEvent: TypeAlias = ChoiceChunk | Chunk | Broken


def _around(chunk: Chunk, index: int, *, has_ids: bool) -> Around:
    """Return what stands around a text of the choice at ``index``, and around its ids, in the stream of a chunk."""
    return around(replace(chunk, choices=(Choice(index, TEXT, token_ids=IDS if has_ids else UNSET),)))


@on_the_way
@dataclass(frozen=True)
class Chunks:
    """The stage that rewrites the events of a response as chunks; it is made for each form of a stream.

    ``usage`` adds the last chunk, and ``lists_usage`` the null in all others that OpenAI has then, or the usage
    ``so_far``.  With ``echoes``, the first token follows nothing, and has no log probability.  With a ``tally``, the
    chunks have the tokens that it keeps.
    """

    usage: bool = True
    lists_usage: bool = False
    echoes: bool = False
    so_far: UsageSoFar | None = None
    tally: Tally | None = None

    async def __call__(self, source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[CompletionEvent, None]:
        """Rewrite the events of one response."""
        no_usage, spelling = None if self.lists_usage else UNSET, Spelling(is_first_given=self.echoes)
        writer = ChunkWriter(self.usage, no_usage, spelling, so_far=self.so_far, tally=self.tally)
        join(rewrite=writer.feed)
        rest = YieldPoint()
        async for event in source:
            for chunk in writer.feed(event):
                yield chunk
            if isinstance(event, events.OutputTextDelta) and event.logprobs:
                await rest()  # those of a long prompt come at once


class ChunkWriter:
    """State machine, one per response."""

    def __init__(
        self,
        adds_usage: bool,
        no_usage: UnsetType | None,
        spelling: Spelling,
        so_far: UsageSoFar | None = None,
        tally: Tally | None = None,
    ) -> None:
        self._adds_usage = adds_usage
        self._no_usage = no_usage
        self._so_far = so_far
        self._tally = tally
        self._taken: Taken | None = None
        """The tokens that chunks have had so far; None before the first one, which has the prompt."""
        self._spelling = spelling
        self._first = Chunk("", 0, "", (), usage=no_usage)
        self._around = Around(())

    def feed(self, event: ResponseEvent) -> Iterable[CompletionEvent]:
        """Take an event, and return the chunks that follow from it."""
        if type(event) is events.OutputTextDelta:  # nearly every event
            return (self._text(event),)
        return self._rare(event)

    def _text(self, event: events.OutputTextDelta) -> ChoiceChunk | Chunk:
        """Take a piece of the text."""
        if self._taken is not None and not (event.logprobs or self._so_far):
            return ChoiceChunk(self._around, event.delta, self._taken.next(), self._first)
        if event.logprobs or self._so_far or self._tally:
            logprobs = self._spelling.of(event.logprobs) if event.logprobs else None
            return self._with(Choice(0, event.delta, logprobs))
        return ChoiceChunk(self._around, event.delta, UNSET, self._first)

    def _rare(self, event: ResponseEvent) -> Iterator[CompletionEvent]:
        match event:
            case events.ResponseCreated(response=response):
                created, model = response.created_at, response.model
                self._first = Chunk(completion_id(response.id), created, model, (), usage=self._no_usage)
                self._around = _around(self._first, 0, has_ids=self._tally is not None)
            case events.ResponseCompleted() | events.ResponseIncomplete() | events.ResponseFailed():
                yield from self._end(event.response)
            case _:
                pass

    def _end(self, response: Response) -> Iterator[CompletionEvent]:
        if response.status in ("failed", "cancelled"):
            yield Broken.by(failure(response))
            return
        ended = Choice(0, "", finish_reason=finish_reason(response), stop_reason=response.stop_reason)
        if response.generations:
            ended = replace(ended, weight_versions=response.generations[0].weight_versions)
        yield self._with(ended)
        if self._adds_usage and response.usage:
            yield replace(self._first, usage=CompletionUsage.of(response.usage))

    def _with(self, choice: Choice) -> Chunk:
        usage = self._so_far() if self._so_far else None
        return replace(
            self._first,
            choices=(self._with_tokens(choice),),
            usage=self._first.usage if usage is None else CompletionUsage.of(usage),
        )

    def _with_tokens(self, choice: Choice) -> Choice:
        """Return a piece of the choice with the tokens that no chunk has had, if they are kept."""
        if self._tally is None:
            return choice
        prompt = self._tally.prompt if self._taken is None else UNSET
        self._taken = self._taken or Taken(self._tally)
        return replace(choice, prompt_token_ids=prompt, token_ids=self._taken.next())


class Spelling:
    """State machine: the places of tokens in a text, by the bytes that they spell there."""

    def __init__(self, *, is_first_given: bool) -> None:
        self._has_no_logprob = is_first_given
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def of(self, logprobs: Iterable[Logprob]) -> Logprobs:
        """Take the next tokens."""
        shown = Logprobs([], [], [], [])
        for token in logprobs:
            shown.tokens.append(token.token)
            shown.text_offset.append(self._length)
            self._length += len(self._decoder.decode(bytes(token.bytes)))
            if self._has_no_logprob:
                self._has_no_logprob = False
                shown.token_logprobs.append(None)
                shown.top_logprobs.append(None)
                continue
            shown.token_logprobs.append(token.logprob)
            top = {token.token: token.logprob}
            for other in token.top_logprobs:
                top[other.token] = other.logprob
            shown.top_logprobs.append(top)
        return shown


def completion_id(response_id: str) -> str:
    """Return the id of the completion that a response is."""
    return f"cmpl-{response_id.removeprefix('resp_')}"


def finish_reason(response: Response) -> FinishReason:
    """Return why a response ended."""
    match response.incomplete_details:
        case None:
            return "stop"
        case details:
            return "content_filter" if details.reason == "content_filter" else "length"


async def choices(
    source: AsyncIterator[tuple[int, CompletionEvent]], of_each: int
) -> AsyncGenerator[CompletionEvent, None]:
    """Make one stream of several completions: each is the choice at its position.

    A prompt counts once for all of its choices, of which there are ``of_each``.
    """
    first: Chunk | None = None
    arounds: dict[int, Around] = {}
    usages: dict[int, CompletionUsage] = {}
    async for position, event in source:
        match event:
            case Broken():
                yield event
                return
            case ChoiceChunk(text=text, token_ids=token_ids):
                first = first or event.first
                if position not in arounds:
                    arounds[position] = _around(first, position, has_ids=token_ids is not UNSET)
                yield ChoiceChunk(arounds[position], text, token_ids, first, index=position)
            case Chunk(usage=CompletionUsage() as usage, choices=()):
                usages[position] = usage
            case Chunk():
                first = first or replace(event, choices=())
                placed = tuple(replace(choice, index=position) for choice in event.choices)
                yield replace(first, choices=placed, usage=event.usage)
    if first and usages:
        yield replace(first, usage=_total([usage for _, usage in sorted(usages.items())], of_each))


def _total(usages: Sequence[CompletionUsage], of_each: int) -> CompletionUsage:
    prompts = usages[::of_each]
    of_prompts, of_choices = sum(each.prompt_tokens for each in prompts), sum(each.completion_tokens for each in usages)
    cached = sum(each.prompt_tokens_details.cached_tokens for each in prompts)
    return CompletionUsage(of_prompts, of_choices, of_prompts + of_choices, PromptTokensDetails(cached))


@dataclass
class _Growing:
    """A choice, growing by its pieces."""

    texts: list[str] = field(default_factory=list)
    logprobs: Logprobs | None = None
    last: Choice | None = None
    prompt: IdList | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET

    def add(self, choice: Choice) -> None:
        self.texts.append(choice.text)
        self.last = choice
        self.prompt = self.prompt or choice.prompt_token_ids
        self.take(choice.token_ids)
        if choice.logprobs is None:
            return
        if self.logprobs is None:
            self.logprobs = Logprobs([], [], [], [])
        for name in Logprobs.__struct_fields__:
            getattr(self.logprobs, name).extend(getattr(choice.logprobs, name))

    def take(self, token_ids: Sequence[int] | UnsetType) -> None:
        if token_ids is not UNSET:
            self.token_ids = self.token_ids or []
            self.token_ids += token_ids

    def whole(self, index: int) -> Choice:
        ended = self.last or Choice(index, "")
        return Choice(
            index,
            "".join(self.texts),
            self.logprobs,
            finish_reason=ended.finish_reason,
            stop_reason=ended.stop_reason,
            prompt_token_ids=self.prompt,
            token_ids=self.token_ids,
            weight_versions=ended.weight_versions,
        )


async def completion(source: AsyncIterator[CompletionEvent]) -> Chunk:
    """Return the completion that chunks add up to; raise the error of one that failed."""
    growing: dict[int, _Growing] = {}
    usage: CompletionUsage | UnsetType = UNSET
    chunk: Chunk | None = None
    async for event in source:
        match event:
            case Broken(error=error):
                raise failed(error.code, error.message)
            case ChoiceChunk(text=text, index=index, token_ids=token_ids):
                one = growing.setdefault(index, _Growing())
                one.texts.append(text)
                one.take(token_ids)
            case Chunk():
                chunk, usage = event, event.usage or usage
                for choice in event.choices:
                    growing.setdefault(choice.index, _Growing()).add(choice)
    if chunk is None:
        raise RuntimeError("a response ended without an event")
    return replace(chunk, choices=tuple(each.whole(at) for at, each in sorted(growing.items())), usage=usage)
