"""From an engine's outputs to the bytes of a stream, without a socket: our pipeline and vLLM's frontend in turns.

Both get vLLM's `RequestOutput` objects, as `AsyncLLM` returns them, and are timed between the first and the last one
of the measured text.  Neither has a store; ours still keeps its event log.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any

from penstock.pipeline.core import source_of
from penstock.pipeline.protocol.events import to_sse
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.services.engines.vllm import VllmEngine
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE, load_encoding
from tests.bench.core import FILL, recorded_text
from tests.bench.figures import Comparison, Figure
from tests.support.event_streams import harmony_pipeline

STEPS = (1, 8)
DEPTHS = (0, 1_000, 4_000, 16_000)
PROMPT = tuple(range(1_000, 1_100))

Measure = Callable[["Outputs"], Coroutine[Any, Any, None]]


@dataclass
class Outputs:
    """The engine outputs of one request, with the CPU time before and after the measured ones."""

    depth: int
    step: int
    tokens: int
    marks: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        text = recorded_text()
        ahead = [*text.thoughts(self.depth), *text.answer(), *text.run(FILL)]
        measured = list(engine_outputs(text.run(self.tokens), self.step))
        yield from list(engine_outputs(ahead, FILL))
        self.marks.append(time.process_time_ns())
        yield from measured
        self.marks.append(time.process_time_ns())
        yield from engine_outputs(load_encoding().encode_markup("<|return|>"), FILL, "stop")

    @property
    def cost(self) -> float:
        started, ended = self.marks
        return (ended - started) / 1e3 / self.tokens


def engine_outputs(tokens: list[int], step: int, reason: str | None = None) -> Iterator[Any]:
    """Yield the tokens as `AsyncLLM` returns them, ``step`` at a time."""
    from vllm.outputs import CompletionOutput, RequestOutput  # noqa: PLC0415 - takes seconds

    for at in range(0, len(tokens), step):
        completion = CompletionOutput(0, "", tokens[at : at + step], None, None, finish_reason=reason)
        yield RequestOutput("r", None, list(PROMPT), None, [completion], finished=reason is not None)


@dataclass
class Ready:
    """An `AsyncLLM` and the collector of its only request; all outputs are ready at once."""

    outputs: Iterator[Any]
    errored: bool = False
    request_id: str = "r"

    async def add_request(self, *_: Any, **__: Any) -> Ready:
        return self

    def get_nowait(self) -> Any:
        return next(self.outputs)

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        for output in self.outputs:
            yield output


async def ours(outputs: Outputs) -> None:
    ready: Any = Ready(iter(outputs))
    engine = VllmEngine(llm=ready, models=("gpt-oss",), context_length=131_072, vocabulary_size=VOCABULARY_SIZE)
    pipeline = harmony_pipeline(engine)
    async with pipeline.open(source_of([CreateResponse(input="Hi", stream=True)])) as events:
        async for event in events:
            to_sse(event)


async def peer(outputs: Outputs) -> None:
    """Run the steps of vLLM's server for a rendered request, in the order of its `create_responses`."""
    from openai_harmony import Message, Role  # noqa: PLC0415
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata  # noqa: PLC0415 - takes seconds
    from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events  # noqa: PLC0415
    from vllm.entrypoints.openai.responses.context import HarmonyContext  # noqa: PLC0415
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: PLC0415
    from vllm.parser.harmony import HarmonyParser  # noqa: PLC0415

    serving = serving_of(Ready(iter(outputs)))
    request = ResponsesRequest(model="gpt-oss", input="Hi", stream=True, store=False)
    messages = [Message.from_role_and_content(Role.USER, "Hi")]
    context = HarmonyContext(messages, [], frozenset(), HarmonyParser(None, request.tools), request)
    params = request.to_sampling_params(4_096, {})
    metadata = RequestResponseMetadata(request_id=request.request_id)
    generated = serving._generate_with_builtin_tools(
        request.request_id, {"prompt_token_ids": list(PROMPT)}, params, context
    )
    events = serving.responses_stream_generator(request, params, generated, context, "gpt-oss", None, metadata)
    async for event in _convert_stream_to_sse_events(events):
        event.encode()


def serving_of(engine: Ready) -> Any:
    """Return vLLM's serving class, set up as for the config of a gpt-oss."""
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses  # noqa: PLC0415 - takes seconds
    from vllm.parser.harmony import HarmonyParser  # noqa: PLC0415

    serving = OpenAIServingResponses.__new__(OpenAIServingResponses)
    known = {
        "engine_client": engine,
        "model_config": SimpleNamespace(max_model_len=131_072, is_encoder_decoder=False),
        "use_harmony": True,
        "parser": HarmonyParser,
        "response_store": {},
        "response_store_lock": asyncio.Lock(),
        "msg_store": {},
        "event_store": {},
        "background_tasks": {},
    }
    absent = ("tool_server", "request_logger", "enable_store", "enable_log_outputs", "enable_auto_tools")
    details = ("enable_prompt_tokens_details", "enable_per_request_metrics", "enable_force_include_usage")
    vars(serving).update(known | dict.fromkeys(chain(absent, details)))
    return serving


async def cost(frontend: Measure, depth: int, step: int, tokens: int) -> float:
    outputs = Outputs(depth, step, tokens)
    gc.collect()
    await frontend(outputs)
    return outputs.cost


async def in_process(rounds: int, tokens: int, depths: Sequence[int] = DEPTHS) -> list[Comparison]:
    """Compare both frontends at every step size and reasoning length, all of them once in a round."""
    loads = [(step, depth) for step in STEPS for depth in depths]
    found = [
        [(await cost(ours, depth, step, tokens), await cost(peer, depth, step, tokens)) for step, depth in loads]
        for _ in range(1 + rounds)
    ]
    comparisons = []
    for (step, depth), figures in zip(loads, zip(*found[1:], strict=True), strict=True):  # the first round warms up
        mine, other = zip(*figures, strict=True)
        comparisons.append(Comparison({"step": step, "reasoning": depth}, Figure(mine), Figure(other)))
    return comparisons
