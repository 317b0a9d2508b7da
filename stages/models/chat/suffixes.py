"""The texts of a description, and marks with a suffix.

Checkpoints of one family, Hunyuan, write ``<think:6124c78e>`` or ``<think:opensource>``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

_THINK = re.compile(r"<think(:\w+)>")
_MARK = re.compile(r"<(/?\w+)>")

Form = TypeVar("Form")


def suffix(marks: Iterable[str]) -> str:
    """Return the suffix of the marks of a vocabulary; empty if they have none."""
    found = [match[1] for mark in marks if (match := _THINK.fullmatch(mark))]
    return found[0] if found else ""


def texts(form: object) -> Iterator[str]:
    """Yield the texts of a description, those in its patterns without their backslashes."""
    if isinstance(form, str):
        yield form.replace("\\", "")
    elif isinstance(form, tuple):
        for each in form:
            yield from texts(each)
    elif is_dataclass(form) and not isinstance(form, type):
        for field in fields(form):
            yield from texts(getattr(form, field.name))
    yield from getattr(form, "texts", ())


def suffixed(form: Form, ending: str) -> Form:
    """Return a description whose marks end in a suffix, without the calls for grammars, whose styles are fixed."""
    made: Any = form
    if isinstance(form, str):
        made = _MARK.sub(rf"<\1{ending}>", form)
    elif isinstance(form, tuple):
        made = tuple(suffixed(each, ending) for each in form)
    elif is_dataclass(form) and not isinstance(form, type):
        values = {field.name: suffixed(getattr(form, field.name), ending) for field in fields(form)}
        made = replace(form, **values | ({"written": ()} if "written" in values else {}))
    result: Form = made
    return result
