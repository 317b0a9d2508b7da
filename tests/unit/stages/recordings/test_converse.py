"""Answers from recordings that change while the server runs."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import CannotStart, EngineFailed
from penstock.pipeline.frames import ItemDelta, ParsedFrame, ResolvedRequest
from penstock.pipeline.recordings.format import UnreadableRecording, read_frames
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.stages.converse.converse import guarding
from penstock.stages.models.harmony.vocabulary import encoding_on_demand
from penstock.stages.recordings.converse import partly_run
from penstock.stages.recordings.recordings import read_recordings
from penstock.stages.responses import recorded_stages, responses_pipeline
from tests.support.paths import HARMONY

GREETING = HARMONY / "greeting"


def pipeline_of(folder: Path) -> Pipeline[Any, Any]:
    """The pipeline of a server that answers from the recordings in ``folder``."""
    model = recorded_stages(encoding_on_demand(), read_recordings(folder))
    return responses_pipeline(model, ScriptedEngine(), RunRegistry(Store(NullDatabase())))


def test_pipeline_without_the_stage_that_recordings_replace_is_refused() -> None:
    async def answer(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
        async for _ in source:
            yield ItemDelta("Hello.")

    pipeline = pipeline_of(GREETING)
    without = replace(pipeline.stage("converse"), inner=Pipeline.start("render", answer))
    with pytest.raises(CannotStart, match="in place of the stage generate, which this pipeline does not have"):
        partly_run(pipeline.replace("converse", without))


def test_answers_from_recordings_need_no_guard() -> None:
    pipeline = pipeline_of(GREETING)
    assert guarding(pipeline, lambda request, call: "No.") is pipeline


@pytest.mark.parametrize("cut", [None, 100, -10])
async def test_lost_recording_fails_the_response(tmp_path: Path, cut: int | None) -> None:
    tokens = shutil.copytree(GREETING, tmp_path / "greeting") / "tokens.jsonl"
    pipeline = pipeline_of(tmp_path)
    if cut is None:
        shutil.rmtree(tmp_path / "greeting")
    else:
        tokens.write_bytes(tokens.read_bytes()[:cut])
    conversations = source_of(read_frames(GREETING / "conversation.jsonl", ResolvedRequest))
    with pytest.raises(EngineFailed) as failed:
        async with pipeline.from_stage("converse").open(conversations) as events:
            await anext(events)
    assert failed.value.message == "The recording 'greeting' can no longer be read."
    assert isinstance(failed.value.__cause__, UnreadableRecording)
    assert str(failed.value.__cause__).startswith(str(tokens))
