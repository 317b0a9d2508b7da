"""The settings of plug-ins: each is a table of the operator's, which the pydantic model of the plug-in validates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.pipeline.logs import nearest

PARAMETER = "settings"
"""The parameter by which a plug-in takes its settings."""

_NOT_ITS_OWN = "; one of the server stands above all tables"
"""The end of a message about a key that resembles no setting of a stage."""

Tables: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The settings of plug-ins, each under the name that `table_of` gives its table."""


class WrongSettings(ValueError):
    """The settings of a plug-in are wrong, or it has no model for them."""


def table_of(name: str) -> str:
    """Return the name of a plug-in's table: that of its entry point, or the last part of its file or module."""
    source, colon, _ = name.partition(":")
    if not colon:
        return name
    return Path(source).stem if source.endswith(".py") else source.rpartition(".")[2]


def model_of(install: Callable[..., Any]) -> type[BaseModel] | None:
    """Return the model that annotates the settings of a plug-in, or None if it takes none; raise `WrongSettings`."""
    try:
        parameters = list(inspect.signature(install).parameters.values())
        if unknown := [each.name for each in parameters[1:] if each.name != PARAMETER and _is_required(each)]:
            raise WrongSettings(f"there is nothing for its parameter {unknown[0]}{nearest(unknown[0], [PARAMETER])}")
        if PARAMETER not in (each.name for each in parameters):
            return None
        model = inspect.signature(install, eval_str=True).parameters[PARAMETER].annotation
    except NameError as error:
        raise WrongSettings(f"it has an annotation that its module does not define: {error}") from error
    if not (inspect.isclass(model) and issubclass(model, BaseModel)):
        raise WrongSettings(f"annotate its parameter {PARAMETER} with a pydantic model")
    return model


def _is_required(parameter: inspect.Parameter) -> bool:
    is_open = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not is_open


def validated(model: type[BaseModel], label: str, table: Mapping[str, Any]) -> BaseModel:
    """Return the settings that a table has; raise `WrongSettings`, which shows no value, as it may be secret."""
    try:
        return model.model_validate(table, extra="forbid")
    except ValidationError as error:
        problems = "; ".join(_problems(error.errors(include_input=False), model))
    raise WrongSettings(f"[stages.{label}]: {problems}")


def _problems(errors: list[ErrorDetails], model: type[BaseModel]) -> Iterator[str]:
    for error in errors:
        key = ".".join(map(str, error["loc"]))
        message = error["msg"].removeprefix("Value error, ")
        if error["type"] == "extra_forbidden":
            near = nearest(key, model.model_fields)
            message = f"there is no such setting{near or _NOT_ITS_OWN}"
        yield f"{key}: {message}" if key else message
