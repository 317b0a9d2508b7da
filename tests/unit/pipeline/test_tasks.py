"""Work in threads of its own."""

from __future__ import annotations

import asyncio
import weakref
from threading import get_ident

import pytest

from penstock.pipeline import tasks
from penstock.pipeline.tasks import MANY_VALUES, apart, in_thread, let_go, until_it_waits


class Value:
    """A value that tells when it is freed."""


@pytest.mark.parametrize("is_long", [True, False])
async def test_long_work_alone_leaves_the_loop(is_long: bool) -> None:
    assert (await apart(is_long, get_ident) != get_ident()) == is_long


@pytest.mark.io
@pytest.mark.parametrize(("count", "is_kept"), [(MANY_VALUES + 1, True), (MANY_VALUES, False)])
async def test_only_many_values_are_freed_in_a_thread(
    count: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "LINGER_SECONDS", 0.0)
    threads = list[int]()
    values = [Value() for _ in range(count)]
    _finalize(values, threads)
    let_go(values)
    del values
    assert len(threads) == (0 if is_kept else count)
    while len(threads) < count:
        await asyncio.sleep(0)
    assert all((thread != get_ident()) == is_kept for thread in threads)


async def test_variables_of_work_that_fails_are_freed_in_its_thread() -> None:
    threads = list[int]()

    def fail(*, again: bool) -> None:
        values = [Value()]
        _finalize(values, threads)
        if not again:
            raise ValueError("No")
        try:
            fail(again=False)
        except ValueError as error:
            raise RuntimeError("No") from error

    with pytest.raises(RuntimeError):
        await in_thread(fail, again=True)
    assert len(threads) == 2
    assert get_ident() not in threads


async def test_error_for_work_that_was_left_is_not_logged() -> None:
    logged, loop = list[object](), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: logged.append(context))
    drained = loop.create_future()
    until_it_waits(asyncio.wait_for(drained, None))
    drained.set_exception(ConnectionError("The client has left."))
    await asyncio.sleep(0)
    del drained
    assert not logged


def _finalize(values: list[Value], threads: list[int]) -> None:
    for value in values:
        weakref.finalize(value, lambda: threads.append(get_ident()))
