"""What each client of the live tests does over each dialect, by the tests in ``tests/live/matrix.toml``.

    python -m tests.support.matrix JUNIT

reads the outcomes of a run of `make clients` from a file of pytest's ``--junitxml``, and writes them to
``tests/live/matrix.json``, of which the site has a page.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from tests.support.paths import ROOT

LIVE = ROOT / "tests" / "live"
KEPT = LIVE / "matrix.json"

SHOWN = ("chat", "stream", "tool", "structured", "error")
"""What a client may show: an answer, a stream, a call of a tool and its result, structured output, and an error."""

NODE_SUITE = re.compile(r"(\w+\.test\.mjs): (.+)")
NPM = "npm:"


@dataclass(frozen=True)
class Client:
    """A client over a dialect, with the test that shows each thing."""

    name: str
    package: str
    dialect: str
    tests: Mapping[str, str]

    @property
    def version(self) -> str:
        """The version that the tests install."""
        return versions()[self.package]


def clients() -> list[Client]:
    rows = tomllib.loads((LIVE / "matrix.toml").read_text())["client"]
    return [
        Client(row["name"], row["package"], row["dialect"], {shown: row[shown] for shown in SHOWN if shown in row})
        for row in rows
    ]


def versions() -> dict[str, str]:
    """Return the versions of the clients; the names of npm's packages begin with ``npm:``."""
    of_python = dict(line.split("==") for line in (ROOT / ".locks" / "clients.txt").read_text().split())
    folders = [path.parent for path in LIVE.glob("*/node/package.json")]
    of_npm = [json.loads((folder / "package.json").read_text())["dependencies"] for folder in folders]
    return of_python | {f"{NPM}{name}": version for each in of_npm for name, version in each.items()}


def outcomes(junit: Path) -> dict[str, bool]:
    """Return True for each test that passed, by file and name; skipped tests are left out.

    A test is there with its parameters, and without them if it passed with all.  The suites of JavaScript are tests,
    too, by the name of their file.
    """
    found: dict[str, list[bool]] = defaultdict(list)
    for case in ElementTree.parse(junit).iter("testcase"):
        if case.find("skipped") is None:
            whole = case.attrib["name"]
            name, _, parameters = whole.partition("[")
            file = case.attrib["classname"].rpartition(".")[2]
            passed = case.find("failure") is None and case.find("error") is None
            if name == "test_node_client_works":
                found[parameters.rstrip("]")].append(passed)
            else:
                for test in {name, whole}:
                    found[f"{file}.py::{test}"].append(passed)
    return {test: all(passed) for test, passed in found.items()}


@dataclass(frozen=True)
class Row:
    """A client over a dialect, and whether it does each thing; what is missing has no test."""

    name: str
    version: str
    dialect: str
    works: Mapping[str, bool]


def measured(junit: Path) -> list[Row]:
    """Return the rows of a run; raise `KeyError` for a test that did not run."""
    passed = outcomes(junit)
    return [
        Row(
            client.name, client.version, client.dialect, {key: passed[_ran(test)] for key, test in client.tests.items()}
        )
        for client in clients()
    ]


def _ran(test: str) -> str:
    of_node = NODE_SUITE.fullmatch(test)
    return of_node[1] if of_node else test


def kept() -> tuple[str, list[Row]]:
    """Return the date and the rows of the last run that was written."""
    found = json.loads(KEPT.read_text())
    return found["date"], [Row(**row) for row in found["rows"]]


def main(junit: Path) -> None:
    date = datetime.now(UTC).date().isoformat()
    KEPT.write_text(json.dumps({"date": date, "rows": [asdict(row) for row in measured(junit)]}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
