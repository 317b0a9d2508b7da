"""Changing stream intervals against vLLM's output processor, which does not expect them to change."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.stages.models.vllm_private import set_stream_interval
from penstock.stages.services.engines.stream_interval import MOST

pytestmark = [
    pytest.mark.filterwarnings("ignore")  # vLLM's imports warn
]


@pytest.mark.parametrize("seed", range(20))
def test_vllm_sends_every_token_once_at_any_interval(seed: int) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415 - takes seconds
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason  # noqa: PLC0415
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector  # noqa: PLC0415

    processor: Any = OutputProcessor(None, log_stats=False)
    request = EngineCoreRequest(
        request_id="one",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id="one",
    )
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "one")
    processor.add_request(request, None, queue=collector)
    draw, received, count = random.Random(seed), list[int](), 200
    for token in range(count):
        if draw.random() < 0.2:
            set_stream_interval(processor.request_states["one"], draw.choice([1, 2, 4, MOST]))
        reason = FinishReason.STOP if token == count - 1 else None
        processor.process_outputs([EngineCoreOutput("one", [token], finish_reason=reason)], 0.0, None)
        output: Any = collector.get_nowait()
        if output is not None:
            received += output.outputs[0].token_ids
        assert received
        assert token + 1 - len(received) < MOST
    assert received == list(range(count))
