"""The system call filter as several architectures would run it."""

import errno
import struct
from collections.abc import Sequence

import pytest

from penstock.extensions.tools.sandbox.seccomp import Machine, Permissions, program

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
REFUSED, ABSENT = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
ARCHITECTURE: dict[Machine, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PYTHON = Permissions(programs=False, metadata=False)
SHELL = Permissions(programs=True, metadata=True)

Call = tuple[int, int]
"""The number of a call on x86-64 and on arm64."""
READ, OPENAT, GETPID = (0, 63), (257, 56), (39, 172)
SOCKET, SOCKETPAIR, CONNECT = (41, 198), (53, 199), (42, 203)
PTRACE, MOUNT, UNSHARE, BPF, IO_URING = (101, 117), (165, 40), (272, 97), (321, 280), (425, 425)
CLONE, CLONE3, EXECVE, KILL, PRLIMIT = (56, 220), (435, 435), (59, 221), (62, 129), (302, 261)
FCNTL, IOCTL, PRCTL = (72, 25), (16, 29), (157, 167)
FCHMOD, UTIMENSAT = (91, 52), (280, 88)


def verdict(code: bytes, number: int, architecture: int, arguments: Sequence[int] = ()) -> int:
    """Run a filter as the kernel's BPF machine does, and return its verdict on a call."""
    data = struct.pack("<iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("=HBBI", code))
    at, held = 0, 0
    while True:
        operation, if_true, if_false, constant = steps[at]
        at += 1
        match operation:
            case 0x20:
                held = struct.unpack_from("<I", data, constant)[0]
            case 0x54:
                held &= constant
            case 0x06:
                return int(constant)
            case 0x15:
                at += if_true if held == constant else if_false
            case 0x25:
                at += if_true if held > constant else if_false
            case 0x35:
                at += if_true if held >= constant else if_false
            case 0x45:
                at += if_true if held & constant else if_false
            case _:
                raise AssertionError(operation)


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> Machine:
    return "x86_64" if request.param == "x86_64" else "aarch64"


def verdict_on(machine: Machine, permissions: Permissions, call: Call, *arguments: int) -> int:
    number = call[0] if machine == "x86_64" else call[1]
    return verdict(program(machine, permissions), number, ARCHITECTURE[machine], arguments)


@pytest.mark.parametrize("permissions", [PYTHON, SHELL])
def test_file_calls_are_allowed_and_kernel_calls_refused(machine: Machine, permissions: Permissions) -> None:
    assert {verdict_on(machine, permissions, call) for call in (READ, OPENAT, GETPID)} == {ALLOWED}
    refused = (SOCKET, CONNECT, PTRACE, MOUNT, UNSHARE, BPF, IO_URING)
    assert {verdict_on(machine, permissions, call, 1, 1) for call in refused} == {REFUSED}


def test_only_a_shell_starts_programs_and_changes_modes(machine: Machine) -> None:
    calls = (EXECVE, KILL, FCHMOD, UTIMENSAT)
    assert {verdict_on(machine, PYTHON, call) for call in calls} == {REFUSED}
    assert {verdict_on(machine, SHELL, call) for call in calls} == {ALLOWED}


def test_python_has_threads_and_a_shell_has_processes(machine: Machine) -> None:
    thread, process = 0x003D0F00, 0x01200011
    assert verdict_on(machine, PYTHON, CLONE, thread) == ALLOWED
    assert verdict_on(machine, PYTHON, CLONE, process) == REFUSED
    assert verdict_on(machine, SHELL, CLONE, process) == ALLOWED
    for bit in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict_on(machine, SHELL, CLONE, process | bit) == REFUSED
    assert verdict_on(machine, SHELL, CLONE3) == verdict_on(machine, PYTHON, CLONE3) == ABSENT


def test_only_connected_socket_pairs_are_allowed(machine: Machine) -> None:
    """Event loops need one; a datagram socket of a pair could be connected elsewhere."""
    flags = 0o2004000
    assert verdict_on(machine, PYTHON, SOCKETPAIR, 1, 1 | flags) == ALLOWED
    assert verdict_on(machine, PYTHON, SOCKETPAIR, 1, 2 | flags) == REFUSED
    assert verdict_on(machine, PYTHON, SOCKETPAIR, 2, 1) == REFUSED


def test_limits_of_other_processes_are_refused(machine: Machine) -> None:
    """A process of the same user could be killed by them."""
    assert verdict_on(machine, PYTHON, PRLIMIT, 0) == ALLOWED
    assert verdict_on(machine, PYTHON, PRLIMIT, 1) == REFUSED


def test_python_cannot_signal_through_descriptors(machine: Machine) -> None:
    """A descriptor's owner could be sent any signal.  The parent death signal cannot be changed either."""
    for command in (8, 15):
        assert verdict_on(machine, PYTHON, FCNTL, 3, command) == REFUSED
    for request in (0x8901, 0x8902):
        assert verdict_on(machine, PYTHON, IOCTL, 3, request) == REFUSED
    assert verdict_on(machine, PYTHON, PRCTL, 1) == REFUSED
    for call, command in ((FCNTL, 1), (FCNTL, 4), (IOCTL, 0x5421), (PRCTL, 15)):
        assert verdict_on(machine, PYTHON, call, command, command) == ALLOWED
    assert {verdict_on(machine, SHELL, call, 8, 8) for call in (FCNTL, IOCTL, PRCTL)} == {ALLOWED}


def test_foreign_calls_kill_and_later_ones_do_not_exist(machine: Machine) -> None:
    """A call with an unknown number cannot be judged."""
    code = program(machine, PYTHON)
    other: Machine = "aarch64" if machine == "x86_64" else "x86_64"
    assert verdict(code, 0, ARCHITECTURE[other]) == KILLED
    assert verdict(code, 0, 0x40000003) == KILLED
    assert verdict(code, 0x40000000 | 257, ARCHITECTURE[machine]) == KILLED
    assert verdict(code, -1, ARCHITECTURE[machine]) == KILLED
    assert verdict(code, 451, ARCHITECTURE[machine]) == ABSENT
