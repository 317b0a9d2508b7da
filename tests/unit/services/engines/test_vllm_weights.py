"""Weights of vLLM in this process: what an update cannot change is refused, and errors of the workers are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.pipeline.errors import EngineDead, EngineFailed, InvalidRequest
from penstock.services.engines.engine import ChangesWeights, NamesWeights, WeightWork
from penstock.services.engines.vllm import VllmEngine, kept_weights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn
]


def config(kind: str, quantization: str | None = None, *, is_tied: bool = False) -> Any:
    model = SimpleNamespace(
        hf_config=SimpleNamespace(model_type=kind),
        hf_text_config=SimpleNamespace(tie_word_embeddings=is_tied),
        quantization=quantization,
    )
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(world_size=2, world_size_across_dp=6))


@dataclass
class Llm:
    """Stands in for `AsyncLLM`, and notes what its workers do."""

    vllm_config: Any
    fault: Exception | None = None
    done: list[tuple[str, Any]] = field(default_factory=list)

    async def collective_rpc(self, method: str, kwargs: Any) -> None:
        if self.fault:
            raise self.fault
        self.done.append((method, kwargs))


def engine_over(llm: Any) -> VllmEngine:
    return VllmEngine(llm=llm, models=("tiny",), context_length=8, vocabulary_size=8)


@pytest.mark.parametrize(
    ("given", "is_cpu", "words"),
    [
        (config("gpt_oss"), True, "the experts"),
        (config("gpt_oss"), False, "the experts"),
        (config("gpt_oss", "mxfp4"), True, ""),
        (config("qwen3", is_tied=True), True, "an output layer"),
        (config("qwen3", is_tied=True), False, ""),
        (config("qwen3"), True, ""),
    ],
)
async def test_update_that_would_keep_old_weights_is_refused(
    given: Any, is_cpu: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_module("vllm.v1.engine.exceptions")  # with the real platform
    monkeypatch.setattr(import_module("vllm.platforms").current_platform, "is_cpu", lambda: is_cpu)
    engine = engine_over(llm := Llm(given))
    assert kept_weights(given).startswith(words)
    works: tuple[WeightWork, ...] = ("reload_weights", "start_weight_update")
    for work in works:
        if words:
            with pytest.raises(InvalidRequest, match=words):
                await engine.in_workers(work)
        else:
            await engine.in_workers(work, given=1)
    assert llm.done == ([] if words else [(work, {"given": 1}) for work in works])


async def test_engine_says_why_its_workers_failed() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - takes seconds

    for fault, kind, words in (
        (Exception("Call to reload_weights method failed: no file"), EngineFailed, "no file"),
        (EngineDeadError(), EngineDead, "died"),
    ):
        with pytest.raises(kind, match=words):
            await engine_over(Llm(config("qwen3"), fault)).in_workers("reload_weights")


def test_engine_has_the_doors_of_trainers_and_metrics() -> None:
    engine = engine_over(Llm(config("qwen3")))
    assert isinstance(engine, ChangesWeights)
    assert isinstance(engine, NamesWeights)
    assert [engine.workers(with_replicas=each) for each in (False, True)] == [2, 6]
    assert engine.weight_version == ""
