"""Command-line agents of npm as their users run them: one request, in which the model runs a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from string import Template

import pytest

from tests.support.command_line_agents import AGENTS, Agent, Home, lines
from tests.support.launched_agents import AgentServer, call

COMMAND, PRINTED = "expr 1234 '*' 5678 | tee product.txt", "7006652"

Session = Callable[[Agent], tuple[str, str]]


@pytest.fixture(scope="module")
def home(request: pytest.FixtureRequest, agents: AgentServer, tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("home"), agents.url, str(request.config.getoption("--node")))


@pytest.fixture(scope="module")
def session(home: Home, agents: AgentServer) -> Session:
    """The output of an agent whose model runs a command and says what it printed, and the server's log."""

    @cache
    def ran(agent: Agent) -> tuple[str, str]:
        before = len(agents.log.read_text())
        (home.folder / "product.txt").unlink(missing_ok=True)
        order = Template(agent.order).substitute(COMMAND=COMMAND)
        ended = home.run(agent, f"{order}\nsay It printed {{result}}")
        assert ended.status == 0, ended
        assert (home.folder / "product.txt").read_text() == f"{PRINTED}\n"
        return ended.out, agents.log.read_text()[before:]

    return ran


def name(agent: Agent) -> str:
    return agent.name


@pytest.mark.parametrize("agent", AGENTS, ids=name)
def test_agent_shows_the_answer(agent: Agent, session: Session) -> None:
    out, log = session(agent)
    assert agent.shown(out).startswith("It printed ")
    assert log.count(agent.door) == 2


@pytest.mark.parametrize("agent", [agent for agent in AGENTS if agent.pieces], ids=name)
def test_answer_comes_in_pieces(agent: Agent, session: Session) -> None:
    out, _ = session(agent)
    assert agent.pieces
    pieces = agent.pieces(lines(out))
    assert len(pieces) > 2
    assert "".join(pieces).strip() == agent.shown(out).strip()


@pytest.mark.parametrize("agent", AGENTS, ids=name)
def test_model_reads_what_its_command_printed(agent: Agent, session: Session) -> None:
    out, _ = session(agent)
    assert PRINTED in agent.shown(out)


@pytest.mark.parametrize("agent", [agent for agent in AGENTS if agent.refused], ids=name)
def test_agent_says_that_there_is_no_such_model(agent: Agent, home: Home, agents: AgentServer) -> None:
    before = len(agents.log.read_text())
    ended = home.run(agent, "say Hello.", model="nope")
    assert agent.refused in ended.out + ended.err
    assert agents.log.read_text()[before:].count(agent.door.partition(" 200")[0] + " 404") == 1


@pytest.mark.parametrize("agent", [agent for agent in AGENTS if agent.name == "qwen-chat"], ids=name)
def test_answer_is_held_to_a_schema(agent: Agent, home: Home) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    ended = home.run(agent, call("structured_output", age=36), "--json-schema", json.dumps(schema))
    assert lines(ended.out)[-1]["structured_result"] == {"age": 36}
