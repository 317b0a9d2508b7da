"""Faults that this project once had, each put back by a small change: a simulation must find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from penstock.stages.services.runs.run import Run, RunRegistry


def lost_ids() -> AbstractContextManager[Any]:
    """Send the id of a response before it is stored: a killed server loses it."""
    begin = RunRegistry.begin

    def begun(registry: RunRegistry, started: Any) -> Run:
        run = begin(registry, started)
        run._commit = None
        return run

    return patch.object(RunRegistry, "begin", begun)


PLANTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "lost-ids": lost_ids,
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Put a fault back for the length of a block, if there is a name."""
    if name is None:
        yield
        return
    with PLANTED[name]():
        yield
