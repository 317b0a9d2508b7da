"""Parsers that only vLLM reads: all those of vLLM 0.32 that a model can have are in penstock's table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

PLUGGED = "plugged"


@pytest.fixture
def plugged() -> Iterator[str]:
    """The name of a parser of thoughts and of one of calls that are registered with vLLM, as a plug-in does it.

    The first needs a mark that few vocabularies have.
    """
    from vllm.reasoning import ReasoningParserManager  # noqa: PLC0415 - takes seconds
    from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415 - takes seconds

    thoughts, calls = "k2_horizon_reasoning_parser", "muse_glimmer_tool_parser"
    ReasoningParserManager.register_lazy_module(PLUGGED, f"vllm.reasoning.{thoughts}", "K2HorizonReasoningParser")
    ToolParserManager.register_lazy_module(PLUGGED, f"vllm.tool_parsers.{calls}", "MuseGlimmerToolParser")
    yield PLUGGED
    for known in (
        *(ReasoningParserManager.reasoning_parsers, ReasoningParserManager.lazy_parsers),
        *(ToolParserManager.tool_parsers, ToolParserManager.lazy_parsers),
    ):
        known.pop(PLUGGED, None)
