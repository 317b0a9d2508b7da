from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import pytest

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.faults import first, name_stage, running
from penstock.pipeline.lifecycle.rules import InvariantBroken


@dataclass(frozen=True)
class Pass:
    at: int | None = None

    async def __call__(self, source: AsyncIterator[int]) -> AsyncGenerator[int, None]:
        async for number in source:
            if number == self.at:
                raise ZeroDivisionError
            yield number


@dataclass(frozen=True)
class Once:
    inner: Pipeline[int, int]

    async def __call__(self, source: AsyncIterator[int]) -> AsyncGenerator[int, None]:
        async with self.inner.open(source_of([number async for number in source])) as numbers:
            async for number in numbers:
                yield number


def three(broken: str, at: int = 1) -> Pipeline[int, int]:
    """Three stages of the same code, the second inside a composite one."""
    stages = {name: Pass(at if name == broken else None) for name in ("one", "two", "three")}
    once = Once(Pipeline.start("two", stages["two"]))
    return Pipeline.start("one", stages["one"]).then("once", once).then("three", stages["three"])


@pytest.mark.parametrize("broken", ["one", "two", "three"])
@pytest.mark.parametrize("at", [0, 1])
async def test_error_names_the_stage_that_raised_it(broken: str, at: int) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        async with three(broken, at).open(source_of([0, 1])) as numbers:
            [number async for number in numbers]
    assert caught.value.__notes__ == [f"in stage {broken}"]
    assert name_stage(caught.value) == broken


@pytest.mark.parametrize("broken", ["one", "two"])
async def test_stage_of_a_caught_error_can_be_named(broken: str) -> None:
    named: list[str] = []

    async def catch(source: AsyncIterator[int]) -> AsyncGenerator[int, None]:
        try:
            async for number in source:
                yield number
        except ZeroDivisionError as error:
            named.append(name_stage(error))

    async with three(broken).then("catch", catch).open(source_of([0, 1])) as numbers:
        assert 1 not in [number async for number in numbers]
    assert named == [broken]


async def test_error_of_the_reader_names_no_stage() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        async with three("").open(source_of([0])) as numbers:
            await anext(numbers)
            raise ZeroDivisionError
    assert not hasattr(caught.value, "__notes__")
    assert name_stage(caught.value) == "an unknown stage"


class Big:
    """An object that must not outlive its run."""


async def test_run_is_released_after_its_end() -> None:
    """A task that was started within a run keeps only its context alive, and the name of no frame of the run."""
    refs: list[weakref.ref[Big]] = []

    async def hold(source: AsyncIterator[int]) -> AsyncGenerator[int, None]:
        big = Big()
        refs.append(weakref.ref(big))
        async for number in source:
            yield number

    async with Pipeline.start("hold", hold).then("again", hold).open(source_of([0, 1])) as numbers:
        within = running.get()
        await anext(numbers)
    assert running.get() == ()
    assert [[*names.values()] for names in within] == [["hold"], []]
    gc.collect()
    assert refs[0]() is None


async def test_stream_without_a_frame_breaks_a_rule() -> None:
    assert await first(source_of([1])) == 1
    with pytest.raises(InvariantBroken, match="a stream has a first frame"):
        await first(source_of([]))
