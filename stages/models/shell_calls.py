"""Shell calls: the arguments that models write, and the API's action for them.

gpt-oss writes ``{"cmd": ["bash", "-lc", "ls"], "workdir": ..., "env": ..., "timeout": ms}``.  Other models write the
action of the API, ``{"commands": ["ls"], "timeout_ms": ms, "max_output_length": n}``.  This module reads both, and the
forms between them: a command is a text for the shell, or the list of a program and its arguments.  JSON in place of a
command is refused, since a shell would run what it finds in it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

_SHELLS = frozenset({"bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "/usr/bin/sh"})
_JSON = ("{", "[")

_Value: TypeAlias = list[list[str] | str] | list[str] | str

MOST_COMMANDS = 64
"""The most commands of one call."""


class ArgumentsInvalid(ValueError):
    """The arguments are invalid; the message is written for the model."""


class _Written(msgspec.Struct):
    cmd: list[str] | str | None = None
    command: list[str] | str | None = None
    commands: list[list[str] | str] | str | None = None
    workdir: str | None = None
    working_directory: str | None = None
    user: str | None = None
    env: dict[str, str] | None = None
    timeout: float | None = None
    timeout_ms: float | None = None
    max_output_length: int | None = None


@dataclass(frozen=True)
class ShellCommands:
    """Commands to run one after another, each as the argument list of a program."""

    commands: tuple[tuple[str, ...], ...]
    workdir: str | None = None
    user: str | None = None
    """The user to run as; None if the model named none."""
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
        workdir=_clean(written.workdir or written.working_directory),
        user=_clean(written.user),
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
    given = [one for one in (written.cmd, written.command, written.commands) if one is not None]
    if len(given) != 1:
        how_many = "several fields for commands" if given else "no command"
        raise ArgumentsInvalid(f'The arguments have {how_many}: write {{"cmd": ["bash", "-lc", "..."]}}.')
    value = _listed(given[0])
    is_one = isinstance(value, str) or written.commands is None
    commands: Sequence[Any] = [value] if is_one else value
    if not 1 <= len(commands) <= MOST_COMMANDS:
        raise ArgumentsInvalid(f"A call runs from one to {MOST_COMMANDS} commands, not {len(commands)}.")
    return tuple(map(_words, commands))


def _listed(value: _Value) -> _Value:
    """Return the list that a text holds as JSON, or else the value."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(msgspec.DecodeError, RecursionError):  # a script may begin with a bracket, too: [ -f a ] && cat a
            return msgspec.json.decode(value, type=list[str])
    return value


def _words(command: Sequence[str]) -> tuple[str, ...]:
    """Return the argument list of a command; a plain string is a script for bash."""
    first = command if isinstance(command, str) else next(iter(command), "")
    if not first.strip():
        raise ArgumentsInvalid("A command is empty.")
    if _is_json(first):
        raise ArgumentsInvalid("A command is JSON.")
    words = ("bash", "-c", command) if isinstance(command, str) else tuple(command)
    for word in words:
        _clean(word)
    return words


def _is_json(text: str) -> bool:
    """Return True for the text of a JSON object or list."""
    if not text.lstrip().startswith(_JSON):
        return False
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


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
