import asyncio
from dataclasses import replace

import pytest

from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.extensions.tools.sandbox.python import PythonSession
from penstock.pipeline.frames import CodeOutputs
from penstock.services.slots import Slots
from penstock.testing import ExampleCalls, check_host
from tests.support.sandboxes import code_host
from tests.support.scripted_tools import NO_CONVERSATION, RunCell, another_conversation

pytestmark = pytest.mark.io

SLOW = "import time; time.sleep(60)"


async def test_host_keeps_all_rules(python_sandbox: Sandbox) -> None:
    calls = ExampleCalls(("python", "1 + 1"), ("python", "1 / 0"), ("python", SLOW))
    await check_host(code_host(python_sandbox), calls)


async def test_value_of_the_last_expression_is_shown(run: RunCell) -> None:
    """As in a notebook, None is not shown."""
    assert await run("x = 20\nprint('a')\nx * 2 + 2") == "a\n42\n"
    assert await run("None") == "(The code wrote nothing.)"
    assert await run("") == "(The code wrote nothing.)"


async def test_variables_modules_and_files_stay(run: RunCell) -> None:
    await run("import math\ndef f(): return math.pi\nwith open('a.txt', 'w') as file: file.write('kept')")
    assert await run("print(f()); open('a.txt').read()") == "3.141592653589793\n'kept'\n"


async def test_traceback_has_no_frames_of_the_server(run: RunCell) -> None:
    assert await run("x = 1\ndef f():\n    return 1 / 0\nf()") == (
        "Traceback (most recent call last):\n"
        '  File "<cell 2>", line 4, in <module>\n    f()\n'
        '  File "<cell 2>", line 3, in f\n    return 1 / 0\n           ~~^~~\n'
        "ZeroDivisionError: division by zero\n"
    )
    assert await run("x") == "1\n"
    assert (await run("if:")).endswith("SyntaxError: invalid syntax\n")
    assert "SystemExit: 3" in await run("raise SystemExit(3)")
    assert await run("class E(Exception):\n    def __str__(self): raise ValueError\nraise E") != ""
    assert await run("x") == "1\n"


async def test_code_may_await(run: RunCell) -> None:
    assert await run("import asyncio\nawait asyncio.sleep(0, 'slept')") == "'slept'\n"


async def test_input_is_empty(run: RunCell) -> None:
    assert (await run("input()")).endswith("EOFError: EOF when reading a line\n")


async def test_outcome_has_the_logs(python: PythonSession) -> None:
    outcome = await python.run("python", "print('é')", 120)
    assert outcome.data == CodeOutputs(({"type": "logs", "logs": "é\n"},))
    assert outcome.result == "é\n"
    assert (await python.run("python", "x = 1", 120)).data is None


async def test_closed_standard_output_is_reopened(run: RunCell) -> None:
    await run("import sys; sys.stdout.close()")
    assert await run("1") == "1\n"


async def test_long_output_is_cut_in_the_middle(run: RunCell) -> None:
    received = await run("print('a' * 1_000_000, 'end')")
    assert len(received) < 65_000
    assert received.startswith("aaa")
    assert "bytes are left out here" in received
    assert received.endswith("a end\n")


async def test_endless_output_ends_the_sandbox(small: PythonSession) -> None:
    outcome = await small.run("python", "x = 1\nwhile True: print('a' * 100_000)", 120)
    assert outcome.error == ("The sandbox has ended (it wrote more than 4 MB of output). All variables are lost.")
    assert outcome.result.startswith("aaaa")
    assert "NameError" in (await small.run("python", "x", 120)).result


async def test_endless_loop_is_interrupted_and_variables_stay(
    python: PythonSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.extensions.tools.sandbox.python._INTERRUPTS", 50)  # a busy machine begins late
    assert (await python.run("python", "x = 5", 120)).error is None
    outcome = await python.run("python", "while True: x += 0", 1)
    assert outcome.error == "The code ran longer than 1 seconds and was interrupted. Variables and files are kept."
    assert outcome.result.endswith("KeyboardInterrupt\n")
    assert (await python.run("python", "import time; time.sleep(600)", 0.2)).result.endswith("KeyboardInterrupt\n")
    assert (await python.run("python", "x", 120)).result == "5\n"


@pytest.mark.parametrize(
    "code",
    ["sum(range(10**12))", "import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass"],
    ids=["in C", "catches all"],
)
async def test_code_that_ignores_the_interrupt_is_killed(
    python: PythonSession, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.extensions.tools.sandbox.python._INTERRUPT_SECONDS", 0.2)
    async with asyncio.timeout(120):
        outcome = await python.run("python", f"y = 1\n{code}", 2)  # on a busy machine it begins late
    assert outcome.error == "The code ran longer than 2 seconds and was killed. All variables are lost."
    assert "NameError" in (await python.run("python", "y", 120)).result


async def test_processor_time_is_limited(python_sandbox: Sandbox) -> None:
    limits = replace(python_sandbox.plan.limits, processor_seconds=1)
    host = code_host(Sandbox(replace(python_sandbox.plan, limits=limits)))
    session = host.session(NO_CONVERSATION)
    try:
        outcome = await session.run("python", "while True: pass", 120)
        assert "used up its processor time" in (outcome.error or "")
    finally:
        await host.close()


async def test_sandboxes_share_nothing(python_sandbox: Sandbox) -> None:
    host = code_host(python_sandbox)
    one, other = host.session(NO_CONVERSATION), host.session(another_conversation())
    try:
        first = await one.run("python", "x = 1\nopen('here', 'w').write('a')\nimport os; os.getcwd()", 120)
        place = first.result.strip()
        code = f"import os\nprint('x' in globals(), os.path.exists('here'))\nprint(open({place} + '/here').read())"
        second = (await other.run("python", code, 120)).result
        assert second.startswith("False False\n")
        assert second.splitlines()[-1].startswith(("PermissionError", "FileNotFoundError"))
    finally:
        await host.close()


async def test_calls_of_one_response_run_in_sequence(python: PythonSession) -> None:
    codes = [f"import time; time.sleep(0.05); print({number})" for number in range(4)]
    outcomes = await asyncio.gather(*(python.run("python", code, 120) for code in codes))
    assert [outcome.result for outcome in outcomes] == ["0\n", "1\n", "2\n", "3\n"]


async def test_calls_beyond_the_limit_wait(python_sandbox: Sandbox) -> None:
    host = code_host(python_sandbox, Slots(1))
    one, other = host.session(NO_CONVERSATION), host.session(another_conversation())
    assert (await one.run("python", "1", 120)).result == "1\n"
    assert (await other.run("python", "1", 120)).result == "1\n"  # an idle container holds no slot
    running = asyncio.create_task(one.run("python", "import time; time.sleep(60)", 600))
    await asyncio.sleep(0.1)
    outcome = await other.run("python", "2", 0.05)
    assert "no sandbox was free in time" in (outcome.error or "")
    waiting = asyncio.create_task(other.run("python", "2", 120))
    await asyncio.sleep(0)
    await one.close()
    assert "has ended" in ((await running).error or "")
    assert (await waiting).result == "2\n"
    await other.close()
    await host.close()
