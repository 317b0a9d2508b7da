"""The work of Claude Code as rollouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.agent_rollouts import check_proofs, paths_of
from tests.support.launched_agents import Launched, agent_server, call

TOOLS = "Bash,Edit,Write"
AS_JSON = ("-p", "--output-format", "json", "--tools", TOOLS, "--allowedTools", TOOLS)
"""Few tools make a short prompt."""


def test_session_is_proved_by_the_engine_that_wrote_it(
    penstock: str, claude: Launched, obeying: str, noisy: str, tmp_path: Path
) -> None:
    """Claude Code adds a default to the arguments of ``Edit``, and gpt-oss reads no thoughts of earlier requests."""
    with agent_server(penstock, tmp_path, "--record-logprobs", engine=obeying) as server:
        session, path = replace(claude, url=server.url), str(claude.project / "part.txt")
        edit = (
            call("Write", file_path=path, content="1"),
            call("Edit", file_path=path, old_string="1", new_string="part 1"),
            "say Part 1 is done.",
        )
        show = (call("Bash", command="cat part.txt", description="Show"), "say Part 2 is done.")
        for more, orders in (((), edit), (("--continue",), show)):
            [result] = session.run(*AS_JSON, *more, prompt="\n".join(orders)).lines
            assert (result["result"], result["num_turns"]) == (orders[-1].removeprefix("say "), len(orders))
        server.turns(5)
        found = paths_of(penstock, server, result["session_id"])
        check_proofs(penstock, server, result["session_id"], exact=obeying, off=noisy)
    assert [len(each["turns"]) for each in found] == [2, 2, 2]
    assert [each["cut"] and each["cut"]["reason"] for each in found] == [None, "edit", "thoughts"]
