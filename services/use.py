"""The use of one answer: its tokens and its tools, for the accounts of an operator."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, Protocol

import msgspec

from penstock.pipeline.frames import Origin
from penstock.pipeline.protocol.items import FileSearchCall, Item, WebSearchCall, images_of
from penstock.pipeline.protocol.response import Response


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """The use of one answer.  An account counts each ``id`` once."""

    id: str
    """The id of the response, of the line of a batch, or of the request that another server answered."""
    owner: str = ""
    key_name: str = ""
    team: str = ""
    model: str
    """The name of the model, as the engine serves it."""
    api: str
    """The name of the dialect, such as ``chat``, or of what was passed on, such as ``embeddings``."""
    at: float = msgspec.field(default_factory=time.time)
    """The time of its end, in seconds since 1970."""
    input_tokens: int = 0
    cached_tokens: int = 0
    """The part of the input that the engine had in its cache."""
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """The part of the output that was thoughts."""
    tool_seconds: float = 0.0
    """Seconds for which this server ran tools."""
    searches: int = 0
    """Searches of the web and of files."""
    images: int = 0
    """Images that came with the request."""
    is_line: bool = False
    """True for the line of a batch."""


SUMMED: Final = (
    *("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"),
    *("tool_seconds", "searches", "images"),
)
"""The fields of a use that are added up."""


class Names(Protocol):
    """The names of keys and of teams."""

    def title(self, owner: str) -> str:
        """Return the name of an owner's key."""
        ...

    def team(self, owner: str) -> str:
        """Return the team of an owner; empty if it has none."""
        ...


class EndedRun(Protocol):
    """The parts of a run that tell what its response has used."""

    response: Response
    input: tuple[Item, ...]
    origin: Origin

    @property
    def model(self) -> str:
        """The name of its model, as the engine serves it."""
        ...

    @property
    def tool_seconds(self) -> float:
        """Seconds for which this server ran tools for it."""
        ...


def use_of(run: EndedRun) -> Use:
    """Return what a response has used; that of the line of a batch has the id of the line."""
    response, origin, usage = run.response, run.origin, run.response.usage
    return Use(
        id=origin.line or response.id,
        owner=origin.owner,
        key_name=origin.key_name,
        team=origin.team,
        model=run.model,
        api=origin.api,
        input_tokens=usage.input_tokens if usage else 0,
        cached_tokens=usage.input_tokens_details.cached_tokens if usage else 0,
        output_tokens=usage.output_tokens if usage else 0,
        reasoning_tokens=usage.output_tokens_details.reasoning_tokens if usage else 0,
        tool_seconds=run.tool_seconds,
        searches=_searches(response.output),
        images=sum(len(images_of(item)) for item in run.input),
        is_line=bool(origin.line),
    )


def _searches(items: Iterable[Item]) -> int:
    """Return the number of searches among the items of an output; a page that is opened is none."""
    return sum(
        isinstance(item, FileSearchCall) or (isinstance(item, WebSearchCall) and _searches_web(item)) for item in items
    )


def _searches_web(call: WebSearchCall) -> bool:
    return isinstance(call.action, dict) and call.action.get("type") == "search"
