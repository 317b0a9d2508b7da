"""Private parts of vLLM: that they are there, and tokens that are passed on, beside vLLM's own output processor."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from penstock.stages.models import vllm_private
from penstock.stages.models.vllm_private import (
    PrivatePart,
    UnknownVllm,
    Unread,
    copying_tokenizers_late,
    pass_tokens_on,
)
from tests.support.paths import TINY_QWEN

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn
]

NAMES = ("one", "two", "likely", "ranked")
"""Requests; the last two have log probabilities, and the last has alternatives, so it goes vLLM's way."""

ALTERNATIVES = {"likely": 0, "ranked": 2}

STEPS = 60


class Frontend:
    """An output processor of vLLM, and what the readers of its requests have read."""

    def __init__(self, *, passes_on: bool = True) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor  # noqa: PLC0415 - takes seconds

        self.processor: Any = OutputProcessor(None, log_stats=True)
        self.collectors: dict[str, Any] = {}
        self.unread: dict[str, Unread] = {}
        self.read: dict[str, list[int]] = {}
        self.scores: dict[str, list[float]] = {}
        self.ends: dict[str, Any] = {}
        self.passed_on = 0
        if passes_on:
            pass_tokens_on(self.processor, self.unread, lambda: False)

    def add(self, name: str) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415 - takes seconds
        from vllm.v1.engine import EngineCoreRequest  # noqa: PLC0415
        from vllm.v1.engine.output_processor import RequestOutputCollector  # noqa: PLC0415

        delta, logprobs = RequestOutputKind.DELTA, ALTERNATIVES.get(name)
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[1, 2, 3],
            mm_features=None,
            sampling_params=SamplingParams(
                output_kind=delta, detokenize=False, logprobs=logprobs, flat_logprobs=True, max_tokens=500
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=f"external {name}",
        )
        self.collectors[name], self.read[name], self.scores[name] = RequestOutputCollector(delta, name), [], []
        self.processor.add_request(request, None, queue=self.collectors[name])
        if not logprobs:
            self.unread[name] = Unread()

    def process(self, outputs: list[Any], now: float, weights: str | None = None) -> dict[str, Any]:
        """Process the outputs of a step; return vLLM's statistics of it."""
        from vllm.v1.metrics.stats import IterationStats  # noqa: PLC0415 - takes seconds

        statistics: Any = IterationStats()
        statistics.iteration_timestamp = now
        processed = self.processor.process_outputs(deepcopy(outputs), now, statistics, weight_version=weights)
        assert not processed.request_outputs
        assert not processed.reqs_to_abort
        statistics.inter_token_latencies_iter.sort()  # they go into a histogram
        return {**vars(statistics), "prompt_token_stats": vars(statistics.prompt_token_stats)}

    def take(self, name: str) -> None:
        """Read all that there is: the ids that were passed on precede the output in the collector."""
        collector, unread = self.collectors[name], self.unread.get(name, Unread())
        assert collector.ready.is_set() or not (unread or collector.output)
        self.passed_on += len(unread)
        token_ids, scores = unread.take()
        self.read[name] += token_ids
        self.scores[name] += scores
        if output := collector.get_nowait():
            (completion,) = output.outputs
            self.read[name] += completion.token_ids
            assert (completion.logprobs is None) == (name not in ALTERNATIVES)
            if flat := completion.logprobs:  # those of a token begin with its own; without tokens, all come again
                starts = flat.start_indices[: len(completion.token_ids)]
                self.scores[name] += [flat.logprobs[start] for start in starts]
            if output.finished:
                facts = completion.finish_reason, output.num_cached_tokens, completion.weight_versions
                self.ends[name] = (*facts, vars(output.metrics))
        collector.ready.clear()


def engine_steps(draw: random.Random) -> Iterator[list[Any]]:
    """Yield the outputs of an engine core, a step at a time.  In some steps a request gets none, or an empty one."""
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason  # noqa: PLC0415
    from vllm.v1.metrics.stats import PrefillStats  # noqa: PLC0415 - takes seconds
    from vllm.v1.outputs import LogprobsLists  # noqa: PLC0415

    queued, scheduled, preempted = EngineCoreEventType
    running = {name: draw.randrange(1, STEPS) for name in NAMES}
    for step in range(STEPS):
        outputs = []
        for name, end in list(running.items()):
            if step < end and draw.random() < 0.2:
                continue
            tokens = [draw.randrange(1_000) for _ in range(draw.choice([0, 1, 1, 1, 3]))]
            count = len(tokens)
            columns = draw.choice([1, 3]) if name == "likely" else 3  # others of a batch may have alternatives
            scores = -np.array([[draw.random() for _ in range(columns)] for _ in tokens]).reshape(count, columns)
            likely = LogprobsLists(np.zeros((count, columns), int), scores, np.ones(count, int))
            events = draw.choice([(), (), (), (queued, scheduled), (preempted,)])
            output = EngineCoreOutput(
                name,
                tokens,
                new_logprobs=likely if name in ALTERNATIVES else None,
                events=[EngineCoreEvent(event, step - 0.5) for event in events] or None,
                prefill_stats=PrefillStats(3, 1, 2, 2),
            )
            if step >= end:
                output.finish_reason = draw.choice(list(FinishReason))
                del running[name]
            outputs.append(output)
        yield outputs


@pytest.mark.parametrize("seed", range(20))
def test_readers_and_statistics_get_what_vllm_gives(seed: int) -> None:
    draw, ours, peer = random.Random(seed), Frontend(), Frontend(passes_on=False)
    for name in NAMES:
        ours.add(name)
        peer.add(name)
    for step, outputs in enumerate(engine_steps(draw)):
        weights = f"after {step // 7}"
        assert ours.process(outputs, step, weights) == peer.process(outputs, step, weights)
        for name in NAMES:
            is_read, is_aborted = draw.random() < 0.7, draw.random() < 0.01
            for frontend in (ours, peer):
                if is_aborted:
                    frontend.processor.abort_requests([name], internal=True)
                if is_read or step == STEPS - 1:
                    frontend.take(name)
            if is_read:
                assert ours.read[name] == peer.read[name]
                assert ours.scores[name] == peer.scores[name]
    assert (ours.read, ours.scores) == (peer.read, peer.scores)
    assert all(len(ours.scores[name]) == len(ours.read[name]) for name in ALTERNATIVES)
    assert ours.ends == peer.ends
    assert ours.ends.keys() == set(NAMES)
    assert ours.passed_on > len(NAMES)
    assert not ours.processor.request_states


def test_no_token_follows_an_error() -> None:
    from vllm.v1.engine import EngineCoreOutput  # noqa: PLC0415 - takes seconds
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

    frontend = Frontend()
    frontend.add("one")
    frontend.process([EngineCoreOutput("one", [1])], 1.0)
    frontend.take("one")
    frontend.process([EngineCoreOutput("one", [2])], 2.0)
    frontend.processor.propagate_error(EngineDeadError())
    frontend.process([EngineCoreOutput("one", [3])], 3.0)
    with pytest.raises(EngineDeadError):
        frontend.take("one")
    assert frontend.read["one"] == [1, 2]


def test_installed_vllm_has_all_parts() -> None:
    vllm_private.check_engine_parts()
    vllm_private.check_parser_parts()


@pytest.mark.parametrize(("tested", "warnings"), [(("0.31", "9"), 1), (vllm_private.TESTED, 0)])
def test_release_that_is_not_tested_is_logged(
    tested: tuple[str, ...], warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_private, "TESTED", tested)
    vllm_private.check_engine_parts()
    assert len(caplog.records) == warnings


@pytest.mark.parametrize("check", [vllm_private.check_engine_parts, vllm_private.check_parser_parts])
def test_start_ends_with_one_sentence_about_all_that_is_missing(
    check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (
        PrivatePart("vllm.v1.engine.output_processor", "RequestState", ("queue", "pace"), "tests"),
        PrivatePart("vllm.v1.engine.output_processor", "Outputs", ("queue",), "tests"),
        PrivatePart("vllm.engine.outputs", "Outputs", ("queue",), "tests"),
    )
    monkeypatch.setattr(vllm_private, "ENGINE_PARTS", parts)
    monkeypatch.setattr(vllm_private, "PARSER_PARTS", parts)
    missing = "RequestState.pace, vllm.v1.engine.output_processor.Outputs, vllm.engine.outputs.Outputs"
    with pytest.raises(UnknownVllm, match=rf"^This penstock works with vLLM .* lacks {re.escape(missing)}$"):
        check()


def test_tokenizer_is_copied_for_a_thread_that_tokenizes(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    renderer: Any = import_module("vllm.renderers.hf")
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_QWEN)
    copied = []

    def copy(one: Any, memo: Any) -> Any:
        copied.append(one)
        return one

    monkeypatch.setattr(type(tokenizer), "__deepcopy__", copy, raising=False)
    make = renderer.maybe_make_thread_pool
    with copying_tokenizers_late():
        assert renderer.maybe_make_thread_pool(tokenizer, 2) is tokenizer
    assert renderer.maybe_make_thread_pool is make
    assert not copied
    assert tokenizer("Hello")["input_ids"]
    assert tokenizer("again")["input_ids"]
    assert len(copied) == 1
