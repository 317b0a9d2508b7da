"""``penstock launch`` against a server with recordings, and agents that report how they were started."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from penstock.extensions.workbench.agents import ADVISED, AGENTS, Served
from tests.support.paths import HARMONY, ROOT
from tests.support.processes import PATIENCE, free_port, running_process
from tests.support.server_process import EndedCommand, run_penstock

PENSTOCK = Path(sys.executable).with_name("penstock")
KEY = "sk-alice-0123456789"
REPORT = f"""#!{sys.executable} -IS
import json, os, sys
print(json.dumps({{"arguments": sys.argv[1:], "environment": dict(os.environ), "process": os.getpid()}}))
"""
FOREIGN = {"ANTHROPIC_API_KEY": "sk-ant-of-the-user", "CLAUDE_CODE_USE_BEDROCK": "1"}
"""Variables that would lead Claude Code elsewhere."""


def report(ended: EndedCommand) -> dict[str, Any]:
    """What an agent says of its start."""
    assert ended.status == 0, ended.err
    return dict(json.loads(ended.out))


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """The URL of a server that needs a key, with two models and an alias."""
    folder = tmp_path_factory.mktemp("serve")
    url = f"http://127.0.0.1:{free_port()}"
    command: list[str | Path] = [PENSTOCK, "serve", "my/own", f"--engine=replay:{HARMONY / 'greeting'}", "--store=none"]
    options = [f"--port={url.rpartition(':')[2]}", "--model-alias=claude-*=my/own"]
    keys = {"PENSTOCK_API_KEYS": KEY, "PENSTOCK_KEY": "that of another server"}
    with running_process([*command, *options], f"{url}/health", folder / "log", keys):
        yield url


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name in ("claude", "codex", "opencode"):
        program = tmp_path / "bin" / name
        program.write_text(REPORT)
        program.chmod(0o755)
    return tmp_path


def variables(home: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "HOME": str(home), **more}


def run(command: Sequence[object], home: Path, **more: str) -> EndedCommand:
    with subprocess.Popen(
        [*map(str, command)], env=variables(home, **more), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        out, err = process.communicate(timeout=PATIENCE)
    return EndedCommand(process.returncode, out, err, process.pid)


def launch(home: Path, *arguments: str, **more: str) -> EndedCommand:
    return run_penstock(home, variables(home, **more), "launch", *arguments)


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_agent_takes_the_place_of_the_command(locked: str, home: Path, agent: str) -> None:
    """Its terminal and its signals are those of the command."""
    command = [PENSTOCK, "launch", agent, "--url", f"{locked}/v1", "--", "-p", "Say hello.", "--"]
    ended = run(command, home, PENSTOCK_KEY=KEY)
    found = report(ended)
    assert found["process"] == ended.process
    assert found["arguments"][-3:] == ["-p", "Say hello.", "--"]
    assert KEY in found["environment"].values()
    assert KEY not in "".join(found["arguments"])
    assert ended.err == "penstock: 'my/own' is used; --model takes another: 'tiny-gpt-oss', 'greeting'\n"


def test_agent_gets_the_model_and_its_context(locked: str, home: Path) -> None:
    ended = launch(home, "claude", "--url", locked, "--model", "claude-local", "--api-key", KEY, **FOREIGN)
    found = report(ended)
    environment = found["environment"]
    assert (environment["ANTHROPIC_MODEL"], environment["ANTHROPIC_BASE_URL"]) == ("claude-local", locked)
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in environment  # recordings have no context
    assert not FOREIGN.keys() & environment.keys()
    assert (found["arguments"], ended.err) == ([], "")


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_printed_start_is_that_of_the_agent(locked: str, home: Path, agent: str) -> None:
    arguments = (agent, "--url", locked, "--model", "my/own")
    words = ["--", "exec", 'it\'s "quoted" $HOME\n']
    started = report(launch(home, *arguments, *words, PENSTOCK_KEY=KEY, **FOREIGN))
    printed = launch(home, *arguments, "--print", *words, PENSTOCK_KEY=KEY)
    assert KEY not in printed.out
    pasted = report(run(["sh", "-c", printed.out], home, PENSTOCK_KEY=KEY, **FOREIGN))
    for start in (started, pasted):
        del start["process"]
        for name in ("PWD", "SHLVL", "_", "OLDPWD"):  # those of a shell
            start["environment"].pop(name, None)
    assert pasted == started


def test_codex_finds_the_catalog_in_the_users_cache(locked: str, home: Path) -> None:
    started = launch(home, "codex", "--url", locked, "--model", "my/own", "--api-key", KEY)
    catalog = home / ".cache" / "penstock" / "codex-my-own.json"
    assert f"model_catalog_json={json.dumps(str(catalog))}" in report(started)["arguments"]
    assert json.loads(catalog.read_text())["models"][0]["slug"] == "my/own"


LISTED = {
    "id": "tiny",
    "max_model_len": 131_072,
    "input_modalities": ["text", "image"],
    "tools": ["code_interpreter", "web_search"],
}


@pytest.fixture
def describing() -> Generator[Callable[..., str], None, None]:
    """Run a server that lists one model: ``describing(**fields)`` returns its URL."""
    with ExitStack() as closing:

        def listing(**fields: Any) -> str:
            body = json.dumps({"data": [LISTED | fields]}).encode()

            class Answering(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, format: str, *_: Any) -> None:  # noqa: A002
                    pass

            server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            closing.callback(server.server_close)
            closing.callback(thread.join)
            closing.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield listing


@pytest.mark.parametrize("tools", [[], ["web_search"]])
@pytest.mark.parametrize("modalities", [["text"], ["text", "image"]])
def test_agents_get_what_the_model_reads_and_the_server_runs(
    describing: Callable[..., str], home: Path, tools: list[str], modalities: list[str]
) -> None:
    url = describing(tools=tools, input_modalities=modalities)
    arguments = report(launch(home, "codex", "--url", url))["arguments"]
    assert f'web_search="{"live" if tools else "disabled"}"' in arguments
    of_claude = report(launch(home, "claude", "--url", url))["arguments"]
    assert of_claude == ([] if tools else ["--disallowedTools=WebSearch"])
    [model] = json.loads((home / ".cache/penstock/codex-tiny.json").read_text())["models"]
    assert model["input_modalities"] == modalities
    config = json.loads(report(launch(home, "opencode", "--url", url))["environment"]["OPENCODE_CONFIG_CONTENT"])
    shown = config["provider"]["penstock"]["models"]["tiny"]
    assert (shown["attachment"], shown["modalities"]["input"]) == ("image" in modalities, modalities)


def refusal(home: Path, *arguments: str, **more: str) -> str:
    ended = launch(home, *arguments, **more)
    assert (ended.status, ended.out) == (2, "")
    return ended.err


def test_each_mistake_is_one_sentence(locked: str, home: Path) -> None:
    at = f"penstock: the server at {locked}"
    with_url = ("claude", "--url", locked)
    assert refusal(home, *with_url) == f"{at} needs a key: set the variable PENSTOCK_KEY\n"
    assert refusal(home, *with_url, "--api-key", "wrong") == f"{at} does not know this key\n"
    unknown = refusal(home, *with_url, "--api-key", KEY, "--model", "gpt-9")
    assert unknown == f"{at} serves 'my/own', 'tiny-gpt-oss', 'greeting', not 'gpt-9'\n"
    (home / "bin" / "codex").unlink()
    missing = refusal(home, "codex", "--url", locked, "--api-key", KEY, "--model", "my/own")
    assert missing == "penstock: codex is not installed: npm install -g @openai/codex\n"
    assert not (home / ".cache").exists()
    nowhere = f"http://127.0.0.1:{free_port()}"
    silent = refusal(home, "claude", "--url", nowhere)
    assert silent.startswith(f"penstock: no server answers at {nowhere} (")
    assert silent.endswith("): start one with penstock serve, or name another with --url\n")
    assert refusal(home, "claude", "--url", "gpubox").startswith("penstock: --url gpubox must begin with http")


def held(agent: str) -> int:
    """Return the tokens of the smallest context that holds an agent's prompt and an answer."""
    prompt = AGENTS[agent].prompt
    return next(window for window in count(prompt) if Served("", "tiny", window).holds(prompt))


@pytest.mark.parametrize("agent", AGENTS)
def test_agent_that_cannot_answer_is_not_started(describing: Callable[..., str], home: Path, agent: str) -> None:
    """The message says what it takes, what there is, and what to set."""
    window = held(agent) - 1
    url = describing(max_model_len=window)
    refused = refusal(home, agent, "--url", url)
    assert re.fullmatch(
        rf"penstock: {agent} [\d.]+ takes {AGENTS[agent].prompt:,} tokens .* has {window:,}: no answer fits .*"
        rf"--max-model-len {ADVISED} .*; --anyway starts {agent} all the same\n",
        refused,
    )
    assert not (home / ".cache").exists()
    started = launch(home, agent, "--url", url, "--anyway")
    assert report(started)["environment"]
    assert refused.startswith(started.err.rstrip())


@pytest.mark.parametrize("agent", AGENTS)
def test_context_that_is_soon_full_is_named(describing: Callable[..., str], home: Path, agent: str) -> None:
    for window in (held(agent), ADVISED - 1):
        started = launch(home, agent, "--url", describing(max_model_len=window))
        assert report(started)["environment"]
        assert re.fullmatch(rf".* has {window:,}: it compacts .*--max-model-len {ADVISED} .*\n", started.err)
    assert launch(home, agent, "--url", describing(max_model_len=ADVISED)).err == ""


def test_start_is_printed_for_any_context(describing: Callable[..., str], home: Path) -> None:
    printed = launch(home, "claude", "--url", describing(max_model_len=1024), "--print")
    assert (printed.status, "ANTHROPIC_BASE_URL" in printed.out, "no answer fits" in printed.err) == (0, True, True)


@pytest.fixture
def several(tmp_path: Path) -> Generator[str, None, None]:
    """The URL of a server of a large model and a small one, neither of which is loaded."""
    folder = tmp_path / "several"
    folder.mkdir()
    url = f"http://127.0.0.1:{free_port()}"
    echo = ROOT / "tests" / "examples" / "echo_engine.py"
    tables = "\n".join(f'[models.{name}]\nengine = "{echo}:engine"' for name in ("large", "small"))
    (folder / "penstock.toml").write_text(f'store = "none"\nsandbox = false\n{tables}\n')
    command: list[str | Path] = [PENSTOCK, "serve", f"--port={url.rpartition(':')[2]}"]
    with running_process(command, f"{url}/health", folder / "log", folder=folder):
        yield url


def test_small_tasks_get_a_model_of_their_own(several: str, home: Path) -> None:
    arguments = ("--url", several, "--model", "large", "--small-model", "small")
    ended = launch(home, "claude", *arguments)
    environment = report(ended)["environment"]
    assert (environment["ANTHROPIC_MODEL"], environment["ANTHROPIC_DEFAULT_OPUS_MODEL"]) == ("large", "large")
    assert (environment["ANTHROPIC_SMALL_FAST_MODEL"], environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"]) == (
        "small",
        "small",
    )
    assert "the server loads 'large'" in ended.err
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    config = json.loads(report(launch(home, "opencode", *arguments))["environment"]["OPENCODE_CONFIG_CONTENT"])
    assert (config["model"], config["small_model"]) == ("penstock/large", "penstock/small")
    assert {*config["provider"]["penstock"]["models"]} == {"large", "small"}
    refused = launch(home, "codex", *arguments)
    assert (refused.status, refused.err) == (2, "penstock: --small-model: Codex uses one model for all of its tasks\n")


def test_codex_knows_all_models(several: str, home: Path) -> None:
    report(launch(home, "codex", "--url", several, "--model", "small"))
    [catalog] = (home / ".cache" / "penstock").iterdir()
    assert [model["slug"] for model in json.loads(catalog.read_text())["models"]] == ["small", "large"]
