"""Checks of function calls over the Responses API."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.extensions.workbench.conformance.check import check, must, should
from penstock.extensions.workbench.conformance.client import LONG, Json, Talk, check_read, user
from penstock.extensions.workbench.conformance.responses import items_of, texts
from penstock.extensions.workbench.conformance.responses_streams import events_of, final

CALLING = "OpenAI: guide to function calling"
QUESTION = "What is the weather in Paris?"
PARAMETERS: Json = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": PARAMETERS,
    "strict": True,
}
TIME: Json = WEATHER | {"name": "get_time", "description": "Get the time in a city."}
NAMED: Json = {"type": "function", "name": "get_weather"}


async def _called(talk: Talk, **fields: Any) -> tuple[Json, list[Json]]:
    response = await talk.ask(**({"input": QUESTION, "tools": [WEATHER]} | fields))
    return response, items_of(response, "function_call")


def check_arguments(text: str, *, ended: bool = True) -> None:
    """Check the arguments of a call against `PARAMETERS`; a call that was cut proves nothing."""
    should(ended, "the answer was cut before its end: see --max-tokens")
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, TypeError):
        found = None
    is_right = isinstance(found, dict) and set(found) == {"city"} and isinstance(found["city"], str)
    must(is_right, f"the arguments are not of the schema: {text!r}")


@check("responses", area="tools", source=CALLING, core=True)
async def responses_forced_call(talk: Talk) -> None:
    """A tool_choice that names a function makes the model call it, with arguments of its schema."""
    response, calls = await _called(talk, tool_choice=NAMED)
    should(calls or response["status"] == "completed", "the answer was cut before its end: see --max-tokens")
    must(calls, "there is no call")
    must({call["name"] for call in calls} == {"get_weather"}, f"the call is of {calls[0]['name']!r}")
    check_arguments(calls[0]["arguments"], ended=response["status"] == "completed")


@check("responses", area="tools", source=CALLING, core=True)
async def responses_required_call(talk: Talk) -> None:
    """tool_choice required makes the model call a function, with arguments of its schema."""
    response, calls = await _called(talk, tool_choice="required")
    should(calls or response["status"] == "completed", "the answer was cut before its end: see --max-tokens")
    must(calls, "there is no call")
    check_arguments(calls[0]["arguments"], ended=response["status"] == "completed")


@check("responses", area="tools", source=CALLING, core=True)
async def responses_call_item(talk: Talk) -> None:
    """A call has its own call_id, a name of the request's tools, and a JSON text as arguments."""
    response, calls = await _called(talk, tool_choice="required")
    should(calls and response["status"] == "completed", "there is no whole call")
    for call in calls:
        must(isinstance(call.get("call_id"), str) and call["call_id"], "the call has no call_id")
        must(call.get("name") == "get_weather", f"the call is of {call.get('name')!r}")
        must(isinstance(call.get("arguments"), str), "the arguments are no text")
        must(call.get("status", "completed") == "completed", f"the call is {call.get('status')}")
    must(len({call["call_id"] for call in calls}) == len(calls), "two calls have one call_id")


@check("responses", area="tools", source=CALLING, core=True)
async def responses_no_call(talk: Talk) -> None:
    """tool_choice none keeps the model from calling."""
    _, calls = await _called(talk, tool_choice="none")
    must(not calls, "there is a call")


@check("responses", area="tools", source=CALLING)
async def responses_auto_call(talk: Talk) -> None:
    """tool_choice auto lets the model call, and its markup stays out of the text."""
    response, calls = await _called(talk, tool_choice="auto")
    markup = [mark for mark in ("<tool_call>", "<|", "</think>", "[TOOL_CALLS]") if mark in texts(response)]
    must(not markup, f"the text has the markup {' and '.join(markup)}")
    should(calls, "the model answered in words")


@check("responses", area="tools", source=CALLING)
async def responses_parallel_calls(talk: Talk) -> None:
    """A model may call several functions at once, each with an id of its own."""
    question = "What is the weather in Paris, and what is the weather in London? Call the function twice."
    _, calls = await _called(talk, input=question, tools=[WEATHER, TIME], tool_choice="required")
    ids = [call["call_id"] for call in calls]
    must(len(set(ids)) == len(ids), "two calls have one call_id")
    should(len(calls) > 1, "the model made one call")


@check("responses", area="tools", source=CALLING)
async def responses_single_call(talk: Talk) -> None:
    """parallel_tool_calls false leaves at most one call."""
    question = "What is the weather in Paris, and what is the weather in London? Call the function twice."
    _, calls = await _called(talk, input=question, tool_choice="required", parallel_tool_calls=False)
    must(len(calls) <= 1, f"there are {len(calls)} calls")


@check("responses", area="tools", source=CALLING, core=True)
async def responses_call_stream(talk: Talk) -> None:
    """The arguments of a call are streamed in deltas between the added and the done event of its item."""
    fields: Json = {"input": QUESTION, "tools": [WEATHER], "tool_choice": "required"}
    events = await events_of(talk, **fields)
    calls = items_of(final(events), "function_call")
    should(calls or final(events)["status"] == "completed", "the answer was cut before its end: see --max-tokens")
    must(calls, "there is no call")
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    begun = [item for item in added if item["type"] == "function_call"]
    must(len(begun) == len(calls), f"{len(begun)} calls were added, and {len(calls)} are in the output")
    must(begun[0].get("name") == "get_weather", "the added call has no name")
    must(begun[0].get("call_id") == calls[0]["call_id"], "the added call has another call_id")
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    must(deltas, "there is no response.function_call_arguments.delta")
    must(len(done) == len(calls), f"{len(done)} arguments were done, and the output has {len(calls)} calls")
    grown = "".join(event["delta"] for event in deltas)
    must(grown == "".join(call["arguments"] for call in calls), "the deltas are not the arguments")


@check("responses", area="tools", source=CALLING, core=True)
async def responses_call_result(talk: Talk) -> None:
    """A function_call_output after its call is read, and the model answers."""
    response, calls = await _called(talk, tool_choice="required")
    should(calls and response["status"] == "completed", "there is no whole call to answer")
    outputs = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": f"It rains. {LONG}"} for call in calls
    ]
    answer = await talk.ask(input=[user(QUESTION), *response["output"], *outputs], tools=[WEATHER])
    check_read(answer["usage"]["input_tokens"], "the output of the call")
    should(texts(answer), "the model did not answer in words")


@check("responses", area="tools", source=CALLING)
async def responses_lost_call(talk: Talk) -> None:
    """A function_call_output without its call is a 400."""
    lost = {"type": "function_call_output", "call_id": "call_of_nothing", "output": "It rains."}
    answer = await talk.try_ask(input=[user(QUESTION), lost], tools=[WEATHER])
    should(answer.status != 200, "the server reads an output without a call")
    must(answer.status in (400, 404, 422), f"the status is {answer.status}")
