"""Frames: what passes between the stages, one tagged union per junction.

    CreateResponse -> normalize -> Conversation -> render -> Prompt -> generate -> TokenFrame
                   -> parse -> ParsedFrame -> emit -> EmittedFrame -> persist -> ResponseEvent

The first frame of every junction carries all that the stages behind it need to know of the request, ids and times
included, so that one recorded junction is complete and replays to the same bytes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from pipeline.protocol.events import ResponseEvent
from pipeline.protocol.items import Item, Phase
from pipeline.protocol.response import Response


class _Frame(msgspec.Struct, frozen=True, gc=False, tag=True):
    pass


class Sampling(msgspec.Struct, frozen=True):
    """How the engine picks tokens; ``max_tokens`` None means up to the end of the context."""

    temperature: float
    top_p: float
    max_tokens: int | None = None


class Conversation(_Frame, frozen=True):
    """The request, understood: ``input`` came with it, ``history`` from the responses that it continues.

    ``response`` is the response object as it starts out.  ``date`` is the day of the request, as YYYY-MM-DD.
    """

    response: Response
    history: tuple[Item, ...]
    input: tuple[Item, ...]
    sampling: Sampling
    date: str


class Prompt(_Frame, frozen=True):
    """The conversation as the model reads it; generation stops at any of ``stop_token_ids``."""

    response: Response
    input: tuple[Item, ...]
    token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    sampling: Sampling


class GenerationStarted(_Frame, frozen=True):
    """The engine has accepted the prompt: from here on a failure is an event, no longer an HTTP status."""

    response: Response
    input: tuple[Item, ...]
    prompt_tokens: int


class TokenChunk(_Frame, frozen=True):
    """All tokens that were ready, in order; never empty.  A slow reader gets bigger chunks."""

    token_ids: tuple[int, ...]


FinishReason: TypeAlias = Literal["stop", "length"]


class GenerationFinished(_Frame, frozen=True):
    """The engine is done: it met a stop token, or the limit.  ``duration`` is in seconds since the start."""

    reason: FinishReason
    cached_tokens: int
    duration: float


class ReasoningOpened(_Frame, frozen=True):
    """The model begins to think."""


class MessageOpened(_Frame, frozen=True):
    """The model begins to speak to the user."""

    phase: Phase


class FunctionCallOpened(_Frame, frozen=True):
    """The model begins to write the arguments of a call."""

    name: str


class ItemDelta(_Frame, frozen=True):
    """More text of the open item; never empty."""

    text: str


Repair: TypeAlias = Literal[
    "missing start",
    "missing channel",
    "missing message",
    "missing end",
    "unknown channel",
    "foreign role",
    "undeclared tool",
    "stray marker",
    "unexpected header",
]


class ItemClosed(_Frame, frozen=True):
    """The open item ends: ``complete`` unless generation was cut inside it.

    ``repairs`` names what was wrong with the model's markup, for logs and metrics; the item is whole all the same.
    """

    complete: bool
    repairs: tuple[Repair, ...] = ()


class TurnFinished(_Frame, frozen=True):
    """The model's turn is over.  Tokens are counted as `Usage` counts them."""

    reason: FinishReason
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    duration: float


EngineFrame: TypeAlias = TokenChunk | GenerationFinished
"""``TokenChunk* . GenerationFinished``"""

TokenFrame: TypeAlias = GenerationStarted | TokenChunk | GenerationFinished
"""``GenerationStarted . TokenChunk* . GenerationFinished``"""

ItemFrame: TypeAlias = ReasoningOpened | MessageOpened | FunctionCallOpened | ItemDelta | ItemClosed
"""``(ReasoningOpened | MessageOpened | FunctionCallOpened) . ItemDelta* . ItemClosed``, once per item"""

ParsedFrame: TypeAlias = GenerationStarted | ItemFrame | TurnFinished
"""``GenerationStarted . ItemFrame* . TurnFinished``"""

EmittedFrame: TypeAlias = GenerationStarted | ResponseEvent
"""``GenerationStarted . ResponseEvent+``: what to keep of the request, then the stream itself"""
