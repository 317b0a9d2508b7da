"""Shell calls: the arguments that models write, and the API's action for them.

gpt-oss writes ``{"cmd": ["bash", "-lc", "ls"], "workdir": ..., "env": ..., "timeout": ms}``.  Other models write the
action of the API, ``{"commands": ["ls"], "timeout_ms": ms, "max_output_length": n}``.  This module reads both.
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
    """The arguments are invalid; the message is written for the model."""


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
class ShellCommands:
    """Commands to run one after another, each as the argument list of a program."""

    commands: tuple[tuple[str, ...], ...]
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_ms: int | None = None
    """Time limit for each command, in milliseconds; None if the model set none."""
    max_output_length: int | None = None
    """Limit on the output of each command, in characters; None if the model set none."""


def shell_call(text: str) -> ShellCommands:
    """Parse the arguments that the model wrote; raises `ArgumentsInvalid`."""
    try:
        written = msgspec.json.decode(text, type=_Written)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ArgumentsInvalid(f"The arguments do not have the form that the tool takes: {exc}") from None
    return ShellCommands(
        commands=_commands(written),
        workdir=_clean(written.workdir),
        env={_variable(name): _clean(value) or "" for name, value in (written.env or {}).items()},
        timeout_ms=_positive(written.timeout_ms if written.timeout_ms is not None else written.timeout, "timeout"),
        max_output_length=_positive(written.max_output_length, "max_output_length"),
    )


def shell_action(text: str) -> dict[str, Any]:
    """Return the action of a shell call item; invalid arguments become its only command, unparsed."""
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
    """Format a command as a user would type it: the script of a shell call, or the quoted words."""
    match words:
        case (shell, "-c" | "-lc", script) if shell in _SHELLS:
            return script
        case _:
            return shlex.join(words)


def executed(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command to run: ``-lc`` becomes ``-c``, as sandboxes have no login profile to read."""
    match words:
        case (shell, "-lc", *rest) if shell in _SHELLS:
            return shell, "-c", *rest
        case _:
            return words


def _commands(written: _Written) -> tuple[tuple[str, ...], ...]:
    one = written.cmd if written.cmd is not None else written.command
    if one is not None:
        commands = [_words(one)]
    elif written.commands is not None:
        commands = [_words(command) for command in written.commands]
    else:
        raise ArgumentsInvalid('The arguments name no command: write {"cmd": ["bash", "-lc", "..."]}.')
    if not 1 <= len(commands) <= _MOST_COMMANDS:
        raise ArgumentsInvalid(f"A call runs from one to {_MOST_COMMANDS} commands, not {len(commands)}.")
    return tuple(commands)


def _words(command: list[str] | str) -> tuple[str, ...]:
    """Return the argument list of a command; a plain string is a script for bash."""
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
        raise ArgumentsInvalid(f"{name!r} is not a name for a variable.")
    return name


def _positive(number: float | None, name: str) -> int | None:
    if number is None:
        return None
    if not math.isfinite(number) or number < 1:
        raise ArgumentsInvalid(f"{name} must be at least 1.")
    return int(min(number, 2**31 - 1))
