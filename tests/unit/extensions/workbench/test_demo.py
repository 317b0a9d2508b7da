"""``penstock demo``: what a stranger sees first."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import openai
import pytest

from penstock.extensions.workbench.demo import RECORDINGS
from tests.support.processes import PATIENCE, RunCommand, free_port, running_process

FOLDERS = sorted(path.name for path in RECORDINGS.iterdir())


@pytest.mark.io
@pytest.mark.slow
def test_answer_passes_the_stages_and_a_server_gives_it_again(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    log = tmp_path / "log"
    command = [sys.executable, "-m", "penstock.api.cli", "demo", "--no-open", "--port", str(port)]
    with running_process(command, f"{url}/ready", log) as demo:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        assert client.responses.create(model="hello", input="Hi").output_text == "Hello! How can I help you today?"
        begun = client.responses.create(model="tiny-gpt-oss", input="Say hello.", background=True)
        assert client.responses.retrieve(begun.id).id == begun.id
        shown = log.read_text()
        (key,) = re.findall(rf"^Its live page: {url}/live#key=(\S+)$", shown, re.MULTILINE)
        asking = Request(f"{url}/live/recordings", headers={"Authorization": f"Bearer {key}"})
        with urlopen(asking) as answer:
            assert {"hello", "tiny-gpt-oss"} >= {each["model"] for each in json.load(answer)["data"]} > set()
        (page,) = map(Path, re.findall(r"^/\S+\.html$", shown, re.MULTILINE))
        assert "get_weather" in page.read_text()
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE) == 0
    assert "turn 1 ends: stop, 49 tokens" in shown
    assert f"Serving tiny-gpt-oss at {url}/v1" in shown
    assert not page.parent.exists()


@pytest.mark.parametrize("name", FOLDERS)
def test_recording_of_the_demo_is_what_its_replay_gives(name: str, penstock: RunCommand) -> None:
    ended = penstock("diff", str(RECORDINGS / name))
    assert (ended.status, ended.err) == (0, "")
