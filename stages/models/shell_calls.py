"""What a model writes when it calls a shell, and how the wire tells it.

gpt-oss writes ``{"cmd": ["bash", "-lc", "ls"], "workdir": ..., "env": ..., "timeout": ms}``; other models write the
action of the API, ``{"commands": ["ls"], "timeout_ms": ms, "max_output_length": n}``.  Both are read here, once.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

_SHELLS = frozenset({"bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "/usr/bin/sh"})
_MOST_COMMANDS = 64


class ArgumentsInvalid(ValueError):
    """What is wrong with the arguments, for the model to read."""


class _Written(msgspec.Struct):
    cmd: list[str] | str | None = None
    command: list[str] | str | None = None
    commands: list[str] | None = None
    workdir: str | None = None
    env: dict[str, str] | None = None
    timeout: float | None = None
    timeout_ms: float | None = None
    max_output_length: int | None = None


@dataclass(frozen=True)
class ShellCall:
    """Commands to run one after another, each the words of one program."""

    commands: tuple[tuple[str, ...], ...]
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_ms: int | None = None
    """The time for each of them, where the model set one."""
    max_output_length: int | None = None
    """How many characters of output the model wants to read of each."""


def shell_call(text: str) -> ShellCall:
    """Read what the model wrote; raises `ArgumentsInvalid`."""
    try:
        written = msgspec.json.decode(text, type=_Written)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ArgumentsInvalid(f"The arguments are not as the tool takes them: {exc}") from None
    return ShellCall(
        commands=_commands(written),
        workdir=_clean(written.workdir),
        env={_variable(name): _clean(value) or "" for name, value in (written.env or {}).items()},
        timeout_ms=_positive(written.timeout_ms if written.timeout_ms is not None else written.timeout, "timeout"),
        max_output_length=_positive(written.max_output_length, "max_output_length"),
    )


def shell_action(text: str) -> dict[str, Any]:
    """The action of a shell call's item; text that is no valid call becomes its one command."""
    try:
        call = shell_call(text)
    except ArgumentsInvalid:
        return {"commands": [text]}
    action: dict[str, Any] = {"commands": [shown(words) for words in call.commands]}
    if call.timeout_ms is not None:
        action["timeout_ms"] = call.timeout_ms
    if call.max_output_length is not None:
        action["max_output_length"] = call.max_output_length
    return action


def shown(words: tuple[str, ...]) -> str:
    """A command as one would type it: the script of a shell, or the words."""
    match words:
        case (shell, "-c" | "-lc", script) if shell in _SHELLS:
            return script
        case _:
            return shlex.join(words)


def executed(words: tuple[str, ...]) -> tuple[str, ...]:
    """A command as it is run: no shell of a sandbox has a profile to read, so none is asked to."""
    match words:
        case (shell, "-lc", *rest) if shell in _SHELLS:
            return shell, "-c", *rest
        case _:
            return words


def _commands(written: _Written) -> tuple[tuple[str, ...], ...]:
    one = written.cmd if written.cmd is not None else written.command
    if one is not None:
        found = [_words(one)]
    elif written.commands is not None:
        found = [_words(command) for command in written.commands]
    else:
        raise ArgumentsInvalid('The arguments name no command: write {"cmd": ["bash", "-lc", "..."]}.')
    if not 1 <= len(found) <= _MOST_COMMANDS:
        raise ArgumentsInvalid(f"A call runs from one to {_MOST_COMMANDS} commands, not {len(found)}.")
    return tuple(found)


def _words(command: list[str] | str) -> tuple[str, ...]:
    """A command of one string is a script."""
    words = ("bash", "-c", command) if isinstance(command, str) else tuple(command)
    if not words or not words[-1].strip():
        raise ArgumentsInvalid("A command is empty.")
    for word in words:
        _clean(word)
    return words


def _clean(value: str | None) -> str | None:
    if value is not None and "\0" in value:
        raise ArgumentsInvalid("A command, a folder or a variable cannot hold a zero character.")
    return value


def _variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ArgumentsInvalid(f"{name!r} is no name of a variable.")
    return name


def _positive(number: float | None, name: str) -> int | None:
    if number is None:
        return None
    if not math.isfinite(number) or number < 1:
        raise ArgumentsInvalid(f"{name} is at least 1.")
    return int(min(number, 2**31 - 1))
