"""Checks of the streams of the Chat Completions API."""

from __future__ import annotations

from typing import Any

from penstock.extensions.workbench.conformance.chat import WEATHER
from penstock.extensions.workbench.conformance.check import SSE, check, fits, must, present, should
from penstock.extensions.workbench.conformance.client import DONE, Json, Talk, user
from penstock.extensions.workbench.conformance.responses_tools import QUESTION, check_arguments
from penstock.extensions.workbench.conformance.shapes import Chunk

STREAMING = "OpenAI: API reference, the chat completion chunk object"
CALL: Json = {"messages": [user(QUESTION)], "tools": [WEATHER], "tool_choice": "required"}


async def chunks_of(talk: Talk, **fields: Any) -> list[Chunk]:
    """Return the chunks of a stream."""
    bodies = (await talk.stream(**fields)).objects
    must(bodies, "the stream has no chunks")
    return [fits(Chunk, body, f"chunk {at}") for at, body in enumerate(bodies)]


@check("chat", area="streams", source=SSE, core=True)
async def chat_sse(talk: Talk) -> None:
    """A stream is text/event-stream in UTF-8, and data: [DONE] ends it."""
    stream = await talk.stream()
    ends = [at for at, event in enumerate(stream.events) if event.data == DONE]
    must(ends == [len(stream.events) - 1], "the stream does not end with one [DONE]")
    must(not stream.rest, f"the stream breaks off in an event: {stream.rest[:100]!r}")


@check("chat", area="streams", source=STREAMING, core=True)
async def chat_chunks(talk: Talk) -> None:
    """Every chunk has the fields of the reference, with one id, one time and one model."""
    chunks = await chunks_of(talk)
    for name in ("id", "created", "model"):
        values = {getattr(chunk, name) for chunk in chunks}
        must(len(values) == 1, f"the chunks have {len(values)} values of {name}")


@check("chat", area="streams", source=STREAMING, core=True)
async def chat_role_first(talk: Talk) -> None:
    """The first delta of a choice has the role of the assistant."""
    deltas = [choice.delta for chunk in await chunks_of(talk) for choice in chunk.choices]
    must(deltas and deltas[0].role == "assistant", "the first delta has no role")
    should(sum(delta.role is not None for delta in deltas) == 1, "the role comes again")


@check("chat", area="streams", source=STREAMING, core=True)
async def chat_one_finish(talk: Talk) -> None:
    """Exactly one chunk of a choice has a finish_reason, and no delta follows it."""
    choices = [choice for chunk in await chunks_of(talk) for choice in chunk.choices]
    ends = [at for at, choice in enumerate(choices) if choice.finish_reason is not None]
    must(len(ends) == 1, f"{len(ends)} chunks have a finish_reason")
    must(ends[0] == len(choices) - 1, "a delta follows the finish_reason")


@check("chat", area="streams", source=STREAMING, core=True)
async def chat_same_content(talk: Talk) -> None:
    """The deltas of a stream add up to the content of the same request without a stream."""
    whole = (await talk.ask())["choices"][0]["message"]["content"] or ""
    choices = [choice for chunk in await chunks_of(talk) for choice in chunk.choices]
    streamed = "".join(choice.delta.content or "" for choice in choices)
    should(whole, "the model wrote no text")
    must(streamed, "the stream has no content")
    should(streamed == whole, "the content is another one, as sampling may have it")


@check("chat", area="streams", source=STREAMING, core=True)
async def chat_include_usage(talk: Talk) -> None:
    """With include_usage, the last chunk has no choices and the usage, and the others have a usage that is null."""
    bodies = (await talk.stream(stream_options={"include_usage": True})).objects
    must(bodies, "the stream has no chunks")
    chunks = [fits(Chunk, body, f"chunk {at}") for at, body in enumerate(bodies)]
    usage = present(chunks[-1].usage, "the last chunk is not that of the usage")
    must(not chunks[-1].choices, "the last chunk has a choice")
    must(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "total_tokens is not the sum")
    must(all(chunk.usage is None for chunk in chunks[:-1]), "another chunk has a usage")
    should(all("usage" in body for body in bodies), "chunks have no usage, where the reference has null")


@check("chat", area="streams", source=STREAMING, core=True)
async def chat_no_usage(talk: Talk) -> None:
    """Without include_usage, each chunk has a choice, and no usage comes."""
    chunks = await chunks_of(talk)
    must(all(chunk.choices for chunk in chunks), "a chunk has no choice")
    should(all(chunk.usage is None for chunk in chunks), "a chunk has the usage")


@check("chat", area="tools", source=STREAMING, core=True)
async def chat_call_stream(talk: Talk) -> None:
    """A call is streamed: its id, type and name come first and once, and then its arguments in pieces."""
    choices = [choice for chunk in await chunks_of(talk, **CALL) for choice in chunk.choices]
    pieces = [call for choice in choices for call in choice.delta.tool_calls or []]
    end = next((choice.finish_reason for choice in choices if choice.finish_reason), None)
    should(pieces or end != "length", "the answer was cut before its end: see --max-tokens")
    must(pieces, "there is no call")
    first = [piece for piece in pieces if piece.index == pieces[0].index]
    must(pieces[0].index == 0, f"the index of the first call is {pieces[0].index}")
    must(first[0].id and first[0].function and first[0].function.name == "get_weather", "the first piece has no name")
    must(first[0].type == "function", f"the type of the first piece is {first[0].type!r}")
    again = [piece for piece in first[1:] if piece.id or (piece.function and piece.function.name)]
    should(not again, "the id or the name comes again")
    arguments = "".join(piece.function.arguments or "" for piece in first if piece.function)
    check_arguments(arguments, ended=end != "length")
    must(end == "tool_calls", f"finish_reason is {end}")


@check("chat", area="tools", source=STREAMING)
async def chat_call_pieces(talk: Talk) -> None:
    """The arguments of a call come in several pieces, while the model writes them."""
    choices = [choice for chunk in await chunks_of(talk, **CALL) for choice in chunk.choices]
    pieces = [call.function.arguments for choice in choices for call in choice.delta.tool_calls or [] if call.function]
    should(len([piece for piece in pieces if piece]) > 1, "the arguments come at once")
