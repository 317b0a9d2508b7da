import asyncio
import contextlib
import json
import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.extensions.tools.sandbox.container import ContainerSession
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.pipeline.frames import ShellOutput
from penstock.pipeline.hosted_kinds import kinds
from penstock.services.tools import ToolResult
from penstock.testing import ExampleCalls, check_host
from tests.support.sandboxes import shell_host
from tests.support.scripted_tools import NO_CONVERSATION

pytestmark = pytest.mark.io

EXEC = kinds()["container"].tools[0].name

SET_ATTRIBUTE = 'python3 -c \'import os, sys; os.setxattr(sys.argv[1], "user.a", b"b")\''

SLEEP = f"470.{os.getpid()}"
"""Seconds to sleep; the number identifies the sleeping processes of this test run."""


def outputs_of(outcome: ToolResult) -> tuple[dict[str, Any], ...]:
    assert isinstance(outcome.data, ShellOutput)
    return outcome.data.outputs


async def shell(container: ContainerSession, script: str, seconds: float = 120, **more: object) -> ToolResult:
    arguments = {"cmd": ["bash", "-lc", script], **more}
    return await container.run(EXEC, json.dumps(arguments), seconds)


async def exit_code(container: ContainerSession, script: str) -> int:
    outcome = await shell(container, script)
    assert outcome.error is None, outcome
    ended = outputs_of(outcome)[0]["outcome"]
    assert ended["type"] == "exit"
    return int(ended["exit_code"])


async def test_host_keeps_all_rules(container_sandbox: Sandbox) -> None:
    quick, slow = '{"cmd": ["true"]}', f'{{"cmd": ["sleep", "{SLEEP}"]}}'
    await check_host(shell_host(container_sandbox), ExampleCalls((EXEC, quick), (EXEC, '{"cmd": 1}'), (EXEC, slow)))


async def test_command_returns_output_and_exit_code(container: ContainerSession) -> None:
    outcome = await shell(container, "echo out; echo err >&2; exit 3")
    assert outcome == ToolResult(
        result="out\nerr\n(exit code 3)",
        data=ShellOutput(({"stdout": "out\n", "stderr": "err\n", "outcome": {"type": "exit", "exit_code": 3}},)),
    )
    assert (await shell(container, "true")).result == "(The command wrote nothing.)"


async def test_files_stay_between_calls(container: ContainerSession) -> None:
    await shell(container, "mkdir -p a && echo kept > a/b && chmod 700 a")
    assert (await shell(container, "cat b", workdir="a")).result == "kept"


async def test_commands_run_in_sequence(container: ContainerSession) -> None:
    outcome = await container.run(
        EXEC, json.dumps({"commands": ["exit 1", "seq 3 | wc -l", "echo $HOME | wc -c"]}), 120
    )
    assert [output["outcome"]["exit_code"] for output in outputs_of(outcome)] == [1, 0, 0]
    assert outputs_of(outcome)[1]["stdout"] == "3\n"


async def test_variables_and_words_are_passed_unchanged(container: ContainerSession) -> None:
    outcome = await container.run(EXEC, json.dumps({"cmd": ["printenv", "A"], "env": {"A": "$B *"}}), 120)
    assert outcome.result == "$B *"
    assert "No such file" in (await container.run(EXEC, '{"cmd": ["nowhere"]}', 120)).result
    assert "No such file" in (await shell(container, "true", workdir="/nowhere")).result


async def test_wrong_arguments_are_explained_to_the_model(container: ContainerSession) -> None:
    outcome = await container.run(EXEC, '{"cmd": 1}', 120)
    assert (outcome.error or "").startswith("The arguments do not have the form that the tool takes")
    assert container.action(EXEC, '{"cmd": ["bash", "-lc", "ls"]}') == {"commands": ["ls"]}


@pytest.mark.parametrize("more", [{}, {"timeout": 500}])
async def test_slow_command_is_killed(container: ContainerSession, more: dict[str, int]) -> None:
    await shell(container, "echo a > f")
    arguments = {"commands": ["sleep 60", "echo b"], **more}
    outcome = await container.run(EXEC, json.dumps(arguments), 60 if more else 0.5)
    assert outcome.error is None
    assert [output["outcome"] for output in outputs_of(outcome)] == [{"type": "timeout"}]
    assert "took too long" in outcome.result
    assert (await shell(container, "cat f")).result == "a"


async def test_processes_of_a_command_end_with_it(container: ContainerSession) -> None:
    nap = f"sleep {SLEEP}"
    hide = f"setsid {nap} & (setsid bash -c '{nap} & disown' &) ; nohup {nap} >/dev/null 2>&1 & sleep 0.1; echo x"
    before = sleepers()
    async with asyncio.timeout(120):
        assert (await shell(container, hide)).result == "x"
    assert sleepers() == before


async def test_fork_bomb_is_stopped(container: ContainerSession) -> None:
    await shell(container, "true")
    outcome = await shell(container, "f() { f | f & f; }; f", 0.5)
    assert outcome.error is None, outcome
    assert (await shell(container, "echo well")).result == "well"


async def test_first_process_cannot_be_killed_from_inside(container: ContainerSession) -> None:
    await shell(container, "echo a > f")
    await shell(container, "kill -9 -1; kill -9 $PPID; kill -9 1; kill -STOP $PPID")
    assert (await shell(container, "cat f")).result == "a"


async def test_network_and_host_are_unreachable(container: ContainerSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert await exit_code(container, f"echo x > /dev/tcp/127.0.0.1/{port}") != 0
    for script in (
        "cat /etc/passwd",
        "cat /etc/shadow",
        "ls /root",
        "ls /home",
        f"kill -0 {os.getpid()}",
        "echo x > /usr/bin/here",
        "echo x > /dev/shm/here",
        "echo x > /here",
        "unshare -U true",
        "mount -t tmpfs none .",
        "python3 -c 'import socket; socket.socket()'",
        "su -c true",
    ):
        assert await exit_code(container, script) != 0, script


async def test_server_variables_are_not_inherited(container: ContainerSession) -> None:
    names = {line.partition("=")[0] for line in (await shell(container, "env")).result.splitlines()}
    expected = {
        "PATH",
        "HOME",
        "TMPDIR",
        "LANG",
        "LC_CTYPE",
        "MPLBACKEND",
        "OPENBLAS_NUM_THREADS",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
    }
    assert names <= expected


async def test_metadata_of_others_cannot_be_changed(container_sandbox: Sandbox, container: ContainerSession) -> None:
    """The mode and times of a file are not restricted by Landlock: only its owner's user id protects them."""
    host = shell_host(container_sandbox)
    other = host.session(NO_CONVERSATION)
    with tempfile.TemporaryDirectory() as folder:
        daemons = Path(folder) / "file of a daemon"
        daemons.touch(mode=0o600)
        os.chmod(folder, 0o777)  # noqa: PTH101
        if os.geteuid() == 0:
            os.chown(daemons, 65534, 65534)
        try:
            place = (await shell(other, "touch secret; chmod 600 secret; pwd")).result
            assert not await exit_code(container, f"touch own; chmod 666 own; {SET_ATTRIBUTE} own")
            for path in (f"{place}/secret", str(daemons)):
                for command in ("chmod 666", "touch -d 1970-01-01", SET_ATTRIBUTE):
                    if place != "/mnt/data" or path != f"{place}/secret":
                        assert await exit_code(container, f"{command} '{path}'"), (command, path)
            assert (await shell(other, "stat -c %a secret")).result == "600"
            assert daemons.stat().st_mode & 0o777 == 0o600
            assert daemons.stat().st_mtime > 0
        finally:
            await other.close()
            await host.close()


async def test_deleted_files_of_all_commands_count(small_container: ContainerSession) -> None:
    full = "head -c 1000000 /dev/zero >&5 || rm -f held"
    hold = f"exec 5>f$i; rm f$i; {full}; while [ -e held ]; do sleep 0.1; done"
    outcome = await shell(small_container, f"touch held; for i in $(seq 20); do ({hold}) & done; wait", 60)
    assert "No space left" in outcome.result or "MB of files" in (outcome.error or ""), outcome


async def test_process_that_has_ended_but_is_not_reaped_holds_no_files(container: ContainerSession) -> None:
    outcome = await shell(container, "sh -c 'true & exec sleep 2'; echo done")
    assert "done" in outcome.result, outcome


async def test_folder_without_rights_does_not_end_the_sandbox(container: ContainerSession) -> None:
    outcome = await shell(container, "mkdir -m 000 closed; sleep 1; rmdir closed; echo done")
    assert outcome.result == "done", outcome


async def test_files_of_a_thread_that_outlives_the_first_one_count(small_container: ContainerSession) -> None:
    code = (
        "import ctypes, os, threading, time\n"
        "def hold():\n"
        "    kept = []\n"
        "    for _ in range(20):\n"
        '        file = open("a", "wb"); os.unlink("a"); file.write(bytes(1 << 20)); file.flush(); kept.append(file)\n'
        "    time.sleep(8)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=hold).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    outcome = await shell(small_container, f"exec python3 -c '{code}'", 60)
    assert "No space left" in outcome.result or "MB of files" in (outcome.error or ""), outcome


async def test_endless_output_ends_the_command(container_sandbox: Sandbox) -> None:
    limits = replace(container_sandbox.plan.limits, flood=2 << 20)
    host = shell_host(Sandbox(replace(container_sandbox.plan, limits=limits)))
    session = host.session(NO_CONVERSATION)
    try:
        outcome = await shell(session, "echo a > f; yes")
        assert outcome.result.startswith("y\ny\n")
        assert "bytes are left out here" in outcome.result
        assert "it wrote without end" in outcome.result
        assert len(outcome.result) < 70_000
        assert (await shell(session, "cat f")).result == "a"
    finally:
        await host.close()


async def test_model_can_lower_the_output_limit(container: ContainerSession) -> None:
    outcome = await shell(container, "seq 1000", max_output_length=20)
    assert outputs_of(outcome)[0]["stdout"].startswith("1\n2\n3\n4\n5\n\n[... 3873 bytes are left out here ...]\n")


async def test_cancelling_and_closing_end_all_processes(container: ContainerSession) -> None:
    await shell(container, "true")
    before = sleepers()
    running = asyncio.create_task(shell(container, f"setsid sleep {SLEEP} & sleep {SLEEP}", 600))
    while len(sleepers()) < len(before) + 2:
        await asyncio.sleep(0.01)
    running.cancel()
    async with asyncio.timeout(120):
        with pytest.raises(asyncio.CancelledError):
            await running
        while sleepers() != before:
            await asyncio.sleep(0.005)
    await container.close()
    assert (await shell(container, "true")).error is not None


def sleepers() -> set[str]:
    """The process ids of the ``sleep`` commands that these tests have started."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes() == f"sleep\0{SLEEP}\0".encode():
                found.add(folder.name)
    return found
