"""The probe at the start of a server, on poorer machines as well."""

import asyncio
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import uvloop

from penstock.extensions.tools.sandbox import plan
from penstock.extensions.tools.sandbox.plan import Kind, Mode, Plan
from penstock.extensions.tools.sandbox.probe import NoSandbox, Sandbox, probe
from tests.support.processes import descendants
from tests.support.sandboxes import available, code_host, shell_host
from tests.support.scripted_tools import NO_CONVERSATION

pytestmark = pytest.mark.io

LANDLOCK, PRCTL = 444, {"x86_64": 157, "aarch64": 167}
CLONE, UNSHARE = {"x86_64": 56, "aarch64": 220}, {"x86_64": 272, "aarch64": 97}
MACHINE = os.uname().machine

PROBE = """
import asyncio, sys
from penstock.extensions.tools.sandbox.confined import LIBC, filter_calls
from penstock.extensions.tools.sandbox.probe import Sandbox, probe
LIBC.prctl(38, 1, 0, 0, 0)
filter_calls(bytes.fromhex(sys.argv[2]))
found = asyncio.run(probe(sys.argv[1]))
print(found.plan.mode if isinstance(found, Sandbox) else "none: " + found.reason)
"""

SERVE = """
import asyncio, sys
from penstock.extensions.tools.sandbox.probe import probe
from tests.support.sandboxes import code_host, shell_host
from tests.support.scripted_tools import NO_CONVERSATION

async def main(kind, mode, text):
    host = {"python": code_host, "container": shell_host}[kind](await probe(kind, modes=(mode,)))
    print(flush=True)
    await host.session(NO_CONVERSATION).run("", text, 60)
asyncio.run(main(*sys.argv[1:]))
"""


def filtered(*steps: tuple[int, int, int, int]) -> str:
    """A seccomp filter in hexadecimal: ``steps`` jump to its last two instructions, which allow or refuse."""
    code = [(0x20, 0, 0, 0), *steps, (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50001)]
    return b"".join(struct.pack("=HBBI", *step) for step in code).hex()


def without_landlock() -> str:
    return filtered((0x15, 1, 0, LANDLOCK))


def without_filters() -> str:
    """A filter under which no process can load a further filter."""
    return filtered((0x15, 0, 2, PRCTL[MACHINE]), (0x20, 0, 0, 16), (0x15, 1, 0, 22))


def without_namespaces() -> str:
    return filtered(
        (0x15, 3, 0, UNSHARE[MACHINE]), (0x15, 0, 2, CLONE[MACHINE]), (0x20, 0, 0, 16), (0x45, 1, 0, 0x7E020000)
    )


def probed(kind: Kind, refused: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, kind, refused], check=False, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("kind", ["python", "container"])
@pytest.mark.parametrize("refused", [without_landlock, without_filters])
def test_no_sandbox_without_landlock_or_filters(kind: Kind, refused: Callable[[], str]) -> None:
    assert probed(kind, refused()).startswith("none: ")


def test_refused_namespaces_select_the_other_mode() -> None:
    assert probed("python", without_namespaces()) == "landlock"
    assert probed("container", without_namespaces()).startswith("landlock" if os.geteuid() == 0 else "none: ")


async def test_no_sandbox_without_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = await probe("python", interpreter="/nowhere/bin/python3")
    assert isinstance(found, NoSandbox)
    assert "landlock with /nowhere/bin/python3" in found.reason
    assert not any(tmp_path.iterdir())  # noqa: ASYNC240 - it is empty


@pytest.fixture
def packages() -> Iterator[Path]:
    """A folder with the module `given`, readable by the user of a sandbox, and not below its /dev."""
    with TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        Path(folder, "given.py").write_text("value = 42")
        yield Path(folder)


async def test_packages_can_be_given(mode: Mode, packages: Path) -> None:
    host = code_host(await available("python", (mode,), packages=packages))
    session = host.session(NO_CONVERSATION)
    try:
        assert (await session.run("python", "import given; given.value", 120)).result == "42\n"
        received = (await session.run("python", "open(given.__file__, 'w')", 120)).result
        assert received.splitlines()[-1].startswith(("PermissionError", "OSError: [Errno 30]"))
    finally:
        await host.close()


def test_log_lists_active_protections() -> None:
    strong = Sandbox(Plan("python", "bubblewrap", "/usr/bin/python3", drops_user=True))
    assert strong.describe() == (
        "python: own files, network and processes (bubblewrap), Landlock, seccomp, limits, another user, "
        "/usr/bin/python3"
    )
    weak = Sandbox(Plan("container", "landlock", "/usr/bin/python3"))
    assert weak.describe() == (
        "container: no namespaces, no /mnt/data, Landlock, seccomp, limits, the server's user, /usr/bin/python3"
    )
    linked = Sandbox(replace(weak.plan, uses_link=True))
    assert linked.describe() == (
        "container: no namespaces, Landlock, seccomp, limits, the server's user, /usr/bin/python3"
    )


async def test_sandbox_works_without_the_drive_if_its_link_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine may have a disk of its own there, which no sandbox reads."""
    assert (await available("python", ("landlock",))).has_home
    monkeypatch.setattr(plan, "HOME", str(tmp_path))
    assert not (await available("python", ("landlock",))).has_home


def test_sandboxes_work_on_the_servers_event_loop(mode: Mode) -> None:

    async def main() -> None:
        python, container = await available("python", (mode,)), await available("container", (mode,))
        hosts = code_host(python), shell_host(container)
        code, shell = (host.session(NO_CONVERSATION) for host in hosts)
        assert (await code.run("python", "1 + 1", 120)).result == "2\n"
        late = await code.run("python", "while True: pass", 0.2)
        assert late.error is not None
        assert (await shell.run("exec", '{"cmd": ["echo", "a"]}', 120)).result == "a"
        await asyncio.gather(*(host.close() for host in hosts))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize(
    ("kind", "text"),
    [("python", "import time\ntime.sleep(53)"), ("container", '{"cmd": "setsid sleep 53 & sleep 53"}')],
)
def test_killed_server_leaves_no_process(mode: Mode, kind: Kind, text: str) -> None:
    asyncio.run(available(kind, (mode,)))
    others, command = descendants(1), [sys.executable, "-c", SERVE, kind, mode, text]
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": folder}) as server,
    ):
        Path(folder).chmod(0o755)  # as a sandbox may be another user's
        assert server.stdout is not None
        server.stdout.readline()
        wanted, until = 2 if kind == "container" else 1, time.monotonic() + 60
        while len(running := descendants(server.pid)) < wanted or not settled(running, kind):
            assert time.monotonic() < until
            time.sleep(0.02)
        server.send_signal(signal.SIGKILL)
        while running & descendants(1) - others:
            assert time.monotonic() < until
            time.sleep(0.01)


def settled(pids: set[int], kind: Kind) -> bool:
    """True if the sandbox has started its work.

    A server that is killed while bubblewrap divides in two may leave one of the two, which waits for the other.
    """
    commands = [command(pid) for pid in pids]
    if kind == "container":
        return commands.count(b"sleep\0" + b"53\0") == 2
    return any(b"def take_control" in text and not text.startswith(b"bwrap") for text in commands)


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
