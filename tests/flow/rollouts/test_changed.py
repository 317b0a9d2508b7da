"""Texts that a stage of the operator's has removed: rollouts have none of their tokens, wherever the stage stands."""

from __future__ import annotations

import re
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.extensions.rollouts.lines import Unusable
from penstock.extensions.rollouts.reading import RecordedTurn, read_turns
from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import (
    ConversedFrame,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ReasoningOpened,
    ResolvedRequest,
    TokenChunk,
    TokenFrame,
    TurnFinished,
)
from penstock.pipeline.plugins import guarded
from penstock.pipeline.protocol.events import OutputTextDelta, ResponseEvent
from penstock.pipeline.recordings.recorder import Recorder, own_stages
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.optional.rewrite import Rewrite
from tests.support.chat_templates import model_with_images
from tests.support.event_streams import harmony_pipeline
from tests.support.server import CALL, HELLO, WEATHER, only_recording, running_server, script

CARD = re.compile(r"\d+")

THOUGHT = "<|channel|>analysis<|message|>Think.<|end|>"
NEXT = "<|start|>assistant"
ANSWER = "<|channel|>final<|message|>The card is 4711, yes.<|return|>"
SECRET_THOUGHT = "<|channel|>analysis<|message|>It is 4711.<|end|>"
PLAIN_ANSWER = "<|channel|>final<|message|>Hello.<|return|>"
SECRET_CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"4711"}<|call|>'


def masked(text: str) -> str:
    return CARD.sub("#", text)


async def mask_parsed(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    """Mask numbers, and keep the tokens of the items, which would bring them back."""
    async for frame in source:
        yield ItemDelta(masked(frame.text)) if isinstance(frame, ItemDelta) else frame


async def mask_conversed(source: AsyncIterator[ConversedFrame]) -> AsyncGenerator[ConversedFrame, None]:
    async for frame in source:
        yield ItemDelta(masked(frame.text)) if isinstance(frame, ItemDelta) else frame


async def mask_tokens(source: AsyncIterator[TokenFrame]) -> AsyncGenerator[TokenFrame, None]:
    """Drop the tokens of numbers."""
    async for frame in source:
        if not isinstance(frame, TokenChunk):
            yield frame
        elif kept := tuple(token for token in frame.token_ids if not CARD.search(load_encoding().decode([token]))):
            yield replace(frame, token_ids=kept)


async def mask_events(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
    async for event in source:
        yield replace(event, delta=masked(event.delta)) if isinstance(event, OutputTextDelta) else event


async def cut_parsed(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    """End a turn before the first number, as a guard does."""
    async for frame in source:
        if isinstance(frame, ItemDelta) and CARD.search(frame.text):
            yield ItemClosed(complete=False)
            yield TurnFinished("content_filter", cached_tokens=0, output_tokens=1, reasoning_tokens=0, duration=0.0)
            return
        yield frame


async def drop_thoughts(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    is_open = False
    async for frame in source:
        if isinstance(frame, ReasoningOpened):
            is_open = True
        elif isinstance(frame, ItemClosed) and is_open:
            is_open = False
        elif not is_open:
            yield frame


async def add_warning(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        if isinstance(frame, MessageOpened):
            yield MessageOpened("commentary")
            yield ItemDelta("Beware.")
            yield ItemClosed(complete=True)
        yield frame


async def pass_on(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield frame


async def count(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
    async for event in source:
        yield event


async def mask_prompt(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
    async for request in source:
        yield request


async def count_tokens(source: AsyncIterator[TokenFrame]) -> AsyncGenerator[TokenFrame, None]:
    async for frame in source:
        yield frame


@dataclass(frozen=True)
class Own:
    """A stage of the operator's, at its place."""

    stage: Any
    place: str
    is_after: bool = True

    def __call__(self, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        insert = pipeline.insert_after if self.is_after else pipeline.insert_before
        return insert(self.place, "own", self.stage)


REWRITE = Own(Rewrite(masked, held=CARD), "parse")
MASKS: dict[str, Callable[[Any], Any]] = {
    "with tokens": Own(mask_parsed, "parse"),
    "as Rewrite": REWRITE,
    "of tokens": Own(mask_tokens, "generate"),
    "after converse": Own(mask_conversed, "converse"),
    "cuts": Own(cut_parsed, "parse"),
}
HARMLESS: dict[str, Callable[[Any], Any]] = {
    "none": lambda pipeline: pipeline,
    "after parse": Own(pass_on, "parse"),
    "after generate": Own(count_tokens, "generate"),
    "after persist": Own(count, "persist"),
    "before render": Own(mask_prompt, "render", is_after=False),
}


@asynccontextmanager
async def recording(folder: Path, **options: Any) -> AsyncGenerator[Recorder, None]:
    taps = Recorder(folder / "recorded", **options)
    try:
        yield taps
    finally:
        await taps.close()


async def turn_of(
    folder: Path,
    install: Callable[[Any], Any],
    written: Script,
    after: tuple[str, ...] | None = None,
    **options: Any,
) -> RecordedTurn:
    """Record an answer behind a stage of the operator's, and read its first turn."""
    return (await turns_of(folder, install, ScriptedEngine(written), after, **options))[0]


async def turns_of(
    folder: Path,
    install: Callable[[Any], Any],
    engine: ScriptedEngine,
    after: tuple[str, ...] | None = None,
    model: Any = None,
    **body: Any,
) -> Sequence[RecordedTurn]:
    options: dict[str, Any] = {} if after is None else {"after": after}
    async with recording(folder, **options) as taps:

        def edit(pipeline: Any) -> Any:
            return taps.tapped(guarded(install(pipeline), pipeline))

        async with running_server(engine, folder, edit=edit, model=model) as served:
            status, answer = await served.post({"input": "Hi", "tools": [WEATHER], **body})
            assert status == 200, answer
    return read_turns(only_recording(folder / "recorded"))


def text_of(turn: RecordedTurn) -> str:
    return load_encoding().decode(list(turn.output))


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (THOUGHT + NEXT + ANSWER, THOUGHT),
        (SECRET_THOUGHT + NEXT + PLAIN_ANSWER, ""),
        (THOUGHT + NEXT + PLAIN_ANSWER, THOUGHT + NEXT + PLAIN_ANSWER),
        (THOUGHT + NEXT + SECRET_CALL, THOUGHT),
    ],
)
@pytest.mark.parametrize("mask", MASKS)
async def test_removed_text_is_in_no_token(tmp_path: Path, mask: str, text: str, kept: str, size: int) -> None:
    turn = await turn_of(tmp_path, MASKS[mask], script(text, chunk_size=size))
    rewrites_calls = mask != "as Rewrite"  # the arguments of calls pass it unchanged
    assert text_of(turn) == (kept if rewrites_calls or "call" not in text else text)
    left = len(script(text).token_ids) - len(turn.output)
    assert turn.left_out <= left if mask == "cuts" else turn.left_out == left
    assert len(turn.logprobs) == len(turn.output)


@pytest.mark.parametrize("text", [HELLO, CALL, THOUGHT + NEXT + ANSWER, "<|channel|>final<|message|>Unended"])
@pytest.mark.parametrize("stage", HARMLESS)
async def test_stage_that_changes_nothing_leaves_nothing_out(tmp_path: Path, stage: str, text: str) -> None:
    """Only the tokens of an item without an end are not known, so a stage may have changed them."""
    turn = await turn_of(tmp_path, HARMLESS[stage], script(text, chunk_size=3))
    assert text_of(turn) == (text if stage != "after generate" or text.endswith("|>") else "")


async def test_masked_events_of_the_first_client_are_left_out(tmp_path: Path) -> None:
    turn = await turn_of(tmp_path, Own(mask_events, "persist"), script(THOUGHT + NEXT + ANSWER))
    assert "4711" not in text_of(turn)


@pytest.mark.parametrize("stage", [drop_thoughts, add_warning])
async def test_item_that_is_dropped_or_added_ends_the_output(tmp_path: Path, stage: Any) -> None:
    turn = await turn_of(tmp_path, Own(stage, "parse"), script(THOUGHT + NEXT + PLAIN_ANSWER))
    assert text_of(turn) == (THOUGHT if stage is add_warning else "")


@pytest.mark.parametrize("stage", ["after parse", "after persist"])
async def test_hidden_thoughts_and_stop_texts_are_no_change(tmp_path: Path, stage: str) -> None:
    text = THOUGHT + NEXT + "<|channel|>final<|message|>One two three"
    turn = await turn_of(tmp_path, HARMLESS[stage], script(text), include_reasoning=False, stop=["two"])
    assert text_of(turn).startswith(THOUGHT + NEXT + "<|channel|>final<|message|>One")
    assert "three" not in text_of(turn)


async def test_call_that_became_a_thought_is_no_change(tmp_path: Path) -> None:
    text = '<|channel|>commentary to=functions.apply_patch <|constrain|>json<|message|>{"no": 1}<|call|>'
    turn = await turn_of(tmp_path, HARMLESS["after parse"], script(text), tools=[{"type": "apply_patch"}])
    assert (text_of(turn), turn.left_out) == (text, 0)


@pytest.mark.parametrize("size", [1, 1000])
async def test_chat_model_loses_what_was_masked(tmp_path: Path, size: int) -> None:
    chat = model_with_images(sees=False)
    for text, kept in (("Card 4711.<|im_end|>", ""), ("Hello.<|im_end|>", "Hello.<|im_end|>")):
        (folder := tmp_path / text[0]).mkdir()
        written = Script(chat.vocabulary.encode(text), chunk_size=size)
        turn = await turn_of(folder, MASKS["with tokens"], written, model=chat)
        assert turn.output == array("I", chat.vocabulary.encode(kept) if kept else ())


@pytest.mark.parametrize("after", [("generate", "render"), ("generate", "render", "parse")])
async def test_files_that_would_tell_are_needed(tmp_path: Path, after: tuple[str, ...]) -> None:
    with pytest.raises(Unusable, match=r"a stage of yours may have changed the output, and .* is missing"):
        await turn_of(tmp_path, HARMLESS["after parse"], script(), after)
    (other := tmp_path / "other").mkdir()
    assert (await turn_of(other, HARMLESS["none"], script(), after)).left_out == 0


@pytest.mark.parametrize("stage", [*HARMLESS, *MASKS])
async def test_each_turn_of_a_response_is_compared(tmp_path: Path, stage: str) -> None:
    """Where a stage may have changed tokens, those of a call of a missing tool are not known."""
    install, is_strict = (HARMLESS | MASKS)[stage], stage in ("after generate", "of tokens")
    lost = '<|channel|>analysis to=browser.search code<|message|>{"query": "height"}<|call|>'
    engine = ScriptedEngine(turns=(script(lost), script(THOUGHT + NEXT + ANSWER)))
    first, second = await turns_of(tmp_path, install, engine)
    assert (text_of(first), text_of(second)) == (
        lost * (not is_strict),
        THOUGHT + (NEXT + ANSWER) * (stage in HARMLESS),
    )


def test_own_stages_are_named_by_what_they_follow() -> None:
    pipeline = harmony_pipeline(ScriptedEngine())
    edited = pipeline
    for place in ("recall", "render", "generate", "parse", "converse", "emit", "persist"):
        edited = edited.insert_after(place, f"own {place}", pass_any)
    places = ("generate", "parse", "converse", "emit", "persist")
    assert own_stages(guarded(edited, pipeline)) == {place: (f"own {place}",) for place in places}
    assert own_stages(guarded(pipeline, pipeline)) == {}


async def pass_any(source: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    async for frame in source:
        yield frame
