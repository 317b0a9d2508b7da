"""Refusals: the errors that the model reads as the results of calls that it cannot make."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.pipeline.protocol.params.json_body import shortened

_MOST_CHARACTERS = 4_000
"""The most characters of names in one error: a request may have thousands of tools."""


def refusal_of(name: str, callables: Iterable[str] = (), *, exists: bool = False) -> str:
    """Return the error for a call of the tool ``name``, in the model's spelling.

    ``callables`` are the names of the tools that the model can call.  The tool ``exists`` if the request declares it,
    but does not let the model call it now.
    """
    problem = (
        f"the tool {shortened(name)!r} cannot be called now" if exists else f"there is no tool {shortened(name)!r}"
    )
    names = list(callables)
    if not names:
        return f"Error: {problem}. Go on without it."
    listed, length = list[str](), 0
    for callable_name in names:
        length += len(callable_name)
        if listed and length > _MOST_CHARACTERS:
            break
        listed.append(callable_name)
    more = f", and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
    return f"Error: {problem}. The tools that can be called are {', '.join(listed)}{more}."
