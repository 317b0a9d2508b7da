"""Plug-ins: functions that put an operator's own stages into a pipeline.

A plug-in is a function that takes a pipeline and returns an edited one, conventionally called ``install``.  If it
keeps something open as long as the pipeline runs, such as a connection, it is an async context manager that yields the
edited pipeline.  The operator names each: as ``package.module:install``, as a file (``redact.py:install``), or as an
entry point of the group ``penstock.stages``.  A package that is installed but not named changes nothing.  A plug-in
that has the parameter ``settings`` gets its settings by it.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
import re
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, reduce
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel

from penstock.pipeline.core import Pipeline, Step
from penstock.pipeline.errors import CannotRun, CannotStart, Stopped
from penstock.pipeline.frame_order import ORDERS
from penstock.pipeline.junction import Junction, JunctionError, inner_junctions
from penstock.pipeline.logs import nearest
from penstock.pipeline.plugin_settings import PARAMETER, Tables, WrongSettings, model_of, table_of, validated
from penstock.pipeline.stage_guard import StageGuard

logger = logging.getLogger(__name__)

GROUP = "penstock.stages"
"""The group of entry points for plug-ins."""

STORES = "penstock.stores"
"""The group of entry points for databases: functions that take a URL, each under the name of the URL's scheme."""

DIALECTS = "penstock.dialects"
"""The group of entry points for dialects: each is a `Dialect`, under its name."""

HOSTS = "penstock.hosts"
"""The group of entry points for hosts: functions that open the host of a tool, each under the name of the tool."""

KINDS = "penstock.kinds"
"""The group of entry points for kinds of tools: each is a `HostedKind`, under the name of its host."""

RESOURCES = "penstock.resources"
"""The group of entry points for resources: functions that open groups of routes beside the dialects."""

STORE_PARTS = "penstock.store_parts"
"""The group of entry points for parts of the store: classes, each with tables of its own."""

ENGINES = "penstock.engines"
"""The group of entry points for engines: ``several`` is a function that starts those of several models."""

CHECKS = "penstock.checks"
"""The group of entry points for checks: async functions of the settings, whose text ``penstock check`` shows."""

AUDITS = "penstock.audits"
"""The group of entry points for audit logs: ``audit`` writes what a command decides, for the length of a block."""

PARSERS = "penstock.parsers"
"""The group of entry points for parsers of chat models, each under the name that an option gives."""

_CODE = re.compile(r".*\.py(:.*)?|[\w.]+:[\w.]+")

NEEDED = ("normalize", "persist")
"""Stages that must stay: a server cuts its pipeline at the first, and ``persist`` keeps its responses."""

WITH = "--with"
"""The option that names a plug-in."""

TOOL = "--tool"
"""The option that names the host of a tool."""

Value = TypeVar("Value")

Edit: TypeAlias = Callable[[Pipeline[Any, Any]], Pipeline[Any, Any]]
"""A function that returns a pipeline, edited."""

Function: TypeAlias = Callable[..., Pipeline[Any, Any] | AbstractAsyncContextManager[Pipeline[Any, Any]]]
"""A plug-in: it takes a pipeline, and its settings if it has any."""

Install: TypeAlias = Callable[[Pipeline[Any, Any]], AbstractAsyncContextManager[Pipeline[Any, Any]]]
"""A function that edits a pipeline for the length of a block."""


class WrongPlugin(CannotRun):
    """A plug-in cannot be found, or cannot be installed; ``option`` is the option that names it."""

    def __init__(self, name: str, problem: str, option: str = WITH) -> None:
        super().__init__(f"{option} {name}: {problem}")


@dataclass(frozen=True)
class Plugin:
    """A plug-in, and its name as the operator wrote it."""

    name: str
    install: Function
    settings: Mapping[str, BaseModel] = field(default_factory=dict, repr=False)
    """The argument of ``install`` besides the pipeline, if it takes one."""

    @asynccontextmanager
    async def __call__(self, pipeline: Pipeline[Any, Any]) -> AsyncGenerator[Pipeline[Any, Any], None]:
        """Yield the pipeline, edited, for the length of a block.

        Raises `WrongPlugin` if the plug-in fails, or if the server could not run the edited pipeline: a needed stage
        is gone, or the frames at its ends no longer fit.
        """
        async with AsyncExitStack() as closing:
            try:
                edited = self.install(pipeline, **self.settings)
                if isinstance(edited, AbstractAsyncContextManager):
                    edited = await closing.enter_async_context(edited)
            except Stopped:
                raise
            except (Exception, SystemExit) as error:
                raise WrongPlugin(self.name, described(error, "it raised ")) from error
            if not isinstance(edited, Pipeline):
                raise WrongPlugin(self.name, f"it returned {edited!r} instead of a pipeline")
            self._check(pipeline, edited)
            yield edited

    def _check(self, pipeline: Pipeline[Any, Any], edited: Pipeline[Any, Any]) -> None:
        if missing := [name for name in NEEDED if name in pipeline.names() and name not in edited.names()]:
            raise WrongPlugin(self.name, f"the server needs {missing[0]}: `replace` it instead of removing it")
        try:
            edited.accepts().check(pipeline.accepts(), "the server", edited.steps[0].name)
            pipeline.emits().check(edited.emits(), edited.steps[-1].name, "the server")
        except JunctionError as error:
            raise WrongPlugin(self.name, str(error)) from error


def load(names: Iterable[str], tables: Tables = MappingProxyType({})) -> Install:
    """Return a function that installs the named plug-ins in order, and guards the stages that they insert.

    They end in the reverse order, after the block.

    Each plug-in gets the settings of its table, if it takes any.  Both this function and the returned one raise
    `WrongPlugin`.
    """
    plugins = [_plugin(name, tables) for name in names]
    _check_tables(plugins, tables)
    unread = tables.keys() - {table_of(plugin.name) for plugin in plugins if plugin.settings}
    for plugin in plugins:
        if (label := table_of(plugin.name)) in unread:
            raise WrongPlugin(plugin.name, f"it takes no settings, but there is the table [stages.{label}]")
    return partial(edited_by, plugins)


@asynccontextmanager
async def edited_by(
    plugins: Iterable[Plugin], pipeline: Pipeline[Any, Any]
) -> AsyncGenerator[Pipeline[Any, Any], None]:
    """Yield the pipeline with the stages of the plug-ins, each guarded, for the length of a block."""
    edited = pipeline
    async with AsyncExitStack() as closing:
        for plugin in plugins:
            edited = await closing.enter_async_context(plugin(edited))
        yield guarded(edited, pipeline)


def _check_tables(plugins: Sequence[Plugin], tables: Tables) -> None:
    """Raise `WrongPlugin` if plug-ins of different models would read the same table."""
    readers: dict[str, Plugin] = {}
    for plugin in plugins:
        if not plugin.settings or (label := table_of(plugin.name)) not in tables:
            continue
        first = readers.setdefault(label, plugin)
        if type(first.settings[PARAMETER]) is not type(plugin.settings[PARAMETER]):
            problem = (
                f"{WITH} {first.name} reads the table [stages.{label}] as well: name one of them by an entry point"
            )
            raise WrongPlugin(plugin.name, problem)


def _plugin(name: str, tables: Tables) -> Plugin:
    install = function_named(name)
    label = table_of(name)
    with blamed(name, WITH):
        try:
            model = model_of(install)
            return Plugin(name, install, {PARAMETER: validated(model, label, tables.get(label, {}))} if model else {})
        except WrongSettings as error:
            raise WrongPlugin(name, str(error)) from None


def guarded(edited: Pipeline[Any, Any], original: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    """Return the ``edited`` pipeline with a `StageGuard` on each stage that the ``original`` does not have."""
    return edited if edited is original else _guarded(edited, list(original.every_step()), original.emits())


def guarded_at(anchor: str, function: Callable[..., Any], pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    """Return the pipeline with a `StageGuard` on the stage ``anchor``, which runs a ``function`` of the operator's."""
    known = [step for step in pipeline.every_step() if step.name != anchor]
    return _guarded(pipeline, known, pipeline.emits(), function)


def all_guarded(pipeline: Pipeline[Any, Any], *, has_order: bool) -> Pipeline[Any, Any]:
    """Return the pipeline with a `StageGuard` on every stage, which checks the order of its frames if ``has_order``."""
    return _guarded(pipeline, (), pipeline.emits(), has_order=has_order)


def _guarded(
    pipeline: Pipeline[Any, Any],
    known: Sequence[Step],
    taken: Junction,
    function: Callable[..., Any] | None = None,
    *,
    has_order: bool = True,
) -> Pipeline[Any, Any]:
    """Guard the stages that are not ``known``; ``taken`` are the frames that the pipeline has to give."""
    steps: list[Step] = []
    for step in reversed(pipeline.steps):
        guard = None if any(_is_same(step, other) for other in known) else _guard(step, taken, function)
        if step.inner:
            within = inner_junctions(type(step.stage))
            ends = within[1] if within else step.inner.emits()
            inner = _guarded(step.inner, known, ends, function, has_order=has_order)
            step = step.with_inner(inner)  # noqa: PLW2901
        if guard and not has_order:
            guard = replace(guard, order=None)
        steps.append(replace(step, guard=guard or step.guard))
        if not guard or step.accepts().frames in ORDERS:
            taken = taken if step.accepts().is_open else step.accepts()
    return Pipeline(tuple(reversed(steps)))


def _is_same(step: Step, other: Step) -> bool:
    """Return True if both are the same stage; the pipelines inside a composite stage may differ."""
    if step.stage is other.stage:
        return True
    if type(step.stage) is not type(other.stage) or not step.inner or not other.inner:
        return False
    one, two = vars(step.stage), vars(other.stage)
    return all(value is two[name] for name, value in one.items() if name != "inner")


def _guard(step: Step, taken: Junction, function: Callable[..., Any] | None) -> StageGuard:
    """Return the guard for a stage; its order is that of the frames ``taken`` by the next stage of the server."""
    own = step.emits()
    accepted = taken if own.is_open or Any in own.frames else own
    return StageGuard(step.name, accepted, ORDERS.get(taken.frames), function)


def function_named(name: str, option: str = WITH, group: str = GROUP) -> Callable[..., Any]:
    """Return the function that an ``option`` names: ``module:function``, ``file.py:function`` or an entry point.

    The entry point is of the ``group``.  Raises `WrongPlugin`.
    """
    function: Callable[..., Any] = _named(name, option, group, "function", callable)
    return function


def optional_function(name: str, group: str) -> Callable[..., Any] | None:
    """Return the function of an entry point; None if there is none, or if it needs a package that is not installed.

    Raises `WrongPlugin` for another fault.
    """
    named = installed(group)
    if name not in named:
        return None
    try:
        return function_named(name, group=group)
    except WrongPlugin as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError):
            raise
        package = (missing.name or "").partition(".")[0]
        if not package or named[name].startswith(f"{package}."):  # a part of the package that brings it
            raise
        logger.info("%s of %s is left out: it needs %s, which is not installed", name, group, package)
        return None


def value_named(name: str, option: str, group: str, kind: type[Value]) -> Value:
    """Return the value of a ``kind`` that an ``option`` names, as `function_named` does for a function."""
    value: Value = _named(name, option, group, kind.__name__, lambda value: isinstance(value, kind))
    return value


def _named(name: str, option: str, group: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    if name.endswith(".py"):
        inside = _functions_in(name) if kind == "function" else _calls_in(name)
        raise WrongPlugin(name, f"name its {kind}, too: {' or '.join(inside)}", option)
    source, _, path = (name if ":" in name else _entry_point(name, option, group, kind)).partition(":")
    module = imported(source, name, option)
    value: Any = reduce(lambda owner, attribute: getattr(owner, attribute, None), path.split("."), module)
    if not fits(value):
        near = nearest(path, (each for each, other in vars(module).items() if fits(other)))
        raise WrongPlugin(name, f"{source} has no {kind} {path or 'without a name'}{near}", option)
    return value


def made_by(make: Callable[..., Any], name: str, option: str, *arguments: object, wanted: str) -> Any:
    """Return what a function of the operator's returns for the ``arguments``; ``wanted`` describes them.

    Raises `WrongPlugin` if it does not take them, or if it fails, but passes its `CannotStart` on.
    """
    try:
        inspect.signature(make).bind(*arguments)
    except TypeError as error:
        raise WrongPlugin(name, f"it takes {wanted}", option) from error
    with blamed(name, option):
        return make(*arguments)


@contextmanager
def blamed(name: str, option: str) -> Iterator[None]:
    """Raise `WrongPlugin` for an error of the operator's code in a block.

    `CannotStart` and `CannotRun` pass: their message says all that the operator needs.
    """
    try:
        yield
    except (CannotStart, CannotRun):
        raise
    except Exception as error:
        raise WrongPlugin(name, described(error, "it raised "), option) from error


def imported(source: str, name: str, option: str) -> Any:
    """Import a file or a module for the ``name`` that an ``option`` gives; raise `WrongPlugin`."""
    if source.endswith(".py") and not Path(source).is_file():
        raise WrongPlugin(name, f"there is no file {source}", option)
    try:
        return _module(source)
    except Stopped:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}."):
            raise WrongPlugin(name, f"there is no module {error.name}", option) from error
        raise WrongPlugin(name, described(error, "importing it raised "), option) from error


def _functions_in(file: str) -> list[str]:
    """Return the first functions of a file, each as an option names it, or only ``install`` if it is among them.

    Stages are async, and so are not among them.
    """
    names = [
        each.name for each in _body_of(file) if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
    ]
    named = names[:3] if names and "install" not in names else ["install"]
    return [f"{file}:{name}" for name in named]


def _calls_in(file: str) -> list[str]:
    """Return the first names in a file that get the value of a call, each as an option names it."""
    calls = (each for each in _body_of(file) if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call))
    names = [target.id for each in calls for target in each.targets if isinstance(target, ast.Name)]
    return [f"{file}:{name}" for name in (names or ["NAME"])[:3]]


def _body_of(file: str) -> list[ast.stmt]:
    try:
        return ast.parse(Path(file).read_bytes()).body
    except (
        OSError,
        SyntaxError,
        ValueError,
    ):  # the names are advice in a message: importing the file tells what is wrong
        return []


def names_code(name: str) -> bool:
    """Return True if a name is that of a Python file, or of the function of a file or a module."""
    return _CODE.fullmatch(name) is not None


def installed(group: str) -> Mapping[str, str]:
    """Return the functions that the entry points of a ``group`` name, by the names of the entry points."""
    return _installed(group, tuple(sys.path))


@lru_cache(maxsize=32)
def _installed(group: str, _: tuple[str, ...]) -> Mapping[str, str]:
    """Read the files of every package on the path, which takes longer than to build a pipeline."""
    return {point.name: point.value for point in entry_points(group=group)}


def _entry_point(name: str, option: str, group: str, kind: str) -> str:
    points = installed(group)
    if name not in points:
        there = f"there {'is' if len(points) == 1 else 'are'} {', '.join(sorted(points)) or 'none'}"
        raise WrongPlugin(name, f"it is neither module:{kind} nor an entry point of {group} ({there})", option)
    return points[name]


def _module(source: str) -> Any:
    """Import a module from a file, or by its name, with the working directory last on the path."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = str(Path(source).resolve())  # also the name of the module, because no other module has it
    if path in sys.modules:
        return sys.modules[path]
    spec = importlib.util.spec_from_file_location(path, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path]
        raise
    return module


def described(error: BaseException, raised: str) -> str:
    """Describe an error and its line; errors that this package raises about an edit need none."""
    if isinstance(error, SyntaxError) and error.filename:  # raised by the import, not in the file
        return f"{raised}{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    last = traceback.extract_tb(error.__traceback__)[-1]
    if Path(last.filename).parent == Path(__file__).parent:
        return str(error)
    return f"{raised}{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
