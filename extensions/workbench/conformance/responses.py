"""Checks of the Responses API: its objects, limits and thoughts."""

from __future__ import annotations

import msgspec

from penstock.extensions.workbench.conformance.check import Lacking, Violation, check, fits, must, should
from penstock.extensions.workbench.conformance.client import LONG, Json, Talk, check_read, user
from penstock.extensions.workbench.conformance.shapes import ITEMS, NULLABLE, Response, Usage
from penstock.pipeline.protocol.params.json_body import NO_JSON

CREATE = "OpenAI: API reference, create a model response"
OBJECT = "OpenAI: API reference, the response object"
SCHEMA: Json = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


def texts(response: Json) -> str:
    """Return the text of all messages of a response."""
    return "".join(
        part.get("text", "")
        for item in response["output"]
        if item.get("type") == "message"
        for part in item.get("content", [])
    )


def items_of(response: Json, kind: str) -> list[Json]:
    """Return the items of one type."""
    return [item for item in response["output"] if item.get("type") == kind]


@check("responses", area="objects", source=OBJECT, core=True)
async def responses_object(talk: Talk) -> None:
    """A response has the fields of the reference that are never null, each of its type."""
    response = fits(Response, await talk.ask(), "the response")
    must(response.id, "id is empty")


@check("responses", area="objects", source=OBJECT)
async def responses_nullable(talk: Talk) -> None:
    """A response has the required fields that may be null: error, incomplete_details, instructions and others."""
    response = await talk.ask()
    missing = [name for name in NULLABLE if name not in response]
    should(not missing, f"these fields are missing, which SDKs read as null: {', '.join(missing)}")


@check("responses", area="objects", source=OBJECT, core=True)
async def responses_items(talk: Talk) -> None:
    """Messages, function calls and thoughts of an output have the fields of the reference."""
    response = await talk.ask()
    for at, item in enumerate(response["output"]):
        if kind := ITEMS.get(item["type"]):
            fits(kind, item, f"output[{at}]")
    should(texts(response) or response["status"] != "completed", "the model answered without text")


@check("responses", area="objects", source=OBJECT, core=True)
async def responses_ids(talk: Talk) -> None:
    """The ids of two responses, and of all their items, are different."""
    answers = [await talk.ask() for _ in range(2)]
    ids = [answer["id"] for answer in answers] + [item["id"] for answer in answers for item in answer["output"]]
    must(len(set(ids)) == len(ids), f"an id comes twice: {ids}")


@check("responses", area="objects", source=OBJECT, core=True)
async def responses_usage(talk: Talk) -> None:
    """An answer has its usage, whose total is the sum of its parts."""
    usage = fits(Usage, (await talk.ask()).get("usage"), "usage")
    must(usage.total_tokens == usage.input_tokens + usage.output_tokens, "total_tokens is not the sum")
    must(usage.input_tokens > 0 and usage.output_tokens > 0, "a count is zero")
    must(usage.input_tokens_details.cached_tokens <= usage.input_tokens, "there are more cached tokens than tokens")
    must(usage.output_tokens_details.reasoning_tokens <= usage.output_tokens, "there are more thoughts than tokens")


@check("responses", area="objects", source=OBJECT)
async def responses_echo(talk: Talk) -> None:
    """A response repeats parameters of its request: instructions, metadata, temperature and others."""
    given = {"instructions": "Answer briefly.", "metadata": {"a": "1"}, "temperature": 0.5, "top_p": 0.9}
    response = await talk.ask(**given, parallel_tool_calls=False)
    other = [name for name, value in (given | {"parallel_tool_calls": False}).items() if response.get(name) != value]
    must(not other, f"these are not those of the request: {', '.join(other)}")


@check("responses", area="objects", source=CREATE, core=True)
async def responses_input(talk: Talk) -> None:
    """An input may be a list of messages of all roles, with texts or with parts."""
    parts = [{"type": "input_text", "text": "Say hello."}]
    untyped = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    typed = [{"type": "message", "role": "system", "content": "Be brief."}, user("Hi."), user("Hello.")]
    for given in (untyped, typed):
        must((await talk.ask(input=given)).get("object") == "response", "the answer is no response")


@check("responses", area="objects", source=CREATE, core=True)
async def responses_history(talk: Talk) -> None:
    """The output of a response may be sent back as input of the next one."""
    first = await talk.ask()
    second = await talk.ask(input=[user(LONG), *first["output"], user("Say hello again.")])
    check_read(second["usage"]["input_tokens"], "the history")


@check("responses", area="limits", source=CREATE, core=True)
async def responses_max_output_tokens(talk: Talk) -> None:
    """max_output_tokens bounds an output, which is then incomplete with the reason max_output_tokens."""
    response = await talk.ask(input="Count from 1 to 500, and never stop talking.", max_output_tokens=16)
    used = response["usage"]["output_tokens"]
    must(used <= 16, f"the output has {used} tokens")
    should(response["status"] != "completed" or used == 16, "the model said less than 16 tokens")
    must(response["status"] == "incomplete", f"the status is {response['status']}")
    reason = (response.get("incomplete_details") or {}).get("reason")
    must(reason == "max_output_tokens", f"the reason is {reason!r}")


@check("responses", area="structured output", source="OpenAI: guide to structured outputs", core=True)
async def responses_json_schema(talk: Talk) -> None:
    """With text.format json_schema, the text is JSON of the schema."""
    form = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}
    response = await talk.ask(input="The weather in Paris, as JSON.", text={"format": form})
    check_weather(texts(response), ended=response["status"] == "completed")


@check("responses", area="structured output", source="OpenAI: guide to structured outputs")
async def responses_json_object(talk: Talk) -> None:
    """With text.format json_object, the text is a JSON object."""
    response = await talk.ask(input="A short JSON object with a city.", text={"format": {"type": "json_object"}})
    check_json_object(texts(response), ended=response["status"] == "completed")


def check_weather(text: str, *, ended: bool) -> None:
    """Check a text against `SCHEMA`; one that was cut proves nothing."""
    found = check_json_object(text, ended=ended)
    is_right = set(found) == {"city", "warm"} and isinstance(found["city"], str) and isinstance(found["warm"], bool)
    must(is_right, f"the text is not of the schema: {text[:200]}")


def check_json_object(text: str, *, ended: bool) -> Json:
    """Return the JSON object that a text is; one that was cut proves nothing."""
    should(ended, "the answer was cut before its end: see --max-tokens")
    try:
        found = msgspec.json.decode(text)
    except NO_JSON as error:
        raise Violation(f"the text is no JSON ({error}): {text[:200]}") from error
    must(isinstance(found, dict), f"the text is no JSON object: {text[:200]}")
    return dict(found)


@check("responses", area="reasoning", source="OpenAI: guide to reasoning")
async def responses_reasoning(talk: Talk) -> None:
    """A thought comes before the message, and its tokens are counted."""
    response = await talk.ask(reasoning={"effort": "low"})
    thoughts = [at for at, item in enumerate(response["output"]) if item["type"] == "reasoning"]
    if not thoughts:
        raise Lacking("the model did not think")
    messages = [at for at, item in enumerate(response["output"]) if item["type"] == "message"]
    must(not messages or thoughts[0] < messages[0], "the thought follows the message")
    has_text = any(item.get("content") or item.get("summary") for item in items_of(response, "reasoning"))
    counted = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    must(counted > 0 or not has_text, "usage counts no reasoning_tokens")


@check("responses", area="reasoning", source="OpenAI: API reference, include")
async def responses_encrypted_reasoning(talk: Talk) -> None:
    """Include reasoning.encrypted_content adds encrypted_content to thoughts, which may be sent back."""
    response = await talk.ask(include=["reasoning.encrypted_content"], store=False)
    thoughts = items_of(response, "reasoning")
    if not thoughts:
        raise Lacking("the model did not think")
    must(all(item.get("encrypted_content") for item in thoughts), "a thought has no encrypted_content")
    await talk.ask(input=[user("Say hello."), *response["output"], user("Again.")], store=False)
