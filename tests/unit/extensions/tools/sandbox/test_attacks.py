"""Code that tries to leave the sandbox, in each mode that works here."""

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.extensions.tools.sandbox.container import ContainerSession
from penstock.extensions.tools.sandbox.plan import DESCRIPTOR
from penstock.extensions.tools.sandbox.process import Process
from penstock.extensions.tools.sandbox.python import PythonSession
from tests.support.processes import descendants
from tests.support.scripted_tools import RunCell

pytestmark = pytest.mark.io

REFUSED = ("PermissionError", "FileNotFoundError", "OSError: [Errno 30]", "OSError: [Errno 18]")
"""The errors of a refused access: no permission, no such file, a read-only disk (30), another disk (18)."""


def last(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file of the host that every user may read and write."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        path = Path(folder) / "secret"
        path.write_text("host's secret")
        path.chmod(0o666)
        yield path


def process_of(session: PythonSession | ContainerSession) -> Process:
    (container,) = session._lease._containers._live.values()
    (process,) = container.processes.values()
    return process


def untouched(secret: Path) -> None:
    assert secret.read_text() == "host's secret"
    assert secret.stat().st_mode & 0o777 == 0o666
    assert list(secret.parent.iterdir()) == [secret]
    assert not Path("/dev/shm/here").exists()


@pytest.fixture
def bystander(python: PythonSession) -> Iterator[int]:
    """A process of the host with the sandbox's own user."""
    user = process_of(python)._folder.user
    with subprocess.Popen(["sleep", "60"], user=user.id if user else None) as process:
        yield process.pid
        process.kill()


async def test_network_is_unreachable(run: RunCell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}))"
        assert last(await run(code)).startswith("PermissionError")
        for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
            output = await run(f"socket.socket(socket.{family}, socket.SOCK_DGRAM)")
            assert last(output).startswith("PermissionError"), family


async def test_host_sockets_are_unreachable(run: RunCell, secret: Path) -> None:
    path = str(secret.parent / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        os.chmod(path, 0o777)  # noqa: PTH101
        server.setblocking(False)
        output = await run(
            "import socket\n"
            "for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):\n"
            "    try:\n"
            "        one, other = socket.socketpair(socket.AF_UNIX, kind)\n"
            f"        one.sendto(b'x', {path!r})\n"
            "    except OSError as exc: print(type(exc).__name__)\n"
        )
        assert output == "OSError\nPermissionError\n"
        with pytest.raises(BlockingIOError):
            server.recv(10)


async def test_host_files_cannot_be_read(run: RunCell, secret: Path) -> None:
    for path in ("/etc/passwd", "/etc/hostname", str(secret), "/proc/1/environ", "/proc/self/environ", str(Path.cwd())):
        output = await run(f"import os\nopen({path!r}).read() if not os.path.isdir({path!r}) else os.listdir({path!r})")
        assert last(output).startswith(REFUSED), (path, output)
    for folder in ("/root", "/usr/bin"):
        assert last(await run(f"import os; os.listdir({folder!r})")).startswith(REFUSED)


async def test_host_files_cannot_be_changed(run: RunCell, secret: Path) -> None:
    path = str(secret)
    attempts = (
        f"open({path!r}, 'w')",
        f"open({path + '2'!r}, 'w')",
        f"os.truncate({path!r}, 0)",
        f"os.unlink({path!r})",
        f"os.rename({path!r}, {path + '2'!r})",
        f"os.link({path!r}, 'mine')",
        f"os.chmod({path!r}, 0)",
        f"os.utime({path!r})",
        f"os.mkdir({path + '2'!r})",
        "open('/usr/lib/here', 'w')",
        "open('/dev/shm/here', 'w')",
        "open('/here', 'w')",
    )
    for attempt in attempts:
        output = await run(f"import os\n{attempt}")
        assert last(output).startswith(REFUSED), (attempt, output)
    untouched(secret)


async def test_symlink_leads_nowhere(run: RunCell, secret: Path) -> None:
    output = await run(f"import os\nos.symlink({str(secret)!r}, 'link')\nopen('link').read()")
    assert last(output).startswith(REFUSED)


async def test_server_variables_are_not_inherited(run: RunCell) -> None:
    names = set(eval((await run("import os; sorted(os.environ)")).strip()))
    assert names <= {"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "MPLBACKEND", "OPENBLAS_NUM_THREADS", "PWD"}


async def test_server_files_are_not_inherited(run: RunCell, python: PythonSession) -> None:
    output = await run(
        "import os\n"
        "def there(number):\n"
        "    try: os.fstat(number)\n"
        "    except OSError: return False\n"
        "    return True\n"
        "[number for number in range(128) if there(number)]"
    )
    own_folder = [DESCRIPTOR] if process_of(python)._plan.uses_link else []
    assert output == f"{[0, 1, 2, 3, *own_folder]}\n"


async def test_other_processes_cannot_be_signalled_or_found(run: RunCell, bystander: int) -> None:
    for attempt in (
        f"os.kill({bystander}, 9)",
        f"os.kill({os.getpid()}, 0)",
        "os.kill(-1, 9)",
        f"os.killpg({bystander}, 9)",
        f"os.pidfd_open({bystander})",
        f"resource.prlimit({bystander}, resource.RLIMIT_CPU, (0, 0))",
        f"os.setpriority(os.PRIO_PROCESS, {bystander}, 19)",
        f"os.sched_setaffinity({bystander}, [0])",
        f"os.getpgid({bystander})",
        f"os.getsid({bystander})",
        f"os.getpriority(os.PRIO_PROCESS, {bystander})",
        f"os.sched_getaffinity({bystander})",
        f"os.sched_getscheduler({bystander})",
        f"os.sched_getparam({bystander})",
        "import fcntl; fcntl.flock(open(os.__file__), fcntl.LOCK_EX)",
    ):
        output = await run(f"import os, resource\n{attempt}")
        assert last(output).startswith("PermissionError"), (attempt, output)
    os.kill(bystander, 0)


async def test_process_cannot_be_started(run: RunCell) -> None:
    attempts = (
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess; subprocess.run(['/bin/true'])",
        "if os.system('true') != 0: raise PermissionError",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
    )
    for attempt in attempts:
        output = await run(f"import os\n{attempt}")
        assert last(output).startswith(("PermissionError", "BlockingIOError")), (attempt, output)


async def test_raw_system_calls_are_refused(run: RunCell) -> None:
    # ptrace, mount, unshare, bpf, io_uring_setup, setns and chroot
    x86_64, arm64 = [101, 165, 272, 321, 425, 308, 161], [117, 40, 97, 280, 425, 268, 51]
    numbers = x86_64 if os.uname().machine == "x86_64" else arm64
    output = await run(
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"for number in {numbers}:\n"
        "    print(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())\n"
        "print(libc.syscall(700), ctypes.get_errno())\n"
        "print(libc.prctl(22, 0, 0, 0, 0), libc.setuid(0))"
    )
    assert output == "-1 1\n" * len(numbers) + "-1 38\n" + "-1 -1\n"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="only the kernel of x86-64 has the calls of x32")
async def test_foreign_architecture_call_kills(python: PythonSession) -> None:
    outcome = await python.run("python", "import ctypes\nctypes.CDLL(None).syscall(0x40000000 | 41, 2, 1, 0)", 120)
    assert "has ended" in (outcome.error or "")


async def test_memory_is_limited(run: RunCell) -> None:
    assert last(await run("x = 1\nbytearray(768 << 20)")) == "MemoryError"
    assert last(await run("import mmap; mmap.mmap(-1, 768 << 20)")).startswith("OSError")
    assert await run("x") == "1\n"


async def test_threads_are_limited(run: RunCell) -> None:
    output = await run(
        "import threading, time\n"
        "stop = threading.Event()\n"
        "started = 0\n"
        "try:\n"
        "    for _ in range(400):\n"
        "        threading.Thread(target=stop.wait, daemon=True).start()\n"
        "        started += 1\n"
        "except RuntimeError: pass\n"
        "stop.set()\n"
        "0 < started < 100"
    )
    assert output == "True\n"


async def test_small_threads_are_limited_too(run: RunCell) -> None:
    output = await run(
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "attributes, thread = ctypes.create_string_buffer(64), ctypes.c_ulong()\n"
        "libc.pthread_attr_init(attributes)\n"
        "libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(16384))\n"
        "pause = ctypes.cast(libc.pause, ctypes.c_void_p)\n"
        "started = 0\n"
        "while started < 400 and not libc.pthread_create(ctypes.byref(thread), attributes, pause, None): started += 1\n"
        "0 < started < 100"
    )
    assert output == "True\n"


async def test_file_sizes_are_limited(small: PythonSession) -> None:
    one = await small.run("python", "open('a', 'wb').write(bytes(8 << 20))", 120)
    assert last(one.result).startswith("OSError")
    code = "import time\nfor n in range(60):\n    open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(60)"
    many = await small.run("python", code, 120)
    assert "No space left" in many.result or "MB of files" in (many.error or "")


async def test_number_of_files_is_limited(python: PythonSession) -> None:
    code = "import os, time\nfor n in range(5000): os.close(os.open(str(n), os.O_CREAT))\ntime.sleep(60)"
    outcome = await python.run("python", code, 120)
    assert "4096 files" in (outcome.error or "")


async def test_threads_are_stopped_between_calls(python: PythonSession) -> None:
    """Else an idle container would use the processor without a slot."""
    code = "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()"
    assert (await python.run("python", code, 120)).error is None
    async with asyncio.timeout(120):
        while state_of(program_of(python)) != "T":  # the signal is sent, and may not have arrived
            await asyncio.sleep(0.01)
    assert (await python.run("python", "threading.active_count()", 120)).result == "2\n"


def program_of(session: PythonSession) -> int:
    """Return the process that runs the code: bubblewrap waits for it."""
    first = process_of(session)._outer.pid
    (program,) = {one for one in {first, *descendants(first)} if not descendants(one)}
    return program


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


WRITE_DELETED = "file = open('a', 'w+b'); os.unlink('a'); file.write(bytes(1 << 20)); file.flush()"
HOLD_OPEN = f"{WRITE_DELETED}; kept.append(file)"
HOLD_MAPPED = f"{WRITE_DELETED}; libc.mmap(0, 4096, 1, 1, file.fileno(), 0)"


@pytest.mark.parametrize("hold", [HOLD_OPEN, HOLD_MAPPED], ids=["open", "mapped"])
async def test_deleted_files_count(small: PythonSession, hold: str) -> None:
    code = (
        "import ctypes, os, time\nkept, libc = [], ctypes.CDLL(None)\n"
        "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]\n"
        f"for _ in range(20): {hold}; time.sleep(0.05)\ntime.sleep(60)"
    )
    outcome = await small.run("python", code, 120)
    assert "No space left" in outcome.result or "MB of files" in (outcome.error or ""), outcome


async def test_file_cannot_hide_in_a_message(run: RunCell) -> None:
    code = "import array, socket\none, _ = socket.socketpair()\n"
    code += "one.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1]))])"
    assert last(await run(code)).startswith("PermissionError")


def test_sandbox_gives_way_to_the_server(python: PythonSession) -> None:
    assert os.getpriority(os.PRIO_PROCESS, program_of(python)) == 19
    group = Path(f"/proc/{process_of(python)._outer.pid}/autogroup")
    assert not group.exists() or group.read_text().endswith("nice 19\n")


async def test_limits_cannot_be_raised(run: RunCell) -> None:
    output = await run("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    assert last(output).startswith("ValueError: not allowed to raise")


async def test_closing_the_channel_ends_the_sandbox(python: PythonSession) -> None:
    outcome = await python.run("python", "import os\nos.closerange(3, 100)", 120)
    assert "All variables are lost" in (outcome.error or "")
    assert (await python.run("python", "1", 120)).result == "1\n"


@pytest.mark.parametrize(
    "line",
    ["b'no json'", "b'[]'", "b'{}\\n{}'", "b'[' * 100_000", "b'x' * (5 << 20)"],
    ids=["no JSON", "no object", "two lines", "too deep", "too long"],
)
async def test_malformed_line_in_the_channel_ends_the_sandbox(python: PythonSession, line: str) -> None:
    code = (
        f"import os\ntext = memoryview({line} + b'\\n')\nwhile text: text = text[os.write(3, text):]\nwhile True: pass"
    )
    outcome = await python.run("python", code, 120)
    assert "has ended" in (outcome.error or "")


@pytest.mark.parametrize("line", ["{}", '{"number": 1}', '{"number": 99}'])
async def test_forged_answer_ends_the_sandbox(python: PythonSession, line: str) -> None:
    """An answer that came too early would be that of the next question."""
    outcome = await python.run("python", f"import os, time\nos.write(3, b'{line}\\n')\ntime.sleep(60)", 120)
    assert "broke the channel" in (outcome.error or "")
    assert (await python.run("python", "1", 120)).result == "1\n"


def alive(pids: set[int]) -> set[int]:
    """The processes that have not ended; a zombie, which its parent has not waited for, has ended."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
    return found


def readiness_to_go(pids: set[int]) -> set[str]:
    return {Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in pids}


@pytest.fixture
def others() -> set[int]:
    """Children of this process other than the sandbox.  Request it before the sandbox's fixture."""
    return descendants(os.getpid())


async def test_container_leaves_nothing(others: set[int], python: PythonSession) -> None:
    before = descendants(os.getpid()) - others
    containers = python._lease._containers
    await python.run("python", "open('a', 'w').close()", 120)
    folder = process_of(python)._folder.path
    assert before
    assert (folder / "a").exists()
    await asyncio.gather(python.close(), python.close())
    (container,) = containers.of("")
    await asyncio.gather(containers.end(container), containers.close())
    assert not alive(before)
    assert not folder.exists()


async def test_sandboxes_are_killed_first_if_memory_is_short(others: set[int], python: PythonSession) -> None:
    assert readiness_to_go(descendants(os.getpid()) - others) == {"1000"}


async def test_deep_tree_is_removed(python: PythonSession) -> None:
    await python.run("python", "import os\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')", 120)
    folder = process_of(python)._folder.path
    assert (folder / "d").exists()
    await python._lease._containers.close()
    assert not folder.exists()


async def test_cancelling_kills_at_once(others: set[int], python: PythonSession) -> None:
    before = descendants(os.getpid()) - others
    running = asyncio.create_task(python.run("python", "sum(range(10**12))", 600))
    await asyncio.sleep(0.1)
    running.cancel()
    async with asyncio.timeout(120):
        with pytest.raises(asyncio.CancelledError):
            await running
        while alive(before):
            await asyncio.sleep(0.005)
