"""``prompt``: a template of the operator, by its id, and the values of its variables."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from penstock.pipeline.protocol.items import InputFile, InputImage, InputText
from penstock.pipeline.protocol.params.common import Echoed, at_most
from penstock.pipeline.protocol.params.items import VARIABLE
from penstock.pipeline.protocol.params.structs import TextOrObject

MOST_VARIABLES = 100
"""The most variables of a prompt."""

Variable: TypeAlias = str | InputText | InputImage | InputFile

_Value: TypeAlias = Annotated[Variable, TextOrObject(VARIABLE)]


class PromptParam(Echoed):
    """A template, its latest version if none is named; strings, images and files are values of its variables."""

    id: str
    version: str | None = None
    variables: Annotated[dict[str, _Value], at_most(MOST_VARIABLES, "variables")] | None = None
