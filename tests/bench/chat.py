"""The cost of a token of a chat model from its id to the socket, beside its cost in vLLM's own Responses API.

Both run vLLM's parsers.  vLLM's server gets the text of each token for free; ours detokenizes itself.  Figures are
medians of CPU time, taken in turns in the same run: the time of the whole output divided by its number of tokens, so
that costs which grow with the length show.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from penstock.pipeline.core import source_of
from penstock.pipeline.frames import ChatTurn, GenerationFinished, GenerationStarted, TokenChunk, TokenFrame
from penstock.pipeline.protocol.events import to_sse
from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.services.web.image_cache import ImageCache
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.responses import chat_stages, responses_pipeline
from tests.support.chat_families import family_model
from tests.support.stored_responses import facts, response

PROSE = "The weather in Paris is mild today, with a light wind from the west and some clouds by the evening. "
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
LENGTHS = {"text": (2_000, 8_000, 32_000), "a call": (2_000, 8_000)}
ROUNDS = 3
SLOW_CALL = 2_000
"""Longest tool call, in tokens, that is measured for more than one round: vLLM takes seconds for longer ones."""


@dataclass(frozen=True)
class Written:
    model: ChatModel
    names: tuple[str, str]
    token_ids: tuple[int, ...]

    @property
    def texts(self) -> list[str]:
        return [self.model.vocabulary.token_bytes[token].decode() for token in self.token_ids]


def output_of_family(family: str, names: tuple[str, str], what: str, length: int) -> Written:
    model = family_model(family)
    encode = model.vocabulary.encode
    words = encode(PROSE)
    prose = (words * (length // len(words) + 1))[:length]
    around: tuple[list[int], list[int]]
    if what == "text":
        around = encode("Hm.\n</think>\n\n"), []
    elif names[1] == "hermes":
        around = (
            encode('Hm.\n</think>\n\n<tool_call>\n{"name": "note", "arguments": {"text": "'),
            encode('"}}\n</tool_call>'),
        )
    else:
        around = (
            encode("Hm.\n</think>\n\n<tool_call>\n<function=note>\n<parameter=text>\n"),
            encode("\n</parameter>\n</function>\n</tool_call>"),
        )
    return Written(model, names, (*around[0], *prose, *around[1], model.stop_token_ids[0]))


async def ours(output: Written) -> float:
    started = GenerationStarted(
        facts(
            replace(response(), output=(), usage=None),
            tools=Toolset((FunctionTool("note", parameters=PARAMETERS),)),
        ),
        3,
        chat=ChatTurn(),
        prompt=tuple(output.model.vocabulary.encode("<think>\n")),
    )
    chunks: list[TokenFrame] = [TokenChunk((token,)) for token in output.token_ids]
    frames = [started, *chunks, GenerationFinished("stop", 0, 1.0)]
    responses = responses_pipeline(
        chat_stages(output.model, ImageCache()), ScriptedEngine(), RunRegistry(Store(NullDatabase()))
    )
    begun = time.process_time_ns()
    async with responses.from_stage("parse").open(source_of(frames)) as events:
        async for event in events:
            to_sse(event)
    return (time.process_time_ns() - begun) / 1e3 / len(output.token_ids)


async def theirs(output: Written) -> float:
    """Microseconds per token of the code that streams responses in vLLM's server."""
    from vllm.entrypoints.openai.responses.context import SimpleContext  # noqa: PLC0415 - takes seconds
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses  # noqa: PLC0415
    from vllm.parser import ParserManager  # noqa: PLC0415

    tokenizer = output.model.vocabulary.tokenizer
    parser = ParserManager.get_parser(*reversed(output.names), enable_auto_tools=True)
    tool = {"type": "function", "name": "note", "parameters": PARAMETERS, "strict": None}
    request = ResponsesRequest(model="m", input="", tools=[tool], tool_choice="auto", stream=True)
    context = SimpleContext(parser_cls=parser, tokenizer=tokenizer, request=request, chat_template_kwargs={})
    prompt = output.model.vocabulary.encode("<think>\n")
    pairs = list(zip(output.token_ids, output.texts, strict=True))

    async def generated() -> AsyncIterator[Any]:
        for token, text in pairs:
            is_last = token == output.token_ids[-1]
            answer = SimpleNamespace(
                text="" if is_last else text,
                token_ids=[token],
                finish_reason="stop" if is_last else None,
                logprobs=None,
            )
            context.last_output = SimpleNamespace(outputs=[answer], prompt_token_ids=prompt)
            yield context

    numbers = count()

    def numbered(event: Any) -> Any:
        event.sequence_number = next(numbers)
        return event

    server = SimpleNamespace(_raise_if_error=lambda *_: None)
    begun = time.process_time_ns()
    events = OpenAIServingResponses._process_simple_streaming_events(
        server, request, None, generated(), context, "m", tokenizer, None, 0, numbered
    )
    async for event in events:
        _ = f"event: {event.type}\ndata: {event.model_dump_json(indent=None)}\n\n".encode()
    return (time.process_time_ns() - begun) / 1e3 / len(output.token_ids)


async def chat_figures() -> str:
    lines = ["chat models, 1 token per chunk     tokens   us per token   vLLM's own   ratio   to the shortest"]
    for family, names in (("qwen3", ("qwen3", "hermes")), ("qwen3_coder", ("qwen3", "qwen3_coder"))):
        for what, lengths in LENGTHS.items():
            shortest = 0.0
            for length in lengths:
                mine, other = await compared(output_of_family(family, names, what, length), what, length)
                shortest = shortest or mine
                label = f"{'+'.join(names)}, {what}"
                lines.append(
                    f"{label:32s}{length:9,d}{mine:15.2f}{other:13.1f}{mine / other:8.2f}{mine / shortest:18.2f}"
                )
    return "\n".join(lines)


async def compared(output: Written, what: str, length: int) -> tuple[float, float]:
    rounds = 1 if what != "text" and length > SLOW_CALL else ROUNDS
    figures = [(await ours(output), await theirs(output)) for _ in range(rounds)]
    return statistics.median(mine for mine, _ in figures), statistics.median(other for _, other in figures)
