"""opencode as its users run it, over Chat Completions."""

from __future__ import annotations

from typing import Any

from tests.support.launched_agents import DONE, AgentServer, Launched, call, is_need

Json = dict[str, Any]


def asked(opencode: Launched, prompt: str, *arguments: str) -> list[Json]:
    """Return the parts of the answer to one request of a user."""
    return [line["part"] for line in opencode.run("run", "--format", "json", *arguments, prompt=prompt).lines]


def texts(parts: list[Json]) -> list[str]:
    return [part["text"] for part in parts if part["type"] == "text"]


def test_opencode_gets_a_text_and_thoughts(opencode: Launched, agents: AgentServer) -> None:
    before = agents.log.read_text().count("POST /v1/chat/completions: 200")
    parts = asked(opencode, "say Hello from the model.")
    assert texts(parts) == ["Hello from the model."]
    counted = parts[-1]["tokens"]
    assert counted["reasoning"] > 0
    prompt = counted["input"] + counted["cache"]["read"]
    assert is_need("opencode", "opencode", prompt), prompt
    assert agents.log.read_text().count("POST /v1/chat/completions: 200") > before


def test_opencode_runs_a_command_and_goes_on(opencode: Launched) -> None:
    order = call("bash", command="printf hello > hello.txt", description="Write")
    parts = asked(opencode, f"{order}\nsay It is written.")
    assert (opencode.project / "hello.txt").read_text() == "hello"
    assert [part["state"]["status"] for part in parts if part["type"] == "tool"] == ["completed"]
    assert texts(parts) == ["It is written."]
    parts = asked(opencode, "say Anything else?", "--continue")
    assert texts(parts) == ["Anything else?"]
    assert parts[-1]["tokens"]["cache"]["read"] > 5000


def test_full_server_is_asked_again(opencode: Launched, agents: AgentServer) -> None:
    assert texts(asked(opencode, f"refuse Too busy for {opencode.folder.name}.")) == [DONE]
    assert "POST /v1/chat/completions: 503" in agents.log.read_text()
