"""Mistakes in the settings, as the operator reads them: where each was made, what was expected, and what was meant."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import get_args

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from penstock.api.settings.expected import expected
from penstock.api.settings.from_vllm import instead_of
from penstock.api.settings.model_settings import WRONG_MODELS
from penstock.api.settings.options import options
from penstock.api.settings.settings import OF_VLLM, Settings
from penstock.api.settings.sources import (
    FILE,
    MODELS,
    PREFIX,
    flags,
    keys,
    locations,
    option_name,
    unknown_option,
    variable,
)
from penstock.pipeline.logs import nearest
from penstock.services.engines.vllm import WrongOption, option_names

SECRETS = {"api_keys", "seal_keys"} | {
    name for name, field in Settings.model_fields.items() if SecretStr in get_args(field.annotation)
}
"""Settings that hold keys."""

KEY_PLACES = {f"--{name.replace('_', '-')}": variable(name) for name in SECRETS} | {
    "--api-key": "--api-key-file or PENSTOCK_API_KEYS",
    "--api-keys": "--api-key-file or PENSTOCK_API_KEYS",
    "--seal-keys": "--seal-key-file or PENSTOCK_SEAL_KEYS",
}
"""Options that would show a key in the process list, each with the right place for the key."""

UNSHOWN = SECRETS | {"stages"}
"""Settings whose values no message shows: stages of the operator may have keys in theirs."""


def mistakes(error: ValidationError, arguments: Sequence[str]) -> str:
    """Describe what is wrong with the settings, in one line for each of them."""
    first: dict[object, ErrorDetails] = {}  # a setting of several forms has an error for each of them
    for each in error.errors():
        first.setdefault(each["loc"][:1] or each["msg"], each)
    return "\n".join(dict.fromkeys(_mistake(each, arguments) for each in first.values()))


def location(key: str, arguments: Sequence[str]) -> str:
    """Return where a setting was made: the option, the variable, or the key and line of ``penstock.toml``."""
    option = f"--{key.replace('_', '-')}"
    if option in (option_name(argument).replace("--no-", "--") for argument in arguments):
        return option
    variables = [name for name in os.environ if name.upper() == variable(key)]
    in_file = locations(FILE).get(key.replace("-", "_"))
    of_vllm = [name for name, setting in OF_VLLM.items() if setting == key and name in os.environ]
    found = [*variables, *([in_file] if in_file else []), *of_vllm]
    return found[0] if found else "MODEL" if key == "model" else option


def placed(message: str, arguments: Sequence[str]) -> str:
    """Return a message in which each option of penstock or vLLM is named as the operator set it.

    An option that lacks its value may have lost it to MODEL.
    """
    named = re.sub(
        r"(?<!\S)(?<!mean )--([a-z][\w-]*)", lambda option: location(option[1].replace("-", "_"), arguments), message
    )
    lacking = re.match(r"argument (--[\w-]+).*: expected (?:at least )?one argument$", message)
    following = [after for before, after in pairwise(arguments) if lacking and option_name(before) == lacking[1]]
    return f"{named}; {_misread(following[0], lacking[1])}" if lacking and following else named


def explained(error: Exception, arguments: Sequence[str]) -> str:
    """Return the message of an error that ends the start, with each option as the operator set it.

    Options that neither vLLM nor penstock has are named in one line each.
    """
    if isinstance(error, WrongOption) and error.unknown:
        return "\n".join(_not_taken(name, error.known, arguments) for name in error.unknown)
    return placed(str(error), arguments)


_VERY_LIKE = 0.8
"""The likeness of a typing mistake; many options of vLLM are less like one of penstock."""


def misspelt(arguments: Sequence[str], more: Iterable[str] = ()) -> list[str]:
    """Return a line for each option that is neither penstock's nor vLLM's, but very like one.

    ``more`` are those of a command that has its own.  Without vLLM its options are not known, and are in no line.
    """
    ours = ["--help", *flags(Settings.model_fields), *more]
    known = {*ours, *option_names()}
    typed = (name for argument in arguments if (name := option_name(argument)).startswith("--"))
    unknown = [
        name
        for name in dict.fromkeys(typed)
        if not ({name, name.replace("--no-", "--", 1)} & known or instead_of(name))
    ]
    return [f"{name}: there is no such option{near}" for name in unknown if (near := nearest(name, ours, _VERY_LIKE))]


def misread_model(model: str | None, arguments: Sequence[str], engine_arguments: Sequence[str]) -> str | None:
    """Return the mistake if MODEL is the value of an option of vLLM, as another argument stands alone; or else None."""
    before = arguments[arguments.index(model) - 1] if model in arguments[1:] else ""
    if before not in engine_arguments or not before.startswith("--") or "=" in before:
        return None
    alone = (
        one
        for previous, one in pairwise(arguments)
        if one in engine_arguments and not one.startswith("-") and previous not in engine_arguments
    )
    return _misread(str(model), before) if next(alone, None) else None


def _misread(model: str, option: str) -> str:
    return f"MODEL is read as {model!r}, which follows {option}: write MODEL first, or {option}={model}"


def _not_taken(name: str, known: Iterable[str], arguments: Sequence[str]) -> str:
    """Describe an unknown option of the command line or of the table ``[vllm]``."""
    if name in flags(Settings.model_fields):  # the command line would have read it as penstock's own
        key = name.removeprefix("--")
        return f"{key} in the table [vllm] of {FILE}: it is a setting of penstock: move it above the table"
    if better := KEY_PLACES.get(name):
        reason = f"it is not vLLM's engine that checks keys: use {better}"
    else:
        reason = unknown_option(name, [*flags(Settings.model_fields), *known])
    return f"{placed(name, arguments)}: {reason}"


def _mistake(error: ErrorDetails, arguments: Sequence[str]) -> str:
    if error["type"] == WRONG_MODELS:
        return placed(error["msg"], arguments)
    if not error["loc"]:  # settings that do not fit together: the message names them by their options
        return placed(error["msg"].removeprefix("Value error, "), arguments)
    key = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return _unknown(key)
    if key == "model" and isinstance(error["input"], dict):
        name = next(iter(error["input"]), "NAME")
        return f"{location(key, arguments)}: it is the name of one model: a table of several is [{MODELS}.{name}]"
    return f"{location(key, arguments)}: {_expected(key, error)}"


def _unknown(key: str) -> str:
    if key.upper().startswith(PREFIX):
        return f"{key}: there is no such variable{nearest(key.upper(), map(variable, keys(Settings.model_fields)))}"
    known = [name.replace("_", "-") for name in keys(Settings.model_fields)]
    where = locations(FILE).get(key.replace("-", "_"), f"{key} ({FILE})")
    if f"--{key.replace('_', '-')}" in option_names():
        return f"{where}: it is an option of vLLM's engine: move it into the table [vllm]"
    near = nearest(key, known)
    return f"{where}: there is no such setting{near}. If it is an option of vLLM, move it into the table [vllm]"


def _expected(key: str, error: ErrorDetails) -> str:
    examples = [option.example for option in options() if option.key == key.replace("_", "-")]
    return expected(error, next(iter(examples), None), is_shown=key not in UNSHOWN)
