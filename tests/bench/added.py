"""Time that a frontend adds before the first token, in process: our pipeline and vLLM's frontend in turns.

Two spans are measured: from the body of a request to the engine, and from the engine's first token to the bytes of the
first delta.  Work that overlaps the engine's prefill delays nothing and is left out.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from penstock.api.runs.housekeeping import tune_gc
from penstock.api.runs.scheduler import Scheduler
from penstock.pipeline.protocol.events import ResponseCompleted, to_sse
from penstock.pipeline.protocol.params.validation import read_request
from penstock.services.engines.vllm import VllmEngine
from penstock.services.runs.run import RunRegistry
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE, load_encoding
from penstock.stages.responses import harmony_stages, responses_pipeline
from tests.bench.figures import Comparison, Figure
from tests.bench.first_token import FIRST, SHORT, long_text, prompts
from tests.bench.inprocess import Ready, engine_outputs, serving_of
from tests.bench.loopback import NAME
from tests.support.stores import open_store

ADDED, TO_ENGINE, FROM_TOKEN = "ms added", "ms from the body to the engine", "ms from the first token to its delta"
CPU, ON_LOOP = "ms of CPU of both", "ms of that on the loop"
MEASURES = (ADDED, TO_ENGINE, FROM_TOKEN, CPU, ON_LOOP)

CONTEXT = 131_072


@dataclass(frozen=True)
class Moment:
    """Readings in seconds: wall clock, CPU time of the process, CPU time of the loop's thread."""

    wall: float
    cpu: float
    loop: float


def now() -> Moment:
    return Moment(time.perf_counter(), time.process_time(), time.thread_time())


@dataclass
class Noting(Ready):
    """An `AsyncLLM` that answers with one token, and records when the request came and when the token left."""

    outputs: Iterator[Any] = field(init=False)
    moments: list[Moment] = field(default_factory=list)

    async def add_request(self, *_: Any, **__: Any) -> Ready:
        self.moments.append(now())
        self.outputs = self._outputs()
        return self

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.moments.append(now())
        for output in self._outputs():
            yield output

    def check_admission(self, _: int) -> None:
        """Admit every request; vLLM's frontend calls this first."""

    def _outputs(self) -> Iterator[Any]:
        markup = load_encoding().encode_markup
        parts = (("<|channel|>final<|message|>Hm", None), ("<|return|>", "stop"))
        outputs = [output for text, reason in parts for output in engine_outputs(markup(text), CONTEXT, reason)]
        self.moments.append(now())
        yield from outputs


@dataclass(frozen=True)
class Frontend:
    """A frontend that answers a request with the bytes of its events, and the engine below it."""

    engine: Noting
    answer: Callable[[bytes], AsyncGenerator[bytes, None]]

    async def added(self, body: Mapping[str, Any]) -> dict[str, float]:
        """Run one request and return each of `MEASURES`, in milliseconds."""
        data, delta = json.dumps({"model": NAME, "stream": True, **body}).encode(), None
        self.engine.moments.clear()
        begun = now()
        async for event in self.answer(data):
            if delta is None and FIRST in event:
                delta = now()
        if delta is None:
            raise RuntimeError("no text came")
        received, sent = self.engine.moments
        spans = (begun, received), (sent, delta)
        to_engine, from_token = ((end.wall - start.wall) * 1e3 for start, end in spans)
        cpu = sum(end.cpu - start.cpu for start, end in spans) * 1e3
        on_loop = sum(end.loop - start.loop for start, end in spans) * 1e3
        return dict(zip(MEASURES, (to_engine + from_token, to_engine, from_token, cpu, on_loop), strict=True))


@asynccontextmanager
async def ours() -> AsyncGenerator[tuple[Frontend, Callable[[Mapping[str, Any]], Awaitable[str]]], None]:
    """Yield the whole pipeline over a store in a file, as the route runs it, and a function that stores a response."""
    llm: Any = Noting()
    engine = VllmEngine(llm=llm, models=(NAME,), context_length=CONTEXT, vocabulary_size=VOCABULARY_SIZE)
    with TemporaryDirectory() as folder:
        async with open_store(str(Path(folder) / "store.sqlite3")) as store:
            runs = RunRegistry(store)
            scheduler = Scheduler(
                responses_pipeline(harmony_stages(load_encoding()), engine, runs), engine, runs, store
            )

            async def events(data: bytes) -> AsyncGenerator[Any, None]:
                async with await scheduler.prepare(read_request(data)) as opened:
                    async for event in scheduler.run(opened):
                        yield event

            async def answer(data: bytes) -> AsyncGenerator[bytes, None]:
                async for event in events(data):
                    yield to_sse(event)

            async def stored(body: Mapping[str, Any]) -> str:
                ended = [each async for each in events(json.dumps(body).encode()) if type(each) is ResponseCompleted]
                return str(ended[0].response.id)

            yield Frontend(llm, answer), stored


def peer() -> Frontend:
    from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events  # noqa: PLC0415
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: PLC0415 - takes seconds
    from vllm.renderers.online_renderer import OnlineRenderer  # noqa: PLC0415

    engine = Noting()
    serving = serving_of(engine)
    tokenizer = SimpleNamespace(get_tokenizer=lambda: None, tokenizer=None)
    renderer = OnlineRenderer.__new__(OnlineRenderer)
    vars(renderer).update(
        model_config=serving.model_config, use_harmony=True, parser=serving.parser, renderer=tokenizer,
        trust_request_chat_template=False, reasoning_effort_map=None,
    )  # fmt: skip
    vars(serving).update(
        online_renderer=renderer, renderer=tokenizer, default_sampling_params={}, override_max_tokens=None,
        chat_template=None, chat_template_content_format="auto", chat_template_kwargs={},
        models=SimpleNamespace(is_base_model=lambda _: True, model_name=lambda _: NAME, lora_requests={}),
        has_kv_connector=False,
    )  # fmt: skip

    async def answer(data: bytes) -> AsyncGenerator[bytes, None]:
        request = ResponsesRequest.model_validate(json.loads(data))
        async for event in _convert_stream_to_sse_events(await serving.create_responses(request)):
            yield event.encode()

    return Frontend(engine, answer)


async def added(short: int, long: int) -> list[Comparison]:
    """Every measure of every prompt, in turns; the first of each is left out."""
    found: list[Comparison] = []
    theirs = peer()
    tune_gc()  # as a server does once it is up
    async with ours() as (mine, stored):
        for load, bodies in prompts(await stored({"input": long_text()})):
            rounds = short if load["prompt"] == SHORT else long
            figures = [(await mine.added(bodies[0]()), await theirs.added(bodies[1]())) for _ in range(1 + rounds)][1:]
            for what in MEASURES:
                of_ours, of_peer = (Figure(tuple(figure[side][what] for figure in figures)) for side in (0, 1))
                found.append(Comparison(load, of_ours, of_peer, what))
    gc.unfreeze()
    return found
