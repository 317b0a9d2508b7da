"""The places where settings are made, besides the command line: the environment and ``penstock.toml``."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
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

_KEY = re.compile(r"""\s*\[?["']?([\w-]+)["']?\s*[=.\]]""")
"""The beginning of a line that sets a key or begins a table."""


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
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except ValueError as error:
        is_bare = str(error).startswith(("Invalid value", "Expected newline or end of document after a statement"))
        hint = '; a text stands in quotes: store-ttl = "7d"' if is_bare else ""
        raise CannotRun(f"{file}: {error}{hint}") from None
    except OSError as error:
        raise CannotRun(f"{file}: {error.strerror}") from None
    named = {key.replace("_", "-"): key for key in known}
    settings: dict[str, Any] = {}
    for typed, value in table.items():
        dashed = typed.replace("_", "-")
        key = named.get(dashed, dashed)
        if key in settings:
            raise CannotRun(f"{file}: {dashed} and {key} are one setting")
        settings[key] = value
    return settings


def locations(file: Path) -> dict[str, str]:
    """Return each key of a file with its line, ``store-ttl (penstock.toml, line 3)``, by its name with underscores."""
    found: dict[str, str] = {}
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    for number, line in enumerate(lines, start=1):
        if match := _KEY.match(line):
            found.setdefault(match[1].replace("-", "_"), f"{match[1]} ({file}, line {number})")
    return found
