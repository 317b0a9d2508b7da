"""Shrinking: find the smallest case that still fails, by leaving out its parts (delta debugging).

`minimal` finds a smallest selection of parts.  A cut divides a case into parts, and rebuilds it from some of them.  The
search is a generator: it yields candidates, and the caller sends back True if the candidate still fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import msgspec

from penstock.pipeline.frames import GenerationStarted, ResolvedRequest
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.tools import Tool, Toolset
from penstock.pipeline.recordings.case import Case, Token, Turn

Part = TypeVar("Part")
Asking: TypeAlias = Generator[Case, bool, Case]
"""Yields candidates, receives True for each that still fails, and returns the smallest failing case."""

Cut: TypeAlias = Callable[[Case], tuple[list[Any], Callable[[Collection[Any]], Case]]]
"""Returns the parts of a case, and a function that rebuilds the case from a selection of them."""


def minimal(parts: Sequence[Part], *, coarse: bool = True) -> Generator[tuple[Part, ...], bool, tuple[Part, ...]]:
    """Find a selection of ``parts`` that suffices and is minimal: no single part can be left out.

    Yield selections, and receive True for each that suffices.  All parts together must suffice.  With ``coarse``, try
    to leave out large groups of parts first; otherwise single parts only, which is faster if few can be left out.
    """
    kept = tuple(parts)
    if not kept or (yield ()):
        return ()
    size = (len(kept) + 1) // 2 if coarse else 1
    while True:
        before = kept
        end = len(kept)
        while end > 0:
            start = max(0, end - size)
            smaller = kept[:start] + kept[end:]
            if smaller and (yield smaller):
                kept = smaller
            end = start
        if size > 1:
            size = min((size + 1) // 2, max(1, len(kept) // 2))
        elif kept == before:
            return kept


def shrink(case: Case, is_mark: Callable[[int], bool] = bool, letter: int | None = None) -> Asking:
    """Apply all cuts to a case, again and again, until none makes it smaller.

    ``is_mark`` returns True for the special tokens that separate messages.  ``letter`` is a token of plain text that
    may replace any other token; without it, no token is replaced.
    """
    cuts: tuple[Cut, ...] = (
        _turns,
        lambda case: _segments(case, is_mark),
        _tokens,
        _others(letter),
        _borders,
        _request,
    )
    coarse = True
    while True:
        before = case
        for cut in cuts:
            case = yield from _reduced(case, cut, coarse=coarse)
        if case == before:
            return case
        coarse = False


def _reduced(case: Case, cut: Cut, *, coarse: bool) -> Asking:
    parts, keeping = cut(case)
    asking = minimal(parts, coarse=coarse)
    try:
        selection = next(asking)
        while True:
            selection = asking.send((yield keeping(selection)))
    except StopIteration as stop:
        return keeping(stop.value) if parts else case


# Cuts: each returns the parts of a case, and a function that rebuilds the case from a selection of them

Place: TypeAlias = tuple[int, int]
"""The index of a turn, and the index of a token in that turn."""


def _turns(case: Case) -> tuple[list[int], Callable[[Collection[int]], Case]]:
    """Cut turns, but never the last one: a response has at least one."""
    last = len(case.turns) - 1

    def keeping(kept: Collection[int]) -> Case:
        return replace(case, turns=tuple(turn for at, turn in enumerate(case.turns) if at in kept or at == last))

    return list(range(last)), keeping


def _segments(
    case: Case, is_mark: Callable[[int], bool]
) -> tuple[list[tuple[Place, ...]], Callable[[Collection[tuple[Place, ...]]], Case]]:
    """Cut the runs of tokens that begin at a special token or a turn, such as a header, a text or an end."""
    segments: list[list[Place]] = []
    for place, token in _places(case):
        if not place[1] or is_mark(token.id):
            segments.append([])
        segments[-1].append(place)

    def keeping(kept: Collection[tuple[Place, ...]]) -> Case:
        return _mapped(case, {place for segment in kept for place in segment}, lambda token: None)

    return [tuple(segment) for segment in segments], keeping


def _tokens(case: Case) -> tuple[list[Place], Callable[[Collection[Place]], Case]]:
    return [place for place, _ in _places(case)], lambda kept: _mapped(case, kept, lambda token: None)


def _others(letter: int | None) -> Cut:
    """Return a cut that replaces tokens by ``letter``; its parts are the tokens that are still different."""

    def others(case: Case) -> tuple[list[Place], Callable[[Collection[Place]], Case]]:
        assert letter is not None
        plain = letter
        places = {place for place, token in _places(case) if token.id != plain}
        simple = {place for place, _ in _places(case)} - places
        return sorted(places), lambda kept: _mapped(case, simple.union(kept), lambda token: replace(token, id=plain))

    return others if letter is not None else lambda case: ([], lambda kept: case)


def _borders(case: Case) -> tuple[list[Place], Callable[[Collection[Place]], Case]]:
    """Cut the borders between the chunks of a turn, which joins the chunks."""
    borders = {place for place, token in _places(case) if token.begins and place[1]}
    rest = {place for place, _ in _places(case)} - borders
    return sorted(borders), lambda kept: _mapped(case, rest.union(kept), lambda token: replace(token, begins=False))


def _places(case: Case) -> Iterator[tuple[Place, Token]]:
    for number, turn in enumerate(case.turns):
        for at, token in enumerate(turn.tokens):
            yield (number, at), token


def _mapped(case: Case, kept: Collection[Place], change: Callable[[Token], Token | None]) -> Case:
    """Apply ``change`` to all tokens that are not kept; it returns None to remove a token."""
    kept = frozenset(kept)

    def changed(number: int, turn: Turn) -> Turn:
        tokens = (token if (number, at) in kept else change(token) for at, token in enumerate(turn.tokens))
        return replace(turn, tokens=tuple(token for token in tokens if token is not None))

    return replace(case, turns=tuple(changed(number, turn) for number, turn in enumerate(case.turns)))


# The request

_PLAIN: dict[str, Any] = {
    "instructions": None,
    "metadata": {},
    "tool_choice": "auto",
    "max_output_tokens": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "user": msgspec.UNSET,
}
"""The response fields that a request may omit, with their values in that case."""


@dataclass(frozen=True)
class Said:
    """A part of a request: a field, or the item or tool at an index."""

    what: str
    at: int = 0


_Asked = TypeVar("_Asked", ResolvedRequest, GenerationStarted)


def _request(case: Case) -> tuple[list[Said], Callable[[Collection[Said]], Case]]:
    frames: list[Any] = [case.conversation] if case.conversation else [turn.started for turn in case.turns]
    parts = list(dict.fromkeys(part for frame in frames for part in _said(frame)))

    def keeping(kept: Collection[Said]) -> Case:
        left_out = frozenset(parts).difference(kept)
        if not left_out:
            return case
        turns = tuple(replace(turn, started=_without(turn.started, left_out)) for turn in case.turns)
        conversation = case.conversation and _without(case.conversation, left_out)
        return replace(case, turns=turns, conversation=conversation)

    return parts, keeping


def _said(frame: ResolvedRequest | GenerationStarted) -> Iterator[Said]:
    response = frame.response
    yield from (Said("tool", at) for at in range(len(response.tools)))
    groups = _groups(frame.input)
    # the group of the last item stays: it is what the response answers
    yield from (Said("item", at) for at in dict.fromkeys(groups) if at != groups[-1])
    if isinstance(frame, ResolvedRequest) and frame.history:
        yield Said("history")
    yield from (Said(field) for field, plain in _PLAIN.items() if getattr(response, field) != plain)


def _without(frame: _Asked, left_out: Collection[Said]) -> _Asked:
    response = frame.response
    tools = tuple(tool for at, tool in enumerate(response.tools) if Said("tool", at) not in left_out)
    plain = {field: value for field, value in _PLAIN.items() if Said(field) in left_out}
    gone = [tool for at, tool in enumerate(response.tools) if Said("tool", at) in left_out]
    changes: dict[str, Any] = {
        "response": msgspec.structs.replace(response, tools=tools, **plain),
        "input": tuple(
            item for at, item in zip(_groups(frame.input), frame.input, strict=True) if Said("item", at) not in left_out
        ),
        "tools": _toolset(frame.tools, gone, is_free="tool_choice" in plain),
    }
    if Said("history") in left_out and isinstance(frame, ResolvedRequest):
        changes |= {"history": (), "tokens": {}, "results": {}}
    return msgspec.structs.replace(frame, **changes)


def _groups(items: Sequence[Item]) -> list[int]:
    """Return the index of the group of each item; a call and its output belong together."""
    first: dict[str, int] = {}
    return [first.setdefault(getattr(item, "call_id", "") or f"{at}", at) for at, item in enumerate(items)]


def _toolset(tools: Toolset, gone: Sequence[dict[str, Any]], *, is_free: bool) -> Toolset:
    """Remove the tools that are ``gone``; with ``is_free``, also the restrictions on the choice of a tool."""
    labels = {tool.get("server_label") for tool in gone}
    changes: dict[str, Any] = {"choice": "auto", "allowed": None} if is_free else {}
    return msgspec.structs.replace(
        tools,
        tools=tuple(tool for tool in tools.tools if not any(_came_with(tool, each) for each in gone)),
        servers=tuple(server for server in tools.servers if server.label not in labels),
        **changes,
    )


def _came_with(tool: Tool, entry: dict[str, Any]) -> bool:
    """True if a tool comes from ``entry``, an entry of the request's ``tools``, which may declare several."""
    name, namespace = entry.get("name"), getattr(tool, "namespace", None)
    if entry["type"] in ("function", "custom"):
        return namespace is None and getattr(tool, "name", None) == name
    return namespace is not None and namespace in (name, entry.get("server_label"))
