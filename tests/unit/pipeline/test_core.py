from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest

from penstock.pipeline.core import Pipeline
from penstock.pipeline.junction import JunctionError
from penstock.pipeline.lifecycle.checker import check

Frame = TypeVar("Frame")


@dataclass(frozen=True)
class Letter:
    text: str


@dataclass(frozen=True)
class Number:
    value: int


@dataclass(frozen=True)
class Note:
    text: str


async def letters() -> AsyncGenerator[Letter, None]:
    for text in "abc":
        yield Letter(text)


async def count(source: AsyncIterator[Letter]) -> AsyncGenerator[Number, None]:
    async for letter in source:
        yield Number(ord(letter.text) - ord("a"))


async def annotate(source: AsyncIterator[Number]) -> AsyncGenerator[Number | Note, None]:
    async for number in source:
        yield number
        yield Note(f"saw {number.value}")


async def spell(source: AsyncIterator[Number | Note]) -> AsyncGenerator[str, None]:
    async for frame in source:
        yield str(frame)


async def keep(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    async for frame in source:
        yield frame


@dataclass(frozen=True)
class Add:
    amount: int

    async def __call__(self, source: AsyncIterator[Number]) -> AsyncGenerator[Number, None]:
        async for number in source:
            yield Number(number.value + self.amount)


@dataclass(frozen=True)
class Twice:
    inner: Pipeline[Number, Number]

    async def __call__(self, source: AsyncIterator[Number]) -> AsyncGenerator[Number, None]:
        async for number in source:
            for _ in range(2):
                async with self.inner.open(one(number)) as inner:
                    async for frame in inner:
                        yield frame


async def one(number: Number) -> AsyncGenerator[Number, None]:
    yield number


def numbers() -> Pipeline[Letter, Number]:
    return Pipeline.start("count", count).then("add", Add(1))


def nested() -> Pipeline[Letter, Number]:
    turn = Pipeline.start("double", Add(10)).then("shift", Add(100))
    return Pipeline.start("count", count).then("twice", Twice(turn)).then("add", Add(1))


async def frames_from(pipeline: Pipeline[Letter, Any]) -> list[Any]:
    async with pipeline.open(letters()) as frames:
        return [frame async for frame in frames]


def names(pipeline: Pipeline[Any, Any]) -> list[str]:
    return [step.name for step in pipeline.steps]


# Composing and editing


async def test_frames_flow_in_order() -> None:
    assert await frames_from(numbers()) == [Number(1), Number(2), Number(3)]


async def test_edits_return_new_pipelines() -> None:
    original = numbers()
    edited = (
        original.insert_before("add", "keep", keep)
        .insert_after("add", "more", Add(5))
        .replace("add", Add(2))
        .remove("keep")
    )
    assert names(edited) == ["count", "add", "more"]
    assert await frames_from(edited) == [Number(7), Number(8), Number(9)]
    assert names(original) == ["count", "add"]


async def test_pipeline_is_cut_at_a_name() -> None:
    assert names(numbers().from_stage("add")) == ["add"]
    assert names(numbers().through("count")) == ["count"]
    async with numbers().from_stage("add").open(one(Number(41))) as frames:
        assert [frame async for frame in frames] == [Number(42)]


async def test_inner_stages_are_reached_by_name() -> None:
    assert await frames_from(nested()) == [Number(v) for v in (111, 111, 112, 112, 113, 113)]
    edited = (
        nested()
        .replace("shift", Add(0))
        .insert_after("double", "more", Add(1000))
        .insert_before("double", "keep", keep)
    )
    assert await frames_from(edited.remove("keep")) == [Number(v) for v in (1011, 1011, 1012, 1012, 1013, 1013)]
    assert names(edited.inner("twice")) == ["keep", "double", "more", "shift"]


async def test_one_stage_replaces_neighbours() -> None:
    edited = nested().replace("shift", Add(0), first="double")
    assert names(edited.inner("twice")) == ["shift"]
    assert await frames_from(edited) == [Number(v) for v in (1, 1, 2, 2, 3, 3)]
    assert names(numbers().replace("add", count, first="count")) == ["add"]
    for first, last in (("double", "add"), ("shift", "double"), ("count", "shift")):
        with pytest.raises(LookupError, match=f"no stage named '{last}' comes with or after '{first}' in its pipeline"):
            nested().replace(last, Add(0), first=first)


def test_cut_inside_a_composite_leaves_the_composite_out() -> None:
    assert names(nested().from_stage("shift")) == ["shift", "add"]
    assert names(nested().through("double")) == ["count", "double"]
    assert names(nested().following("twice")) == names(nested().following("shift")) == ["add"]


@pytest.mark.parametrize(
    "edit", ["insert_before", "insert_after", "replace", "remove", "from_stage", "through", "stage", "inner"]
)
def test_unknown_name_lists_the_known_ones(edit: str) -> None:
    inserted = ("x", keep)
    arguments: dict[str, Any] = {"insert_before": inserted, "insert_after": inserted, "replace": (keep,)}
    with pytest.raises(LookupError, match="count, twice, double, shift, add"):
        getattr(nested(), edit)("cuont", *arguments.get(edit, ()))


def test_inner_of_a_plain_stage_is_refused() -> None:
    with pytest.raises(LookupError, match="no inner pipeline"):
        numbers().inner("add")


# Junctions


def test_wrong_order_is_refused_when_built() -> None:
    with pytest.raises(
        JunctionError, match=r"annotate gives Number \| Note, and add takes Number: it does not accept Note"
    ):
        Pipeline.start("annotate", annotate).then("add", Add(1))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def test_edits_are_checked_again() -> None:
    pipeline = Pipeline.start("count", count).then("annotate", annotate).then("spell", spell)
    with pytest.raises(JunctionError, match="gives Letter, and annotate takes Number"):
        pipeline.remove("count").insert_before("annotate", "letters", keep_letters)
    with pytest.raises(JunctionError, match="spell gives str, and add takes Number"):
        pipeline.insert_after("spell", "add", Add(1))


async def keep_letters(source: AsyncIterator[Letter]) -> AsyncGenerator[Letter, None]:
    async for letter in source:
        yield letter


def test_pass_through_stage_fits_any_junction() -> None:
    pipeline = (
        numbers()
        .insert_before("count", "first", keep)
        .insert_after("count", "middle", keep)
        .insert_after("add", "last", keep)
    )
    assert names(pipeline) == ["first", "count", "middle", "add", "last"]
    with pytest.raises(JunctionError):
        Pipeline.start("annotate", annotate).then("keep", keep).then("add", Add(1))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def test_subclass_of_an_accepted_frame_fits() -> None:
    class Special(Number):
        pass

    async def special(source: AsyncIterator[Letter]) -> AsyncGenerator[Special, None]:
        async for _ in source:
            yield Special(1)

    special.__annotations__ = {"source": AsyncIterator[Letter], "return": AsyncGenerator[Special, None]}
    assert names(Pipeline.start("special", special).then("add", Add(1))) == ["special", "add"]


async def measure(source: AsyncIterator[Frame]) -> AsyncGenerator[Number, None]:
    async for frame in source:
        yield Number(len(str(frame)))


async def dump(source: AsyncIterator[Any]) -> AsyncGenerator[object, None]:
    async for frame in source:
        yield frame


async def look(source: AsyncIterator[object]) -> AsyncGenerator[Any, None]:
    async for frame in source:
        yield frame


def test_stage_that_takes_anything_may_give_another_type() -> None:
    assert names(Pipeline.start("spell", spell).then("measure", measure).then("add", Add(1)))[-1] == "add"
    assert str(Pipeline.start("count", count).then("measure", measure)).splitlines()[-1] == "measure : Number -> Number"
    with pytest.raises(JunctionError, match="measure gives Number, and count takes Letter"):
        Pipeline.start("measure", measure).then("count", count)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def test_any_and_object_accept_everything() -> None:
    pipeline = Pipeline.start("annotate", annotate).then("dump", dump).then("look", look).then("add", Add(1))
    assert names(pipeline) == ["annotate", "dump", "look", "add"]
    with pytest.raises(JunctionError, match="gives object, and add takes Number"):
        Pipeline.start("dump", dump).then("add", Add(1))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


class Scale:
    async def method(self, source: AsyncIterator[Number]) -> AsyncGenerator[Number, None]:
        async for number in source:
            yield Number(number.value * 2)


async def times(factor: int, source: AsyncIterator[Number]) -> AsyncGenerator[Number, None]:
    async for number in source:
        yield Number(number.value * factor)


async def plus(source: AsyncIterator[Number], *, amount: int) -> AsyncGenerator[Number, None]:
    async for number in source:
        yield Number(number.value + amount)


async def test_methods_and_partials_are_stages() -> None:
    partials = (partial(times, 3), partial(plus, amount=1))
    pipeline = numbers().then("method", Scale().method).then("times", partials[0]).then("plus", partials[1])
    assert await frames_from(pipeline) == [Number(7), Number(13), Number(19)]
    for stage in (Scale().method, *partials):
        with pytest.raises(JunctionError, match="gives Letter, and wrong takes Number"):
            Pipeline.start("letters", keep_letters).insert_after("letters", "wrong", stage)


def test_a_class_of_stages_is_examined_once() -> None:
    one = Pipeline.start("add", Add(1))
    assert one.replace("add", Add(2)).accepts() is one.accepts()


def test_label_of_a_junction_has_no_modules() -> None:
    assert str(Pipeline.start("check", check)) == "check : ResponseEvent -> ResponseEvent"


def test_names_are_unique_inside_and_outside() -> None:
    with pytest.raises(ValueError, match="repeat: add"):
        numbers().then("add", Add(1))
    with pytest.raises(ValueError, match="repeat: shift"):
        nested().then("shift", Add(1))


def test_pipeline_without_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        Pipeline.start("count", count).remove("count")


def test_stage_without_annotations_is_refused() -> None:
    async def bare(source):  # type: ignore[no-untyped-def]
        yield source

    with pytest.raises(JunctionError, match="not annotated"):
        Pipeline.start("bare", bare)

    async def vague(source: AsyncIterator) -> AsyncGenerator:  # type: ignore[type-arg]
        yield source

    with pytest.raises(JunctionError, match="does not name the frames"):
        Pipeline.start("vague", vague)


def test_drawing_shows_names_and_junctions() -> None:
    assert str(nested().insert_after("count", "note", keep)).splitlines() == [
        "count    : Letter -> Number",
        "note     : Number -> Number",
        "twice    : Number -> Number",
        "  double : Number -> Number",
        "  shift  : Number -> Number",
        "add      : Number -> Number",
    ]


# Closing


@dataclass
class Log:
    closed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Watched:
    name: str
    log: Log
    breaks_at: int | None = None

    async def __call__(self, source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
        seen = 0
        try:
            async for frame in source:
                seen += 1
                if seen == self.breaks_at:
                    raise RuntimeError(f"{self.name} broke")
                yield frame
        finally:
            await asyncio.sleep(0)
            self.log.closed.append(self.name)


async def endless(log: Log) -> AsyncGenerator[Letter, None]:
    try:
        while True:
            yield Letter("a")
            await asyncio.sleep(0)
    finally:
        log.closed.append("source")


def watched(log: Log, **breaks_at: int) -> Pipeline[Letter, Letter]:
    pipeline: Pipeline[Letter, Letter] = Pipeline.start("one", Watched("one", log, breaks_at.get("one")))
    for name in ("two", "three"):
        pipeline = pipeline.then(name, Watched(name, log, breaks_at.get(name)))
    return pipeline


DOWNSTREAM_FIRST = ["three", "two", "one", "source"]


async def leave_by_break(pipeline: Pipeline[Letter, Letter], log: Log) -> None:
    async with pipeline.open(endless(log)) as frames:
        async for _ in frames:
            break


async def leave_by_error(pipeline: Pipeline[Letter, Letter], log: Log) -> None:
    with pytest.raises(ZeroDivisionError):
        async with pipeline.open(endless(log)) as frames:
            async for _ in frames:
                raise ZeroDivisionError


async def cancel_when(waiting: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_cancellation_between_frames(pipeline: Pipeline[Letter, Letter], log: Log) -> None:
    waiting = asyncio.Event()

    async def consume() -> None:
        async with pipeline.open(endless(log)) as frames:
            async for _ in frames:
                waiting.set()
                await asyncio.Event().wait()

    await cancel_when(waiting, consume())


async def leave_unread(pipeline: Pipeline[Letter, Letter], log: Log) -> None:
    async with pipeline.open(endless(log)) as frames:
        await anext(frames)


Leave = Callable[[Pipeline[Letter, Letter], Log], Awaitable[None]]


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_cancellation_between_frames, leave_unread])
async def test_leaving_closes_downstream_first(leave: Leave) -> None:
    log = Log()
    await leave(watched(log), log)
    assert log.closed == DOWNSTREAM_FIRST


async def test_end_of_source_closes_every_stage() -> None:
    log = Log()
    assert await frames_from(watched(log)) == [Letter("a"), Letter("b"), Letter("c")]
    assert sorted(log.closed) == ["one", "three", "two"]


async def test_broken_stage_closes_the_rest() -> None:
    log = Log()
    with pytest.raises(RuntimeError, match="two broke"):
        async with watched(log, two=2).open(endless(log)) as frames:
            async for _ in frames:
                pass
    assert sorted(log.closed) == sorted(DOWNSTREAM_FIRST)
    assert log.closed[-2:] == ["one", "source"]


async def test_cancellation_inside_a_stage_closes_the_rest() -> None:
    log = Log()
    waiting = asyncio.Event()

    async def stuck() -> AsyncGenerator[Letter, None]:
        try:
            waiting.set()
            await asyncio.Event().wait()
            yield Letter("a")
        finally:
            log.closed.append("source")

    async def consume() -> None:
        async with watched(log).open(stuck()) as frames:
            async for _ in frames:
                pass

    await cancel_when(waiting, consume())
    assert sorted(log.closed) == sorted(DOWNSTREAM_FIRST)


async def test_unread_stages_are_never_run() -> None:
    log = Log()
    async with watched(log).open(endless(log)):
        pass
    assert log.closed == []


async def test_pipeline_serves_many_runs_at_once() -> None:
    pipeline = numbers()
    async with pipeline.open(letters()) as first, pipeline.open(letters()) as second:
        assert await anext(first) == await anext(second) == Number(1)
        assert await anext(first) == Number(2)
        assert [frame async for frame in second] == [Number(2), Number(3)]
        assert [frame async for frame in first] == [Number(3)]
