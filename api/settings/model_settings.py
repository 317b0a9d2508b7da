"""The settings of several models: a table for each of them, in ``penstock.toml`` or a file of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, CliSuppress, NoDecode

from penstock.api.settings.engine_settings import REPLAY, ChatSettings, ModelEngineSettings
from penstock.api.settings.expected import expected
from penstock.api.settings.sources import FILE, MODELS, keys, line_of, read_file, read_toml, variable
from penstock.api.values import Duration, decoded
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import nearest
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.services.engines.vllm import option_names
from penstock.services.model_names import covers, is_name, wrong_name
from penstock.stages.normalize.tool_types import named

Kind = Literal["generate", "embed", "score", "rerank", "classify", "pool", "audio", "image", "any"]
"""The work of a model: penstock reads the answers of those that generate, and passes on those of all others."""

OF_PROCESS = ("idle", "sleep", "start_timeout", "groups", "priority")
"""The settings of a model that concern the process that penstock starts for it."""


class ModelTable(ChatSettings, ModelEngineSettings, extra="forbid", hide_input_in_errors=True):
    """One model of several, with what a server of it alone could have, and how it shares a machine with others."""

    names: list[str] = Field(
        default=[],
        description="other names of the model for clients; a name may be a pattern, as in a shell",
        examples=[["claude-*"]],
    )
    command: str | None = Field(
        default=None,
        description="the program that serves the model, which penstock starts, watches and ends; {port} in it is the "
        "port where it listens, otherwise --host and --port follow it",
        examples=["vllm serve openai/gpt-oss-20b"],
    )
    idle: Duration | None = Field(
        default=None,
        gt=0,
        description="time after its last response after which the model sleeps or ends; by default only if another "
        "one needs its place",
        examples=["10m"],
    )
    sleep: Literal[0, 1, 2] = Field(
        default=0,
        description="level of vLLM's sleep mode in which the model waits to be used again; 0 ends its process",
    )
    start_timeout: Duration = Field(
        default="10m", validate_default=True, gt=0, description="time that the start of the command may take"
    )
    groups: list[str] = Field(
        default=[],
        description="groups of models that share a place, such as a GPU: one model of a group is up at once, or as "
        "many as [model-groups] says",
        examples=[["gpu0"]],
    )
    priority: int = Field(
        default=0,
        description="a model that waits for its place ends the responses of one with a lower priority, if no other "
        "can yield",
    )
    kind: Kind = Field(
        default="generate",
        description="what the model does; penstock passes on what a model does not generate, without reading it",
    )
    instead: str | None = Field(
        default=None, description="the model that answers when this one is full or down", examples=["small"]
    )
    tools: list[str] | None = Field(
        default=None,
        description="the tools that the server runs for this model; by default those of --allow-tool",
        examples=[["web_search"]],
    )
    summaries: str | None = Field(
        default=None,
        description="the model that writes the summaries of compactions; by default this one",
        examples=["small"],
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        named = dict[str, Any]()
        for typed, value in table.items():
            key = "engine" if typed == "urls" else str(typed).replace("-", "_")
            if key in named:
                raise ValueError(f"{typed} is set twice" if typed != "urls" else "engine and urls are one setting")
            named[key] = value
        return named

    @field_validator("names")
    @classmethod
    def _names(cls, names: list[str]) -> list[str]:
        for name in names:
            if reason := wrong_name(name):
                raise ValueError(reason)
        return names

    @field_validator("engine")
    @classmethod
    def _is_engine(cls, urls: list[str]) -> list[str]:
        if any(url.startswith(REPLAY) for url in urls):
            raise ValueError(f"{REPLAY}DIR cannot stand beside other models: start a server of its own for recordings")
        return urls

    @field_validator("command")
    @classmethod
    def _can_run(cls, command: str | None) -> str | None:
        if command is not None and (reason := wrong_command(command)):
            raise ValueError(reason)
        return command

    @field_validator("groups")
    @classmethod
    def _groups(cls, groups: list[str]) -> list[str]:
        if repeated := [group for group, count in Counter(groups).items() if count > 1]:
            raise ValueError(f"{repeated[0]} stands there twice")
        return groups

    @field_validator("vllm")
    @classmethod
    def _model_stands_apart(cls, options: dict[str, Any]) -> dict[str, Any]:
        if "model" in options:
            raise ValueError("model is a key of the table of the model, and no option here")
        return options

    @model_validator(mode="after")
    def _has_one_engine(self) -> Self:
        if self.command and self.engine:
            raise ValueError("command and engine cannot stand together: a model has one of them")
        if not (self.command or self.engine or self.model):
            raise ValueError("it needs a command, an engine, or the model for vLLM in this process")
        if not self.is_here and self.vllm:
            where = "its command" if self.command else "the engine's own server"
            raise ValueError(f"vllm has no effect, as the model does not run in this process: {where} has the options")
        if useless := [] if self.command else [name for name in OF_PROCESS if name in self.model_fields_set]:
            names, verb = " and ".join(useless).replace("_", "-"), "needs" if len(useless) == 1 else "need"
            raise ValueError(f"{names} {verb} a command: penstock stops only what it has started")
        if self.kind != "generate" and (self.is_here or self.engine_factory):
            raise ValueError(f"a model of the kind {self.kind} needs a server: a command, or the URL of an engine")
        return self

    @property
    def is_here(self) -> bool:
        """True if vLLM in this process runs the model."""
        return not (self.command or self.engine)

    @property
    def generates(self) -> bool:
        """True if it generates what penstock reads."""
        return self.kind in ("generate", "any")

    @property
    def where(self) -> str:
        """The place where the model runs, in words."""
        if self.command:
            return f"started by {self.command}"
        return f"at {' and '.join(self.engine)}" if self.engine else f"{self.model} on vLLM in this process"

    def apart(self) -> Self:
        """Return the table of a model that vLLM in this process would run, as if it ran elsewhere."""
        return self.model_copy(update={"engine": ["http://127.0.0.1:9"], "vllm": {}}) if self.is_here else self


def wrong_command(command: str) -> str:
    """Return why a command cannot run; empty if nothing speaks against it."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"{shortened(command)!r} is not a command as in a shell: {error}"
    if not words:
        return "the command has no words"
    program = words[0]
    if "\0" in command:
        return "the command has a character that no program gets"
    if re.fullmatch(r"[A-Za-z_]\w*=.*", program, re.DOTALL):
        return f"{shortened(program)} is no program: write env before the variables"
    if shutil.which(program) is None:
        path = "" if "/" in program else " on the PATH"
        return f"there is no program {shortened(program)}{path}"
    return ""


SHARED = (ModelEngineSettings.model_fields.keys() | ChatSettings.model_fields.keys()) & ModelTable.model_fields.keys()
"""The settings of a model that the server may have, too, for all models that do not set them."""

_SPELLINGS = {"engine": ("engine", "urls")}


@dataclass(frozen=True)
class Places:
    """The places of the tables of models: lines of a ``file``, in which they stand below the keys ``above``."""

    file: Path = FILE
    above: tuple[str, ...] = (MODELS,)

    def of(self, name: str, key: str = "") -> str:
        """Return the place of a model's table, or of one of its keys, as far as it is known."""
        table = (*self.above, name)
        shown = f"[{'.'.join(part if re.fullmatch('[A-Za-z0-9_-]+', part) else _quoted(part) for part in table)}]"
        line = line_of(self.file, table, _SPELLINGS.get(key, (key,)))
        given = variable(MODELS) if self.above and variable(MODELS) in os.environ else ""
        where = given or (f"{self.file}, line {line}" if line else "")
        return f"{shown}{' ' * bool(key)}{key.replace('_', '-')}{f' ({where})' if where else ''}"


def _quoted(name: str) -> str:
    return json.dumps(shortened(name), ensure_ascii=False)


class ModelsSettings(ChatSettings, BaseSettings):
    """Several models behind one server, with what holds for those that do not set it."""

    SECTION: ClassVar[str] = "Several models"

    model_file: Path | None = Field(
        default=None,
        alias="model_config",
        title="FILE",
        description="a TOML file of several models, with a table [NAME] for each, whose keys are those of "
        "[models.NAME]; read again at SIGHUP",
        examples=["models.toml"],
    )
    models: CliSuppress[Annotated[dict[str, ModelTable], NoDecode]] = Field(
        default={}, validate_default=True, repr=False
    )
    model_groups: CliSuppress[Annotated[dict[str, int], NoDecode]] = {}

    @field_validator("models", mode="before")
    @classmethod
    def _read(cls, given: Any, info: ValidationInfo) -> dict[str, ModelTable]:
        return cls.read_models(given, info.data.get("model_file"))

    @classmethod
    def read_models(cls, given: Any, file: Path | None) -> dict[str, ModelTable]:
        """Return the models that the settings give, or those of their ``file``; raise an error for wrong ones."""
        tables = decoded(given)
        if file is None:
            return checked(tables, Places(), keys(cls.model_fields))
        if tables:
            raise _wrong(
                [f"--model-config: models stand in {Places().of(next(iter(tables)))} as well: keep one of both"]
            )
        if not (of_file := read_toml(file)):
            raise _wrong([f"--model-config: {file} has no model: begin a table for each, such as [big]"])
        return checked(of_file, Places(file, ()), keys(cls.model_fields))

    @field_validator("model_groups", mode="before")
    @classmethod
    def _groups_of_models(cls, given: Any, info: ValidationInfo) -> Any:
        return cls.read_groups(given, info.data["models"]) if "models" in info.data else {}

    @classmethod
    def read_groups(cls, given: Any, tables: Mapping[str, ModelTable]) -> dict[str, int]:
        """Return how many models of each group may be up at once; raise an error for wrong groups of these models."""
        groups = decoded(given)
        if not isinstance(groups, dict):
            raise _wrong(["model-groups: expected a table with a number for each group"])
        known = sorted({group for table in tables.values() for group in table.groups})
        for group, most in groups.items():
            place = _place_of_group(group)
            if group not in known:
                raise _wrong([f"{place}: no model is in a group of that name{nearest(group, known)}"])
            if type(most) is not int or most < 1:
                raise _wrong([f"{place}: expected the number of models that may be up at once, not {most!r}"])
        return groups

    @classmethod
    def of_files(cls, file: Path | None = None) -> tuple[dict[str, ModelTable], dict[str, int]]:
        """Return the models, and how many of each group may be up at once, as ``file`` or the settings have them now.

        Only a command line could name another file of models.  Raises `CannotRun` for wrong ones.
        """
        in_file = read_file(FILE, keys(cls.model_fields))
        models, groups, named = (
            os.environ.get(variable(key), in_file.get(key)) for key in (MODELS, "model_groups", "model_config")
        )
        try:
            tables = cls.read_models(models or {}, file or (Path(named) if named else None))
            return tables, cls.read_groups(groups or {}, tables)
        except ValueError as error:
            raise CannotRun(str(error)) from None

    def with_models_of_files(self, own_tools: Collection[str]) -> Self:
        """Return the settings with the models that their files have now; raise `CannotRun` for wrong ones.

        ``own_tools`` are the labels of the operator's own tools.
        """
        tables, groups = self.of_files(self.model_file)
        if not tables:
            raise CannotRun(f"{FILE} has no table of a model")
        try:
            check_tools(tables, own_tools, self.places)
        except ValueError as error:
            raise CannotRun(str(error)) from None
        return self.model_copy(update={"models": tables, "model_groups": groups})

    @property
    def places(self) -> Places:
        """The places of the tables of models."""
        return Places(self.model_file, ()) if self.model_file else Places()


def _place_of_group(group: str) -> str:
    line = line_of(FILE, ("model-groups",), (group,)) or line_of(FILE, ("model_groups",), (group,))
    return f"[model-groups] {group}{f' ({FILE}, line {line})' if line else ''}"


WRONG_MODELS = "wrong_models"
"""The type of an error whose message names the place of each mistake."""


def _wrong(lines: Iterable[str]) -> PydanticCustomError:
    text = "\n".join(lines)
    return PydanticCustomError(WRONG_MODELS, "{text}", {"text": text})


def checked(given: Any, places: Places, known: Collection[str] = ()) -> dict[str, ModelTable]:
    """Return the tables of models; raise an error with a sentence for each mistake.

    ``known`` are the settings of the server, which have no place in a table.
    """
    if not isinstance(given, dict):
        raise _wrong([f"{MODELS}: expected a table for each model, such as [{MODELS}.big]"])
    try:
        tables = _TABLES.validate_python(given)
    except ValidationError as error:
        raise _wrong(_sentence(each, given[each["loc"][0]], places, known) for each in error.errors()) from None
    if mistakes := list(_mistakes(tables, places)):
        raise _wrong(mistakes)
    return tables


_TABLES = TypeAdapter(dict[str, ModelTable])

_UNSHOWN = frozenset({"engine_key", "shadow_key"})


_HOMES = {"command": "its command", **dict.fromkeys(("engine", "urls"), "the engine's own server")}
"""The places of options of vLLM, by the key of a table that says where its model runs."""


def _sentence(error: ErrorDetails, table: Any, places: Places, known: Collection[str]) -> str:
    name, key = (*map(str, error["loc"]), "")[:2]
    place = places.of(name, key)
    if error["type"] == "extra_forbidden":
        dashed = key.replace("_", "-")
        if key in known:
            return f"{place}: it is a setting of the server: move it above all tables of {FILE}"
        if f"--{dashed}" in option_names():
            home = next((at for given, at in _HOMES.items() if given in table), "the model's table vllm")
            return f"{place}: it is an option of vLLM's engine: move it into {home}"
        return f"{place}: there is no such setting{nearest(dashed, _keys_of_table())}"
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"{place}: a model is a table, such as [{MODELS}.big]"
    field = ModelTable.model_fields.get(key)
    example = field.examples[0] if field and field.examples else None
    return f"{place}: {expected(error, example, is_shown=key not in _UNSHOWN).replace('--', '')}"


def _keys_of_table() -> list[str]:
    return ["urls", *(name.replace("_", "-") for name in ModelTable.model_fields)]


def _mistakes(tables: Mapping[str, ModelTable], places: Places) -> Iterator[str]:
    """Yield a sentence for each mistake of tables that are right each for itself."""
    yield from _wrong_names(tables, places)
    here = [name for name, table in tables.items() if table.is_here]
    for name in here[1:]:
        yield f"{places.of(name)}: vLLM in this process runs one model, which is {places.of(here[0])}"
    for name, table in tables.items():
        for key, other in (("instead", table.instead), ("summaries", table.summaries)):
            if other is not None and other not in tables:
                yield f"{places.of(name, key)}: there is no model {shortened(other)!r}{nearest(other, tables)}"
        writer = tables.get(table.summaries or name)
        if table.summaries and writer and not writer.generates:
            yield f"{places.of(name, 'summaries')}: {table.summaries} does not generate, as its kind is {writer.kind}"
        stand_in = tables.get(table.instead or name)
        if stand_in and "any" not in (kinds := (table.kind, stand_in.kind)) and len({*kinds}) > 1:
            yield f"{places.of(name, 'instead')}: {table.instead} is of another kind, {stand_in.kind}"
    yield from _circles(tables, places)
    if tables and not any(table.generates for table in tables.values()):
        yield f"{places.of(next(iter(tables)), 'kind')}: no model generates, and a server needs one that does"


def check_tools(tables: Mapping[str, ModelTable], own: Collection[str], places: Places) -> None:
    """Raise an error for the first tool of a model that is neither built in nor one of the operator's ``own``."""
    for name, table in tables.items():
        try:
            named(table.tools or (), own)
        except ValueError as error:
            raise _wrong([f"{places.of(name, 'tools')}: {error}"]) from None


def _wrong_names(tables: Mapping[str, ModelTable], places: Places) -> Iterator[str]:
    owners = {name: (name, "") for name in tables}
    for name, table in tables.items():
        if reason := wrong_name(name):
            yield f"{places.of(name)}: {reason}"
        elif not is_name(name):
            yield f"{places.of(name)}: the name of a table is no pattern; its names may have some"
        for other in table.names:
            place = places.of(name, "names")
            if other in owners:
                yield f"{place}: {shortened(other)!r} names two models, or one twice; see {places.of(*owners[other])}"
            else:
                owners[other] = (name, "names")
    owned = [(name, pattern) for name, table in tables.items() for pattern in table.names]
    for (first, wider), (name, pattern) in combinations(owned, 2):
        if first != name and tables[first].kind == tables[name].kind and covers(wider, pattern):
            place, other = places.of(name, "names"), places.of(first, "names")
            yield f"{place}: {pattern!r} is never meant, as {wider!r} stands before it: move it above {other}"


def _circles(tables: Mapping[str, ModelTable], places: Places) -> Iterator[str]:
    """Yield a sentence for each circle of models that stand in for each other, at its first model."""
    seen = set[str]()
    for first in tables:
        path = dict[str, None]()
        name: str | None = first
        while name is not None and name in tables and name not in path and name not in seen:
            path[name] = None
            name = tables[name].instead
        if name is not None and name in path:
            circle = [*path][[*path].index(name) :]
            yield (
                f"{places.of(name, 'instead')}: a circle, as each model stands in for the one before it: "
                + ", ".join((*circle, name))
            )
        seen.update(path)
