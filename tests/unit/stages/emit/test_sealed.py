"""Thoughts that leave sealed: their text and tokens, for their owner, in the done item and in the response."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.protocol.events import OutputItemAdded, OutputItemDone, ResponseEvent
from penstock.pipeline.protocol.items import Reasoning
from penstock.services.sealing import SealedItem, SealedReasoning, Sealer
from penstock.stages.emit.emit import Emit
from tests.support.event_streams import checked, final
from tests.support.frames import (
    SUMMARY_OPTIONS,
    Frames,
    client_events,
    code_call,
    finished,
    frame_source,
    mcp_call,
    message,
    reasoning,
    started,
)

INCLUDE = ("reasoning.encrypted_content",)
OWNER = "owner"
SEALER = Sealer()


def begun(include: tuple[str, ...] = (), **fields: Any) -> frames.GenerationStarted:
    first = started(**fields)
    origin = replace(first.facts.origin, owner=OWNER)
    return frames.with_facts(first, include=include, origin=origin)


def turn(first: frames.GenerationStarted, *items: Frames) -> Frames:
    return (first, *(frame for item in items for frame in item), finished())


THOUGHT: Frames = (*reasoning("I ", "see.")[:-1], frames.ItemClosed(complete=True, token_ids=(5, 200_000)))


async def emitted(sequence: Iterable[frames.ConversedFrame], sealer: Sealer | None = SEALER) -> list[ResponseEvent]:
    async with aclosing(Emit(sealer)(frame_source(tuple(sequence)))) as out:
        return checked(client_events([frame async for frame in out][1:]))


def thought_in(events: Iterable[ResponseEvent]) -> Reasoning:
    """The only thought of a response; it is the same in its last event and in the response."""
    listed = list(events)
    (done,) = [each.item for each in listed if isinstance(each, OutputItemDone) and isinstance(each.item, Reasoning)]
    assert done in final(listed).output
    return done


def opened(thought: Reasoning) -> SealedReasoning | None:
    assert isinstance(thought.encrypted_content, str)
    return SEALER.open(thought.encrypted_content, OWNER, SealedReasoning)


@pytest.mark.parametrize(
    ("include", "store", "is_sealed"),
    [((), True, False), (INCLUDE, True, True), ((), False, True), (INCLUDE, False, True)],
)
async def test_thought_is_sealed_if_it_is_included_or_not_stored(
    include: tuple[str, ...], store: bool, is_sealed: bool
) -> None:
    events = await emitted(turn(begun(include, store=store), THOUGHT, message("Hi")))
    assert (thought_in(events).encrypted_content is not UNSET) == is_sealed


async def test_sealed_thought_holds_its_text_and_tokens() -> None:
    events = await emitted(turn(begun(store=False), THOUGHT, message("Hi")))
    thought = thought_in(events)
    assert opened(thought) == SealedReasoning("I see.", (5, 200_000), writer="tiny-gpt-oss")
    assert thought.text == "I see."


async def test_thought_is_sealed_once_it_is_done() -> None:
    events = await emitted(turn(begun(store=False), THOUGHT))
    (added,) = [each.item for each in events if isinstance(each, OutputItemAdded)]
    assert isinstance(added, Reasoning)
    assert added.encrypted_content is UNSET


async def test_summarized_thought_is_sealed_too() -> None:
    thought = thought_in(await emitted(turn(begun(store=False, reasoning=SUMMARY_OPTIONS), THOUGHT)))
    assert thought.summary[0].text == "I see."
    assert opened(thought) == SealedReasoning("I see.", (5, 200_000), writer="tiny-gpt-oss")


async def test_thought_holds_what_items_before_it_do_not_show() -> None:
    call = code_call("1 + 1")
    written: Frames = (*message("So.", phase="commentary")[:-1], frames.ItemClosed(complete=True, token_ids=(7,)))
    shown = mcp_call("{}")
    events = await emitted(turn(begun(store=False), call, written, shown, THOUGHT, message("Hi")))
    ids = [each.item.id for each in events if isinstance(each, OutputItemDone)]
    sealed = opened(thought_in(events))
    assert sealed is not None
    assert sealed.before == (SealedItem(ids[0], (), "2\n"), SealedItem(ids[1], (7,)))


async def test_items_are_sealed_with_the_next_thought_alone() -> None:
    frames_of_two = turn(begun(store=False), code_call("1"), THOUGHT, THOUGHT)
    events = await emitted(frames_of_two)
    done = [each.item for each in events if isinstance(each, OutputItemDone) and isinstance(each.item, Reasoning)]
    both = [opened(thought) for thought in done]
    assert [len(each.before) for each in both if each] == [1, 0]


async def test_cut_thought_is_sealed_without_tokens() -> None:
    events = await emitted((begun(store=False), *reasoning("I see", complete=False), finished("length")))
    assert opened(thought_in(events)) == SealedReasoning("I see", writer="tiny-gpt-oss")


async def test_nothing_is_sealed_without_a_sealer() -> None:
    events = await emitted(turn(begun(INCLUDE, store=False), THOUGHT), sealer=None)
    assert thought_in(events).encrypted_content is UNSET
