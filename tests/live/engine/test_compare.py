"""Forced replay through vLLM: in this process, and over both of its endpoints for tokens."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from penstock.extensions.workbench.forced.comparison import ComparedAnswer, Comparison, Figures
from penstock.extensions.workbench.forced.recorded import read_answer, recordings_in
from penstock.extensions.workbench.forced.turn import Turn
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.extensions.workbench.shadow import Shadow, Shadowed
from penstock.pipeline.frames import GenerationFinished, GenerationStarted, Prompt
from penstock.pipeline.recordings.comparison import common_prefix
from penstock.pipeline.recordings.format import read_frames
from penstock.services.engines.engine import Engine
from penstock.services.engines.http_endpoints import ENDPOINTS, Endpoint
from penstock.services.engines.vllm import VllmEngine
from penstock.services.engines.vllm_http import start_vllm_http
from penstock.stages.generate import Generate
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE, load_encoding
from tests.support.api_clients import wait_until
from tests.support.engine_requests import ON_SHARED_ENGINE, sampled
from tests.support.event_streams import generate, token_ids
from tests.support.fixture_cases import HARMONY_CASES
from tests.support.noisy import write_noisy
from tests.support.processes import PATIENCE, free_port, running_process
from tests.support.table_engine import write_turns
from tests.support.tiny_engine import ARGUMENTS

pytestmark = ON_SHARED_ENGINE

RECORDED = [case for case in HARMONY_CASES if not (case / "completion.txt").exists()][:12]
MOST = 100


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny gpt-oss, with weights that are a little off."""
    return write_noisy(tmp_path_factory.mktemp("noisy") / "tiny_gpt_oss")


@pytest.fixture(scope="module")
def noisy_url(noisy: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """A ``vllm serve`` of the noisy model."""
    url = f"http://127.0.0.1:{free_port()}"
    options = ("--structured-outputs-config.backend=guidance", "--enable-scale-out", "--host", "127.0.0.1")
    command: list[str | Path] = [Path(sys.executable).with_name("vllm"), "serve", noisy, *ARGUMENTS, *options]
    with running_process([*command, "--port", url.rpartition(":")[2]], f"{url}/health", noisy.parent / "serve.log"):
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def recordings(engine: VllmEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Recordings of greedy answers of the engine."""
    folder = tmp_path_factory.mktemp("recordings")
    for case in RECORDED:
        turns = []
        for number, prompt in enumerate(read_frames(case / "prompt.jsonl", Prompt), start=1):
            tokens = tuple(token_ids(await generate(engine, sampled(prompt, max_tokens=MOST))))
            started = GenerationStarted(prompt.facts, len(prompt.token_ids), held_to_grammar=prompt.grammar is not None)
            turns.append(Turn(number, prompt, started, tokens))
        write_turns(folder / case.name, *turns)
    return recordings_in([folder])


async def compared(engine: Engine, recordings: Mapping[str, Path]) -> dict[str, ComparedAnswer]:
    comparison = Comparison(engine, Vocabulary.of(load_encoding(), VOCABULARY_SIZE, "harmony", None))
    answers = [answer async for answer in comparison.compared(recordings)]
    assert all(isinstance(answer, ComparedAnswer) for answer in answers)
    return {answer.name: answer for answer in answers if isinstance(answer, ComparedAnswer)}


def first_changes(answers: Mapping[str, ComparedAnswer]) -> dict[str, tuple[int, int] | None]:
    """The turn and the index of the first change of each answer."""
    return {
        name: answer.first_change and (answer.first_change[0].turn.number, answer.first_change[1])
        for name, answer in answers.items()
    }


async def free_differences(engine: Engine, recordings: Mapping[str, Path]) -> dict[str, tuple[int, int] | None]:
    """The places at which the engine's own answers to the recorded prompts first differ."""
    found: dict[str, tuple[int, int] | None] = {}
    for name, folder in recordings.items():
        found[name] = None
        for turn in read_answer(name, folder).turns:
            own = token_ids(await generate(engine, sampled(turn.prompt, max_tokens=MOST)))
            same = common_prefix(own, turn.tokens)
            if found[name] is None and same < max(len(own), len(turn.tokens)):
                found[name] = turn.number, same
    return found


async def test_engine_is_not_surprised_by_its_own_answers(engine: VllmEngine, recordings: dict[str, Path]) -> None:
    answers = await compared(engine, recordings)
    figures = Figures()
    for answer in answers.values():
        figures.add(answer)
    assert (figures.answers, figures.changed, figures.left_out) == (len(RECORDED), 0, {})
    assert figures.compared == figures.tokens > 200


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
async def test_changes_are_those_of_a_free_run(
    noisy_url: str, recordings: dict[str, Path], endpoint: Endpoint[Any]
) -> None:
    elsewhere = await start_vllm_http([noisy_url], endpoints=(endpoint,))
    try:
        expected = await free_differences(elsewhere, recordings)
        answers = await compared(elsewhere, recordings)
    finally:
        await elsewhere.close()
    assert first_changes(answers) == expected
    assert None in expected.values()
    assert any(expected.values())


async def test_shadow_finds_the_same_changes_while_a_server_runs(
    engine: VllmEngine, noisy_url: str, recordings: dict[str, Path]
) -> None:
    elsewhere = await start_vllm_http([noisy_url])
    answers = await compared(elsewhere, recordings)
    turns = [each for answer in answers.values() for each in answer.turns if each.turn.prompt.grammar is None]
    expected = sum(token.has_changed is True for each in turns for token in each.tokens)

    async def connect() -> Engine:
        return elsewhere

    def changed() -> float:
        return REGISTRY.get_sample_value("penstock_shadow_tokens_total", {"verdict": "changed"}) or 0

    def read() -> float:
        return sum(
            REGISTRY.get_sample_value("penstock_shadow_turns_total", {"outcome": outcome}) or 0
            for outcome in ("same", "changed", "uncounted", "dropped", "too_long", "failed")
        )

    before, read_before, shadow = changed(), read(), Shadow(connect)
    stage = Shadowed(Generate(engine), shadow.take, 1.0)
    async with shadow.running():  # which closes the engine
        for each in turns:
            prompt = sampled(each.turn.prompt, max_tokens=MOST)
            frames = [frame async for frame in stage(one(prompt))]
            assert isinstance(frames[-1], GenerationFinished)
        await wait_until(lambda: read() - read_before == len(turns))
    assert changed() - before == expected > 0


async def one(prompt: Prompt) -> AsyncGenerator[Prompt, None]:
    yield prompt


def compare_in_process(recordings: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``penstock compare``, which no token may pass."""
    command: list[str | Path] = [Path(sys.executable).with_name("penstock"), "compare", recordings]
    command += ["--json", "--most-changed", "0", "--engine", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


async def test_command_compares_in_this_process_as_over_http(
    noisy: Path, noisy_url: str, recordings: dict[str, Path]
) -> None:
    elsewhere = await start_vllm_http([noisy_url])
    try:
        expected = first_changes(await compared(elsewhere, recordings))
    finally:
        await elsewhere.close()
    folder = next(iter(recordings.values())).parent
    for words in ([noisy_url], [str(noisy), *ARGUMENTS]):
        ended = await asyncio.to_thread(compare_in_process, folder, *words)
        assert ended.returncode == 1, ended.stderr
        *answers, summary = map(json.loads, ended.stdout.splitlines())
        assert summary["exceeded"]
        assert {answer["answer"]: _first_change(answer) for answer in answers} == expected


def _first_change(answer: dict[str, Any]) -> tuple[int, int] | None:
    changes = (
        (turn["turn"], at) for turn in answer["turns"] for at, token in enumerate(turn["tokens"]) if token["changed"]
    )
    return next(changes, None)
