"""Let two stages of a response share state: log how often the markup of a model had to be repaired.

Only a stage after `parse` sees the repairs, turn by turn, and only a stage after `emit` sees how the response ended.
The first frame of each junction carries the facts of the request, so both stages can find their common object by the id
of the response. The dictionary is weak: an entry lives as long as one of the stages holds the object.

With `--frontends`, each process has a dictionary of its own; the store counts [limits](LIMITS.md) for all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from weakref import WeakValueDictionary

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import (
    EmittedFrame,
    GenerationStarted,
    ItemClosed,
    ParsedFrame,
    RequestFacts,
    ResponseStarted,
    TurnFinished,
)
from penstock.pipeline.protocol.events import TerminalEvent

SHARED: WeakValueDictionary[str, Counter[str]] = WeakValueDictionary()


def repairs_of(facts: RequestFacts) -> Counter[str]:
    return SHARED.setdefault(facts.response_id, Counter())


async def collect(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    repairs = Counter[str]()
    async for frame in source:
        if isinstance(frame, GenerationStarted):
            repairs = repairs_of(frame.facts)
        elif isinstance(frame, ItemClosed | TurnFinished):
            repairs.update(frame.repairs)
        yield frame


async def report(source: AsyncIterator[EmittedFrame]) -> AsyncGenerator[EmittedFrame, None]:
    repairs = Counter[str]()
    async for frame in source:
        if isinstance(frame, ResponseStarted):
            repairs = repairs_of(frame.facts)
        elif isinstance(frame, TerminalEvent) and repairs:
            logging.getLogger(__name__).warning("Repaired, then %s: %s", frame.response.status, dict(repairs))
        yield frame


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.insert_after("parse", "collect", collect).insert_after("emit", "report", report)
