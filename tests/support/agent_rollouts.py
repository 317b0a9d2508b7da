"""Rollouts of agents, and their proofs, as ``penstock rollouts`` makes them.

These tests run in an environment without penstock, so this module imports nothing of it.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.support.launched_agents import AgentServer
from tests.support.processes import PATIENCE

Json = dict[str, Any]

TOLERANCE = 1.0
"""Nats.  The model is made to write what it never would: the logits of such tokens lie between 64 and 128 below the
others, where the numbers of bfloat16 are 0.5 apart."""


def paths_of(penstock: str, server: AgentServer, session: str) -> list[Json]:
    """Return the paths of a session, which has all turns of a server; check that they have all that was written."""
    turns = [(prompt, answer) for prompt, answer in server.turns(1) if len(answer) > 1]  # others only warm a cache
    ended = _rollouts(penstock, server.recorded, "--session", session, "-o", "-")
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert sum(sum(path["mask"]) for path in found) == sum(len(answer) for _, answer in turns)
    whole = [[*prompt, *answer] for prompt, answer in turns]
    assert [path for path in found if path["token_ids"] not in whole] == []
    for path in found:
        assert [logprob is not None for logprob in path["logprobs"]] == [own == 1 for own in path["mask"]]
    return found


def check_proofs(penstock: str, server: AgentServer, session: str, exact: str, off: str) -> None:
    """Check that the engine at one URL finds a session ``exact``, and that at another finds it off, and where."""
    ended = _prove(penstock, server.recorded, exact)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^exact: \d+ tokens of \d+ paths within 1 nats$", ended.stdout, re.MULTILINE), ended.stdout
    ended = _prove(penstock, server.recorded, off)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    place = rf"^the first: session {session}, path 0, resp_\w+, turn 1, token \d+ \(index \d+\): '.* was -.*, and is -"
    assert re.search(place, ended.stdout, re.MULTILINE), ended.stdout


def _prove(penstock: str, recorded: Path, engine: str) -> subprocess.CompletedProcess[str]:
    return _rollouts(penstock, recorded, "--prove", "--engine", engine, "--tolerance", str(TOLERANCE))


def _rollouts(penstock: str, recorded: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [penstock, "rollouts", str(recorded), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
