"""A program is a function of its code and of the outcomes of its calls: it may end after any round and run again."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from textwrap import indent
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.extensions.programs.arguments import parsed
from penstock.extensions.programs.running import MOST_CALLS, RunningProgram
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.services.tools import NestedCall, PastCall
from tests.support.programs import host_of, played

pytestmark = [pytest.mark.io, pytest.mark.slow]

BEGIN = """\
import itertools, random
numbers = itertools.count()
async def call():
    result = await notes.say(text=[next(numbers), random.random()])
    print("got", result)
    return result
async def failing():
    try:
        return await call()
    except ToolError as error:
        print("failed", error)
"""
CALL = st.sampled_from(["call()", "failing()", "asyncio.sleep(0.001, 'slept')", "asyncio.sleep(0)"])


def several(inner: st.SearchStrategy[str], *, most: int = 4) -> st.SearchStrategy[str]:
    return st.lists(inner, min_size=1, max_size=most).map(", ".join)


def awaitables(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions that can be awaited, made of others."""
    return st.one_of(
        several(inner).map(lambda parts: f"asyncio.gather({parts}, return_exceptions=True)"),
        inner.map(lambda part: f"asyncio.wait_for({part}, 0.002)"),
        inner.map(lambda part: f"asyncio.shield({part})"),
    )


AWAITABLES = st.recursive(CALL, awaitables, max_leaves=4)


def statements(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Statements, made of others."""
    bodies = inner.map(lambda body: indent(body, "    "))
    lists = several(AWAITABLES)
    return st.one_of(
        bodies.map(lambda body: f"for turn in range(2):\n{body}"),
        bodies.map(lambda body: f"try:\n{body}\nexcept (Exception, ExceptionGroup) as error:\n    print(type(error))"),
        bodies.map(
            lambda body: f"async def task():\n{body}\nawait asyncio.gather(task(), task(), return_exceptions=True)"
        ),
        lists.map(lambda parts: f"for each in asyncio.as_completed([{parts}]):\n    print('next', await each)"),
        lists.map(
            lambda parts: (
                "async with asyncio.TaskGroup() as group:\n"
                f"    for each in [{parts}]: group.create_task(asyncio.wait_for(each, None))"
            )
        ),
        lists.map(
            lambda parts: (
                f"tasks = {{asyncio.ensure_future(each) for each in [{parts}]}}\n"
                "done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)\n"
                "for each in done: print('done', each.exception() or each.result())\n"
                "for each in pending: each.cancel()"
            )
        ),
        lists.map(lambda parts: f"left = [asyncio.ensure_future(each) for each in [{parts}]]\nawait asyncio.sleep(0)"),
        st.lists(inner, min_size=2, max_size=3).map("\n".join),
    )


PROGRAMS = st.recursive(AWAITABLES.map(lambda part: f"print('value', await {part})"), statements, max_leaves=5)


def outcome(number: int, call: NestedCall) -> PastCall:
    return PastCall(call, error=f"No {number}.") if number % 3 == 1 else PastCall(call, str(number))


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(PROGRAMS)
def test_program_that_runs_again_asks_and_writes_the_same(program_sandbox: Sandbox, program: str) -> None:
    """The process ends after each round, so that the program runs again from its start after each."""

    async def both() -> None:
        async with host_of(program_sandbox) as host:
            code = BEGIN + program
            asked, result = await played(host, code, outcome)
            assert result.error is None, result
            assert "Traceback" not in result.result or "Error" in result.result
            assert sum(map(len, asked)) < MOST_CALLS
            assert await played(host, code, outcome, is_kept=False) == (asked, result)

    asyncio.run(both())


IN_SETS = """
async def call(n):
    return await notes.say(text=n)
for each in asyncio.as_completed([call(n) for n in range(50)]):
    await each
tasks = [asyncio.ensure_future(call(n)) for n in range(50)]
done, _ = await asyncio.wait(tasks)
for each in done:
    await call(tasks.index(each))
"""
"""A program whose calls have the order of sets."""


async def test_order_of_tasks_in_a_set_is_not_that_of_their_addresses(program_sandbox: Sandbox) -> None:
    """Another build of Python gives objects other addresses: a set has tasks in the order in which they were made.

    It may begin in the middle, as numbers are counted beyond the size of its table.
    """
    async with host_of(program_sandbox) as host:
        asked, _ = await played(host, IN_SETS)
    begun, again, *one_by_one = [[json.loads(call.arguments)["text"] for call in each] for each in asked]
    assert begun == again == list(range(50))
    in_set = [number for (number,) in one_by_one]
    assert {(after - before) % 50 for before, after in pairwise(in_set)} == {1}


def test_calls_of_a_client_are_read_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may list as many calls as a program makes, without outcomes and with long arguments."""
    reads = list[str]()

    def read(text: str) -> Any:
        reads.append(text)
        return parsed(text)

    monkeypatch.setattr("penstock.extensions.programs.running.parsed", read)
    unused: Any = None
    program = RunningProgram(unused, unused, unused)
    program.hear([PastCall(NestedCall((None, "add"), f'{{"a": {number}}}'), str(number)) for number in range(50)])
    forged = [PastCall(NestedCall((None, "add"), f'{{ "a":{number}}}'), None) for number in range(1_000, 0, -1)]
    outcomes = [each.result for each in program._recalled(forged) if each.is_known]  # noqa: SLF001
    assert outcomes == [str(number) for number in range(49, 0, -1)]
    assert len(reads) <= 50 + 1_000
