"""Checks of the Chat Completions API without streams."""

from __future__ import annotations

from typing import Any

from penstock.extensions.workbench.conformance.check import Doubt, Lacking, check, fits, must, present, should
from penstock.extensions.workbench.conformance.client import LONG, Json, Talk, check_read, user
from penstock.extensions.workbench.conformance.responses import SCHEMA, check_json_object, check_weather
from penstock.extensions.workbench.conformance.responses_tools import CALLING, PARAMETERS, QUESTION, check_arguments
from penstock.extensions.workbench.conformance.shapes import ChatUsage, Completion

CREATE = "OpenAI: API reference, create a chat completion"
OBJECT = "OpenAI: API reference, the chat completion object"
STRUCTURED = "OpenAI: guide to structured outputs"
FUNCTION: Json = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": PARAMETERS,
    "strict": True,
}
WEATHER: Json = {"type": "function", "function": FUNCTION}
TIME: Json = {"type": "function", "function": FUNCTION | {"name": "get_time", "description": "Get the time in a city."}}
NAMED: Json = {"type": "function", "function": {"name": "get_weather"}}
TWO = "What is the weather in Paris, and what is the weather in London? Call the function twice."


async def completion(talk: Talk, **fields: Any) -> Completion:
    """Return a completion."""
    found = fits(Completion, await talk.ask(**fields), "the completion")
    must(found.choices, "there is no choice")
    return found


async def called(talk: Talk, question: str = QUESTION, **fields: Any) -> Completion:
    """Return a completion that may call a function."""
    return await completion(talk, **({"messages": [user(question)], "tools": [WEATHER]} | fields))


@check("chat", area="objects", source=OBJECT, core=True)
async def chat_object(talk: Talk) -> None:
    """A completion has the fields of the reference, each of its type, and one choice with the index 0."""
    found = await completion(talk)
    must(found.id, "id is empty")
    must([choice.index for choice in found.choices] == [0], "there is not one choice with the index 0")
    should(found.choices[0].message.content or found.choices[0].finish_reason != "stop", "there is no text")


@check("chat", area="objects", source=OBJECT, core=True)
async def chat_ids(talk: Talk) -> None:
    """The ids of two completions are different."""
    ids = [(await completion(talk)).id for _ in range(2)]
    must(ids[0] != ids[1], f"the id {ids[0]} comes twice")


@check("chat", area="objects", source=OBJECT, core=True)
async def chat_usage(talk: Talk) -> None:
    """An answer has its usage, whose total is the sum of its parts."""
    usage = fits(ChatUsage, (await talk.ask()).get("usage"), "usage")
    must(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "total_tokens is not the sum")
    must(usage.prompt_tokens > 0 and usage.completion_tokens > 0, "a count is zero")


@check("chat", area="objects", source=CREATE, core=True)
async def chat_roles(talk: Talk) -> None:
    """Messages of the system, the user and the assistant, with texts or parts, are read."""
    system: Json = {"role": "system", "content": "Be brief."}
    parts: Json = {"role": "user", "content": [{"type": "text", "text": LONG}]}
    messages = [system, parts, {"role": "assistant", "content": "Hello."}, user("Say hello.")]
    check_read((await talk.ask(messages=messages))["usage"]["prompt_tokens"], "the history")


@check("chat", area="objects", source=CREATE)
async def chat_developer(talk: Talk) -> None:
    """A message of the developer is read."""
    await completion(talk, messages=[{"role": "developer", "content": "Be brief."}, user("Say hello.")])


@check("chat", area="objects", source=CREATE)
async def chat_n(talk: Talk) -> None:
    """With n, a completion has as many choices, each with its index."""
    found = await completion(talk, n=2, temperature=1)
    must(sorted(choice.index for choice in found.choices) == [0, 1], "the indexes of the choices are not 0 and 1")


@check("chat", area="objects", source=OBJECT)
async def chat_logprobs(talk: Talk) -> None:
    """With logprobs, each token of the content has its log probability and the likeliest tokens in its place."""
    found = await talk.ask(logprobs=True, top_logprobs=2)
    tokens = ((found["choices"][0].get("logprobs") or {}).get("content")) or []
    must(tokens, "logprobs.content is empty")
    for token in tokens:
        must(isinstance(token["token"], str) and token["logprob"] <= 0, "a token has no text or no log probability")
        must(len(token["top_logprobs"]) <= 2, "a token has more than two alternatives")
        must("bytes" in token, "a token has no bytes")
    spelled = b"".join(bytes(token["bytes"] or ()) for token in tokens).decode(errors="replace")
    content = found["choices"][0]["message"]["content"] or ""
    should(spelled.strip() == content.strip(), "the bytes of the tokens are not those of the content")


@check("chat", area="limits", source=CREATE, core=True)
async def chat_max_completion_tokens(talk: Talk) -> None:
    """max_completion_tokens bounds a completion, which then ends with length."""
    found = await completion(talk, messages=[user("Count to 500, and never stop talking.")], max_completion_tokens=8)
    tokens = present(found.usage, "the completion has no usage").completion_tokens
    must(tokens <= 8, f"the completion has {tokens} tokens")
    should(tokens == 8, "the model wrote less than 8 tokens")
    must(found.choices[0].finish_reason == "length", f"finish_reason is {found.choices[0].finish_reason}")


@check("chat", area="limits", source=CREATE, core=True)
async def chat_max_tokens(talk: Talk) -> None:
    """max_tokens, the older name, bounds a completion as well."""
    fields: Json = {"max_completion_tokens": None, "max_tokens": 8}
    found = await completion(talk, messages=[user("Count to 500, and never stop talking.")], **fields)
    tokens = present(found.usage, "the completion has no usage").completion_tokens
    must(tokens <= 8, f"the completion has {tokens} tokens")


@check("chat", area="limits", source=CREATE, core=True)
async def chat_stop(talk: Talk) -> None:
    """A text of stop ends a completion before it, and is not in the content."""
    first = (await completion(talk)).choices[0]
    words = (first.message.content or "").split()
    should(first.finish_reason == "stop" and words and len(words[-1]) > 1, "there is no text to stop at")
    stop = words[-1][1:]
    again = (await completion(talk, stop=[stop])).choices[0]
    must(stop not in (again.message.content or ""), f"the content has the text {stop!r}")
    must(again.finish_reason == "stop", f"finish_reason is {again.finish_reason}")


@check("chat", area="structured output", source=STRUCTURED, core=True)
async def chat_json_schema(talk: Talk) -> None:
    """With response_format json_schema, the content is JSON of the schema."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    found = await completion(talk, messages=[user("The weather in Paris, as JSON.")], response_format=form)
    check_weather(found.choices[0].message.content or "", ended=found.choices[0].finish_reason == "stop")


@check("chat", area="structured output", source=STRUCTURED)
async def chat_json_object(talk: Talk) -> None:
    """With response_format json_object, the content is a JSON object."""
    form = {"type": "json_object"}
    found = await completion(talk, messages=[user("A short JSON object with a city.")], response_format=form)
    check_json_object(found.choices[0].message.content or "", ended=found.choices[0].finish_reason == "stop")


@check("chat", area="tools", source=CALLING, core=True)
async def chat_forced_call(talk: Talk) -> None:
    """A tool_choice that names a function makes the model call it, with arguments of its schema."""
    choice = (await called(talk, tool_choice=NAMED)).choices[0]
    calls = choice.message.tool_calls or []
    should(calls or choice.finish_reason != "length", "the answer was cut before its end: see --max-tokens")
    must(calls, "there is no call")
    must(calls[0].function.name == "get_weather", f"the call is of {calls[0].function.name!r}")
    check_arguments(calls[0].function.arguments, ended=choice.finish_reason != "length")


@check("chat", area="tools", source=CALLING, core=True)
async def chat_required_call(talk: Talk) -> None:
    """tool_choice required makes the model call a function, and the completion ends with tool_calls."""
    choice = (await called(talk, tool_choice="required")).choices[0]
    calls = choice.message.tool_calls or []
    should(calls or choice.finish_reason != "length", "the answer was cut before its end: see --max-tokens")
    must(calls, "there is no call")
    check_arguments(calls[0].function.arguments, ended=choice.finish_reason != "length")
    must(choice.finish_reason == "tool_calls", f"finish_reason is {choice.finish_reason}")
    must(all(call.id for call in calls), "a call has no id")


@check("chat", area="tools", source=CALLING, core=True)
async def chat_no_call(talk: Talk) -> None:
    """tool_choice none keeps the model from calling."""
    choice = (await called(talk, tool_choice="none")).choices[0]
    must(not choice.message.tool_calls, "there is a call")
    must(choice.finish_reason != "tool_calls", "finish_reason is tool_calls")


@check("chat", area="tools", source=CALLING)
async def chat_auto_call(talk: Talk) -> None:
    """tool_choice auto lets the model call, and its markup stays out of the text."""
    choice = (await called(talk, tool_choice="auto")).choices[0]
    content = choice.message.content or ""
    markup = [mark for mark in ("<tool_call>", "<|", "</think>", "[TOOL_CALLS]") if mark in content]
    must(not markup, f"the content has the markup {' and '.join(markup)}")
    must(choice.finish_reason == "tool_calls" or not choice.message.tool_calls, "calls end with another finish_reason")
    should(choice.message.tool_calls, "the model answered in words")


@check("chat", area="tools", source=CALLING)
async def chat_parallel_calls(talk: Talk) -> None:
    """A model may call several functions at once, each with an id of its own."""
    choice = (await called(talk, TWO, tools=[WEATHER, TIME], tool_choice="required")).choices[0]
    ids = [call.id for call in choice.message.tool_calls or []]
    must(len(set(ids)) == len(ids), "two calls have one id")
    should(len(ids) > 1, "the model made one call")


@check("chat", area="tools", source=CALLING)
async def chat_single_call(talk: Talk) -> None:
    """parallel_tool_calls false leaves at most one call."""
    choice = (await called(talk, TWO, tool_choice="required", parallel_tool_calls=False)).choices[0]
    number = len(choice.message.tool_calls or [])
    must(number <= 1, f"there are {number} calls")


@check("chat", area="tools", source=CALLING, core=True)
async def chat_call_result(talk: Talk) -> None:
    """A tool message after its call is read, and the model answers."""
    body = await talk.ask(messages=[user(QUESTION)], tools=[WEATHER], tool_choice="required")
    choice = body["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    should(calls and choice["finish_reason"] != "length", "there is no whole call to answer")
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"It rains. {LONG}"} for call in calls]
    history = [user(QUESTION), choice["message"], *results]
    answer = await talk.ask(messages=history, tools=[WEATHER])
    check_read(answer["usage"]["prompt_tokens"], "the result of the call")
    should(answer["choices"][0]["message"]["content"], "the model did not answer in words")


@check("chat", area="reasoning", source="DeepSeek, vLLM: reasoning of chat completions")
async def chat_reasoning(talk: Talk) -> None:
    """A thought stands beside the content, as reasoning or reasoning_content, and its markup is in neither."""
    message = (await talk.ask())["choices"][0]["message"]
    thought = message.get("reasoning_content") or message.get("reasoning")
    content = message.get("content") or ""
    must("<think>" not in content and "</think>" not in content, "the content has the markup of a thought")
    if not thought:
        raise Lacking("the model did not think")
    if not isinstance(thought, str):
        raise Doubt("the thought is no text")
    must("<think>" not in thought and "</think>" not in thought, "the thought has markup")
