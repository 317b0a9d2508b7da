"""Plug-ins: stages from outside, put into a pipeline by functions that edit it.

A plug-in is a function that takes a pipeline and returns an edited one, conventionally called ``install``.  Each is
named: as ``package.module:install``, as a file, ``redact.py:install``, or as an entry point of the group
``penstock.stages``.  What is installed but not named changes nothing.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeAlias

from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.junction import JunctionError

GROUP = "penstock.stages"
"""The entry points of plug-ins."""

NEEDED = ("normalize", "render", "persist")
"""Where a server cuts its pipeline, and what keeps its responses."""

Install: TypeAlias = Callable[[Pipeline[Any, Any]], Pipeline[Any, Any]]
"""A plug-in: it returns the pipeline, edited."""


class WrongPlugin(CannotRun):
    """A plug-in cannot be found, or cannot be installed."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"--with {name}: {problem}")


@dataclass(frozen=True)
class Plugin:
    """A plug-in under the name that the operator wrote."""

    name: str
    install: Install

    def __call__(self, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        """Edit a pipeline; raises `WrongPlugin`, also where others than before would be asked for at its ends."""
        try:
            edited = self.install(pipeline)
        except (Exception, SystemExit) as error:
            raise WrongPlugin(self.name, _told(error, "it raised ")) from error
        if not isinstance(edited, Pipeline):
            raise WrongPlugin(self.name, f"it returned {edited!r} where an edited pipeline was to come")
        self._check(pipeline, edited)
        return edited

    def _check(self, pipeline: Pipeline[Any, Any], edited: Pipeline[Any, Any]) -> None:
        """Raise `WrongPlugin` unless whoever ran the pipeline can run the edited one."""
        if lost := [name for name in NEEDED if name in pipeline.names() and name not in edited.names()]:
            raise WrongPlugin(self.name, f"{lost[0]} is gone, which the server needs: `replace` it instead")
        try:
            edited.accepts().check(pipeline.accepts(), "the server", edited.steps[0].name)
            pipeline.emits().check(edited.emits(), edited.steps[-1].name, "the server")
        except JunctionError as error:
            raise WrongPlugin(self.name, str(error)) from error


def load(names: Iterable[str]) -> Install:
    """What installs all the plug-ins that are named, in their order.

    Raises `WrongPlugin`, and so does what it returns.
    """
    plugins = [Plugin(name, _found(name)) for name in names]
    return lambda pipeline: reduce(lambda edited, plugin: plugin(edited), plugins, pipeline)


def _found(name: str) -> Install:
    place, _, path = (name if ":" in name else _entry_point(name)).partition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise WrongPlugin(name, f"there is no file {place}")
    try:
        module = _module(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            raise WrongPlugin(name, f"there is no module {error.name}") from error
        raise WrongPlugin(name, _told(error, "importing it raised ")) from error
    install: Any = reduce(lambda owner, attribute: getattr(owner, attribute, None), path.split("."), module)
    if not callable(install):
        raise WrongPlugin(name, f"{place} has no function {path or 'without a name'}")
    return install  # type: ignore[no-any-return]


def _entry_point(name: str) -> str:
    """What the entry point of that name stands for."""
    found = {point.name: point.value for point in entry_points(group=GROUP)}
    if name not in found:
        there = f"there are {', '.join(sorted(found))}" if found else "there are none"
        raise WrongPlugin(name, f"it is no entry point of {GROUP} ({there}), and names no module:function")
    return found[name]


def _module(place: str) -> Any:
    """The module at that place: a file, or as Python finds it, in the working directory last."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = str(Path(place).resolve())  # which no other module has for its name
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


def _told(error: BaseException, raised: str) -> str:
    """What was raised, and where; what a pipeline says of an edit speaks for itself."""
    if isinstance(error, SyntaxError) and error.filename:  # it was raised where the file was read, and not in it
        return f"{raised}{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    last = traceback.extract_tb(error.__traceback__)[-1]
    if Path(last.filename).parent == Path(__file__).parent:
        return str(error)
    return f"{raised}{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
