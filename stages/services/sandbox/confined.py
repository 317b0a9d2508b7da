"""The first thing that runs in a sandbox: it gives up all that it can, then becomes the program that it is sent.

This file is sent as text to a Python that has nothing but its standard library, and is never imported there.
Descriptor 0 is the control channel, a socket: one line of JSON says what to give up and what to run.
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
"""How many rights over files each version of Landlock knows; later ones know no more."""
READ = 1 << 0 | 1 << 2 | 1 << 3
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15


def main() -> None:
    """Confine this process, say so, and serve."""
    control, requests = take_control()
    order = json.loads(requests.readline())
    if order["dies_with_parent"]:
        check(LIBC.prctl(1, int(signal.SIGKILL), 0, 0, 0))
    check(LIBC.prctl(38, 1, 0, 0, 0))  # no new privileges
    limit(order["limits"])
    version = landlock(order["read"], order["write"])
    if order["scope"] and version < 6:
        raise RuntimeError(f"Landlock {version} does not keep signals in")
    filter_calls(bytes.fromhex(order["filter"]))
    verify(order["unreadable"])
    serve = load(order["programs"])
    answer(control, ready=version)
    serve(requests, control, order)


def load(programs: dict[str, str]) -> Callable[[io.BufferedReader, int, dict[str, Any]], None]:
    """Make modules of texts, this one among them; the last one has the program."""
    sys.modules["penstock.stages.services.sandbox.confined"] = sys.modules[__name__]
    module = sys.modules[__name__]
    for name, text in programs.items():
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(text, name, "exec"), vars(module))  # noqa: S102 - our own text
    serve: Callable[[io.BufferedReader, int, dict[str, Any]], None] = vars(module)["serve"]
    return serve


def take_control() -> tuple[int, io.BufferedReader]:
    """Move the control channel out of the way of whoever reads the standard input."""
    control = os.dup(0)
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control, os.fdopen(control, "rb", closefd=False)


def check(result: int) -> int:
    """The result of a call of the C library."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def limit(limits: dict[str, int]) -> None:
    """Lower the limits for good."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        allowed = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (allowed, allowed))


def landlock(read: list[str], write: list[str]) -> int:
    """Nothing but these folders and files, no TCP, and no signals or sockets out of here; the version of Landlock."""
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
    """Let this process do so much at ``path``, if there is such a path."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    granted = rights if os.path.isdir(path) else rights & OF_FILES  # noqa: PTH112 - pathlib would be imported for this
    rule = struct.pack("=Qi", granted, place)
    check(LIBC.syscall(ADD_RULE, ctypes.c_long(ruleset), ctypes.c_long(1), ctypes.c_char_p(rule), ctypes.c_long(0)))
    os.close(place)


def filter_calls(program: bytes) -> None:
    """Load the filter of system calls."""
    held = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    check(LIBC.prctl(22, 2, ctypes.c_char_p(described), 0, 0))


def verify(path: str) -> None:
    """Try what must not work: a protection that is silently absent is none."""

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
    """One line back."""
    line = memoryview(json.dumps(facts).encode() + b"\n")
    while line:
        line = line[os.write(control, line) :]


if __name__ == "__main__":
    main()
