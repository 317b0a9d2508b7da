"""The options of ``penstock serve`` in words: for its help, for ``penstock config`` and for ``SETTINGS.md``."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import CLI_SUPPRESS

from penstock.api.settings import Settings
from penstock.pipeline.errors import CannotRun

SECTIONS = {
    name: str(vars(part)["SECTION"])
    for part in reversed(Settings.__mro__)
    for name in vars(part).get("__annotations__", ())
    if "SECTION" in vars(part) and name in Settings.model_fields
}
"""The section of each setting."""

NEEDED = (
    *("engine", "host", "port", "api-key-file", "limits"),
    *("store", "trusted-proxy", "mcp-config", "record", "metrics-port"),
)
"""The options that most operators need, by their keys: the help shows them if no word follows ``--help``."""

ALL = "all"
"""The word after ``--help`` for all options."""


@dataclass(frozen=True)
class Option:
    """One option; ``key`` is its name in ``penstock.toml``."""

    key: str
    section: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.key}"

    @property
    def flags(self) -> list[str]:
        """The option, with its short form, and its opposite if it is on by default."""
        shortcuts = Settings.model_config.get("cli_shortcuts") or {}
        short = [f"-{shortcuts[self.key]}"] if self.key in shortcuts else []
        return [*short, self.flag, *([f"--no-{self.key}"] if self.field.default is True else [])]

    @property
    def description(self) -> str:
        """The effect of the option, in words."""
        return self.field.description or ""

    @property
    def default(self) -> Any:
        """The default as an operator would write it; None if there is none."""
        value = self.field.get_default(call_default_factory=True)
        home = f"{Path.home()}/"
        return f"~/{value.removeprefix(home)}" if isinstance(value, str) and value.startswith(home) else value

    @property
    def example(self) -> Any:
        """A value to show: the first example, or else the default."""
        return self.field.examples[0] if self.field.examples else self.default

    @property
    def default_text(self) -> str:
        """The default in words: empty if there is none."""
        value = self.default
        if isinstance(value, bool):
            return "on" if value else "off"
        return "" if value is None or value in ([], {}) else str(value)

    @property
    def kind(self) -> str | None:
        """A word for the option's value; None for a switch."""
        annotation = self.field.annotation
        if annotation is bool:
            return None
        values = ",".join(get_args(annotation)) if get_origin(annotation) is Literal else None
        return self.field.title or (f"{{{values}}}" if values else "N")


def options() -> Iterator[Option]:
    """Yield all options but MODEL, section by section."""
    for name, field in Settings.model_fields.items():
        if name not in ("model", "engine_arguments") and CLI_SUPPRESS not in field.metadata:
            yield Option((field.alias or name).replace("_", "-"), SECTIONS[name], field)


def needed() -> Iterator[Option]:
    """Yield the options that most operators need."""
    by_key = {option.key: option for option in options()}
    yield from (by_key[key] for key in NEEDED)


def named(word: str) -> Iterator[Option]:
    """Yield the options that have ``word`` in their name or section, as ``vllm serve --help=WORD`` does; or all."""
    part = word.casefold().removeprefix("--").replace("_", "-")
    yield from (each for each in options() if part == ALL or part in each.key or part in each.section.casefold())


class _Formatter(argparse.HelpFormatter):
    """Keeps the names of options and models on one line."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def help_text(command: str, word: str = "") -> str:
    """Return the help of ``penstock serve``, or of another command that takes its options.

    It shows the options that most need, or those that ``word`` names; it raises `CannotRun` if that names none.
    """
    shown = list(named(word) if word else needed())
    if not shown:
        raise CannotRun(f"--help {word}: no option and no group has this in its name; --help {ALL} shows all of them")
    more = f"penstock {command} --help {ALL} shows all {len(list(options()))} options of penstock by group. "
    parser = argparse.ArgumentParser(
        f"penstock {command}",
        f"penstock {command} [MODEL] [options of penstock] [options of vLLM]",
        Settings.__doc__,
        f"{'' if word == ALL else more}Each is also a variable (PENSTOCK_STORE_TTL) and a key of penstock.toml "
        "(store-ttl), which penstock config prints. vllm serve --help=all lists the options of vLLM's engine, such as "
        "--max-model-len.",
        formatter_class=_Formatter,
        add_help=False,
    )
    parser.add_argument("MODEL", nargs="?", help=Settings.model_fields["model"].description)
    about = parser.add_argument_group("help")
    about.add_argument(
        *("-h", "--help"), nargs="?", metavar="WORD", help=f"the options with WORD in their name or group, or {ALL}"
    )
    for section, members in groupby(shown, lambda option: option.section if word else "options that most need"):
        group = parser.add_argument_group(section)
        for option in members:
            default = option.default_text if option.kind or option.field.default is True else ""
            text = f"{option.description} (default: {default})" if default else option.description
            text = text.replace("%", "%%")
            if option.kind:
                group.add_argument(*option.flags, metavar=option.kind, help=text)
            else:
                group.add_argument(*option.flags, action="store_true", help=text)
    return parser.format_help()
