"""The machine that finds smallest cases, and the parts that it may remove."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.frames import GenerationFinished, GenerationStarted, with_facts
from penstock.pipeline.recordings.ddmin import minimal, shrink
from penstock.pipeline.recordings.failing_case import CaseToken, CaseTurn, FailingCase, read_case, request_of
from penstock.pipeline.recordings.format import FILES, FORMAT, Header, UnreadableRecording, read_recording, write_frames
from tests.support.paths import HARMONY
from tests.support.stored_responses import facts

Tried = TypeVar("Tried")


def search(
    find: Callable[[Callable[[Tried], bool]], Tried], holds: Callable[[Tried], bool]
) -> tuple[Tried, list[Tried]]:
    """The result of a search, and all candidates that it tried."""
    tried: list[Tried] = []

    def test(candidate: Tried) -> bool:
        tried.append(candidate)
        return holds(candidate)

    return find(test), tried


# Selections

counts = st.integers(0, 40)


@given(counts, st.data(), st.booleans())
def test_exactly_the_needed_parts_are_found(count: int, data: st.DataObject, coarse: bool) -> None:
    needed = data.draw(st.sets(st.integers(0, count - 1)) if count else st.just(set()))
    found, tried = search(partial(minimal, range(count), coarse=coarse), lambda kept: needed <= set(kept))
    assert found == tuple(sorted(needed))
    assert len(tried) <= 2 + (2 * count if not needed else 3 * count + 2 * count * max(1, len(needed)))


@given(counts, st.integers(), st.booleans())
def test_no_single_part_can_be_left_out(count: int, salt: int, coarse: bool) -> None:
    def suffices(kept: tuple[int, ...]) -> bool:
        return len(kept) == count or hash((salt, kept)) % 3 == 0

    found, tried = search(partial(minimal, range(count), coarse=coarse), suffices)
    assert suffices(found)
    assert not any(suffices(found[:at] + found[at + 1 :]) for at in range(len(found)) if len(found) > 1)
    assert (found, tried) == search(partial(minimal, range(count), coarse=coarse), suffices)
    assert len(tried) <= 4 * (count + 1) ** 2


@given(counts, st.integers())
def test_selections_only_get_smaller(count: int, salt: int) -> None:
    sufficient: list[set[int]] = [set(range(count))]

    def suffices(kept: tuple[int, ...]) -> bool:
        assert set(kept) < sufficient[-1]
        if holds := hash((salt, kept)) % 3 == 0:
            sufficient.append(set(kept))
        return holds

    search(partial(minimal, range(count), coarse=True), suffices)


# Cases

tokens = st.builds(CaseToken, st.integers(1, 9), st.booleans())
turns = st.lists(tokens, max_size=12).map(
    lambda drawn: CaseTurn(GenerationStarted(facts(), 1), tuple(drawn), GenerationFinished("stop", 0, 0.0))
)
cases = st.lists(turns, min_size=1, max_size=3).map(lambda drawn: FailingCase(Header(FORMAT), tuple(drawn)))


def ids(case: FailingCase) -> list[int]:
    return [token.id for turn in case.turns for token in turn.tokens]


def has(case: FailingCase, wanted: list[int]) -> bool:
    """True if the case has the wanted tokens, in that order."""
    rest = iter(ids(case))
    return all(token in rest for token in wanted)


@given(cases, st.data())
def test_case_shrinks_to_needed_tokens(case: FailingCase, data: st.DataObject) -> None:
    wanted = [token for token in ids(case) if data.draw(st.booleans())]
    found, tried = search(
        partial(shrink, case, is_mark=lambda token: token < 3, letter=1), lambda tried: has(tried, wanted)
    )
    assert has(found, wanted)
    assert len(ids(found)) == len(wanted)
    assert all(len(turn.frames()) <= 3 for turn in found.turns)
    assert not any(has(smaller, wanted) for smaller in tried if len(ids(smaller)) < len(wanted))
    assert len(found.turns) <= max(1, len(case.turns))


def test_arbitrary_tokens_become_letters() -> None:
    turn = CaseTurn(
        GenerationStarted(facts(), 1),
        tuple(CaseToken(token, begins=True) for token in (5, 6, 7, 8, 9)),
        GenerationFinished("stop", 0, 0.0),
    )
    found, _ = search(
        partial(shrink, FailingCase(Header(FORMAT), (turn,)), letter=1),
        lambda tried: len(ids(tried)) >= 3 and 8 in ids(tried),
    )
    assert sorted(ids(found)) == [1, 1, 8]


@pytest.mark.parametrize("folder", sorted(HARMONY.glob("*/")), ids=lambda folder: folder.name)
def test_recording_is_read_and_written_unchanged(folder: Path, tmp_path: Path) -> None:
    for name, data in read_case(folder).files().items():
        (tmp_path / name).write_bytes(data)
        stage = next(stage for stage, (file, _) in FILES.items() if file == name)
        written, read = (read_recording(each / name, FILES[stage][1]) for each in (tmp_path, folder))
        assert (written.header, written.frames, written.end) == (read.header, read.frames, read.end)


def test_request_shrinks_too() -> None:
    case = read_case(HARMONY / "function_call_result")
    assert case.conversation
    assert len(case.conversation.facts.input) > 1
    found, _ = search(partial(shrink, case), lambda tried: True)
    assert found.conversation
    assert found.size == 0
    assert not found.conversation.facts.tools.tools
    assert len(found.conversation.facts.input) <= 2
    assert found.turns[0].started.facts.input == found.conversation.facts.input
    body: dict[str, Any] = request_of(found.conversation)
    assert set(body) <= {"model", "input", "temperature", "top_p"}


def test_needed_tool_stays() -> None:
    case = read_case(HARMONY / "calls_in_and_out_of_namespaces")

    def needs_weather(tried: FailingCase) -> bool:
        return any(tool.name == "get_weather" for tool in tried.turns[0].started.facts.tools.tools)

    found, _ = search(partial(shrink, case), needs_weather)
    assert [tool.name for tool in found.turns[0].started.facts.tools.tools] == ["get_weather"]
    assert [tool["name"] for tool in found.turns[0].started.facts.response.tools] == ["get_weather"]


def test_namesakes_in_and_out_of_a_namespace_go_separately() -> None:
    case = read_case(HARMONY / "calls_in_and_out_of_namespaces")
    inner = next(tool for tool in case.turns[0].started.facts.tools.tools if tool.namespace == "agents")
    outer = {"type": "function", "name": inner.name, "parameters": None, "strict": None, "description": None}
    assert case.conversation
    known = case.conversation.facts
    given = replace(known.response, tools=(*known.response.tools, outer))
    tools = replace(known.tools, tools=(*known.tools.tools, replace(inner, namespace=None)))
    both = dataclasses.replace(case, conversation=with_facts(case.conversation, response=given, tools=tools))

    def needs_inner(tried: FailingCase) -> bool:
        assert tried.conversation
        return any(
            (tool.namespace, tool.name) == ("agents", inner.name) for tool in tried.conversation.facts.tools.tools
        )

    found, _ = search(partial(shrink, both), needs_inner)
    assert found.conversation
    assert {tool.namespace for tool in found.conversation.facts.tools.tools} == {"agents"}
    assert [tool["type"] for tool in found.conversation.facts.response.tools] == ["namespace"]


def test_mcp_server_goes_with_its_tool() -> None:
    """Otherwise its tools would still be offered."""
    case = read_case(HARMONY / "served_mcp")
    assert case.conversation
    assert case.conversation.facts.tools.servers
    found, _ = search(partial(shrink, case), lambda tried: True)
    assert found.conversation
    assert (found.conversation.facts.tools.servers, found.conversation.facts.response.tools) == ((), ())


def test_recording_without_one_conversation_is_refused(tmp_path: Path) -> None:
    shutil.copy(HARMONY / "greeting" / "tokens.jsonl", tmp_path)
    write_frames(tmp_path / "conversation.jsonl", [])
    with pytest.raises(UnreadableRecording, match=r"conversation\.jsonl:2: 0 conversations"):
        read_case(tmp_path)
