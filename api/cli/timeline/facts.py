"""The facts at the top of a timeline: the model, the request, the result, and the speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from rich.text import Text

from penstock.api.cli.story import Speed, Story, speed_of
from penstock.api.cli.timeline.shown import ALARM, as_json, visible
from penstock.pipeline.protocol.response import Response

Fact: TypeAlias = tuple[str, Text]


def facts_of(story: Story, repairs: Iterable[str]) -> Iterator[Fact]:
    """Yield the names and values of the facts; ``repairs`` are all repairs that the parser made."""
    yield "model", _model(story)
    if response := _response(story):
        yield "request", _joined([response.id, *_asked(response)])
        yield "result", Text(_result(response), "" if response.status == "completed" else ALARM)
    if speed := speed_of(story.behind(story.read)):
        yield "speed", Text(_fast(speed))
    if counts := Counter(repairs):
        counted = [name if count == 1 else f"{name} ({count} times)" for name, count in counts.items()]
        yield "repaired", Text(", ".join(counted), ALARM)
    for note in filter(None, (story.note, story.left_out, story.differs)):
        yield "note", Text(visible(note), "italic")


def _model(story: Story) -> Text:
    header = story.header
    versions = [f"{name} {version}" for name, version in header.versions.items()]
    model = header.model or "of a model without name"
    return _joined([model, header.encoding, header.source, *versions, header.recorded_at])


def _response(story: Story) -> Response | None:
    """Return the latest known state of the response."""
    frames = [crossing.frame for junction in story.junctions for crossing in junction.crossings]
    responses = (getattr(frame, "response", None) for frame in reversed(frames))
    return next((response for response in responses if response), None)


def _asked(response: Response) -> Iterator[str]:
    """Yield the tools, the temperature, and the parameters that differ from their defaults."""
    names = [tool.get("name") or tool.get("server_label") or tool["type"] for tool in response.tools]
    if names:
        yield f"tools: {', '.join(map(str, names))}"
    yield f"temperature {response.temperature:g}"
    if effort := response.reasoning.effort:
        yield f"effort {effort}"
    if (form := response.text.get("format", {}).get("type", "text")) != "text":
        yield f"format {form}"
    if response.max_output_tokens is not None:
        yield f"at most {response.max_output_tokens} tokens"
    if response.tool_choice != "auto":
        yield f"tool choice {as_json(response.tool_choice)}"


def _result(response: Response) -> str:
    parts: list[str] = [response.status]
    if response.error:
        parts.append(f"{response.error.code}: {response.error.message}")
    if response.incomplete_details:
        parts.append(response.incomplete_details.reason)
    if usage := response.usage:
        cached, thought = usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens
        parts.append(f"{usage.input_tokens} tokens in" + (f", {cached} of them cached" if cached else ""))
        parts.append(f"{usage.output_tokens} tokens out" + (f", {thought} of them thoughts" if thought else ""))
    return visible(" · ".join(parts))


def _fast(speed: Speed) -> str:
    rate = "" if speed.rate is None else f", then {speed.rate:.1f} tokens/s"
    return f"first token after {speed.first:.3f} s{rate}"


def _joined(facts: Iterable[str | None]) -> Text:
    return Text(" · ").join(Text(visible(fact)) for fact in facts if fact)
