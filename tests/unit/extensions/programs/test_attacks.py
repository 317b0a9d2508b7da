"""Programs that harm the server, or try: each has one clear result, and nothing is left behind."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from penstock.extensions.programs import running
from penstock.extensions.programs.host import ProgramHost
from penstock.extensions.tools.sandbox.folder import Folder
from penstock.extensions.tools.sandbox.live_containers import new_folder
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.services.tools import NestedCall, PastCall, ToolResult
from tests.support.processes import descendants
from tests.support.programs import ended, host_of, numbered, played, request, rounds, step

pytestmark = pytest.mark.io

WRITE_TO_CHANNEL = """
import os
def put(line):
    text = memoryview(line + b"\\n")
    while text: text = text[os.write(3, text):]
"""
FIND_CALLS = "import gc, sys\ncalls = next(each for each in gc.get_objects() if type(each).__name__ == 'Calls')\n"
BROKEN = "it ended itself, used up its processor time, or broke the channel to the server"


@pytest.fixture(autouse=True)
async def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """After a test, and the end of its host, no process and no folder is left."""
    before, folders = descendants(os.getpid()), list[Path]()

    async def recorded() -> Folder:
        folders.append((made := await new_folder()).path)
        return made

    monkeypatch.setattr("penstock.extensions.programs.host.new_folder", recorded)
    yield
    assert folders
    assert not [path for path in folders if path.exists()]
    assert descendants(os.getpid()) <= before


@pytest.fixture
async def host(program_sandbox: Sandbox, leaves_nothing: None) -> AsyncIterator[ProgramHost]:
    limits = replace(program_sandbox.plan.limits, disk=4 << 20, flood=4 << 20)
    async with host_of(Sandbox(replace(program_sandbox.plan, limits=limits))) as opened:
        yield opened


def killed(reason: str) -> float:
    return REGISTRY.get_sample_value("penstock_sandboxes_killed_total", {"reason": reason}) or 0


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(600)",
        "await asyncio.sleep(600)",
        "while True:\n    try: await asyncio.sleep(0)\n    except BaseException: pass",
        "while True:\n    try: await add('wrong')\n    except ToolError: await asyncio.sleep(1)",
    ],
)
async def test_program_ends_after_its_time(host: ProgramHost, code: str) -> None:
    before = killed("timeout")
    whole, session = f"print('begun')\nawait add(1)\n{code}", host.session(request())
    (call,) = await rounds(session, whole)  # so that the start does not count
    outcome = await ended(session, whole, [numbered(0, call)], seconds=3)
    assert outcome.error == "The program ran longer than 3 seconds, and was ended."
    assert outcome.result == "begun\n"
    assert killed("timeout") == before + 1


async def test_time_is_that_of_all_steps(host: ProgramHost) -> None:
    code, session = "import time; time.sleep(1)\nawait add(1)\n'done'", host.session(request())
    (call,) = await rounds(session, code)
    outcome = await ended(session, code, [numbered(0, call)], seconds=1)
    assert outcome.error == "The program ran longer than 1 seconds, and was ended."


async def test_flood_of_calls_ends(host: ProgramHost) -> None:
    for code in (
        "await asyncio.gather(*map(add, range(1_100)))",
        "await asyncio.gather(*(add('wrong') for _ in range(1_100)), return_exceptions=True)",
    ):
        asked, outcome = await played(host, code)
        assert outcome.error == "The program made more than 1,000 calls, and was ended."
        assert sum(map(len, asked)) < 1_000


@pytest.mark.parametrize(("argument", "result"), [(1_000_000, 1), (1, 1_000_000), (500_000, 500_000)])
async def test_flood_of_texts_ends(
    host: ProgramHost, argument: int, result: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps a bounded part of the calls of a program, however few of them there are."""
    monkeypatch.setattr(running, "LONGEST_CALLS", 3_000_000)
    code = f"while True: await write('a' * {argument})"
    asked, outcome = await played(host, code, lambda _, call: PastCall(call, "r" * result))
    assert outcome.error == (
        "The program was ended. The arguments and results of its calls have more than 3,000,000 characters."
    )
    assert 0 < len(asked) <= 3


async def test_endless_output_ends(host: ProgramHost) -> None:
    """The output of all steps counts."""
    once = "print('a' * (3 << 20))"
    _, outcome = await played(host, f"{once}\nawait add(1)\n{once}\nwhile True: await add(2)")
    assert outcome.error == "The sandbox has ended (it wrote more than 4 MB of output)."
    assert outcome.result.startswith("aaa")


async def test_full_disk_ends(host: ProgramHost) -> None:
    code = "for n in range(40): open(str(n), 'wb').write(bytes(1 << 20))\nawait asyncio.sleep(60)"
    outcome = await ended(host.session(request()), code)
    assert "No space left" in outcome.result or "MB of files" in (outcome.error or "")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run('true')",
        "import socket; socket.create_server(('', 0))",
    ],
)
async def test_program_starts_no_process_and_has_no_network(host: ProgramHost, code: str) -> None:
    outcome = await ended(host.session(request()), code)
    assert outcome.error is None
    assert outcome.result.splitlines()[-1].startswith(("PermissionError", "BlockingIOError"))


@pytest.mark.parametrize(
    "code",
    [
        *(
            f"{WRITE_TO_CHANNEL}put({line})\nwhile True: pass"
            for line in (
                "b'garbage'",
                "b'[]'",
                "b'{}\\n{}'",
                "b'[' * 100_000",
                "b'{\"number\": 2, \"calls\": [' + b'[[[]]],' * 500_000 + b'[]]}'",
                "b'x' * (5 << 20)",
            )
        ),
        "import os; os._exit(0)",
        "import os; os.closerange(3, 100)",
    ],
    ids=["garbage", "no object", "two lines", "too deep", "too many values", "too long", "exit", "closed"],
)
async def test_broken_channel_ends_the_program(host: ProgramHost, code: str) -> None:
    before = killed("died")
    outcome = await ended(host.session(request()), code)
    assert outcome.error == f"The sandbox has ended ({BROKEN})."
    assert killed("died") == before + 1


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("[]", "it broke the channel to the server"),
        ("5", "it broke the channel to the server"),
        ("[['add', '{\"a\": 1}']] * 65", "it broke the channel to the server"),
        ("[['secret', '{}']]", "it called a function that it does not have"),
        ("[['add']]", "it called a function that it does not have"),
        ("[['add', {'a': 1}]]", "it called a function that it does not have"),
        ("[[['add'], '{}']]", "it called a function that it does not have"),
    ],
)
async def test_forged_round_ends_the_program(host: ProgramHost, calls: str, reason: str) -> None:
    code = f"{FIND_CALLS}calls._ask(calls={calls})"
    outcome = await ended(host.session(request()), code)
    assert outcome.error == f"The sandbox has ended ({reason})."


async def test_forged_arguments_are_checked(host: ProgramHost) -> None:
    """They do not leave, whatever the program has done to its side of the check."""
    bomb = "'[' * 200_000"
    forged = f"[['add', '{{\"a\": \"x\"}}'], ['add', {bomb}], ['add', '[' + '[],' * 300_000 + '[]]']]"
    outcome = await ended(host.session(request()), f"{FIND_CALLS}calls._ask(calls={forged})['outcomes']")
    assert outcome.result.count("None") == 3
    for problem in ("a is no integer", "the arguments have too many values"):
        assert problem in outcome.result


@pytest.mark.parametrize(
    "code",
    [
        "asyncio.get_running_loop().calls = None\nawait add(1)",
        "type(asyncio.get_running_loop()).select = lambda self, timeout: []\nawait add(1)",
        "asyncio.set_event_loop_policy(None)\nasync def main(): await add(1)\nasyncio.run(main())",
        f"{FIND_CALLS}calls.exchange = lambda: True\nawait add(1)",
        f"{FIND_CALLS}calls._number = 0\nawait add(1)",
        "import builtins\nbuiltins.print = builtins.len = None\nimport sys\nsys.modules.clear()\nawait add(1)",
        "import json\njson.dumps = json.loads = None\nawait add(1)",
    ],
)
async def test_changed_runtime_harms_the_program_alone(host: ProgramHost, code: str) -> None:
    session = host.session(request())
    outcome = await step(session, code, seconds=5)
    if isinstance(outcome, ToolResult):
        assert "Error" in outcome.result or outcome.error
    else:
        assert outcome == (NestedCall((None, "add"), '{"a": 1}'),)
    await session.close()
    assert (await ended(host.session(request()), "1 + 1")).result == "2\n"


async def test_threads_stop_while_the_program_waits(host: ProgramHost) -> None:
    code = (
        "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()\n"
        "await add(1)"
    )
    session = host.session(request())
    await rounds(session, code)
    (program,) = (sleeper.program for sleeper in host.sleeping._sleepers.values())
    first = program._process._outer.pid
    (pid,) = {one for one in {first, *descendants(first)} if not descendants(one)}
    async with asyncio.timeout(120):
        while state_of(pid) != "T":
            await asyncio.sleep(0.01)
    assert (await ended(session, code, [numbered(0, NestedCall((None, "add"), '{"a": 1}'))])).result == "0\n"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_program_that_dies_while_it_waits_runs_again(host: ProgramHost) -> None:
    session = host.session(request())
    (call,) = await rounds(session, "await add(1)")
    (program,) = (sleeper.program for sleeper in host.sleeping._sleepers.values())
    program.kill()
    assert (await ended(session, "await add(1)", [numbered(7, call)])).result == "7\n"


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.5])
async def test_cancelled_step_ends_the_program(host: ProgramHost, seconds: float) -> None:
    """At its start, and while it runs."""
    running = asyncio.create_task(step(host.session(request()), "while True: pass"))
    await asyncio.sleep(seconds)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not len(host.sleeping)
    await ended(host.session(request()), "1")  # a folder was made


async def test_closed_session_ends_the_program_that_runs(host: ProgramHost) -> None:
    session = host.session(request())
    running = asyncio.create_task(step(session, "while True: pass"))
    async with asyncio.timeout(120):
        while not session._running:
            await asyncio.sleep(0.01)
    await asyncio.gather(session.close(), session.close())
    outcome = await running
    assert isinstance(outcome, ToolResult)
    assert (outcome.error or "").startswith("The sandbox has ended")
    assert (await ended(session, "1")).error == "The sandbox has ended (the response has ended)."


async def test_results_that_are_bombs_harm_the_program_alone(host: ProgramHost) -> None:
    bomb = "[" * 500_000 + "]" * 500_000
    _, outcome = await played(host, "len(await add(1))", lambda _, call: PastCall(call, bomb))
    assert outcome.result == "1000000\n"
    _, outcome = await played(host, "len(await add(1))", lambda _, call: PastCall(call, "[" + "[]," * 300_000 + "[]]"))
    assert outcome.result == "300001\n"
