"""The cost of a token in our stages after the engine, for items of every kind, and with a stage of the operator's.

Figures are medians of CPU time; variants are interleaved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec.structs import replace as with_fields

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.frames import GenerationStarted, TokenChunk, TokenFrame, TokenLogprob, with_facts
from penstock.pipeline.plugins import Edit, guarded
from penstock.pipeline.protocol.events import Delta, to_sse
from penstock.pipeline.recordings.format import read_frames
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.recordings.converse import passed
from penstock.stages.responses import recorded_responses
from tests.bench.core import RECORDING, recorded_text

MEASURED = 4_096
ROUNDS = 15

PLACES = ("generate", "parse", "converse", "emit", "persist")
"""The stages after which a stage of the operator's is measured."""


@dataclass(frozen=True)
class Stream:
    """A recorded response whose text tokens come one by one, in an item opened by ``header``."""

    started: GenerationStarted
    header: str = "<|channel|>analysis<|message|>"
    top_logprobs: int | None = None

    def frames(self) -> list[TokenFrame]:
        tokens = recorded_text().run(1 + MEASURED)
        opening = self._chunk([*load_encoding().encode_markup(self.header), tokens[0]])
        return [self.started, opening, *(self._chunk([token]) for token in tokens[1:])]

    def _chunk(self, token_ids: list[int]) -> TokenChunk:
        if self.top_logprobs is None:
            return TokenChunk(tuple(token_ids))
        top = tuple((other, -1.0 - other / 8) for other in range(self.top_logprobs))
        return TokenChunk(tuple(token_ids), (TokenLogprob(-0.5, top),) * len(token_ids))


def variants() -> dict[str, Stream]:
    """Return streams of the same text in items of every kind, and with options that add work for each token."""
    stream = Stream(next(iter(read_frames(RECORDING, TokenFrame))))
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


async def cost(frames: list[TokenFrame], edit: Edit = lambda pipeline: pipeline) -> float:
    """Return microseconds per token from ids to SSE bytes."""
    pipeline = edit(recorded_responses()).following("generate")
    async with pipeline.open(source_of(frames)) as events:
        while not isinstance(await anext(events), Delta):
            pass
        started = time.process_time_ns()
        for _ in range(MEASURED):
            to_sse(await anext(events))
        return (time.process_time_ns() - started) / 1e3 / MEASURED


async def medians(measures: Mapping[str, Callable[[], Awaitable[float]]]) -> dict[str, float]:
    figures: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(ROUNDS):
        for name, costs in figures.items():
            costs.append(await measures[name]())
    return {name: statistics.median(costs) for name, costs in figures.items()}


async def variant_table() -> str:
    streams = {name: stream.frames() for name, stream in variants().items()}
    found = await medians({name: partial(cost, frames) for name, frames in streams.items()})
    lines = ["1 token per chunk               us per token   to a message"]
    lines += [f"{name:30s}{figure:14.2f}{figure / found['a message']:15.2f}" for name, figure in found.items()]
    return "\n".join(lines)


def inserted(place: str, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    """Insert a stage of the operator's that passes all frames on, without a guard."""
    return pipeline.insert_after(place, "passed", passed)


def inserted_by_operator(place: str, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    """Insert the same stage as ``--with`` does."""
    return guarded(inserted(place, pipeline), pipeline)


async def guard_table() -> str:
    """Return the costs of a stage of the operator's, with its guard and without."""
    frames = variants()["a message"].frames()
    measures = {"": partial(cost, frames)}
    for place in PLACES:
        measures[place] = partial(cost, frames, partial(inserted, place))
        measures[f"{place}, guarded"] = partial(cost, frames, partial(inserted_by_operator, place))
    found = await medians(measures)
    lines = ["a stage that passes on   us per token   with its guard   ratio   the stage adds   its guard adds"]
    lines.append(f"{'none':22s}{found['']:15.2f}")
    for place in PLACES:
        bare, checked = found[place], found[f"{place}, guarded"]
        added = f"{checked / bare:8.2f}{bare - found['']:17.2f}{checked - bare:17.2f}"
        lines.append(f"{f'after {place}':22s}{bare:15.2f}{checked:17.2f}{added}")
    return "\n".join(lines)
