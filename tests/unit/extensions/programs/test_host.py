"""Programs: their calls in rounds, their output, and the processes that are kept while they wait."""

import asyncio
import json

import pytest
from prometheus_client import REGISTRY

from penstock.extensions.programs.host import ProgramHost, ProgramSession
from penstock.extensions.programs.running import MOST_AT_ONCE
from penstock.extensions.programs.sleeping import PER_SLOT
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.services.slots import Slots
from penstock.services.toolbox import open_toolbox
from penstock.services.tools import LONGEST_RESULT, Advancing, HostSettings, NestedCall, PastCall, ToolResult
from penstock.testing import ExampleCalls, check_host
from tests.support.programs import ADD, ended, host_of, numbered, played, request, rounds, step

pytestmark = pytest.mark.io

GATHERED = "await asyncio.gather(add(1), add(a=2, b=3), notes.say(text='é'))"
RANDOM = "import os\nmine = os.urandom(8).hex()\nawait notes.say(text=mine)\nawait notes.say(text=mine)\n'done'"
"""A program that cannot run again from its start."""


def add(a: int) -> NestedCall:
    return NestedCall((None, "add"), json.dumps({"a": a}))


async def test_host_keeps_all_rules(program_sandbox: Sandbox) -> None:
    calls = ExampleCalls(("program", "1 + 1"), ("program", "1 / 0"), ("program", "import time; time.sleep(60)"))
    await check_host(ProgramHost(program_sandbox, Slots(4)), calls)


async def test_host_comes_through_its_door() -> None:
    async with asyncio.timeout(120):
        tools = await open_toolbox(HostSettings(slots=Slots(1)))
    try:
        assert isinstance(tools.hosts["program"].session(request()), Advancing)
    finally:
        await tools.close()


async def test_calls_that_wait_are_one_round(session: ProgramSession) -> None:
    assert await rounds(session, GATHERED) == (
        NestedCall((None, "add"), '{"a": 1}'),
        NestedCall((None, "add"), '{"a": 2, "b": 3}'),
        NestedCall(("notes", "say"), '{"text": "é"}'),
    )


async def test_results_come_back_in_the_order_of_the_calls(host: ProgramHost) -> None:
    asked, outcome = await played(host, GATHERED)
    assert len(asked) == 1
    assert outcome == ToolResult("[0, 1, 2]\n")


@pytest.mark.parametrize(
    ("result", "shown"),
    [('{"a": [1, null]}', "{'a': [1, None]}"), ("plain", "'plain'"), ("NaN", "'NaN'"), ("", "''"), ("[" * 9_999, None)],
)
async def test_result_is_parsed_if_it_is_json(host: ProgramHost, result: str, shown: str | None) -> None:
    _, outcome = await played(host, "await add(1)", lambda _, call: PastCall(call, result))
    assert outcome.result == f"{shown or repr(result)}\n"


async def test_error_of_a_tool_is_an_exception(host: ProgramHost) -> None:
    code = "try: await add(1)\nexcept ToolError as error: print('It said:', error)\nawait add(2)"
    _, outcome = await played(host, code, lambda number, call: PastCall(call, error=f"No {number}."))
    assert outcome.error is None
    assert outcome.result == (
        "It said: No 0.\nTraceback (most recent call last):\n"
        '  File "<program>", line 3, in <module>\n    await add(2)\nToolError: No 1.\n'
    )


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("add('1')", "ToolError: add: a is no integer"),
        ("add()", "ToolError: add: a is missing"),
        ("add(1, c=2)", "ToolError: add: c is not allowed"),
        ("add(a={1})", "TypeError: Object of type set is not JSON serializable"),
        ("add(1, 2, 3)", "TypeError: add() takes 2 positional arguments, and 3 were given"),
        ("add(1, a=1)", "TypeError: add() got multiple values for argument 'a'"),
        ("notes.say(text=float('nan'))", "ValueError: Out of range float values are not JSON compliant"),
        ("notes.say(text='\\ud800')", "ToolError: notes.say: the arguments are no JSON"),
        ("notes.say(text='a' * 2**20)", "ToolError: The arguments are longer than"),
        ("write(1)", "TypeError: write() takes one argument, a string"),
        ("write('\\ud800')", "ToolError: write: the text has characters that are none"),
        ("notes.other()", "AttributeError"),
        ("unknown()", "NameError: name 'unknown' is not defined"),
    ],
)
async def test_wrong_call_does_not_leave(session: ProgramSession, call: str, problem: str) -> None:
    outcome = await ended(session, f"await {call}")
    assert outcome.error is None
    assert outcome.result.splitlines()[-1].startswith(problem), outcome.result


async def test_text_of_a_custom_tool_leaves_as_it_is(host: ProgramHost) -> None:
    asked, _ = await played(host, "await write('{\"a\": é')")
    assert asked == [(NestedCall((None, "write"), '{"a": é'),)]


async def test_right_calls_of_a_round_leave_beside_wrong_ones(host: ProgramHost) -> None:
    code = "await asyncio.gather(add(1), add('x'), add(2), return_exceptions=True)"
    asked, outcome = await played(host, code)
    assert asked == [(add(1), add(2))]
    assert outcome.result == "[0, ToolError('add: a is no integer'), 1]\n"


async def test_long_result_is_an_error(host: ProgramHost) -> None:
    _, outcome = await played(host, "await add(1)", lambda _, call: PastCall(call, "a" * (LONGEST_RESULT + 1)))
    assert outcome.result.endswith("ToolError: The result is longer than 1,000,000 characters.\n")


async def test_output_is_that_of_all_steps(host: ProgramHost) -> None:
    code = "for n in range(3): print('before', n); await add(n)\nprint('a' * 99_999, 'end')\nNone"
    _, outcome = await played(host, code)
    assert outcome.result.startswith("before 0\nbefore 1\nbefore 2\naaa")
    assert "bytes are left out here" in outcome.result
    assert outcome.result.endswith("a end\n")


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("x = 20\nprint('a')\nx * 2 + 2", "a\n42\n"),
        ("for _ in range(3): pass", "(The program wrote nothing.)"),
        ("", "(The program wrote nothing.)"),
        ("import sys\nsys.stdout.close()\n1 / 0", "ZeroDivisionError: division by zero\n"),
        ("raise SystemExit(3)", "SystemExit: 3\n"),
        ("if:", "SyntaxError: invalid syntax\n"),
        ("async def main(): return await asyncio.to_thread(len, 'abc')\nasyncio.run(main())", "3\n"),
        ("async def main(): return 5\nasyncio.get_event_loop().run_until_complete(main())", "5\n"),
        (
            "async with asyncio.TaskGroup() as group: task = group.create_task(asyncio.sleep(0, 1))\ntask.result()",
            "1\n",
        ),
        (
            "await asyncio.get_running_loop().create_future()",
            "All tasks wait, and neither for a tool nor for a time.\n",
        ),
        ("await asyncio.wait_for(asyncio.Event().wait(), 0.01)", "TimeoutError\n"),
        ("import os; os.listdir('.')", "[]\n"),
    ],
)
async def test_what_a_program_writes_is_its_result(session: ProgramSession, code: str, result: str) -> None:
    outcome = await ended(session, code)
    assert outcome.error is None
    assert outcome.result.endswith(result)


async def test_timer_fires_only_if_no_call_waits(host: ProgramHost) -> None:
    asked, outcome = await played(host, "await asyncio.wait_for(add(1), 1e-9)")
    assert (len(asked), outcome.result) == (1, "0\n")


async def test_sleep_takes_its_time(session: ProgramSession) -> None:
    code = "import time\nbegan = time.monotonic()\nawait asyncio.sleep(0.2)\ntime.monotonic() - began >= 0.2"
    assert (await ended(session, code)).result == "True\n"


async def test_program_that_runs_again_does_not_sleep_again(session: ProgramSession) -> None:
    code = "for n in range(100):\n    await add(n)\n    if n < 99: await asyncio.sleep(3600)\n'done'"
    outcome = await ended(session, code, [numbered(n, add(n)) for n in range(100)])
    assert outcome == ToolResult("'done'\n")


async def test_more_calls_than_fit_wait_for_the_next_round(host: ProgramHost) -> None:
    asked, outcome = await played(host, "len(await asyncio.gather(*map(add, range(150))))")
    assert [len(each) for each in asked] == [MOST_AT_ONCE, MOST_AT_ONCE, 150 - 2 * MOST_AT_ONCE]
    assert outcome.result == "150\n"


async def test_long_arguments_wait_for_the_next_round(host: ProgramHost) -> None:
    code = "len(await asyncio.gather(*(notes.say(text='a' * 1_000_000) for _ in range(5))))"
    asked, outcome = await played(host, code)
    assert [len(each) for each in asked] == [3, 2]
    assert outcome.result == "5\n"


# Processes that are kept, and programs that run again


async def test_process_goes_on(host: ProgramHost) -> None:
    asked, outcome = await played(host, RANDOM)
    assert asked[0] == asked[1]
    assert outcome.result == "'done'\n"


async def test_program_that_asks_something_else_fails(host: ProgramHost) -> None:
    asked, outcome = await played(host, RANDOM, is_kept=False)
    assert len(asked) == 1
    assert outcome.error is not None
    assert outcome.error.startswith("The program cannot go on: its call 1 was notes.say(")
    assert not len(host.sleeping)


async def test_program_that_asks_less_fails(session: ProgramSession) -> None:
    outcome = await ended(session, "print('hi')", [numbered(0, add(1))])
    assert outcome.result == "hi\n"
    assert 'call 1 was add({"a": 1}), and when it ran again, it made no such call' in (outcome.error or "")


async def test_client_may_write_arguments_anew(session: ProgramSession) -> None:
    past = [PastCall(NestedCall((None, "add"), '{"b":2.0,"a":1}'), "7"), PastCall(NestedCall((None, "add"), ""), "8")]
    assert (await ended(session, "await add(1, 2) + await add(3)", past)).result == "15\n"


async def test_rest_of_a_round_is_asked_for(session: ProgramSession) -> None:
    first, second, third = await rounds(session, GATHERED)
    assert await rounds(session, GATHERED, [numbered(5, first)]) == (second, third)
    past = [numbered(5 + at, call) for at, call in enumerate((first, second, third))]
    assert (await ended(session, GATHERED, past)).result == "[5, 6, 7]\n"


async def test_other_past_is_not_that_of_the_process(session: ProgramSession) -> None:
    code = "await add(1), await add(2)"
    assert await rounds(session, code, [PastCall(add(1), "5")]) == (add(2),)
    outcome = await ended(session, code, [PastCall(add(1), "6"), PastCall(add(2), "7")])
    assert outcome.result == "(6, 7)\n"


@pytest.mark.parametrize("keeps", [True, False])
async def test_program_outlives_its_session_if_it_is_kept(host: ProgramHost, keeps: bool) -> None:
    first = host.session(request())
    (call,) = await rounds(first, RANDOM)
    if keeps:
        first.keep("call_p", ())
    await first.close()
    assert len(host.sleeping) == keeps
    outcome = await step(host.session(request()), RANDOM, [numbered(0, call)])
    assert isinstance(outcome, tuple) == keeps


async def test_only_a_kept_process_goes_on_without_a_result(host: ProgramHost) -> None:
    """An item of a search does not have all that it has found."""
    code = "print(await add(1), await add(2))"
    first = host.session(request())
    (call,) = await rounds(first, code)
    (second,) = await rounds(first, code, [numbered(0, call)])
    first.keep("call_p", ())
    await first.close()
    past = [PastCall(call, None), numbered(1, second)]
    assert await ended(host.session(request()), code, past) == ToolResult("0 1\n")
    outcome = await ended(host.session(request()), code, past)
    assert (outcome.error or "").endswith("the result of its call 1 is no longer known.")


async def test_program_is_that_of_its_owner_and_its_tools(host: ProgramHost) -> None:
    for other in (request("other"), request(tools=(ADD,))):
        first = host.session(request())
        code = "x = await add(1)\nawait add(2)"
        (call,) = await rounds(first, code)
        first.keep("call_p", ())
        second = host.session(other)
        assert await rounds(second, code, [numbered(0, call)]) == (add(2),)
        await first.close()
        await second.close()
        host.sleeping.drop(("", "call_p"))


async def test_kept_process_ends_after_its_time(program_sandbox: Sandbox) -> None:
    async with host_of(program_sandbox, ttl=0.05) as host:
        session = host.session(request())
        await rounds(session, "await add(1)")
        session.keep("call_p", ())
        async with asyncio.timeout(120):
            while len(host.sleeping):
                await asyncio.sleep(0.01)


async def test_processes_are_bounded_per_owner_and_in_all(program_sandbox: Sandbox) -> None:
    async with host_of(program_sandbox, slots=2) as host:

        async def waiting(owner: str, number: int) -> ProgramSession:
            session = host.session(request(owner))
            await step(session, "await add(1)", call_id=f"call_{number}")
            session.keep(f"call_{number}", ())
            return session

        for number in range(PER_SLOT * 2):
            await waiting("one", number)
        assert len(host.sleeping) == PER_SLOT
        await waiting("two", 0)
        assert len(host.sleeping) == PER_SLOT + 1
        for number in range(PER_SLOT * 2):
            await waiting("", number)
        assert len(host.sleeping) == PER_SLOT * 2
        assert host.sleeping.take(("one", "call_3")) is None


async def test_waiting_program_holds_no_place(program_sandbox: Sandbox) -> None:
    async with host_of(program_sandbox, slots=1) as host:
        await rounds(host.session(request()), "await add(1)")
        assert (await ended(host.session(request("other")), "1")).result == "1\n"


async def test_programs_are_counted_by_their_outcome(host: ProgramHost) -> None:
    def count(outcome: str) -> float:
        return REGISTRY.get_sample_value("penstock_programs_total", {"outcome": outcome}) or 0

    outcomes = ("completed", "timeout", "replayed", "diverged", "cancelled")
    before = [count(outcome) for outcome in outcomes]
    asleep = REGISTRY.get_sample_value("penstock_programs_sleeping") or 0
    await played(host, "await add(1)")
    await played(host, RANDOM, is_kept=False)
    session = host.session(request())
    (call,) = await rounds(session, endless := "await add(1)\nwhile True: pass")
    await ended(session, endless, [numbered(0, call)], seconds=0.2)
    await rounds(session, "await add(1)")
    assert REGISTRY.get_sample_value("penstock_programs_sleeping") == asleep + 1
    await session.close()
    assert REGISTRY.get_sample_value("penstock_programs_sleeping") == asleep
    assert [count(outcome) - was for outcome, was in zip(outcomes, before, strict=True)] == [1, 1, 1, 1, 0]
