"""`docs/CLIENTS.md`, which names the versions of the clients that `make clients` runs, and what each of them does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.site.clients import clients_page
from tests.support.command_line_agents import AGENTS
from tests.support.matrix import LIVE, NODE_SUITE, NPM, SHOWN, Client, clients, kept, outcomes, versions
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "CLIENTS.md").read_text()
_, SECTION = PAGE.partition("\n## Tried\n")[0].split("\n## Tested with each change\n")
ROWS = re.findall(r"^\| ([^|(]+?)(?: \((\w+)\))? \| ([0-9.]+) \|", SECTION, re.MULTILINE)

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.live.clients.test_openai" name="test_text[a]"/>
<testcase classname="tests.live.clients.test_openai" name="test_text[b]"><failure/></testcase>
<testcase classname="tests.live.clients.test_openai" name="test_stream"/>
<testcase classname="tests.live.clients.test_openai" name="test_other"><skipped/></testcase>
<testcase classname="tests.live.agents.test_command_line_agents" name="test_answer[pi-chat]"/>
<testcase classname="tests.live.agents.test_command_line_agents" name="test_answer[pi-messages]"><error/></testcase>
<testcase classname="tests.live.clients.test_node" name="test_node_client_works[openai.test.mjs]"/>
</testsuite></testsuites>"""

VERSIONS = versions()
NODE = json.loads((LIVE / "clients" / "node" / "package.json").read_text())["dependencies"]
OF_MATRIX = {client.name: client.version for client in clients()}


@pytest.mark.parametrize(("name", "language", "version"), ROWS)
def test_page_names_the_version_that_is_tested(name: str, language: str, version: str) -> None:
    of_npm = VERSIONS.get(f"{NPM}{name}")
    assert version == (of_npm if language == "JavaScript" else OF_MATRIX.get(name) or VERSIONS.get(name) or of_npm)


def test_page_names_each_client_of_npm() -> None:
    assert NODE.keys() - {"ai", "zod"} <= {name for name, *_ in ROWS}


def test_each_row_names_a_version() -> None:
    assert len(ROWS) == len(re.findall(r"^\| [^|]+ \| \d", SECTION, re.MULTILINE)) > 10


# What each client does


@pytest.mark.parametrize("client", clients(), ids=lambda client: f"{client.name}-{client.dialect}")
def test_each_cell_names_a_test(client: Client) -> None:
    for test in client.tests.values():
        if of_node := NODE_SUITE.fullmatch(test):
            source = (LIVE / "clients" / "node" / of_node[1]).read_text()
            assert re.search(rf"""test\(["`]{re.escape(of_node[2])}""", source), test
        else:
            file, _, whole = test.partition("::")
            name, _, agent = whole.partition("[")
            (path,) = LIVE.glob(f"*/{file}")
            assert f"def {name}(" in path.read_text(), test
            assert not agent or agent.rstrip("]") in {agent.name for agent in AGENTS}, test


def test_each_agent_of_npm_has_a_row() -> None:
    assert {agent.name for agent in AGENTS} == {
        client.tests["tool"].rpartition("[")[2].rstrip("]")
        for client in clients()
        if "[" in client.tests.get("tool", "")
    }


def test_each_client_of_the_page_has_a_row() -> None:
    named = {client.name.partition(" ")[0] for client in clients()}
    assert {name.partition(" ")[0] for name, *_ in ROWS} <= named


def test_kept_rows_are_those_of_the_clients_that_are_installed() -> None:
    _, rows = kept()
    assert [(row.name, row.version, row.dialect) for row in rows] == [
        (client.name, client.version, client.dialect) for client in clients()
    ]
    assert all(row.works.keys() == client.tests.keys() for row, client in zip(rows, clients(), strict=True))


def test_page_has_each_row() -> None:
    _, rows = kept()
    lines = [line for line in clients_page().splitlines() if line.startswith("| ")]
    assert len(lines) == len(rows) + 1
    assert all(line.count(" | ") == 2 + len(SHOWN) for line in lines)


def test_outcome_of_a_test_is_that_of_all_its_cases(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    assert outcomes(tmp_path / "junit.xml") == {
        "test_openai.py::test_text": False,
        "test_openai.py::test_text[a]": True,
        "test_openai.py::test_text[b]": False,
        "test_openai.py::test_stream": True,
        "test_command_line_agents.py::test_answer": False,
        "test_command_line_agents.py::test_answer[pi-chat]": True,
        "test_command_line_agents.py::test_answer[pi-messages]": False,
        "openai.test.mjs": True,
    }
