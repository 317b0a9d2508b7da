"""The recorded programs: in a sandbox, each makes the calls of its recording, and ends as it did there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.extensions.programs.host import ProgramHost
from penstock.pipeline.frames import Prompt, ResolvedRequest, with_facts
from penstock.pipeline.protocol.items import Program
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import read_frames
from penstock.services.tools import NestedCall, ToolResult
from penstock.stages.converse.programs import past_calls
from tests.support.fixture_cases import HARMONY_CASES
from tests.support.programs import step
from tests.support.scripted_tools import read_script

pytestmark = pytest.mark.io

SCRIPTS = {path.parent: read_script(path) for folder in HARMONY_CASES for path in folder.glob("tools.json")}
RECORDED = [folder for folder, script in SCRIPTS.items() if script.rounds]


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
async def test_recorded_program_makes_its_calls_and_ends_as_it_did(folder: Path, host: ProgramHost) -> None:
    script, whole = SCRIPTS[folder], conversation_of(folder)
    (program,) = [item for item in whole.items if isinstance(item, Program)]
    past, done, session = past_calls(whole, program.call_id), 0, host.session(whole)
    expected: list[tuple[NestedCall, ...] | ToolResult] = list(script.rounds)
    expected += [ToolResult(call.result) for call in script.calls if call.tool == "program"]
    for outcome in expected:
        assert await step(session, program.code, past[:done]) == outcome
        done += len(outcome) if isinstance(outcome, tuple) else 0
    await session.close()


def conversation_of(folder: Path) -> ResolvedRequest:
    """Return the last request of a case, with the items of its response as well."""
    *_, prompt = read_frames(folder / "prompt.jsonl", Prompt)
    response = msgspec.json.decode((folder / "response.json").read_bytes(), type=Response)
    items = {item.id: item for item in (*prompt.facts.input, *response.output)}
    return with_facts(ResolvedRequest(prompt.facts), input=tuple(items.values()))
