"""The metrics of a response that has ended."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from penstock.pipeline import metrics
from penstock.pipeline.protocol.items import Compaction, CustomToolCall, FunctionCall
from penstock.pipeline.protocol.response import Response

_responses, _tokens = cache(metrics.RESPONSES.labels), cache(metrics.TOKENS.labels)
_seconds = cache(metrics.RESPONSE_SECONDS.labels)
"""The series of labels, which a metric else looks up for each response."""


def count_response(response: Response, model: str, mode: str, seconds: float, key: str = "") -> None:
    """Count a response that ended ``seconds`` after it began.

    ``model`` is the served name of its model, and ``key`` the label of its API key, if keys have one.
    """
    incomplete, error = response.incomplete_details, response.error
    reason = incomplete.reason if incomplete else error.code if error else ""
    _responses(model, response.status, reason, mode).inc()
    _seconds(model, mode).observe(seconds)
    tokens = _tokens_of(response)
    for kind, count in tokens.items():
        _tokens(model, kind).inc(count)
    if key:
        metrics.KEY_RESPONSES.labels(key, response.status).inc()
        for kind, count in tokens.items():
            metrics.KEY_TOKENS.labels(key, kind).inc(count)
    for item in response.output:
        if isinstance(item, FunctionCall | CustomToolCall):
            metrics.TOOL_CALLS.labels("function", item.status).inc()
        elif isinstance(item, Compaction):
            metrics.COMPACTIONS.inc()


def _tokens_of(response: Response) -> Mapping[str, int]:
    """Return the tokens of a response by type."""
    usage = response.usage
    if usage is None:
        return {}
    of_input, of_output = usage.input_tokens_details, usage.output_tokens_details
    return {
        "input": usage.input_tokens,
        "cached_input": of_input.cached_tokens,
        "output": usage.output_tokens,
        "reasoning": of_output.reasoning_tokens,
        "tool_output": of_output.tool_output_tokens,
    }
