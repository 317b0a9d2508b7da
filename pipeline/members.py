"""Check that an object of the operator's own has the members of a protocol, before the server relies on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

DECORATE = "make it an async generator function, and decorate it with contextlib.asynccontextmanager"
"""The cure for a function that should return an async context manager."""


def missing_members(given: object, protocol: type) -> list[str]:
    """Return how the members of an object differ from those of a ``protocol``, each with the cure; empty if it fits."""
    members = {name: member for name, member in vars(protocol).items() if not name.startswith("_")}
    problems = (
        _wrong_value(given, name, member.fget) if isinstance(member, property) else _wrong_method(given, name, member)
        for name, member in members.items()
        if isinstance(member, property) or inspect.isfunction(member)
    )
    return [problem for problem in problems if problem]


def _wrong_value(given: object, name: str, declared: Any) -> str | None:
    hint = get_type_hints(declared)["return"]
    label = f"{type(given).__name__}.{name}"
    try:
        value = getattr(given, name)
    except AttributeError:
        of_type = hint.__name__ if isinstance(hint, type) else hint
        return f"{label} is missing: give it as an attribute or a property, of type {of_type}"
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        return f"{label} is {value!r}: {error}"
    return None if value or hint is bool else f"{label} is {value!r}: it must not be empty or 0"


def _wrong_method(given: object, name: str, declared: Callable[..., Any]) -> str | None:
    method = getattr(given, name, None)
    signature = inspect.signature(declared, eval_str=True)
    is_async = inspect.iscoroutinefunction(declared)
    cure = f"write it as `{'async ' if is_async else ''}def {name}{signature}`"
    label = f"the method {name} of {type(given).__name__}"
    if not callable(method):
        return f"{label} is missing: {cure}"
    try:
        named = [name for name, parameter in signature.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
        by_position = len(signature.parameters) - 1 - len(named)
        inspect.signature(method).bind(*[None] * by_position, **dict.fromkeys(named))
    except TypeError as error:
        return f"{label} does not take its arguments ({error}): {cure}"
    if is_async and not inspect.iscoroutinefunction(method):
        return f"{label} is not async: {cure}"
    if not is_async and (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
        return f"{label} gives no async context manager: {DECORATE}"
    return None
