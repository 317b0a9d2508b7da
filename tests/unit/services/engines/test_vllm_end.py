"""The end of vLLM in this process, told by a stand-in for its `AsyncLLM`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.services.engines.vllm import VllmEngine

VLLM = logging.getLogger("vllm")


class Llm:
    """Kills processes that do not end in time, and says so."""

    def shutdown(self) -> None:
        VLLM.getChild("v1.utils").warning("force killing remaining process")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The lines that vLLM logs."""
    logged, level = list[str](), VLLM.level
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    VLLM.addHandler(handler)
    yield logged
    VLLM.removeHandler(handler)
    VLLM.setLevel(level)


@pytest.mark.parametrize(("level", "count"), [(logging.WARNING, 0), (logging.INFO, 1), (logging.DEBUG, 1)])
async def test_killed_processes_are_named_only_if_vllm_logs_all(lines: list[str], level: int, count: int) -> None:
    """The operator has stopped the server, and its last line is penstock's."""
    llm: Any = Llm()
    VLLM.setLevel(level)
    await VllmEngine(llm=llm, models=("tiny",), context_length=8, vocabulary_size=8).close()
    assert (len(lines), VLLM.level) == (count, level)
