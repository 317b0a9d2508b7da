"""Checks of the streams of the Responses API."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import msgspec

from penstock.extensions.workbench.conformance.check import SSE, Doubt, Violation, check, fits, must, should
from penstock.extensions.workbench.conformance.client import DONE, Json, Talk
from penstock.extensions.workbench.conformance.shapes import NULLABLE
from penstock.pipeline.lifecycle.checker import StreamChecker
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.protocol.events import TERMINAL_TYPES, ResponseEvent

EVENTS = "OpenAI: API reference, streaming events of responses"

STATES = ("response.created", "response.queued", "response.in_progress", *TERMINAL_TYPES)
"""The events that carry a response."""

PLACES: dict[str, tuple[str, ...]] = {
    "response.output_item.added": ("output_index",),
    "response.output_item.done": ("output_index",),
    "response.content_part.added": ("item_id", "output_index", "content_index"),
    "response.content_part.done": ("item_id", "output_index", "content_index"),
    "response.output_text.delta": ("item_id", "output_index", "content_index"),
    "response.output_text.done": ("item_id", "output_index", "content_index"),
    "response.output_text.annotation.added": ("item_id", "output_index", "content_index", "annotation_index"),
    "response.refusal.delta": ("item_id", "output_index", "content_index"),
    "response.refusal.done": ("item_id", "output_index", "content_index"),
    "response.reasoning_text.delta": ("item_id", "output_index", "content_index"),
    "response.reasoning_text.done": ("item_id", "output_index", "content_index"),
    "response.reasoning_summary_part.added": ("item_id", "output_index", "summary_index"),
    "response.reasoning_summary_part.done": ("item_id", "output_index", "summary_index"),
    "response.reasoning_summary_text.delta": ("item_id", "output_index", "summary_index"),
    "response.reasoning_summary_text.done": ("item_id", "output_index", "summary_index"),
    "response.function_call_arguments.delta": ("item_id", "output_index"),
    "response.function_call_arguments.done": ("item_id", "output_index"),
}
"""The events of messages, thoughts and calls, each with the fields that say where it belongs."""

TEXTS = {
    "response.output_text": "text",
    "response.refusal": "refusal",
    "response.reasoning_text": "text",
    "response.reasoning_summary_text": "text",
    "response.function_call_arguments": "arguments",
}
"""The texts that come in deltas, each with the field of its done event."""

TASTES = (
    "deltas are never empty",
    "response.in_progress follows response.created and repeats its response",
    "fields of a response that its request determines never change",
    "a response is in progress before it ends by itself",
    "completed_at belongs to completed responses",
    "stop_reason belongs to completed responses",
    "a response begins without an outcome",
    "an item keeps its identity",
    "an item is done before the next is added",
    "the logprobs of a text are those of its deltas",
    "a done part holds its logprobs",
    "an event of a part comes between its added and its done event",
    "the final output equals the items that were done",  # the check final_output has what the reference says
    "the bytes of a text's tokens spell the text",
)
"""The rules of our checker that the reference does not spell out."""


async def events_of(talk: Talk, **fields: Any) -> list[Json]:
    """Return the events of a stream."""
    events = (await talk.stream(**fields)).objects
    must(events, "the stream has no events")
    return events


def final(events: list[Json]) -> Json:
    """Return the response of the event that ends a stream."""
    ends = [event["response"] for event in events if event.get("type") in TERMINAL_TYPES]
    must(len(ends) == 1, f"{len(ends)} events end the stream")
    return dict(ends[0])


@check("responses", area="streams", source=SSE, core=True)
async def responses_sse(talk: Talk) -> None:
    """A stream is text/event-stream in UTF-8, each event is named by its type, and the last one is whole."""
    stream = await talk.stream()
    for event in stream.events:
        if event.data != DONE:
            kind = msgspec.json.decode(event.data).get("type")
            must(event.name == kind, f"the event {kind!r} is named {event.name!r}")
    must(not stream.rest, f"the stream breaks off in an event: {stream.rest[:100]!r}")


@check("responses", area="streams", source=EVENTS, core=True)
async def responses_one_end(talk: Talk) -> None:
    """Exactly one event ends a stream: completed, incomplete or failed, as the status says, and nothing follows."""
    events = await events_of(talk)
    response = final(events)
    last = events[-1]["type"]
    must(last in TERMINAL_TYPES, f"{last} follows the end")
    status = response["status"]
    must(last == f"response.{status}" or status == "cancelled", f"{last} has a response that is {status}")


@check("responses", area="streams", source=EVENTS, core=True)
async def responses_beginning(talk: Talk) -> None:
    """A stream begins with response.created, and response.in_progress comes before the first item."""
    kinds = [event.get("type") for event in await events_of(talk)]
    must(kinds[0] == "response.created", f"the first event is {kinds[0]}")
    must(kinds.count("response.created") == 1, "response.created comes again")
    items = [at for at, kind in enumerate(kinds) if kind == "response.output_item.added"]
    should("response.in_progress" in kinds[: items[0] if items else None], "there is no response.in_progress")


@check("responses", area="streams", source=EVENTS, core=True)
async def responses_sequence(talk: Talk) -> None:
    """The sequence numbers of a stream grow from event to event, and count from 0 without gaps."""
    numbers = [fits(int, event.get("sequence_number"), "sequence_number") for event in await events_of(talk)]
    must(all(after > before for before, after in pairwise(numbers)), f"the numbers do not grow: {numbers[:40]}")
    should(numbers == list(range(len(numbers))), f"the numbers do not count from 0 without gaps: {numbers[:40]}")


@check("responses", area="streams", source=EVENTS, core=True)
async def responses_event_types(talk: Talk) -> None:
    """Every event has a type of the reference, and the fields that say where it belongs."""
    for event in await events_of(talk):
        kind = str(event.get("type"))
        if kind in STATES:
            must(isinstance(event.get("response"), dict), f"{kind} has no response")
            continue
        must(kind in PLACES or kind.split(".")[1].endswith("_call"), f"the reference has no event {kind}")
        for name in PLACES.get(kind, ()):
            must(isinstance(event.get(name), str if name == "item_id" else int), f"{kind} has no {name}")


@check("responses", area="streams", source=EVENTS, core=True)
async def responses_indexes(talk: Talk) -> None:
    """output_index counts the items of the output, and the events of an item carry its index and its id."""
    ids: dict[int, str] = {}
    for event in await events_of(talk):
        index = event.get("output_index")
        if event["type"] == "response.output_item.added":
            must(index == len(ids), f"the output_index of item {len(ids)} is {index}")
            ids[len(ids)] = event["item"].get("id")
        elif index is not None:
            must(index in ids, f"{event['type']} has the output_index {index} of no item")
            named = event["item"].get("id") if event["type"].endswith("item.done") else event.get("item_id")
            must(named == ids[index], f"{event['type']} has the id {named}, and its item {ids[index]}")


@check("responses", area="streams", source=EVENTS, core=True)
async def responses_items_end(talk: Talk) -> None:
    """Each item and each part is added once and done once, in this order."""
    opened: dict[tuple[Any, ...], str] = {}
    for event in await events_of(talk):
        kind, _, step = event["type"].rpartition(".")
        if kind not in ("response.output_item", "response.content_part", "response.reasoning_summary_part"):
            continue
        place = (kind, event["output_index"], event.get("content_index"), event.get("summary_index"))
        before = opened.get(place, "nothing")
        must(before == {"added": "nothing", "done": "added"}[step], f"{event['type']} comes after {before}")
        opened[place] = step
    must("added" not in opened.values(), "the response ended before an item or a part was done")


@check("responses", area="streams", source=EVENTS, core=True)
async def responses_deltas(talk: Talk) -> None:
    """The deltas of a text add up to the text of its done event."""
    grown: dict[tuple[Any, ...], str] = defaultdict(str)
    done = 0
    for event in await events_of(talk):
        kind, _, step = event["type"].rpartition(".")
        if kind not in TEXTS:
            continue
        place = (kind, event["output_index"], event.get("content_index"), event.get("summary_index"))
        if step == "delta":
            grown[place] += event["delta"]
        else:
            done += 1
            must(grown.pop(place, "") == event[TEXTS[kind]], f"{event['type']} has another text than its deltas")
    must(not grown, "a text has deltas and no done event")
    should(done, "the model wrote no text")


@check("responses", area="streams", source=EVENTS, core=True)
async def responses_final_output(talk: Talk) -> None:
    """The output of the last event has the items that were done, each as it was done."""
    events = await events_of(talk)
    done = [_without_nulls(event["item"]) for event in events if event["type"] == "response.output_item.done"]
    output = [_without_nulls(item) for item in final(events)["output"]]
    must(len(output) == len(done), f"{len(done)} items were done, and the output has {len(output)}")
    for at, (item, other) in enumerate(zip(done, output, strict=True)):
        unequal = sorted(name for name in item.keys() | other.keys() if item.get(name) != other.get(name))
        given = [name for name in unequal if name in item and name in other]
        must(not given, f"output[{at}] is not the item that was done: {', '.join(given)}")
        should(not unequal, f"output[{at}] lacks fields of the item that was done: {', '.join(unequal)}")


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return {name: _without_nulls(held) for name, held in value.items() if held is not None}
        case list():
            return [_without_nulls(held) for held in value]
        case _:
            return value


@check("responses", area="streams", source=EVENTS, core=True)
async def responses_stream_usage(talk: Talk) -> None:
    """The response of the last event has its usage."""
    usage = final(await events_of(talk)).get("usage") or {}
    must(usage.get("output_tokens", 0) > 0, "the last response has no usage")


@check("responses", area="streams", source=EVENTS)
async def responses_stream_rules(talk: Talk) -> None:
    """A stream keeps all rules of penstock's checker of streams; those that the reference does not have only warn."""
    checker = StreamChecker()
    for event in await events_of(talk):
        try:
            checker.feed(_read(event))
        except msgspec.ValidationError as error:
            raise Doubt(f"{event.get('type')}: {error}") from None
        except InvariantBroken as broken:
            kind = Doubt if str(broken) in TASTES else Violation
            raise kind(f"{event.get('type')}: {broken}") from None


HOSTED = ("mcp_call", "code_interpreter_call", "file_search_call")
"""The items of which penstock's reader wants fields that are null."""

_TOLERANT: Json = dict.fromkeys(
    (*NULLABLE, "previous_response_id", "max_output_tokens", "safety_identifier", "prompt_cache_key", "usage")
) | {"text": {}, "top_p": 1.0, "temperature": 1.0, "reasoning": {}, "store": True, "metadata": {}}
"""Values of the fields of a response that other servers may leave out."""


def _read(event: Json) -> ResponseEvent:
    """Read an event, in which fields that are null may as well be missing."""
    for name in ("item", "part"):
        if isinstance(held := event.get(name), dict):
            event = event | {name: _given(held)}
    if isinstance(response := event.get("response"), dict):
        response = response | {"output": [_given(item) for item in response["output"]]}
        own: Json = {name: value for name, value in response.items() if value is not None}
        reasoning = {"effort": None, "summary": None, **(own.pop("reasoning", None) or {})}
        event = event | {"response": _TOLERANT | own | {"reasoning": reasoning}}
    return msgspec.convert(event, ResponseEvent)  # type: ignore[no-any-return]


def _given(held: Json) -> Json:
    if "content" in held and isinstance(held["content"], list):
        held = held | {"content": [_given(part) for part in held["content"]]}
    return {name: value for name, value in held.items() if value is not None or held.get("type") in HOSTED}
