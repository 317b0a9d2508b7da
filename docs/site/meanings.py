"""What the fields of bodies mean: the docstring after a field, or its row on the page of parameters."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import cache
from inspect import get_annotations

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.site.gather import LINK, ROOT
from docs.site.python_api import noted
from penstock.pipeline.protocol.params.common import REFUSED, UNUSED, Body
from penstock.pipeline.protocol.params.request import CreateResponse

PAGE = "PARAMETERS.md"
_ROW = re.compile(r"^\| `(\w+)` \| \w+ \| (.+) \|$", re.MULTILINE)
_SENTENCES = re.compile(r"(?<=\.) (?=[A-Z`[])")


def is_refused(field: FieldInfo) -> bool:
    """Return True for a field that is refused unless it is null."""
    return REFUSED in field.metadata


def is_unused(field: FieldInfo) -> bool:
    """Return True for a field that has no effect."""
    return UNUSED in field.metadata


def own_first(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a body: the required ones, then its own, then those that its bases have, too."""
    depths = {name: depth for depth, owner in enumerate(model.__mro__) for name in get_annotations(owner)}
    return dict(sorted(model.model_fields.items(), key=lambda pair: (not pair[1].is_required(), depths[pair[0]])))


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return what the fields of a body mean, in one sentence each; fields that are refused or unused have none."""
    fields = {name for name, field in model.model_fields.items() if not is_refused(field) and not is_unused(field)}
    said = {name: text for name in fields if (text := _meaning(model, name))}
    if missing := fields - said.keys():
        raise LookupError(f"{model.__name__} does not say what these mean: {', '.join(sorted(missing))}")
    return said


def _meaning(model: type[BaseModel], name: str) -> str:
    owner = next(each for each in model.__mro__ if name in get_annotations(each))
    if text := _docstrings(owner).get(name):
        return text
    return _rows().get(name, "") if issubclass(CreateResponse, owner) else ""


@cache
def _docstrings(owner: type[BaseModel]) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    return noted(node.body) if isinstance(node, ast.ClassDef) and owner is not Body else {}


@cache
def _rows() -> dict[str, str]:
    """Return the rows of the page about one parameter of the Responses API, up to their first sentence."""
    table = (ROOT / "docs" / PAGE).read_text().split("\n##")[0]
    return {name: _first_sentence(text) for name, text in _ROW.findall(table) if text.strip()}


def _first_sentence(text: str) -> str:
    linked = LINK.sub(lambda link: f"]({PAGE}{link[1]})" if link[1].startswith("#") else link[0], text)
    begun = linked if linked.startswith("vLLM") else linked[:1].upper() + linked[1:]
    first, *others = _SENTENCES.split(begun)
    return f"{first} [More]({PAGE})." if others else f"{first.removesuffix('.')}."
