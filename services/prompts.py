"""Prompts of the operator: a folder of templates, which requests name and whose variables they fill.

A template is a Markdown file, ``NAME.md`` or ``NAME@VERSION.md``.  Its text is the instructions, and the TOML between
two lines of ``+++`` before it gives parameters that a request leaves out.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.pipeline.errors import CannotStart, InvalidRequest, PromptNotFound, StageError, UnsupportedParameter
from penstock.pipeline.protocol.items import (
    InputFile,
    InputImage,
    InputPart,
    InputText,
    Message,
    MessagePart,
    OutputText,
)
from penstock.pipeline.protocol.params.items import InputItem
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.prompt import PromptParam, Variable
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_body

OF_ONE_REQUEST = frozenset(
    {
        "background",
        "background_options",
        "conversation",
        "instructions",
        "metadata",
        "previous_input_messages",
        "previous_response_id",
        "prompt",
        "request_id",
        "safety_identifier",
        "session_id",
        "store",
        "stream",
        "stream_options",
        "user",
    }
)
"""The parameters that no template gives: they belong to one request, or are the text of the file."""

_FILE = re.compile(r"(?P<id>[A-Za-z0-9_-]{1,64})(?:@(?P<version>[1-9][0-9]{0,8}))?\.md")
_VARIABLE = re.compile(r"\{\{[ \t]*([A-Za-z_][A-Za-z0-9_]{0,63})[ \t]*\}\}")
_YAML = "---"
_FENCE = "+++"


class UnusablePrompts(CannotStart):
    """The folder of prompts cannot be read, or a file in it has a mistake."""


@dataclass(frozen=True)
class Template:
    """One version of a prompt: parameters, in which ``{{name}}`` stands for the value of a variable."""

    id: str
    version: int
    given: CreateResponse

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of its variables."""
        return frozenset(name for text, _ in self._texts for name in _VARIABLE.findall(text))

    @cached_property
    def text_variables(self) -> frozenset[str]:
        """The variables that stand at a place for text alone."""
        return frozenset(name for text, is_plain in self._texts if is_plain for name in _VARIABLE.findall(text))

    @property
    def _texts(self) -> Iterator[tuple[str, bool]]:
        """Each text with variables, and True if its place is for text alone."""
        yield self.given.instructions or "", True
        for item in self.given.input_items:
            if isinstance(item, Message):
                yield from ((text, item.role == "assistant") for text in _texts_of(item))

    def filled(self, variables: Mapping[str, Variable]) -> CreateResponse:
        """Return the parameters with the values of the variables; raises `InvalidRequest` for wrong ones."""
        self._check(variables)
        texts = {name: value for name, value in variables.items() if isinstance(value, str)}
        texts |= {name: value.text for name, value in variables.items() if isinstance(value, InputText)}
        parts: dict[str, InputPart] = {name: InputText(text) for name, text in texts.items()}
        parts |= {name: value for name, value in variables.items() if isinstance(value, InputImage | InputFile)}
        changes: dict[str, Any] = {}
        if self.given.instructions:
            changes["instructions"] = _filled(self.given.instructions, texts)
        if self.given.input is not None:
            changes["input"] = [_message(item, texts, parts) for item in self.given.input_items]
        return self.given.model_copy(update=changes)

    def _check(self, variables: Mapping[str, Variable]) -> None:
        for name in sorted(variables.keys() - self.variables):
            has = f"has the variables {', '.join(sorted(self.variables))}" if self.variables else "has no variables"
            message = f"The prompt {self.id!r} {has}, and none named {shortened(name)!r}."
            raise InvalidRequest(message, param=f"prompt.variables.{shortened(name)}", code="invalid_value")
        for name in sorted(self.variables - variables.keys()):
            message = f"The prompt {self.id!r} needs a value for its variable {name!r}."
            code = "missing_required_parameter"
            raise InvalidRequest(message, param=f"prompt.variables.{name}", code=code)
        for name, value in variables.items():
            if isinstance(value, InputImage | InputFile) and name in self.text_variables:
                message = f"The variable {name!r} stands in a text of the prompt {self.id!r}, so its value is a text."
                raise InvalidRequest(message, param=f"prompt.variables.{name}", code="invalid_value")


@dataclass
class Prompts:
    """The templates of a ``folder``, by id and version; without one there are none.

    Raises `UnusablePrompts` for a wrong file.
    """

    folder: Path | None = None
    templates: Mapping[str, Mapping[int, Template]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.templates = self.read()

    def read(self) -> Mapping[str, Mapping[int, Template]]:
        """Return the templates that the folder has now; raises `UnusablePrompts`."""
        return self.templates if self.folder is None else read_templates(self.folder)

    def find(self, prompt_id: str, version: str | None = None) -> Template:
        """Return a version of a prompt, the latest one if none is named; raises `PromptNotFound`."""
        versions = self.templates.get(prompt_id)
        if not versions:
            raise PromptNotFound(f"There is no prompt {shortened(prompt_id)!r}.", param="prompt.id")
        if version is None:
            return versions[max(versions)]
        for number, template in versions.items():
            if version == str(number):
                return template
        known = ", ".join(map(str, sorted(versions)))
        message = f"The prompt {prompt_id!r} has no version {shortened(version)!r}, only {known}."
        raise PromptNotFound(message, param="prompt.version")

    def template_of(self, prompt: PromptParam) -> Template:
        """Return the template that a request names; raises `UnsupportedParameter` if the server has no prompts."""
        if self.folder is None and not self.templates:
            message = "This server has no prompts: --prompts gives it a folder of them."
            raise UnsupportedParameter(message, param="prompt")
        return self.find(prompt.id, prompt.version)


@dataclass(frozen=True)
class FilledRequest:
    """A request with the parameters of its template, and the names of those."""

    request: CreateResponse
    names: frozenset[str] = frozenset()
    template: Template | None = None

    @property
    def echo(self) -> dict[str, Any] | None:
        """The ``prompt`` of the response: that of the request, with the version that was used."""
        if self.template is None or self.request.prompt is None:
            return None
        sent = {"variables": self.request.prompt.sent.get("variables")}
        return {"id": self.template.id, "version": str(self.template.version), **sent}


def fill(prompts: Prompts, request: CreateResponse) -> FilledRequest:
    """Return a request with what its template gives for the parameters that it leaves out."""
    if request.prompt is None:
        return FilledRequest(request)
    template = prompts.template_of(request.prompt)
    filled = template.filled(request.prompt.variables or {})
    given = {name: getattr(filled, name) for name in filled.model_fields_set if getattr(request, name) is None}
    return FilledRequest(request.model_copy(update=given), frozenset(given), template)


def blamed(error: StageError, filled: FilledRequest) -> StageError:
    """Return the error about a request, whose place is the prompt if the template has given the wrong parameter."""
    head = re.match(r"\w*", error.param or "")
    if head and head[0] in filled.names:
        error.message = f"{error.message} (the prompt gives {error.param})"
        error.param = "prompt"
    return error


def read_templates(folder: Path) -> Mapping[str, Mapping[int, Template]]:
    """Return the templates of a folder, by id and version.  Raises `UnusablePrompts`."""
    found: dict[str, dict[int, Template]] = {}
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".md")
    except OSError as error:
        raise UnusablePrompts(f"--prompts {folder}: {error.strerror}") from error
    for file in files:
        source = f"--prompts {file}"
        if not (name := _FILE.fullmatch(file.name)):
            raise UnusablePrompts(f"{source}: a file is named NAME.md or NAME@VERSION.md, with a whole number")
        version = int(name["version"] or 1)
        versions = found.setdefault(name["id"], {})
        if version in versions:
            raise UnusablePrompts(f"{source}: {name['id']}.md is version 1, too")
        versions[version] = Template(name["id"], version, _parameters(file, source))
    return MappingProxyType({prompt_id: MappingProxyType(versions) for prompt_id, versions in found.items()})


def _parameters(file: Path, source: str) -> CreateResponse:
    try:
        matter, instructions = _split(file.read_text(encoding="utf-8-sig"))
        parameters = tomllib.loads(matter)
    except OSError as error:
        raise UnusablePrompts(f"{source}: {error.strerror}") from error
    except ValueError as error:  # of UTF-8 and TOML, too
        raise UnusablePrompts(f"{source}: {error}") from error
    for name in parameters:
        if name in OF_ONE_REQUEST or name not in CreateResponse.model_fields:
            raise UnusablePrompts(f"{source}: {name} is no parameter that a prompt can give")
    try:
        body = json.dumps({**parameters, "instructions": instructions or None}, allow_nan=False)
        given = read_body(body.encode(), CreateResponse)
    except (InvalidRequest, ValueError, TypeError) as error:  # a date and a number without a value are no JSON
        raise UnusablePrompts(f"{source}: {error}") from error
    for position, item in enumerate(given.input_items):
        if not isinstance(item, Message):
            raise UnusablePrompts(f"{source}: input[{position}] is no message")
    return given


def _split(text: str) -> tuple[str, str]:
    """Return the TOML and the instructions of a file."""
    lines = text.splitlines()
    if lines and lines[0].rstrip() == _YAML and _YAML in (line.rstrip() for line in lines[1:]):
        raise ValueError(f"the head between lines of {_YAML} is not read: write it as TOML between lines of {_FENCE}")
    if not lines or lines[0].rstrip() != _FENCE:
        return "", text.strip()
    for number, line in enumerate(lines[1:], 1):
        if line.rstrip() == _FENCE:
            return "\n".join(("", *lines[1:number])), "\n".join(lines[number + 1 :]).strip()
    raise ValueError(f"a second line with {_FENCE} is missing")


def _texts_of(item: Message) -> Iterable[str]:
    return [part.text for part in item.content if isinstance(part, InputText | OutputText)]


def _filled(text: str, texts: Mapping[str, str]) -> str:
    """Return a text with its variables replaced, once: a value that looks like a variable stays as it is."""
    return _VARIABLE.sub(lambda found: texts[found[1]], text)


def _message(item: InputItem, texts: Mapping[str, str], parts: Mapping[str, InputPart]) -> InputItem:
    if not isinstance(item, Message):
        return item
    content = tuple(new for part in item.content for new in _parts(part, texts, parts))
    return msgspec.structs.replace(item, content=content)


def _parts(part: MessagePart, texts: Mapping[str, str], parts: Mapping[str, InputPart]) -> Sequence[MessagePart]:
    """Return the parts that a part becomes: an image or a file divides the text around it."""
    if isinstance(part, OutputText):
        return (msgspec.structs.replace(part, text=_filled(part.text, texts)),)
    if not isinstance(part, InputText):
        return (part,)
    found: list[MessagePart] = []
    for number, piece in enumerate(_VARIABLE.split(part.text)):
        if number % 2 and piece not in texts:
            found.append(parts[piece])
        elif text := texts[piece] if number % 2 else piece:
            if found and isinstance(last := found[-1], InputText):
                found[-1] = InputText(last.text + text)
            else:
                found.append(InputText(text))
    return found or (InputText(""),)
