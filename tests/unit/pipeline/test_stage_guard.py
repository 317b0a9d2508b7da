"""Guards: a mistake of an operator's stage is reported as that stage's, and no other mistake is."""

from __future__ import annotations

import asyncio
import inspect
import sys
from asyncio import CancelledError
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from threading import get_ident
from typing import Any, TypeVar

import pytest
from msgspec import structs

from penstock.pipeline import field_types, frames, stage_guard
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import EngineFailed, StageError, StageFault, error_named
from penstock.pipeline.faults import name_stage
from penstock.pipeline.field_types import MOST_PARTS, WrongType, check_fields, is_large
from penstock.pipeline.frames import ItemDelta, ParsedFrame, ResolvedRequest, TokenChunk, TokenFrame
from penstock.pipeline.plugins import guarded
from penstock.pipeline.protocol.events import ResponseCompleted
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_request
from penstock.pipeline.recordings.format import FILES, read_frames
from penstock.stages.converse.converse import Converse
from penstock.stages.responses import recorded_responses
from tests.support.event_streams import run_pipeline
from tests.support.paths import HARMONY

Frame = TypeVar("Frame")

CASE = HARMONY / "weather"
TOKENS = list(read_frames(CASE / "tokens.jsonl", TokenFrame))


async def passed(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    async for frame in source:
        yield frame


def guards(edited: Pipeline[Any, Any], original: Pipeline[Any, Any]) -> dict[str, str]:
    """The guarded stages, each with the order that it has to keep."""
    steps = guarded(edited, original).every_step()
    return {step.name: getattr(step.guard.order, "__name__", "") for step in steps if step.guard}


def test_stages_of_the_operator_are_guarded_and_no_others() -> None:
    original = recorded_responses()
    assert guarded(original, original) is original
    edited = original
    for place in original.names():
        edited = edited.insert_after(place, f"after {place}", passed)
    edited = edited.insert_before("normalize", "first", passed).replace("parse", replace(original.stage("parse")))
    assert guards(edited, original) == {
        "first": "OneForOne",
        "after normalize": "OneForOne",
        "after recall": "",
        "after read": "",
        "after resolve": "OneForOne",
        "after summarize": "OneForOne",
        "after render": "OneForOne",
        "after generate": "TokenOrder",
        "parse": "ParsedOrder",
        "after parse": "ParsedOrder",
        "after converse": "ConversedOrder",
        "after emit": "EmittedOrder",
        "after persist": "EventOrder",
    }
    assert guarded(edited, original).stage("after parse") is passed
    assert str(guarded(edited, original)) == str(edited)


def test_composite_stage_is_the_operators_only_if_it_has_changed_itself() -> None:
    original = recorded_responses()
    converse: Converse = original.stage("converse")
    inner = converse.inner.insert_after("parse", "mine", passed)
    assert guards(original.replace("converse", replace(converse, inner=inner)), original) == {"mine": "ParsedOrder"}
    changed = replace(converse, limits=replace(converse.limits, turns=1))
    assert guards(original.replace("converse", changed), original) == {"converse": "ConversedOrder"}


# The error


def after(place: str, stage: Any) -> Pipeline[Any, Any]:
    """The stages from ``parse`` to ``persist``, with a stage of the operator's."""
    original = recorded_responses()
    return guarded(original.insert_after(place, "mine", stage), original).following("generate")


async def fault_of(stage: Any, place: str = "parse") -> StageError:
    """The error that the stage ends with, before ``emit`` makes an event of it."""
    with pytest.raises(StageError) as caught:
        await run_pipeline(after(place, stage).through("mine"), TOKENS)
    return caught.value


async def drop_openings(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        if not isinstance(frame, frames.ReasoningOpened | frames.MessageOpened):
            yield frame


async def count_characters(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield ItemDelta(len(frame.text)) if isinstance(frame, ItemDelta) else frame  # type: ignore[arg-type]


async def unwrap(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield frame.text if isinstance(frame, ItemDelta) else frame  # type: ignore[misc]


async def only_text(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ItemDelta, None]:
    async for frame in source:
        yield frame  # type: ignore[misc]


async def return_early(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield structs.replace(frame, text="a") if isinstance(frame, ItemDelta) else frame
        if isinstance(frame, ItemDelta):
            return


async def leave(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield frame
        sys.exit(3)


async def await_cancelled(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield frame
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        given_up.cancel()
        await given_up


async def look_up(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield frame
        dict[str, int]()["oops"]


def look_up_first(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    dict[str, int]()["oops"]
    return passed(source)


def listed(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    return [source]  # type: ignore[return-value]


def line_of(stage: Any, text: str) -> int:
    """The line of ``text`` in this file, within ``stage``."""
    lines, first = inspect.getsourcelines(stage)
    return first + next(at for at, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("stage", "line", "problem", "last"),
    [
        (
            drop_openings,
            "yield",
            "broke a rule: after GenerationStarted: expected MessageOpened, ",
            "GenerationStarted, ItemDelta of ",
        ),
        (
            count_characters,
            "yield",
            "gave a wrong type: ItemDelta.text: expected `str`, got `int`",
            "Opened, ItemDelta)",
        ),
        (unwrap, "yield", "gave a wrong type: expected ParsedFrame, got str", "ReasoningOpened, str)"),
        (only_text, "yield", "gave a wrong type: expected ItemDelta, got Gen", "frames: GenerationStarted)"),
        (
            return_early,
            "def",
            "ended too early: after ItemDelta: expected ItemDelta, ItemClosed[complete] or ItemClosed[cut], got the",
            "Opened, ItemDelta of 1 character)",
        ),
        (leave, "sys.exit", "raised SystemExit", "frames: GenerationStarted)"),
        (await_cancelled, "await given_up", "raised CancelledError", "frames: GenerationStarted)"),
        (look_up, "oops", "raised KeyError", "frames: GenerationStarted)"),
        (look_up_first, "oops", "raised KeyError", "frames: none)"),
        (listed, "def", "returned list instead of an async generator", "frames: none)"),
    ],
)
async def test_fault_has_the_stage_its_line_and_its_last_frames(stage: Any, line: str, problem: str, last: str) -> None:
    fault = await fault_of(stage)
    assert isinstance(fault, StageFault)
    assert str(fault).startswith(f"the stage 'mine' {problem}")
    assert f" (at {__file__}:{line_of(stage, line)}; its last " in str(fault)
    assert ("'oops'" in str(fault)) is (line == "oops")
    assert last in str(fault)
    assert name_stage(fault) == "mine"
    assert fault.message.startswith(f"The stage 'mine' of this server {problem}")
    assert __file__ not in fault.message
    assert "oops" not in fault.message


async def double(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
    async for request in source:
        yield request
        yield request


async def drop(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
    async for request in source:
        if request.tokens is None:
            yield request


@pytest.mark.parametrize("count", [1, 2])
async def test_stage_gives_one_request_for_each(count: int) -> None:
    requests = list(read_frames(CASE / "conversation.jsonl", ResolvedRequest)) * count
    original = recorded_responses()

    def run(stage: Any) -> Any:
        edited = original.insert_after("normalize", "mine", stage)
        return run_pipeline(guarded(edited, original).following("normalize").through("mine"), requests)

    assert await run(passed) == requests
    for stage, problem in ((double, "broke a rule"), (drop, "ended too early")):
        with pytest.raises(StageFault, match=f"{problem}: a stage gives one frame for each that it takes here"):
            await run(stage)


async def count_late(source: AsyncIterator[frames.EmittedFrame]) -> AsyncGenerator[frames.EmittedFrame, None]:
    async for frame in source:
        if isinstance(frame, ResponseCompleted):
            frame = structs.replace(frame, response=structs.replace(frame.response, metadata={"count": "9"}))  # noqa: PLW2901
        yield frame


async def test_metadata_of_the_end_is_refused() -> None:
    """The client has seen other metadata when the response was created, and a replay of the stream repeats it."""
    with pytest.raises(StageFault, match="fields of a response that its request determines never change"):
        await run_pipeline(after("emit", count_late), TOKENS)


async def test_fault_shows_no_text() -> None:
    parsed = await run_pipeline(after("parse", passed).through("mine"), TOKENS)
    texts = [frame.text for frame in parsed if isinstance(frame, ItemDelta) and len(frame.text) > 4]
    fault = str(await fault_of(drop_openings))
    assert [text in fault for text in texts] == [False] * len(texts) != []


def test_recorded_fault_is_rebuilt() -> None:
    fault = StageFault("stage 'mine'", "raised SystemExit", "at mine.py:3")
    again = error_named(type(fault).__name__, fault.message)
    assert isinstance(again, StageFault)
    assert again.message == "The stage 'mine' of this server raised SystemExit."


# Errors of others


async def raising(error: BaseException) -> AsyncGenerator[TokenFrame, None]:
    yield TOKENS[0]
    raise error


@pytest.mark.parametrize("error", [EngineFailed("It died."), ZeroDivisionError(), SystemExit(3), CancelledError()])
async def test_error_of_the_source_is_not_the_fault_of_the_stage(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        async with after("parse", passed).through("mine").open(raising(error)) as stream:
            [frame async for frame in stream]
    assert caught.value is error


async def test_cancelled_task_is_no_fault() -> None:
    async def wait(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
        async for frame in source:
            yield frame
            await asyncio.Event().wait()

    task = asyncio.create_task(run_pipeline(after("parse", wait).through("mine"), TOKENS))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(CancelledError):
        await task


async def refuse(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for _ in source:
        raise EngineFailed("Not this one.")
    yield frames.ItemClosed(complete=True)


async def test_error_for_the_client_passes_as_it_is() -> None:
    fault = await fault_of(refuse)
    assert (type(fault), str(fault), name_stage(fault)) == (EngineFailed, "Not this one.", "mine")


# The fields of frames

RECORDED = [
    frame for file, junction in FILES.values() if (CASE / file).exists() for frame in read_frames(CASE / file, junction)
]


def test_fields_of_recorded_frames_are_right() -> None:
    for frame in RECORDED:
        check_fields(frame)


def test_field_of_a_wrong_type_is_refused() -> None:
    for frame in RECORDED:
        for name in frame.__struct_fields__:
            with pytest.raises(WrongType, match=name):
                check_fields(structs.replace(frame, **{name: object()}))


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (TokenChunk((1, "2")), r"TokenChunk.token_ids\[1\]: expected `int`, got `str`"),  # type: ignore[arg-type]
        (TokenChunk(True), "TokenChunk.token_ids: expected `array`, got `bool`"),  # type: ignore[arg-type]
        (ItemDelta("\ud83d"), "ItemDelta: .* surrogates not allowed"),
        (frames.AnnotationAdded({"at": object()}), "AnnotationAdded: objects of type object are not written"),
    ],
)
def test_wrong_field_is_described(frame: Any, problem: str) -> None:
    with pytest.raises(WrongType, match=problem):
        check_fields(frame)


def test_field_within_a_field_is_checked() -> None:
    started = next(frame for frame in RECORDED if isinstance(frame, frames.GenerationStarted))
    hot = structs.replace(started.facts.sampling, temperature="hot")
    with pytest.raises(WrongType, match=r"^GenerationStarted.facts.sampling.temperature: expected `float`, got `str`"):
        check_fields(frames.with_facts(started, sampling=hot))


async def test_fields_of_a_request_are_checked() -> None:
    request = read_request((CASE / "request.json").read_bytes())
    check_fields(request)
    with pytest.raises(WrongType, match=r"(?s)CreateResponse: .*temperature"):
        check_fields(request.model_copy(update={"temperature": "hot"}))


@pytest.mark.parametrize("most_parts", [0, MOST_PARTS])
async def test_only_large_frames_are_checked_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, most_parts: int
) -> None:
    checked: set[tuple[bool, bool]] = set()

    def note(frame: Any) -> None:
        checked.add((is_large(frame), get_ident() != loop_thread))
        check_fields(frame)

    loop_thread = get_ident()
    monkeypatch.setattr(field_types, "MOST_PARTS", most_parts)
    monkeypatch.setattr(stage_guard, "check_fields", note)
    await run_pipeline(after("parse", passed).through("mine"), TOKENS)
    assert checked == ({(False, False)} if most_parts else {(True, True), (False, False)})


@pytest.mark.parametrize("part", [{"input": [{"role": "user", "content": "hi"}] * MOST_PARTS}, {"input": "x" * 2**20}])
def test_a_request_is_large_by_its_items_or_its_text(part: dict[str, Any]) -> None:
    assert not is_large(CreateResponse(model="m", input="hi"))
    assert is_large(CreateResponse(model="m", **part))
