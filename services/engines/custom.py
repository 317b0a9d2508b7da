"""Engines of the operator's own: a function that ``--engine`` names makes one, and it is checked before it serves."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import MethodType
from typing import Any

from penstock.pipeline.core import Pipeline
from penstock.pipeline.junction import JunctionError, junctions
from penstock.pipeline.members import DECORATE, missing_members
from penstock.pipeline.plugins import WrongPlugin, blamed, function_named, guarded_at, made_by
from penstock.services.engines.engine import Backend, Engine, TextBackend

ENGINE = "--engine"
"""The option that names an engine."""


@asynccontextmanager
async def open_engine(name: str, settings: object) -> AsyncGenerator[Engine | TextBackend, None]:
    """Run the engine that the function ``name`` makes of the settings, for the length of a block.

    The function returns the engine, or an async context manager that gives it.  `Backend.close` comes before the end
    of the context manager.  Raises `WrongPlugin` if the function fails, or if its engine does not fit.
    """
    make = function_named(name, ENGINE)
    async with AsyncExitStack() as closing:
        engine = made_by(make, name, ENGINE, settings, wanted="one argument: the settings of the server")
        with blamed(name, ENGINE):
            if isinstance(engine, AbstractAsyncContextManager):
                engine = await closing.enter_async_context(engine)
        if problem := misfit(engine):
            raise WrongPlugin(name, f"{problem} (docs/ENGINES.md)", ENGINE)
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
    problems = [
        *missing_members(engine, Backend),
        *(() if hasattr(engine, "answer") else missing_members(engine, Engine)),
    ]
    if hasattr(engine, "answer") and not problems:
        return _wrong_stage(engine.answer, kind)
    return "; ".join(problems) or None


def _wrong_stage(answer: Any, kind: str) -> str | None:
    try:
        own = junctions(f"{kind}.answer", answer)
        declared = junctions("answer", MethodType(TextBackend.answer, object()))
        own[0].check(declared[0], "converse", f"{kind}.answer")
        declared[1].check(own[1], f"{kind}.answer", "converse")
    except JunctionError as error:
        return str(error)
    return None
