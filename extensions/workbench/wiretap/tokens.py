"""The tokens of recorded answers, where a server sends their ids.

vLLM sends ``prompt_token_ids`` and ``token_ids`` in chats and completions that have ``return_token_ids``.  With
``return_tokens_as_token_ids``, the names of tokens in the log probabilities are their ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.pipeline.frames import FinishReason, GenerationFinished, TokenChunk, TokenIds, TokenLogprob
from penstock.pipeline.recordings.wire import WireBody, WireEvent, WireFrame
from penstock.services.engines.http_endpoints import FLOOR

WITH_TOKENS = frozenset({"chat", "completions"})
"""The dialects in which vLLM 0.32 sends the ids of tokens; it has no parameter for them in Responses and Messages."""

NAMED_BY_ID = "token_id:"
"""The beginning of the name of a token that is its id."""

NONE_CAME = "the server did not send them"

_TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

_Ids: TypeAlias = tuple[_TokenId, ...]


class _Alternative(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float = FLOOR


class _Chosen(_Alternative, frozen=True, gc=False):
    top_logprobs: tuple[_Alternative, ...] | None = None


class _Logprobs(msgspec.Struct, frozen=True, gc=False):
    """The log probabilities of a chat (``content``), or of a completion."""

    content: tuple[_Chosen, ...] | None = None
    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None

    def __iter__(self) -> Iterator[tuple[str, float, Mapping[str, float]]]:
        """Yield the name of each token, its log probability, and those of the likeliest tokens in its place."""
        for chosen in self.content or ():
            others = {other.token: other.logprob for other in chosen.top_logprobs or ()}
            # vLLM lists the chosen token first: alone, it says nothing about the likeliest one
            yield chosen.token, chosen.logprob, others if others.keys() != {chosen.token} else {}
        tops = self.top_logprobs or (None,) * len(self.tokens)
        for token, logprob, top in zip(self.tokens, self.token_logprobs, tops, strict=False):
            yield token, FLOOR if logprob is None else logprob, top or {}


class _Choice(msgspec.Struct, frozen=True, gc=False):
    index: int = 0
    token_ids: _Ids | None = None
    prompt_token_ids: _Ids | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    text: str | None = None
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None

    @property
    def has_output(self) -> bool:
        """True if something of the model came, or the end."""
        said = self.delta or self.message or {}
        return bool(self.text or self.finish_reason or any(said[name] for name in said if name != "role"))


class _Details(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct, frozen=True, gc=False):
    choices: tuple[_Choice, ...] | None = None
    prompt_token_ids: _Ids | None = None
    usage: _Usage | None = None
    error: Any = None


class Tokens:
    """The tokens of the first choice of an answer, read from its events or its body."""

    def __init__(self) -> None:
        self.prompt: TokenIds = ()
        """The tokens of the prompt; empty if the server does not send them."""
        self.began = 0.0
        """The time of the first event."""
        self.error = ""
        """The error by which the server ended its answer."""
        self.finish_reason = ""
        self._chunks: list[tuple[float, TokenChunk]] = []
        self._count = 0
        self._usage = _Usage()
        self._problem = ""
        self._has_logprobs = True
        self._has_more_choices = False

    def read(self, at: float, frame: WireFrame) -> None:
        """Read a frame that came at a time."""
        if isinstance(frame, (WireEvent, WireBody)) and isinstance(frame.data, dict) and not self._problem:
            self.began = self.began or at
            try:
                self._read(at, msgspec.convert(frame.data, _Event))
            except msgspec.ValidationError:
                self._lose("an event has an unexpected form")

    @property
    def problem(self) -> str:
        """Why the tokens are not known; empty if they are."""
        if self._problem or not self._count:
            return self._problem or NONE_CAME
        counted = self._usage.completion_tokens
        if self.finish_reason and not self._has_more_choices and counted not in (None, self._count):
            return f"the server counts {counted}, and sent {self._count}"
        return ""

    @property
    def are_partly_known(self) -> bool:
        """True if some ids came."""
        return bool(self._count or self.prompt)

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in the prompt, as far as it is known."""
        return len(self.prompt) or self._usage.prompt_tokens or 0

    @property
    def chunks(self) -> Iterator[tuple[float, TokenChunk]]:
        """The tokens with their times; with log probabilities if there is one for each token."""
        for at, chunk in self._chunks:
            yield at, chunk if self._has_logprobs else replace(chunk, logprobs=())

    def finished(self, at: float) -> GenerationFinished | None:
        """Return the end of the turn at a time; None if the server sent none."""
        if not self.finish_reason:
            return None
        details = self._usage.prompt_tokens_details
        reason: FinishReason = "length" if self.finish_reason == "length" else "stop"
        return GenerationFinished(reason, (details and details.cached_tokens) or 0, duration=at)

    def _read(self, at: float, event: _Event) -> None:
        self._usage = event.usage or self._usage
        if event.error is not None and event.choices is None:
            message = event.error.get("message") if isinstance(event.error, dict) else event.error
            self.error = str(message)
        for choice in event.choices or ():
            if choice.index == 0:
                self.prompt = self.prompt or event.prompt_token_ids or choice.prompt_token_ids or ()
                self.finish_reason = choice.finish_reason or self.finish_reason
                self._take(at, choice)
            else:
                self._has_more_choices = True

    def _take(self, at: float, choice: _Choice) -> None:
        probable = list(choice.logprobs or ())
        ids = choice.token_ids
        if ids is None and choice.logprobs is not None:
            ids = _ids([name for name, _, _ in probable])
        if not ids:
            if ids is None and choice.has_output:
                self._lose("the ids of some are missing" if self._count else NONE_CAME)
            return
        logprobs = tuple(_logprob(value, top) for _, value, top in probable)
        self._has_logprobs &= len(logprobs) == len(ids)
        self._count += len(ids)
        self._chunks.append((at, TokenChunk(ids, logprobs if self._has_logprobs else ())))

    def _lose(self, problem: str) -> None:
        self._problem = problem
        self._chunks.clear()


def _ids(names: Sequence[str]) -> TokenIds | None:
    """Return the ids in the names of tokens; None if one is a text."""
    digits = [name.removeprefix(NAMED_BY_ID) for name in names if name.startswith(NAMED_BY_ID)]
    known = [each for each in digits if each.isascii() and each.isdigit() and len(each) <= 10]
    return tuple(map(int, known)) if len(known) == len(names) else None


def _logprob(value: float, top: Mapping[str, float]) -> TokenLogprob:
    """Return the log probability of a token, with the likeliest tokens in its place if their ids are known."""
    pairs = zip(_ids(list(top)) or (), top.values(), strict=False)
    possible = [(token, other) for token, other in pairs if other > FLOOR]
    return TokenLogprob(value, tuple(sorted(possible, key=itemgetter(1), reverse=True)))
