"""Command-line agents of npm, each over each dialect that it speaks, with the settings of ``docs/CLIENTS.md``.

In settings and arguments, ``$BASE`` is the URL of the server, ``$KEY`` its key, ``$MODEL`` the model, and in orders
``$COMMAND`` a command.  The folder of these agents is ``tests/live/agents``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from tests.support.launched_agents import KEY, MODEL, Ended, run
from tests.support.paths import ROOT

Json = dict[str, Any]

PROGRAMS = ROOT / "tests/live/agents/node/node_modules/.bin"

REFUSED = "This server serves 'agent', not 'nope'"

CHAT, RESPONSES, MESSAGES = (
    f"POST /v1/{path}: 200, completed" for path in ("chat/completions", "responses", "messages")
)
SOCKET = "WebSocket /v1/responses: completed"
"""The names of an answer over each dialect in the log of the server."""


@dataclass(frozen=True, eq=False)
class Agent:
    """An agent over a dialect.

    ``shown`` finds the answer in the output of a run, and ``pieces`` the parts in which it came.  ``order`` has the
    model run a command.  ``refused`` is what a user reads if there is no such model.
    """

    name: str
    program: str
    door: str
    arguments: Sequence[str]
    order: str
    shown: Callable[[str], str]
    pieces: Callable[[list[Json]], list[str]] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    first: Sequence[str] = ()
    refused: str = REFUSED


def lines(out: str) -> list[Json]:
    return [json.loads(line) for line in out.splitlines()]


BASH = 'call bash {"command": "$COMMAND", "description": "Multiply"}'


def copilot(
    name: str, door: str, path: str = "/v1", refused: str = "Model 'nope' not found", **variables: str
) -> Agent:
    """Return GitHub's Copilot CLI; the names of the variables begin with ``COPILOT_PROVIDER_``."""
    settings = {"base_url": f"$BASE{path}", "api_key": "$KEY", **variables}
    return Agent(
        f"copilot-{name}",
        "copilot-linux-x64",
        door,
        ("--allow-all-tools", "--output-format", "json", "-p"),
        BASH,
        lambda out: str([line for line in lines(out) if line["type"] == "assistant.message"][-1]["data"]["content"]),
        lambda found: [line["data"]["deltaContent"] for line in found if line["type"] == "assistant.message_delta"],
        {"COPILOT_OFFLINE": "true", "COPILOT_MODEL": "$MODEL"}
        | {f"COPILOT_PROVIDER_{key.upper()}": value for key, value in settings.items()},
        refused=refused,
    )


def qwen(name: str, door: str, kind: str, prefix: str = "OPENAI", path: str = "/v1") -> Agent:
    return Agent(
        f"qwen-{name}",
        "qwen",
        door,
        ("--auth-type", kind, "-m", "$MODEL", "--yolo", "-o", "stream-json", "--include-partial-messages"),
        BASH.replace("bash", "run_shell_command"),
        lambda out: str(lines(out)[-1]["result"]),
        lambda found: [
            line["event"]["delta"]["text"]
            for line in found
            if line["type"] == "stream_event" and line["event"].get("delta", {}).get("type") == "text_delta"
        ],
        {f"{prefix}_BASE_URL": f"$BASE{path}", f"{prefix}_API_KEY": "$KEY", "QWEN_USAGE_STATISTICS_ENABLED": "false"},
        # Without a terminal, it loses what a command prints at its end.
        {
            ".qwen/settings.json": '{"general": {"enableAutoUpdate": false}, '
            '"tools": {"shell": {"enableInteractiveShell": true}}}'
        },
    )


def pi(name: str, door: str, kind: str, path: str = "/v1") -> Agent:
    provider = {"baseUrl": f"$BASE{path}", "apiKey": "$KEY", "api": kind, "models": [{"id": "$MODEL"}]}
    return Agent(
        f"pi-{name}",
        "pi",
        door,
        ("--provider", "penstock", "--model", "$MODEL", "--mode", "json", "-p"),
        BASH,
        lambda out: str(
            next(line for line in lines(out) if line["type"] == "agent_end")["messages"][-1]["content"][-1]["text"]
        ),
        lambda found: [
            event["delta"]
            for line in found
            if (event := line.get("assistantMessageEvent")) and event["type"] == "text_delta"
        ],
        {"PI_OFFLINE": "1"},
        {".pi/agent/models.json": json.dumps({"providers": {"penstock": provider}})},
    )


CONTINUE = """name: penstock
version: 1.0.0
schema: v1
models:
  - {name: penstock, provider: openai, model: $MODEL, apiBase: $BASE/v1, apiKey: $KEY, capabilities: [tool_use]}
"""


def cline(name: str, door: str, provider: str) -> Agent:
    return Agent(
        f"cline-{name}",
        "cline",
        door,
        ("-P", provider, "-m", "$MODEL", "--json"),
        'call run_commands {"commands": ["$COMMAND"]}',
        lambda out: str(lines(out)[-1]["text"]),
        lambda found: [
            event["text"]
            for line in found
            if (event := line.get("event", {})).get("type") == "content_start" and event["contentType"] == "text"
        ],
        # Cline else starts a process that outlives it.
        {"CLINE_SESSION_BACKEND_MODE": "local", "CLINE_NO_AUTO_UPDATE": "1"},
        {".cline/data/settings/global-settings.json": '{"telemetryOptOut": true, "autoUpdateEnabled": false}'},
        ("auth", "-p", provider, "-k", "$KEY", "-b", "$BASE/v1", "-m", "$MODEL"),
    )


AGENTS = (
    copilot("chat", CHAT),
    copilot("responses", RESPONSES, wire_api="responses"),
    # Copilot asks six times with growing pauses after an error of a WebSocket.
    copilot("socket", SOCKET, refused="", wire_api="responses", transport="websockets"),
    copilot("messages", MESSAGES, path="", type="anthropic"),
    qwen("chat", CHAT, "openai"),
    qwen("responses", RESPONSES, "openai-responses"),
    qwen("messages", MESSAGES, "anthropic", "ANTHROPIC", path=""),
    pi("chat", CHAT, "openai-completions"),
    pi("responses", RESPONSES, "openai-responses"),
    pi("messages", MESSAGES, "anthropic-messages", path=""),
    Agent(
        "continue-chat",
        "cn",
        CHAT,
        ("--config", ".continue/penstock.yaml", "--auto", "-p"),
        BASH.replace("bash", "Bash"),
        str.strip,
        variables={"CONTINUE_METRICS_ENABLED": "0", "CONTINUE_CLI_AUTO_UPDATED": "1"},
        files={".continue/penstock.yaml": CONTINUE},
    ),
    cline("chat", CHAT, "openai-compatible"),
    cline("responses", RESPONSES, "openai-native"),
)


@dataclass(frozen=True)
class Home:
    """A folder that is home and project of agents, their server, and Node."""

    folder: Path
    url: str
    node: str
    settled: set[Agent] = field(default_factory=set)

    def run(self, agent: Agent, prompt: str, *options: str, model: str = MODEL) -> Ended:
        """Have an agent do what a prompt says."""
        values = {"BASE": self.url, "KEY": KEY, "MODEL": model}

        def fill(text: str) -> str:
            return Template(text).substitute(values)

        for path, text in agent.files.items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(fill(text))
        path = f"{Path(self.node).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(self.folder)}
        environment |= {name: fill(value) for name, value in agent.variables.items()}
        program = str(PROGRAMS / agent.program)
        if agent.first and agent not in self.settled:
            self.settled.add(agent)
            settled = run([program, *map(fill, agent.first)], self.folder, environment)
            assert settled.status == 0, settled
        # Some agents put marks around the prompt, on the same lines.
        return run([program, *options, *map(fill, agent.arguments), f"\n{prompt}\n"], self.folder, environment)
