from __future__ import annotations

from pathlib import Path

from penstock.pipeline.plugins import load
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.paths import ROOT
from tests.support.server import running_server, script


async def test_summary_is_made_without_the_model(tmp_path: Path) -> None:
    install = load([f"{ROOT / 'tests/examples/summarize_own.py'}:install"])
    talk = [
        {"role": "user", "content": "Tea, please."},
        {"type": "function_call", "name": "brew", "call_id": "call_1", "arguments": '{"of": "tea"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "The kettle is on."},
        {"role": "assistant", "content": "It is coming."},
    ]
    async with running_server(ScriptedEngine(script()), tmp_path, edit=install) as served:
        _, response = await served.post({"input": [*talk, {"type": "compaction_trigger"}]})
        assert [item["type"] for item in response["output"]] == ["compaction"]
        assert served.engine.prompts == []
        await served.post({"input": [*talk, *response["output"]]})
        prompt = served.prompt_text()
    assert "Last answers:\nIt is coming.\nCalls that were made:\nbrew({" in prompt
    assert "kettle" not in prompt
