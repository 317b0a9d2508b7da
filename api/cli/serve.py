"""The command line of ``penstock serve``: its settings, and the greeting."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence

from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from penstock.api.cli.mistakes import KEY_PLACES, SECRETS, misread_model, mistakes, place
from penstock.api.cli.vllm_options import API_KEY, ENVIRONMENT, INSTEAD, needless, option_name
from penstock.api.options import help_text, options
from penstock.api.settings import Settings
from penstock.api.sources import FILE, flags, places
from penstock.pipeline.errors import CannotRun


def read_settings(arguments: Sequence[str], command: str = "serve") -> Settings:
    """Read the settings of a command; raise `CannotRun` for wrong ones."""
    if {"-h", "--help"} & {*arguments}:
        print(help_text(command), end="")
        sys.exit(0)
    _check_names([option_name(argument) for argument in arguments])
    used = [_named(argument) for argument in arguments if not needless(option_name(argument))]
    try:
        settings = CliApp.run(Settings, cli_args=used)
    except ValidationError as error:
        raise CannotRun(mistakes(error, used)) from error
    except SettingsError as error:  # argparse's message: an option without its value
        raise CannotRun(str(error).removeprefix("error parsing CLI: argument ")) from error
    if misread := misread_model(settings.model, arguments, settings.engine_arguments):
        raise CannotRun(misread)
    if API_KEY in os.environ and not settings.has_keys:
        raise CannotRun(f"{API_KEY} is set, but this server would need no key: {ENVIRONMENT[API_KEY]}")
    for warning in _warnings(settings, used):
        print(f"penstock: {warning}", file=sys.stderr)
    return settings


def _check_names(names: Sequence[str]) -> None:
    """Refuse options that are not taken here, all at once, and print why others are not needed."""
    reason = "a command line shows its keys to all processes"
    keys = [f"{name}: {reason}: use {KEY_PLACES[name]}" for name in names if name in KEY_PLACES]
    others = [f"{name} is an option of vllm serve. Instead: {INSTEAD[name]}" for name in names if name in INSTEAD]
    if refused := [*keys, *others]:
        raise CannotRun("\n".join(refused))
    for name in names:
        if cause := needless(name):
            print(f"penstock: {name} is not needed: {cause}", file=sys.stderr)


def _warnings(settings: Settings, arguments: Sequence[str]) -> Iterator[str]:
    """Yield a line for each variable without effect, an open address, and files of keys that others can read."""
    yield from (f"{name} has no effect: {instead}" for name, instead in ENVIRONMENT.items() if name in os.environ)
    if settings.vllm and settings.engine:
        engine = place("engine", arguments)
        ours = {flag.removeprefix("--") for flag in flags(Settings.model_fields)}
        misplaced = [key for key in settings.vllm if key.replace("_", "-") in ours]
        move = "".join(f"; {key} is a setting of penstock: move it above the table" for key in misplaced)
        yield f"{place('vllm', arguments)}: the table has no effect, as {engine} names another engine{move}"
    if settings.is_open:
        needed = "to have it need a key, set PENSTOCK_API_KEYS or --api-key-file"
        yield f"{place('host', arguments)}: other machines can use this server without a key; {needed}"
    files = [settings.api_key_file, settings.seal_key_file, FILE if SECRETS & places(FILE).keys() else None]
    for file in filter(None, files):
        if file.exists() and file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            yield f"{file} holds keys, and other users of this machine can read it; chmod 600 {file} prevents that"


def _named(argument: str) -> str:
    """Return an argument with the documented name of an option of penstock, which may be typed with underscores."""
    name, separator, value = argument.partition("=")
    documented = option_name(name)
    is_ours = documented.replace("--no-", "--", 1) in {option.flag for option in options()}
    return f"{documented}{separator}{value}" if is_ours else argument


def greeting(settings: Settings, port: int, models: Sequence[str], example: tuple[str, str] | None = None) -> str:
    """Return the message for a server that now listens on ``port``, with a request to try: a model, and its input."""
    model, text = example or (models[0], "Say hello.")
    body = shlex.quote(json.dumps({"model": model, "input": text, "stream": True}))
    page = settings.url(port)
    url = f"{page}/v1"
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.has_keys else ""
    command = f"curl -N {url}/responses{key} -H 'Content-Type: application/json' -d {body}"
    return f"Serving {models[0]} at {url}. Try:\n\n  {command}\n\nor open {page} in a browser.\n"
