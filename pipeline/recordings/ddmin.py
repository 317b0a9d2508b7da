"""Delta debugging: find the smallest case that still fails, by leaving out its parts (the algorithm ``ddmin``).

`minimal` finds a smallest selection of parts.  A cut divides a case into parts, and rebuilds it from some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import msgspec

from penstock.pipeline.frames import GenerationStarted, ResolvedRequest, with_facts
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.response import ECHOED
from penstock.pipeline.protocol.tools import Tool, Toolset
from penstock.pipeline.recordings.failing_case import CaseToken, CaseTurn, FailingCase

Part = TypeVar("Part")
Fails: TypeAlias = Callable[[FailingCase], bool]

Place: TypeAlias = tuple[int, int]
"""The index of a turn, and the index of a token in that turn."""

Parts: TypeAlias = tuple[Sequence[Any], Callable[[Sequence[Any]], FailingCase]]
"""The parts of a case, and a function that rebuilds the case from a selection of them."""
Cut: TypeAlias = Callable[[FailingCase], Parts]


def minimal(parts: Sequence[Part], suffices: Callable[[tuple[Part, ...]], bool], *, coarse: bool) -> tuple[Part, ...]:
    """Find a selection of ``parts`` that suffices and is minimal: no single part can be left out.

    All parts together must suffice.  With ``coarse``, try to leave out large groups of parts first; otherwise single
    parts only, which is faster if few can be left out.
    """
    kept = tuple(parts)
    if not kept or suffices(()):
        return ()
    size = (len(kept) + 1) // 2 if coarse else 1
    while True:
        before = kept
        end = len(kept)
        while end > 0:
            start = max(0, end - size)
            smaller = kept[:start] + kept[end:]
            if smaller and suffices(smaller):
                kept = smaller
            end = start
        if size > 1:
            size = min((size + 1) // 2, max(1, len(kept) // 2))
        elif kept == before:
            return kept


def shrink(
    case: FailingCase, fails: Fails, is_mark: Callable[[int], bool] = bool, letter: int | None = None
) -> FailingCase:
    """Apply all cuts to a failing case, again and again, until none makes it smaller.

    ``is_mark`` returns True for the special tokens that separate messages.  ``letter`` is a token of plain text that
    may replace any other token; without it, no token is replaced.
    """
    cuts: list[Cut] = [_turns, partial(_segments, is_mark=is_mark), _tokens, _chunk_borders, _request]
    if letter is not None:
        cuts.insert(3, partial(_other_tokens, letter=letter))
    coarse = True
    while True:
        before = case
        for cut in cuts:
            case = _reduced(case, cut, fails, coarse=coarse)
        if case == before:
            return case
        coarse = False


def _reduced(case: FailingCase, cut: Cut, fails: Fails, *, coarse: bool) -> FailingCase:
    parts, rebuilt = cut(case)
    return rebuilt(minimal(parts, lambda kept: fails(rebuilt(kept)), coarse=coarse)) if parts else case


# Cuts of turns and tokens


def _turns(case: FailingCase) -> Parts:
    """Cut turns, but never the last one: a response has at least one."""
    return case.turns[:-1], lambda kept: replace(case, turns=(*kept, case.turns[-1]))


def _segments(case: FailingCase, is_mark: Callable[[int], bool]) -> Parts:
    """Cut the runs of tokens that begin at a special token or a turn, such as a header, a text or an end."""
    segments: list[list[Place]] = []
    for place, token in _places(case):
        if not place[1] or is_mark(token.id):
            segments.append([])
        segments[-1].append(place)
    return _changes(case, segments, lambda token: None)


def _tokens(case: FailingCase) -> Parts:
    return _changes(case, [[place] for place, _ in _places(case)], lambda token: None)


def _other_tokens(case: FailingCase, letter: int) -> Parts:
    others = [[place] for place, token in _places(case) if token.id != letter]
    return _changes(case, others, lambda token: replace(token, id=letter))


def _chunk_borders(case: FailingCase) -> Parts:
    borders = [[place] for place, token in _places(case) if token.begins and place[1]]
    return _changes(case, borders, lambda token: replace(token, begins=False))


def _places(case: FailingCase) -> Iterator[tuple[Place, CaseToken]]:
    for number, turn in enumerate(case.turns):
        for at, token in enumerate(turn.tokens):
            yield (number, at), token


def _changes(
    case: FailingCase, groups: Sequence[Sequence[Place]], change: Callable[[CaseToken], CaseToken | None]
) -> Parts:
    """Apply ``change`` to the tokens of the groups that are not kept; it returns None to remove a token."""

    def rebuilt(kept: Sequence[Sequence[Place]]) -> FailingCase:
        changed = set(chain(*groups)).difference(chain(*kept))

        def turn_of(number: int, turn: CaseTurn) -> CaseTurn:
            tokens = (change(each) if (number, at) in changed else each for at, each in enumerate(turn.tokens))
            return replace(turn, tokens=tuple(token for token in tokens if token is not None))

        return replace(case, turns=tuple(turn_of(number, turn) for number, turn in enumerate(case.turns)))

    return groups, rebuilt


# The request

_PLAIN = {name: value for name, value in ECHOED.items() if name != "tools"}  # which are left out one by one


RequestPart: TypeAlias = tuple[str, int]
"""A field of a request, or "item" or "tool" with its index."""

_Frame = TypeVar("_Frame", ResolvedRequest, GenerationStarted)


def _request(case: FailingCase) -> Parts:
    frames: list[Any] = [case.conversation] if case.conversation else [turn.started for turn in case.turns]
    parts = list(dict.fromkeys(part for frame in frames for part in _request_parts(frame)))

    def rebuilt(kept: Sequence[RequestPart]) -> FailingCase:
        left_out = frozenset(parts).difference(kept)
        if not left_out:
            return case
        turns = tuple(replace(turn, started=_without(turn.started, left_out)) for turn in case.turns)
        conversation = case.conversation and _without(case.conversation, left_out)
        return replace(case, turns=turns, conversation=conversation)

    return parts, rebuilt


def _request_parts(frame: ResolvedRequest | GenerationStarted) -> Iterator[RequestPart]:
    response = frame.facts.response
    yield from (("tool", at) for at in range(len(response.tools)))
    groups = _groups(frame.facts.input)
    # the group of the last item stays: it is what the response answers
    yield from (("item", at) for at in dict.fromkeys(groups) if at != groups[-1])
    if isinstance(frame, ResolvedRequest) and frame.history:
        yield "history", 0
    yield from ((field, 0) for field, plain in _PLAIN.items() if getattr(response, field) != plain)


def _without(frame: _Frame, left_out: Collection[RequestPart]) -> _Frame:
    facts = frame.facts
    tools = tuple(tool for at, tool in enumerate(facts.response.tools) if ("tool", at) not in left_out)
    plain = {field: value for field, value in _PLAIN.items() if (field, 0) in left_out}
    gone = [tool for at, tool in enumerate(facts.response.tools) if ("tool", at) in left_out]
    groups = zip(_groups(facts.input), facts.input, strict=True)
    changed = with_facts(
        frame,
        response=msgspec.structs.replace(facts.response, tools=tools, **plain),
        input=tuple(item for at, item in groups if ("item", at) not in left_out),
        tools=_toolset(facts.tools, gone, is_free="tool_choice" in plain),
    )
    if ("history", 0) in left_out and isinstance(changed, ResolvedRequest):
        return msgspec.structs.replace(changed, history=(), tokens={}, results={})
    return changed


def _groups(items: Sequence[Item]) -> list[int]:
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
