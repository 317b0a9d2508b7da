"""The command line of ``penstock serve``: its settings, and warnings about them."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from penstock.api.cli.mistakes import KEY_PLACES, SECRETS, explained, location, misread_model, misspelt, mistakes
from penstock.api.settings import Settings
from penstock.api.settings.from_vllm import API_KEY, VARIABLES
from penstock.api.settings.options import help_text, options
from penstock.api.settings.sources import FILE, flags, locations, option_name
from penstock.api.start.backends import check_options
from penstock.pipeline.errors import CannotRun
from penstock.services.engines.vllm import WrongOption


def read_settings(arguments: Sequence[str], command: str = "serve") -> Settings:
    """Read the settings of a command; raise `CannotRun` for wrong ones."""
    if (word := _word_of_help(arguments)) is not None:
        print(help_text(command, word), end="")
        sys.exit(0)
    settings = parsed_settings(arguments)
    refuse_unknown(settings, arguments)
    if API_KEY in os.environ and not settings.has_keys:
        raise CannotRun(f"{API_KEY} is set, but this server would need no key: {VARIABLES[API_KEY]}")
    for warning in _warnings(settings, [_named(argument) for argument in arguments]):
        print(f"penstock: {warning}", file=sys.stderr)
    return settings


def _word_of_help(arguments: Sequence[str]) -> str | None:
    """Return the word that follows ``--help``: "" if there is none, and None without that option."""
    for argument, following in pairwise([*arguments, "-"]):
        name, equals, word = argument.partition("=")
        if name in ("-h", "--help"):
            return word if equals or following.startswith("-") else following
    return None


def parsed_settings(arguments: Sequence[str], more: Iterable[str] = ()) -> Settings:
    """Read the settings of a command that does not serve; raise `CannotRun` for wrong ones.

    ``more`` are the options of the command, if it has some of its own.
    """
    _refuse_keys([option_name(argument) for argument in arguments])
    if wrong := misspelt(arguments, more):
        raise CannotRun("\n".join(wrong))
    used = [_named(argument) for argument in arguments]
    try:
        settings = CliApp.run(Settings, cli_args=used)
    except ValidationError as error:
        raise CannotRun(mistakes(error, used)) from error
    except SettingsError as error:  # argparse's message: an option without its value
        raise CannotRun(str(error).removeprefix("error parsing CLI: argument ")) from error
    if misread := misread_model(settings.model, arguments, settings.engine_arguments):
        raise CannotRun(misread)
    return settings


def refuse_unknown(settings: Settings, arguments: Sequence[str]) -> None:
    """Raise `CannotRun` for options that vLLM does not have either."""
    try:
        check_options(settings)
    except WrongOption as error:
        raise CannotRun(explained(error, arguments)) from error


def _refuse_keys(names: Sequence[str]) -> None:
    reason = "a command line shows its keys to all processes"
    if refused := [f"{name}: {reason}: use {KEY_PLACES[name]}" for name in names if name in KEY_PLACES]:
        raise CannotRun("\n".join(refused))


def _warnings(settings: Settings, arguments: Sequence[str]) -> Iterator[str]:
    """Yield a line for each variable without effect, an open address, and files of keys that others can read."""
    yield from (f"{name} has no effect: {instead}" for name, instead in VARIABLES.items() if name in os.environ)
    if settings.vllm and settings.engine:
        engine = location("engine", arguments)
        ours = {flag.removeprefix("--") for flag in flags(Settings.model_fields)}
        misplaced = [key for key in settings.vllm if key.replace("_", "-") in ours]
        move = "".join(f"; {key} is a setting of penstock: move it above the table" for key in misplaced)
        yield f"{location('vllm', arguments)}: the table has no effect, as {engine} names another engine{move}"
    if settings.vllm and settings.models and not settings.in_this_process:
        yield f"{location('vllm', arguments)}: the table has no effect, as vLLM in this process runs no model"
    if opened_by := settings.opened_by:
        needed = "to have it need a key, set PENSTOCK_API_KEYS or --api-key-file"
        yield f"{location(opened_by, arguments)}: other machines can use this server without a key; {needed}"
    if settings.live and settings.operator_key is None:
        live = location("live", arguments)
        yield f"{live} has no effect, as other machines reach this server: set PENSTOCK_OPERATOR_KEY"
    files = [settings.api_key_file, settings.seal_key_file, FILE if SECRETS & locations(FILE).keys() else None]
    if any(SECRETS & table.model_fields_set for table in settings.models.values()):
        files.append(settings.model_file or FILE)
    for file in dict.fromkeys(filter(None, files)):
        if _is_open(file):
            yield f"{file} holds keys, and other users of this machine can read it; chmod 600 {file} prevents that"


def _is_open(file: Path) -> bool:
    """True if other users can read a file; False if it cannot be found, which is an error elsewhere."""
    try:
        return bool(file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False


def _named(argument: str) -> str:
    """Return an argument with the documented name of an option of penstock, which may be typed with underscores."""
    name, separator, value = argument.partition("=")
    documented = option_name(name)
    is_ours = documented.replace("--no-", "--", 1) in {option.flag for option in options()}
    return f"{documented}{separator}{value}" if is_ours else argument
