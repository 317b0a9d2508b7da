"""The places where settings are made, besides the command line: the environment and ``penstock.toml``."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.api.settings.from_vllm import instead_of
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import check_names, nearest

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

PREFIX = "PENSTOCK_"
"""The beginning of the environment variables of all settings."""

CLIENT_KEY = f"{PREFIX}KEY"
"""The variable with the key of a server for the clients that `penstock launch` starts: it is no setting."""

FILE = Path("penstock.toml")
"""The file of settings, in the working directory."""

_PART = r"""(?:[\w-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
"""One part of a key of TOML, which may stand in quotes."""

_KEY = re.compile(rf"\s*(\[?)\s*({_PART}(?:\s*\.\s*{_PART})*)\s*[=\]]")
"""The beginning of a line that sets a key or begins a table."""

MODELS = "models"
"""The table of the file with a table for each model."""


def keys(fields: Mapping[str, FieldInfo]) -> list[str]:
    """Return the names of the settings; ``engine_arguments`` is no setting, but the rest of the command line."""
    return [field.alias or name for name, field in fields.items() if name != "engine_arguments"]


def check_keywords(given: Iterable[str], fields: Mapping[str, FieldInfo]) -> None:
    """Raise `TypeError` for the first keyword that is no setting; those of pydantic begin with an underscore."""
    check_names("setting", [name for name in given if not name.startswith("_")], [*keys(fields), "engine_arguments"])


def variable(key: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + key.upper().replace("-", "_")


def flags(fields: Mapping[str, FieldInfo]) -> list[str]:
    """Return the options of the settings, as they are typed."""
    dashed = {(field.alias or name).replace("_", "-"): field.annotation for name, field in fields.items()}
    return [f"--{key}" for key in dashed] + [f"--no-{key}" for key, annotation in dashed.items() if annotation is bool]


def option_name(argument: str) -> str:
    """Return the name of an option as it is documented: vLLM also takes underscores."""
    name = argument.split("=", maxsplit=1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


def unknown_option(argument: str, known: Iterable[str]) -> str:
    """Return the reason why an argument is refused that is not one of the ``known`` options."""
    if not argument.startswith("-"):
        return "it is neither an option nor the value of one, and MODEL is there already"
    if advice := instead_of(option_name(argument)):
        return f"it is an option of vLLM's HTTP server: {advice} (docs/FROM_VLLM.md)"
    return f"there is no such option{nearest(argument, known)}"


def unknown_variables(known: Iterable[str]) -> dict[str, str]:
    """Return the variables with penstock's prefix that name no setting, without their values, which may be secret."""
    variables = {variable(key) for key in known} | {CLIENT_KEY}
    return {name: "" for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in variables}


def read_file(file: Path, known: Iterable[str]) -> dict[str, Any]:
    """Read a file of settings, whose keys may have dashes or underscores; unknown keys are kept with dashes.

    Raises `CannotRun` for a file that is not TOML, or has a setting twice.
    """
    if not file.exists():
        return {}
    named = {key.replace("_", "-"): key for key in known}
    settings: dict[str, Any] = {}
    for typed, value in read_toml(file).items():
        dashed = typed.replace("_", "-")
        key = named.get(dashed, dashed)
        if key in settings:
            raise CannotRun(f"{file}: {dashed} and {key} are one setting")
        settings[key] = value
    return settings


def read_toml(file: Path) -> dict[str, Any]:
    """Read a file of TOML; raise `CannotRun` for one that cannot be read."""
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except ValueError as error:
        is_bare = str(error).startswith(("Invalid value", "Expected newline or end of document after a statement"))
        hint = '; a text stands in quotes: store-ttl = "7d"' if is_bare else ""
        raise CannotRun(f"{file}: {error}{hint}") from None
    except OSError as error:
        raise CannotRun(f"{file}: {error.strerror}") from None


def locations(file: Path) -> dict[str, str]:
    """Return each key of a file with its line, ``store-ttl (penstock.toml, line 3)``, by its name with underscores.

    Those of the tables of models are left out: `line_of` finds them.
    """
    found: dict[str, str] = {}
    for number, table, key in _key_lines(file):
        if not key or table[:1] != (MODELS,):
            name = (key or table)[0]
            found.setdefault(name.replace("-", "_"), f"{name} ({file}, line {number})")
    return found


def line_of(file: Path, table: tuple[str, ...], spellings: Collection[str]) -> int | None:
    """Return the line of a key with one of these ``spellings`` in a table of a file, or else that of the table."""
    of_table = None
    dashed = {spelling.replace("_", "-") for spelling in spellings}
    for number, above, key in _key_lines(file):
        path = (*above, *key)
        if path[: len(table)] == table:
            of_table = of_table or number
            if len(path) > len(table) and path[len(table)].replace("_", "-") in dashed:
                return number
    return of_table


def _key_lines(file: Path) -> Iterator[tuple[int, tuple[str, ...], tuple[str, ...]]]:
    """Yield each line that begins a table or sets a key: its number, its table, and its key, or none."""
    table: tuple[str, ...] = ()
    for number, line in enumerate(file.read_text("utf-8").splitlines() if file.exists() else [], start=1):
        if match := _KEY.match(line):
            parts = tuple(map(_name, re.findall(_PART, match[2])))
            if match[1]:
                table = parts
            yield number, table, () if match[1] else parts


def _name(part: str) -> str:
    """Return the name that a part of a key stands for; in the middle of a text that looks like a key, the part."""
    try:
        return next(iter(tomllib.loads(f"{part} = 0")))
    except ValueError:
        return part
