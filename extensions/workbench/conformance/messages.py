"""Checks of the Messages API."""

from __future__ import annotations

from typing import Any

from penstock.extensions.workbench.conformance.check import Doubt, Lacking, check, fits, must, should
from penstock.extensions.workbench.conformance.client import LONG, Json, Talk, check_read, user
from penstock.extensions.workbench.conformance.errors import problem
from penstock.extensions.workbench.conformance.responses_tools import PARAMETERS, QUESTION
from penstock.extensions.workbench.conformance.shapes import AnthropicMessage, TextBlock, ThinkingBlock, ToolUse

CREATE = "Anthropic: API reference, create a message"
STREAMING = "Anthropic: guide to streaming messages"
TOOLS = "Anthropic: guide to tool use"
THINKING = "Anthropic: guide to extended thinking"
CHANGES = "anthropic-python: tool_addition and tool_removal"
WEATHER: Json = {"name": "get_weather", "description": "Get the weather in a city.", "input_schema": PARAMETERS}
TIME: Json = WEATHER | {"name": "get_time", "description": "Get the time in a city."}
CALL: Json = {"messages": [user(QUESTION)], "tools": [WEATHER], "tool_choice": {"type": "any"}}
TWO = "What is the weather in Paris, and what is the weather in London? Call the tool twice."


async def message(talk: Talk, **fields: Any) -> AnthropicMessage:
    """Return a message."""
    return fits(AnthropicMessage, await talk.ask(**fields), "the message")


def calls_of(found: AnthropicMessage) -> list[ToolUse]:
    """Return the calls of a message."""
    return [block for block in found.content if isinstance(block, ToolUse)]


def text_of(found: AnthropicMessage) -> str:
    """Return the text of a message."""
    return "".join(block.text for block in found.content if isinstance(block, TextBlock))


def prompt_tokens(body: Json) -> int:
    """Return the tokens of a prompt, those of the cache included."""
    usage = body["usage"]
    return sum(
        usage.get(name) or 0 for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )


def check_input(found: AnthropicMessage, call: ToolUse) -> None:
    """Check the input of a call against its schema; a call that was cut proves nothing."""
    should(found.stop_reason != "max_tokens", "the answer was cut before its end: see --max-tokens")
    is_right = set(call.input) == {"city"} and isinstance(call.input["city"], str)
    must(is_right, f"the input is not of the schema: {call.input!r}")


@check("messages", area="objects", source=CREATE, core=True)
async def messages_object(talk: Talk) -> None:
    """A message has the fields of the reference, each of its type, and blocks with text."""
    found = await message(talk)
    must(found.id, "id is empty")
    must(found.stop_reason in ("end_turn", "max_tokens"), f"stop_reason is {found.stop_reason}")
    must(found.stop_sequence is None, "stop_sequence is not null")
    must(all(block.text for block in found.content if isinstance(block, TextBlock)), "a block of text is empty")
    should(text_of(found) or found.stop_reason != "end_turn", "there is no text")


@check("messages", area="objects", source=CREATE)
async def messages_nullable(talk: Talk) -> None:
    """A message, and the message_delta of a stream, have a stop_sequence that is null without one."""
    should("stop_sequence" in await talk.ask(), "the message has no stop_sequence, which SDKs read as null")
    ends = [event["delta"] for event in (await talk.stream()).objects if event["type"] == "message_delta"]
    should(all("stop_sequence" in end for end in ends), "message_delta has no stop_sequence, which SDKs read as null")


@check("messages", area="objects", source=CREATE, core=True)
async def messages_ids(talk: Talk) -> None:
    """The ids of two messages are different."""
    ids = [(await message(talk)).id for _ in range(2)]
    must(ids[0] != ids[1], f"the id {ids[0]} comes twice")


@check("messages", area="objects", source=CREATE, core=True)
async def messages_usage(talk: Talk) -> None:
    """A message has the tokens of its prompt and of its output."""
    body = await talk.ask()
    must(fits(AnthropicMessage, body, "the message").usage.output_tokens > 0, "output_tokens is 0")
    must(prompt_tokens(body) > 0, "the prompt has no tokens")


@check("messages", area="objects", source=CREATE, core=True)
async def messages_system(talk: Talk) -> None:
    """A system prompt, as a text or as blocks, is part of the prompt, and so are earlier messages in blocks."""
    blocks = [{"type": "text", "text": LONG}]
    check_read(prompt_tokens(await talk.ask(system=LONG)), "the system prompt")
    check_read(prompt_tokens(await talk.ask(system=blocks)), "the system prompt in blocks")
    hello = [{"type": "text", "text": "Hello."}]
    earlier = [{"role": "user", "content": blocks}, {"role": "assistant", "content": hello}]
    check_read(prompt_tokens(await talk.ask(messages=[*earlier, user("Say hello.")])), "the history")


@check("messages", area="objects", source="Anthropic: API reference, errors and request ids")
async def messages_request_id(talk: Talk) -> None:
    """An answer has the header request-id."""
    answer = await talk.try_ask()
    answer.accepted()
    should(answer.headers.get("request-id"), "there is no header request-id")


@check("messages", area="objects", source="Anthropic: API reference, count tokens in a message")
async def messages_count_tokens(talk: Talk) -> None:
    """count_tokens returns the tokens of a prompt, as the message then counts them."""
    body = {"model": talk.server.model, "messages": [user("Say hello.")]}
    used = prompt_tokens(await talk.ask())
    counted = (await talk.send("POST", "/messages/count_tokens", body)).accepted()
    must(isinstance(counted.get("input_tokens"), int), "there is no input_tokens")
    should(counted["input_tokens"] == used, f"{counted['input_tokens']} were counted, and the message has {used}")


@check("messages", area="limits", source=CREATE, core=True)
async def messages_max_tokens(talk: Talk) -> None:
    """max_tokens bounds a message, which then ends with max_tokens."""
    found = await message(talk, messages=[user("Count to 500, and never stop talking.")], max_tokens=8)
    must(found.usage.output_tokens <= 8, f"the message has {found.usage.output_tokens} tokens")
    should(found.usage.output_tokens == 8, "the model wrote less than 8 tokens")
    must(found.stop_reason == "max_tokens", f"stop_reason is {found.stop_reason}")


@check("messages", area="errors", source=CREATE, core=True)
async def messages_needs_max_tokens(talk: Talk) -> None:
    """A request without max_tokens, which is required, is a 400 that names it."""
    answer = await talk.try_ask(max_tokens=None)
    should(answer.status != 200, "the server has a default for max_tokens")
    found = problem(answer, 400, 422)
    should("max_tokens" in found.message, f"the message does not name max_tokens: {found.message}")


@check("messages", area="limits", source=CREATE, core=True)
async def messages_stop_sequences(talk: Talk) -> None:
    """A text of stop_sequences ends a message before it, with stop_sequence and that text."""
    first = await message(talk)
    words = text_of(first).split()
    should(first.stop_reason == "end_turn" and words and len(words[-1]) > 1, "there is no text to stop at")
    stop = words[-1][1:]
    again = await message(talk, stop_sequences=[stop])
    must(stop not in text_of(again), f"the text has {stop!r}")
    must(again.stop_reason == "stop_sequence", f"stop_reason is {again.stop_reason}")
    must(again.stop_sequence == stop, f"stop_sequence is {again.stop_sequence!r}")


@check("messages", area="tools", source=TOOLS, core=True)
async def messages_forced_call(talk: Talk) -> None:
    """A tool_choice of the type tool makes the model call that tool, with an input of its schema."""
    found = await message(talk, **(CALL | {"tool_choice": {"type": "tool", "name": "get_weather"}}))
    calls = calls_of(found)
    should(calls or found.stop_reason != "max_tokens", "the answer was cut before its end: see --max-tokens")
    must(calls, "there is no tool_use")
    must(calls[0].name == "get_weather", f"the call is of {calls[0].name!r}")
    check_input(found, calls[0])


@check("messages", area="tools", source=TOOLS, core=True)
async def messages_any_call(talk: Talk) -> None:
    """A tool_choice of the type any makes the model call a tool, and the message ends with tool_use."""
    found = await message(talk, **CALL)
    calls = calls_of(found)
    should(calls or found.stop_reason != "max_tokens", "the answer was cut before its end: see --max-tokens")
    must(calls, "there is no tool_use")
    check_input(found, calls[0])
    must(found.stop_reason == "tool_use", f"stop_reason is {found.stop_reason}")
    must(all(call.id for call in calls), "a call has no id")


@check("messages", area="tools", source=TOOLS, core=True)
async def messages_no_call(talk: Talk) -> None:
    """A tool_choice of the type none keeps the model from calling."""
    must(not calls_of(await message(talk, **(CALL | {"tool_choice": {"type": "none"}}))), "there is a call")


@check("messages", area="tools", source=TOOLS)
async def messages_auto_call(talk: Talk) -> None:
    """A tool_choice of the type auto lets the model call, and its markup stays out of the text."""
    found = await message(talk, **(CALL | {"tool_choice": {"type": "auto"}}))
    markup = [mark for mark in ("<tool_call>", "<|", "</think>", "[TOOL_CALLS]") if mark in text_of(found)]
    must(not markup, f"the text has the markup {' and '.join(markup)}")
    should(calls_of(found), "the model answered in words")


@check("messages", area="tools", source=TOOLS)
async def messages_single_call(talk: Talk) -> None:
    """disable_parallel_tool_use leaves at most one call."""
    choice = {"type": "any", "disable_parallel_tool_use": True}
    number = len(calls_of(await message(talk, **(CALL | {"messages": [user(TWO)], "tool_choice": choice}))))
    must(number <= 1, f"there are {number} calls")


async def calls_after(talk: Talk, tools: list[Json], change: Json, **fields: Any) -> list[str]:
    """Return the names of the tools that a model calls after a system message with a change."""
    messages = [user("Hi."), {"role": "assistant", "content": "Hello."}]
    messages += [{"role": "system", "content": [change]}, user(QUESTION)]
    answer = await talk.try_ask(**(CALL | {"messages": messages, "tools": tools} | fields))
    if answer.status in (400, 422):
        raise Lacking("the server takes no changes of tools")
    found = fits(AnthropicMessage, answer.accepted(), "the message")
    should(calls_of(found) or found.stop_reason != "max_tokens", "the answer was cut before its end: see --max-tokens")
    return [call.name for call in calls_of(found)]


@check("messages", area="tools", source=CHANGES)
async def messages_tool_addition(talk: Talk) -> None:
    """A tool_addition of a system message defines a tool, which may be called from there on."""
    addition = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": WEATHER}}
    names = await calls_after(talk, [TIME], addition, tool_choice={"type": "tool", "name": "get_weather"})
    must("get_weather" in names, f"the model calls {names}")


@check("messages", area="tools", source=CHANGES)
async def messages_tool_removal(talk: Talk) -> None:
    """A tool that a tool_removal of a system message names is not called from there on."""
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}}
    names = await calls_after(talk, [WEATHER, TIME], removal)
    must(names and set(names) == {"get_time"}, f"the model calls {names}")


@check("messages", area="tools", source=TOOLS, core=True)
async def messages_call_result(talk: Talk) -> None:
    """A tool_result after its tool_use is read, and the model answers."""
    body = await talk.ask(**CALL)
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    should(calls and body["stop_reason"] != "max_tokens", "there is no whole call to answer")
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": f"It rains. {LONG}"} for call in calls]
    history = [
        user(QUESTION),
        {"role": "assistant", "content": body["content"]},
        {"role": "user", "content": results},
    ]
    answer = await talk.ask(messages=history, tools=[WEATHER])
    check_read(prompt_tokens(answer), "the result of the call")
    should(text_of(fits(AnthropicMessage, answer, "the message")), "the model did not answer in words")


@check("messages", area="reasoning", source=THINKING)
async def messages_thinking(talk: Talk) -> None:
    """With thinking, a block with the thought and its signature comes first, and may be sent back."""
    limit = max(talk.server.max_tokens, 1025)
    answer = await talk.try_ask(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=limit, temperature=1)
    body = answer.accepted()
    found = fits(AnthropicMessage, body, "the message")
    thoughts = [at for at, block in enumerate(found.content) if isinstance(block, ThinkingBlock)]
    if not thoughts:
        raise Lacking("the model did not think")
    must(thoughts[0] == 0, "the thought is not the first block")
    first = found.content[0]
    should(isinstance(first, ThinkingBlock) and first.signature, "the thought has an empty signature")
    if found.stop_reason == "max_tokens":
        raise Doubt("the answer was cut before its end: see --max-tokens")
    history = [user("Say hello."), {"role": "assistant", "content": body["content"]}, user("Again.")]
    await talk.ask(messages=history)
