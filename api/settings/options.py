"""The options of ``penstock serve`` in words: for its help, for ``penstock config`` and for ``SETTINGS.md``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import CLI_SUPPRESS

from penstock.api.settings import Settings

SECTIONS = {
    name: str(vars(part)["SECTION"])
    for part in reversed(Settings.__bases__)
    for name in part.__annotations__
    if name in Settings.model_fields
}
"""The section of each setting."""


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


def help_text(command: str) -> str:
    """Return the help of ``penstock serve``, or of another command that takes its options."""
    parser = argparse.ArgumentParser(
        f"penstock {command}",
        f"penstock {command} [MODEL] [options of penstock] [options of vLLM]",
        Settings.__doc__,
        "Each option is also a variable (PENSTOCK_STORE_TTL) and a key of penstock.toml (store-ttl), which penstock "
        "config prints. vllm serve --help=all lists the options of vLLM's engine.",
    )
    parser.add_argument("MODEL", nargs="?", help=Settings.model_fields["model"].description)
    for section, members in groupby(options(), lambda option: option.section):
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
