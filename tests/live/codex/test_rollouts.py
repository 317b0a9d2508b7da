"""The work of Codex as rollouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.agent_rollouts import check_proofs, paths_of
from tests.support.client_server import CODEX_EXEC
from tests.support.launched_agents import Launched, agent_server, call


def test_session_is_proved_by_the_engine_that_wrote_it(
    penstock: str, agent: Launched, obeying: str, noisy: str, tmp_path: Path
) -> None:
    """A resumed session begins with other tokens, as gpt-oss reads no thoughts of earlier requests."""
    with agent_server(penstock, tmp_path, "--record-logprobs", engine=obeying) as server:
        codex = replace(agent, url=server.url)
        write = (call("exec_command", cmd="printf hello > hello.txt"), call("exec_command", cmd="cat hello.txt"))
        for more, orders in (((), (*write, "say It is written.")), (("resume", "--last"), (write[1], "say Hello."))):
            events = codex.run(*CODEX_EXEC, *more, "\n".join(orders)).lines
            assert events[-1]["type"] == "turn.completed"
        server.turns(7)  # with the two that only warm a cache
        session = events[0]["thread_id"]
        found = paths_of(penstock, server, session)
        check_proofs(penstock, server, session, exact=obeying, off=noisy)
    assert [len(each["turns"]) for each in found] == [3, 2]
    assert [each["cut"] and each["cut"]["reason"] for each in found] == [None, "thoughts"]
