"""The first program in a sandbox: it drops all privileges that it can, then runs the program that it receives.

The sandbox's Python gets this file as text (``python -c``), and has only the standard library to import.  Descriptor 0
is the control channel, a socket: one line of JSON holds the restrictions and the program to run.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import signal
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of file system rights in each version of Landlock; later versions add none."""
READ = 1 << 0 | 1 << 2 | 1 << 3
"""The rights to execute and read files, and to list folders."""
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""The rights that apply to files.  Landlock refuses a rule that grants other rights on a file."""


def main() -> None:
    """Confine this process, report that on the control channel, and run the program."""
    control, requests = take_control()
    order = json.loads(requests.readline())
    if order["dies_with_parent"]:
        check(LIBC.prctl(1, int(signal.SIGKILL), 0, 0, 0))  # PR_SET_PDEATHSIG
    check(LIBC.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS: Landlock and seccomp require it
    if order["descriptor"] is not None:
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
        os.dup2(folder, order["descriptor"])
        os.close(folder)
    limit(order["limits"])
    version = landlock(order["read"], order["write"])
    if order["scope"] and version < 6:
        raise RuntimeError(f"Landlock {version} does not keep signals in")
    serve = load(order["programs"])
    os.nice(19)  # the server, and an engine on the same cores, come before what the model runs
    filter_calls(bytes.fromhex(order["filter"]))
    verify(order["unreadable"])
    if not os.path.samefile(order["home"], "."):  # noqa: PTH121 - not worth importing pathlib
        raise RuntimeError(f"{order['home']} is another folder")
    answer(control, ready=version, number=order["number"])
    serve(requests, control, order)


def load(programs: dict[str, str]) -> Callable[[io.BufferedReader, int, dict[str, Any]], None]:
    """Create a module from each text, and return `serve` of the last one.

    The programs import this file by its usual name, so it is registered first.
    """
    sys.modules["penstock.extensions.tools.sandbox.confined"] = sys.modules[__name__]
    module = sys.modules[__name__]
    for name, text in programs.items():
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(text, name, "exec"), vars(module))  # noqa: S102 - this project's own text
    serve: Callable[[io.BufferedReader, int, dict[str, Any]], None] = vars(module)["serve"]
    return serve


def take_control() -> tuple[int, io.BufferedReader]:
    """Move the control channel off descriptor 0, which programs read as standard input; return it and a reader."""
    control = os.dup(0)
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control, os.fdopen(control, "rb", closefd=False)


def check(result: int) -> int:
    """Return the result of a C library call; raise `OSError` if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def limit(limits: dict[str, int]) -> None:
    """Lower the soft and hard resource limits; they cannot be raised again."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        allowed = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (allowed, allowed))


def landlock(read: list[str], write: list[str]) -> int:
    """Restrict this process to the given folders and files; return the version of Landlock.

    Version 4 also forbids TCP.  Version 6 also forbids signals to processes, and connections to abstract sockets,
    outside this Landlock domain.  Raises `RuntimeError` below version 3, which does not restrict truncation.
    """
    version = check(LIBC.syscall(CREATE_RULESET, None, ctypes.c_long(0), ctypes.c_long(1)))
    if version < 3:
        raise RuntimeError(f"Landlock {version} does not keep files from being cut")
    handled = (1 << RIGHTS[min(version, 5)]) - 1
    rules = struct.pack("=QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = check(LIBC.syscall(CREATE_RULESET, ctypes.c_char_p(rules), ctypes.c_long(size), ctypes.c_long(0)))
    for path in read:
        grant(ruleset, path, READ)
    for path in write:
        grant(ruleset, path, handled)
    check(LIBC.syscall(RESTRICT_SELF, ctypes.c_long(ruleset), ctypes.c_long(0)))
    os.close(ruleset)
    return version


def grant(ruleset: int, path: str, rights: int) -> None:
    """Allow ``rights`` at ``path``, if it exists."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    granted = rights if os.path.isdir(path) else rights & OF_FILES  # noqa: PTH112 - not worth importing pathlib
    rule = struct.pack("=Qi", granted, place)
    check(LIBC.syscall(ADD_RULE, ctypes.c_long(ruleset), ctypes.c_long(1), ctypes.c_char_p(rule), ctypes.c_long(0)))
    os.close(place)


def filter_calls(program: bytes) -> None:
    """Load the seccomp filter."""
    held = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    check(LIBC.prctl(22, 2, ctypes.c_char_p(described), 0, 0))


def verify(path: str) -> None:
    """Raise `RuntimeError` if this process can read ``path`` or create a network socket.

    A missing protection must not go unnoticed.
    """

    def read() -> None:
        os.close(os.open(path, os.O_RDONLY))

    def connect() -> None:
        check(LIBC.socket(2, 1, 0))

    for attempt in (read, connect):
        try:
            attempt()
        except OSError:
            continue
        raise RuntimeError("this process is not confined")


def answer(control: int, **facts: Any) -> None:
    """Write one line of JSON to the control channel."""
    line = memoryview(json.dumps(facts).encode() + b"\n")
    while line:
        line = line[os.write(control, line) :]


if __name__ == "__main__":
    main()
