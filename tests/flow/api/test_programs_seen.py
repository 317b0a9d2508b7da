"""Programs as their operator sees them: recordings, traces, metrics, the audit log and timelines.

The host of programs follows a script: nothing runs here but the tools.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from penstock.extensions.programs.host import ProgramHost
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.extensions.workbench.timeline.rows import rows_of
from penstock.extensions.workbench.timeline.timeline import timeline_of
from penstock.pipeline.audit import LOGGER
from penstock.pipeline.plugins import load
from penstock.pipeline.protocol.events import DONE, to_sse
from penstock.pipeline.protocol.items import FunctionCall, Program, ProgramOutput, caller_of
from penstock.pipeline.recordings.format import source_of_recording
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.slots import Slots
from penstock.services.tools import NestedCall, Toolbox, ToolResult
from penstock.stages.models.harmony.vocabulary import encoding_on_demand
from penstock.stages.recordings.converse import RecordedTools
from penstock.stages.recordings.recordings import read_recordings
from penstock.stages.responses import recorded_stages, responses_pipeline
from tests.support import server
from tests.support.api_clients import Json
from tests.support.event_streams import final, harmony_pipeline, read_sse, run_request
from tests.support.otlp import collecting
from tests.support.paths import ROOT
from tests.support.plugins import edit_of
from tests.support.scripted_tools import ScriptedProgram, ScriptedTool
from tests.support.server import ScriptedServer
from tests.support.stores import open_store
from tests.support.tool_servers import answer_markup, play_turns, python_markup, tool_server

ASK, LOOK = NestedCall((None, "ask"), '{"of": "stock"}'), NestedCall(("browser", "search"), '{"query": "lamps"}')
OF_PROGRAMS = {"allowed_callers": ["programmatic"]}
TOOLS: list[Json] = [
    {"type": "programmatic_tool_calling"},
    {"type": "function", "name": "ask", "parameters": {"type": "object"}, "strict": False, **OF_PROGRAMS},
    {"type": "web_search", **OF_PROGRAMS},
]
ASKED: Json = {"model": "tiny", "input": "How many lamps are there?", "tools": TOOLS}


@asynccontextmanager
async def programs(
    folder: Path, *rounds: tuple[NestedCall, ...], **options: Any
) -> AsyncGenerator[ScriptedServer, None]:
    """A server that records into ``folder``, and whose model writes a program with these rounds of calls."""
    engine = ScriptedEngine(models=("tiny",))
    tool = ScriptedTool([ToolResult("12"), ToolResult(error="It is down.")])
    toolbox = Toolbox({"program": ScriptedProgram(rounds), "browser": tool})
    async with server.recording_server(engine, folder, toolbox=toolbox, **options) as served:
        yield served


def output_for(response: Json) -> list[Json]:
    """What the client sends back: the outputs of the calls that it has to make."""
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": call["call_id"], "output": "7"} for call in calls]


async def talk(served: ScriptedServer) -> list[tuple[bytes, Json]]:
    """Send a request, and then the outputs of its calls; return both answers."""
    body, answers = ASKED, list[tuple[bytes, Json]]()
    for turns in ([python_markup("run()")], []):
        play_turns(served.engine, *turns, answer_markup("There are 12."))
        sent = await served.stream(body)
        response = await served.get_response(final(read_sse(sent)).id)
        answers.append((sent, response))
        body = {**ASKED, "input": output_for(response), "previous_response_id": response["id"]}
    return answers


async def replayed(folder: Path, stage: str, source: str) -> bytes:
    async with open_store(str(folder.parent / "replay.sqlite3")) as store:
        pipeline = harmony_pipeline(ScriptedEngine(), store)
        async with pipeline.from_stage(stage).open(source_of_recording(server.read_stage(folder, source))) as events:
            return b"".join([to_sse(event) async for event in events]) + DONE


async def test_recording_of_a_program_replays_to_the_same_bytes(tmp_path: Path) -> None:
    """The first response waits for the client, the second goes on with the program: no step of it runs again."""
    async with programs(tmp_path / "r", (LOOK, ASK), (LOOK,)) as served:
        answers = await talk(served)
    assert [[item["type"] for item in answer["output"]] for _, answer in answers] == [
        ["program", "web_search_call", "function_call"],
        ["web_search_call", "program_output", "message"],
    ]
    for sent, answer in answers:
        folder = tmp_path / "r" / answer["id"]
        assert "conversed.jsonl" in server.recorded_files(folder)
        for stage, source in (("emit", "converse"), ("persist", "emit")):
            assert await replayed(folder, stage, source) == sent


async def test_server_of_recordings_answers_with_a_program(tmp_path: Path) -> None:
    """The ids are those of its own response, and the calls name its own program."""
    async with programs(tmp_path / "r", (LOOK, ASK), (LOOK,)) as served:
        recorded = [answer for _, answer in await talk(served)]
    recordings = read_recordings(tmp_path / "r")
    model = recorded_stages(encoding_on_demand(), recordings)
    engine, toolbox = ScriptedEngine(models=("tiny",)), RecordedTools(recordings=recordings)
    async with open_store(str(tmp_path / "replayed.sqlite3")) as store:
        pipeline = responses_pipeline(model, engine, RunRegistry(store), toolbox)
        first = final(await run_request(pipeline, ASKED))
        program, looked, call = first.output
        assert isinstance(program, Program)
        assert isinstance(call, FunctionCall)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        body = {**ASKED, "input": [output], "previous_response_id": first.id}
        second = final(await run_request(pipeline, body))
    looked_again, printed, _ = second.output
    assert [caller_of(item) for item in (looked, call, looked_again)] == [program.call_id] * 3
    assert isinstance(printed, ProgramOutput)
    assert (printed.call_id, printed.result) == (program.call_id, recorded[1]["output"][1]["result"])
    assert program.call_id != recorded[0]["output"][0]["call_id"]


async def test_spans_of_calls_are_below_that_of_their_program(tmp_path: Path) -> None:
    async with collecting() as receiver, programs(tmp_path / "r", (LOOK, ASK), (LOOK,)) as served:
        await talk(served)
    first, second = receiver.named("execute_tool programmatic_tool_calling")
    assert [sorted(receiver.under(span)) for span in (first, second)] == [
        ["execute_tool function", "execute_tool web_search"],
        ["execute_tool web_search"],
    ]
    assert [span.has_failed for span in receiver.named("execute_tool web_search")] == [False, True]
    assert {span.parent for span in (first, second)} == {span.id for span in receiver.named("response")}


async def test_calls_of_programs_are_counted(tmp_path: Path) -> None:
    def counted(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"penstock_{name}_total", labels) or 0

    def counts() -> list[float]:
        return [
            counted("program_calls", tool="web_search"),
            counted("program_calls", tool="function"),
            counted("tool_calls", tool="programmatic_tool_calling", status="completed"),
        ]

    before = counts()
    async with programs(tmp_path / "r", (LOOK, ASK), (LOOK,)) as served:
        await talk(served)
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 1, 1]


@contextmanager
def audited(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Keep the lines of the audit log for the length of a block."""
    logger = logging.getLogger(LOGGER)
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, LOGGER):
        yield
    logger.removeHandler(caplog.handler)


def decisions(caplog: pytest.LogCaptureFixture) -> list[Json]:
    return [vars(record)["audit"] for record in caplog.records if record.name == LOGGER]


async def test_refused_call_of_a_program_is_in_the_audit_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with audited(caplog):
        async with programs(tmp_path / "r", (LOOK, LOOK)) as served:
            play_turns(served.engine, python_markup("run()"), answer_markup())
            _, answer = await served.post({**ASKED, "max_tool_calls": 2})  # the program itself is one
    caller = answer["output"][0]["call_id"]
    noted = {"rule": "tools", "decision": "refused", "subject": answer["id"], "tool": "browser", "caller": caller}
    assert decisions(caplog) == [noted]


async def test_timeline_tells_the_calls_of_a_program_from_those_of_the_model(tmp_path: Path) -> None:
    async with programs(tmp_path / "r", (LOOK, ASK), (LOOK,)) as served:
        answers = await talk(served)
    titles = [
        [row.title for row in rows_of(await timeline_of(tmp_path / "r" / answer["id"])) if row.title]
        for _, answer in answers
    ]
    assert titles == [
        ["program", "web call · search · by the program", "function call · ask · by the program"],
        ["web call · search · by the program", "program output", "message · final answer"],
    ]


# What a stage author sees

GUIDE = (ROOT / "docs" / "STAGES.md").read_text()
[GUARD] = re.findall(r"```python\n# guard_calls.py\n(.*?)```", GUIDE, re.DOTALL)
REFUNDS = """
try:
    await refund(order=1)
except ToolError as error:
    print(error)
print(await ask(of="stock"))
"""


@pytest.mark.io
@pytest.mark.parametrize("is_kept", [True, False])
async def test_guard_refuses_calls_of_programs_before_they_leave(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program_sandbox: Sandbox,
    caplog: pytest.LogCaptureFixture,
    is_kept: bool,
) -> None:
    """The client does not learn of them, also if the program runs again from its start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guard_calls.py").write_text(GUARD)
    host = ProgramHost(program_sandbox, Slots(1))
    refund = {**TOOLS[1], "name": "refund"}
    asked = {**ASKED, "tools": [*TOOLS[:2], refund]}
    turns = [python_markup(REFUNDS), answer_markup()]
    edit = edit_of(load(["guard_calls.py:install"]))
    with audited(caplog):
        async with tool_server(tmp_path, turns, toolbox=Toolbox({"program": host}), edit=edit) as served:
            _, first = await served.post(asked)
            program, call = first["output"]
            if not is_kept:
                host.sleeping.drop(("", program["call_id"]))
            play_turns(served.engine, answer_markup())
            body = {**asked, "input": output_for(first), "previous_response_id": first["id"]}
            _, second = await served.post(body)
    assert (call["name"], call["caller"]) == ("ask", {"type": "program", "caller_id": program["call_id"]})
    assert second["output"][0]["result"] == "Ask the user first.\n7\n"
    refusal = {"rule": "programs", "decision": "refused", "tool": "refund", "caller": program["call_id"]}
    subjects = [first["id"]] if is_kept else [first["id"], second["id"]]
    assert decisions(caplog) == [{**refusal, "subject": subject} for subject in subjects]
