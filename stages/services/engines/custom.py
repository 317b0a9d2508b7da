"""Engines of the operator's own: a function that ``--engine`` names makes one, and it is checked before it serves."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from types import MethodType
from typing import Any, get_type_hints

import msgspec

from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.junction import JunctionError, junctions
from penstock.pipeline.plugins import WrongPlugin, described, function_named, guarded_at
from penstock.stages.services.engines.engine import Backend, Engine, TextBackend

DECORATE = "make it an async generator function, and decorate it with contextlib.asynccontextmanager"


@asynccontextmanager
async def open_engine(name: str, settings: object) -> AsyncGenerator[Engine | TextBackend, None]:
    """Run the engine that the function ``name`` makes of the settings, for the length of a block.

    The function returns the engine, or an async context manager that gives it.  `Backend.close` comes before the end
    of the context manager.  Raises `WrongPlugin` if the function fails, or if its engine does not fit.
    """
    wrong = partial(WrongPlugin, name, option="--engine")
    make = function_named(name, "--engine")
    async with AsyncExitStack() as closing:
        try:
            inspect.signature(make).bind(settings)
        except TypeError as error:
            raise wrong("it takes one argument: the settings of the server") from error
        try:
            engine = make(settings)
            if isinstance(engine, AbstractAsyncContextManager):
                engine = await closing.enter_async_context(engine)
        except CannotStart:
            raise
        except Exception as error:
            raise wrong(described(error, "it raised ")) from error
        if problem := misfit(engine):
            raise wrong(f"{problem} (stages/ENGINES.md)")
        closing.push_async_callback(engine.close)
        yield engine


def guarded_engine(engine: Engine | TextBackend, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    """Return the pipeline with a guard on the stage that runs the operator's engine."""
    if isinstance(engine, TextBackend):
        return guarded_at("parse", engine.answer, pipeline)
    return guarded_at("generate", engine.open, pipeline)


def misfit(engine: Any) -> str | None:
    """Return how an object fits neither `Engine` nor `TextBackend`, with the cure; None if it fits."""
    if isinstance(engine, Coroutine):
        engine.close()
        return f"it returned a coroutine: {DECORATE}"
    if inspect.isasyncgen(engine):
        return f"it returned an async generator: {DECORATE}"
    kind = type(engine).__name__
    if inspect.isclass(engine):
        return f"it returned the class {engine.__name__}: give an instance"
    if not hasattr(engine, "open") and not hasattr(engine, "answer"):
        return f"{kind} has neither a method open, for token ids, nor a method answer, for texts"
    problems = [*_missing(engine, Backend), *(() if hasattr(engine, "answer") else _missing(engine, Engine))]
    if hasattr(engine, "answer") and not problems:
        return _wrong_stage(engine.answer, kind)
    return "; ".join(problems) or None


def _missing(engine: object, protocol: type) -> list[str]:
    members = {name: member for name, member in vars(protocol).items() if not name.startswith("_")}
    problems = (
        _wrong_value(engine, name, member.fget) if isinstance(member, property) else _wrong_method(engine, name, member)
        for name, member in members.items()
        if isinstance(member, property) or inspect.isfunction(member)
    )
    return [problem for problem in problems if problem]


def _wrong_value(engine: object, name: str, declared: Any) -> str | None:
    hint = get_type_hints(declared)["return"]
    label = f"{type(engine).__name__}.{name}"
    try:
        value = getattr(engine, name)
    except AttributeError:
        of_type = hint.__name__ if isinstance(hint, type) else hint
        return f"{label} is missing: give it as an attribute or a property, of type {of_type}"
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        return f"{label} is {value!r}: {error}"
    return None if value or hint is bool else f"{label} is {value!r}: it must not be empty or 0"


def _wrong_method(engine: object, name: str, declared: Callable[..., Any]) -> str | None:
    method = getattr(engine, name, None)
    signature = inspect.signature(declared, eval_str=True)
    is_async = inspect.iscoroutinefunction(declared)
    cure = f"write it as `{'async ' if is_async else ''}def {name}{signature}`"
    label = f"the method {name} of {type(engine).__name__}"
    if not callable(method):
        return f"{label} is missing: {cure}"
    try:
        inspect.signature(method).bind(*[None] * (len(signature.parameters) - 1))
    except TypeError as error:
        return f"{label} does not take its arguments ({error}): {cure}"
    if is_async and not inspect.iscoroutinefunction(method):
        return f"{label} is not async: {cure}"
    if not is_async and (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
        return f"{label} gives no async context manager: {DECORATE}"
    return None


def _wrong_stage(answer: Any, kind: str) -> str | None:
    try:
        own = junctions(f"{kind}.answer", answer)
        declared = junctions("answer", MethodType(TextBackend.answer, object()))
        own[0].check(declared[0], "converse", f"{kind}.answer")
        declared[1].check(own[1], f"{kind}.answer", "converse")
    except JunctionError as error:
        return str(error)
    return None
