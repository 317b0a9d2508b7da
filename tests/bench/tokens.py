"""The cost of a token in our stages after the engine, for items of every kind, beside the openai_harmony parser.

That parser does about a third of the same work.  Figures are medians of CPU time; variants are interleaved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle, islice
from typing import Any

from msgspec.structs import replace as with_fields
from openai_harmony import HarmonyEncoding, HarmonyEncodingName, Role, StreamableParser, load_harmony_encoding

from penstock.pipeline.core import source_of
from penstock.pipeline.frames import GenerationStarted, TokenChunk, TokenFrame, TokenLogprob, with_facts
from penstock.pipeline.protocol.events import Delta, ResponseEvent, to_sse
from penstock.pipeline.recordings.format import read_frames
from penstock.stages.models.harmony.vocabulary import TEXT_TOKENS, load_encoding
from penstock.stages.responses import recorded_responses
from tests.support.paths import HARMONY

RECORDING = HARMONY / "long_reasoning/tokens.jsonl"
DEPTHS = (0, 1_000, 4_000, 16_000)
CHUNK_SIZES = (1, 8)
MEASURED = 4_096
ROUNDS = 15

Measurement = Callable[[], Coroutine[Any, Any, float]]


@dataclass(frozen=True)
class Stream:
    """A recorded response whose text tokens repeat without end, in an item opened by ``header``."""

    started: GenerationStarted
    tokens: tuple[int, ...]
    header: str = "<|channel|>analysis<|message|>"
    top_logprobs: int | None = None

    def opening(self) -> list[int]:
        return load_encoding().encode_markup(self.header)

    def text(self, length: int) -> list[int]:
        return list(islice(cycle(self.tokens), length))

    def frames(self, depth: int, chunk_size: int) -> list[TokenFrame]:
        tokens = self.text(depth + MEASURED)
        chunks = [self.chunk(tokens[at : at + chunk_size]) for at in range(0, len(tokens), chunk_size)]
        return [self.started, self.chunk([*self.opening(), *tokens[:1]]), *chunks]

    def chunk(self, token_ids: list[int]) -> TokenChunk:
        if self.top_logprobs is None:
            return TokenChunk(tuple(token_ids))
        top = tuple((other, -1.0 - other / 8) for other in range(self.top_logprobs))
        return TokenChunk(tuple(token_ids), (TokenLogprob(-0.5, top),) * len(token_ids))


def recorded() -> Stream:
    frames = list(read_frames(RECORDING, TokenFrame))
    tokens = [token for frame in frames if isinstance(frame, TokenChunk) for token in frame.token_ids]
    return Stream(frames[0], tuple(token for token in tokens[3:] if token < TEXT_TOKENS))


def variants(stream: Stream) -> dict[str, Stream]:
    """Return streams of the same text in items of every kind, and with options that add work for each token."""
    response = stream.started.facts.response
    summarised = with_fields(response, reasoning=with_fields(response.reasoning, summary="auto"))
    message = replace(stream, header="<|channel|>final<|message|>")
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    stopping = with_fields(stream.started.facts.sampling, stop=("\nObservation:",))
    return {
        "a message": message,
        "reasoning": stream,
        "reasoning, as a summary": replace(stream, started=with_facts(stream.started, response=summarised)),
        "a function's arguments": replace(stream, header=call),
        "a message with a stop text": replace(message, started=with_facts(stream.started, sampling=stopping)),
        "a message with logprobs": replace(message, top_logprobs=0),
        "a message with 5 top_logprobs": replace(message, top_logprobs=5),
    }


async def ours(frames: list[TokenFrame], depth: int, chunk_size: int) -> float:
    """Return microseconds per token from ids to SSE bytes, after ``depth`` tokens."""
    pipeline = recorded_responses().from_stage("parse")
    async with pipeline.open(source_of(frames)) as events:
        while not isinstance(await anext(events), Delta):
            pass
        await consume(events, depth // chunk_size)
        started = time.process_time_ns()
        await consume(events, MEASURED // chunk_size)
        return (time.process_time_ns() - started) / 1e3 / MEASURED


async def consume(events: AsyncIterator[ResponseEvent], count: int) -> None:
    for _ in range(count):
        to_sse(await anext(events))


@cache
def package_encoding() -> HarmonyEncoding:
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


async def package(stream: Stream) -> float:
    """Return microseconds per token of openai_harmony's parser, with delta and channel read once per token."""
    parser = StreamableParser(package_encoding(), Role.ASSISTANT)
    for token in stream.opening():
        parser.process(token)
    tokens = stream.text(MEASURED)
    started = time.process_time_ns()
    for token in tokens:
        parser.process(token)
        _ = parser.last_content_delta, parser.current_channel
    return (time.process_time_ns() - started) / 1e3 / MEASURED


async def measure(variants: dict[str, Measurement]) -> dict[str, float]:
    figures: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, variant in variants.items():
            figures[name].append(await variant())
    return {name: statistics.median(values) for name, values in figures.items()}


async def token_table() -> str:
    stream = recorded()
    names = {(size, depth): f"{size}/{depth}" for size in CHUNK_SIZES for depth in DEPTHS}
    measurements: dict[str, Measurement] = {
        name: partial(ours, stream.frames(depth, size), depth, size) for (size, depth), name in names.items()
    }
    medians = await measure({"package": partial(package, stream), **measurements})
    lines = [f"openai_harmony's parser alone: {medians['package']:.2f} us per token\n"]
    lines.append("tokens per chunk   behind tokens   us per token   to the parser alone   to the start")
    for (size, depth), name in names.items():
        figure, start = medians[name], medians[names[size, 0]]
        parser = figure / medians["package"]
        lines.append(f"{size:16d}{depth:16,d}{figure:15.2f}{parser:22.2f}{figure / start:15.2f}")
    return "\n".join(lines)


async def variant_table() -> str:
    measurements: dict[str, Measurement] = {
        name: partial(ours, stream.frames(0, 1), 0, 1) for name, stream in variants(recorded()).items()
    }
    medians = await measure(measurements)
    lines = ["1 token per chunk               us per token   to a message"]
    lines += [f"{name:30s}{figure:14.2f}{figure / medians['a message']:15.2f}" for name, figure in medians.items()]
    return "\n".join(lines)
