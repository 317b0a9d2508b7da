"""Claude Code as its users run it: one request, any number of turns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from tests.support.claude_session import captured, capturing, keep, next_body
from tests.support.client_server import Server
from tests.support.launched_agents import DONE, KEY, AgentServer, Launched, agent_server, call, common, is_need
from tests.support.processes import PATIENCE

Json = dict[str, Any]

TOOLS = ("--allowedTools", "Bash,Read,Write,Edit,WebSearch")
AS_JSON = ("-p", "--output-format", "json", *TOOLS)
SHORT = 32_768
"""A context in which Claude Code compacts once a command has written much."""


def asked(claude: Launched, prompt: str, *arguments: str, model: str = "") -> Json:
    """Return the result of one request of a user."""
    [result] = claude.run(*AS_JSON, *arguments, prompt=prompt, model=model).lines
    assert not result["is_error"], result
    return result


def prompt_tokens(result: Json) -> int:
    usage = result["usage"]
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


def test_claude_code_gets_a_text(claude: Launched) -> None:
    result = asked(claude, "say Hello from the model.")
    assert (result["result"], result["num_turns"]) == ("Hello from the model.", 1)
    [usage] = result["modelUsage"].values()
    assert (usage["contextWindow"], usage["thinkingTokens"] > 0) == (131_072, True)
    assert is_need("Claude Code", "claude", prompt_tokens(result)), prompt_tokens(result)


def test_claude_code_streams_thoughts_and_texts(claude: Launched) -> None:
    streaming = ("--output-format", "stream-json", "--verbose", "--include-partial-messages")
    lines = claude.run("-p", *streaming, prompt="say One two three.").lines
    deltas = [line["event"]["delta"] for line in lines if line.get("event", {}).get("type") == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"thinking_delta", "signature_delta", "text_delta"}
    assert "".join(delta.get("text", "") for delta in deltas) == "One two three."


def test_claude_code_runs_a_command(claude: Launched) -> None:
    order = call("Bash", command="printf hello > hello.txt", description="Write")
    result = asked(claude, f"{order}\nsay It is written.")
    assert (claude.project / "hello.txt").read_text() == "hello"
    assert (result["result"], result["num_turns"], result["permission_denials"]) == ("It is written.", 2, [])


def test_claude_code_gets_structured_output(claude: Launched) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    result = asked(claude, call("StructuredOutput", age=36), "--json-schema", json.dumps(schema))
    assert result["structured_output"] == {"age": 36}


def test_deferred_tool_is_found_and_called(claude: Launched) -> None:
    """Claude Code declares the tool only once the model has asked for it."""
    lines = (call("ToolSearch", query="select:CronList"), call("CronList"), "say No jobs.")
    assert asked(claude, "\n".join(lines))["num_turns"] == 3


def test_search_of_claude_code_is_that_of_the_server(claude: Launched, neighbours: str) -> None:
    """Claude Code has a request of its own for it, whose message has the query."""
    query = "penstock\n" + call("browser.search", query="penstock")
    orders = (call("ToolSearch", query="select:WebSearch"), call("WebSearch", query=query), "say Found.")
    lines = claude.run("-p", "--output-format", "stream-json", "--verbose", *TOOLS, prompt="\n".join(orders)).lines
    results = [line["tool_use_result"] for line in lines if "tool_use_result" in line]
    assert results[-1]["searchCount"] == 1
    [found, text] = results[-1]["results"]
    assert ([page["url"] for page in found["content"]], text) == ([f"{neighbours}/vllm"], DONE)
    assert lines[-1]["result"] == "Found."


def test_claude_code_has_no_search_without_one_of_the_server(penstock: str, claude: Launched, tmp_path: Path) -> None:
    orders = (call("ToolSearch", query="select:WebSearch,CronList"), "say {result}")
    with agent_server(penstock, tmp_path) as server:
        result = asked(replace(claude, url=server.url), "\n".join(orders))
    assert result["result"] == "The tool CronList is available from now on."


def test_alias_answers_as_the_model_of_its_name(claude: Launched) -> None:
    result = asked(claude, "say Hello.", model="claude-sonnet-4-5")
    assert (result["result"], [*result["modelUsage"]]) == ("Hello.", ["claude-sonnet-4-5"])


def test_context_is_counted_by_the_server(claude: Launched, agents: AgentServer) -> None:
    before = agents.log.read_text().count("/count_tokens: 200")
    result = asked(claude, "/context")
    assert "/ 131.1k" in result["result"]
    assert agents.log.read_text().count("/count_tokens: 200") > before + 10


def test_full_server_is_asked_again(claude: Launched, agents: AgentServer) -> None:
    assert asked(claude, f"refuse Too busy for {claude.folder.name}.")["result"] == DONE
    assert "POST /v1/messages: 503" in agents.log.read_text()


def test_wrong_key_is_reported_at_once(claude: Launched, agents: AgentServer) -> None:
    before = agents.log.read_text().count("POST /v1/messages: 401")
    ended = claude.execute(["sh", "-c", claude.printed("-p")], "say Hello.", key=KEY + "x")
    assert ended.status == 1
    assert "401 Give an API key of this server" in ended.out
    assert agents.log.read_text().count("POST /v1/messages: 401") == before + 1


def test_session_is_compacted_and_goes_on(penstock: str, claude: Launched, tmp_path: Path) -> None:
    """The summary has what is left to do."""
    orders = [call("Bash", command=f"seq {start} {start + 3000}", description="Count") for start in (1, 3001)]
    orders.append(call("Bash", command="printf done > done.txt", description="Write"))
    with agent_server(penstock, tmp_path, window=SHORT) as server:
        result = asked(replace(claude, url=server.url), "\n".join((*orders, "say Ready.")))
        assert max(len(prompt) for prompt, _ in server.turns(result["num_turns"])) < SHORT
    assert (result["result"], (claude.project / "done.txt").read_text()) == ("Ready.", "done")


def test_agents_of_the_small_tier_ask_the_small_model(penstock: str, claude: Launched, tmp_path: Path) -> None:
    """Each model reads its own turns token by token, with its thoughts."""
    write = call("Bash", command="printf small > small.txt", description="Write")
    task = call(
        "Agent",
        description="Write",
        prompt=f"{write}\nsay I am {{model}}.",
        subagent_type="general-purpose",
        model="haiku",
        run_in_background=False,
    )
    orders = (
        call("Bash", command="printf large > large.txt", description="Write"),
        task,
        "say {model} heard: {result}",
    )
    with agent_server(penstock, tmp_path, models=("large", "small")) as server:
        result = asked(replace(claude, url=server.url, model="large", small="small"), "\n".join(orders))
        turns = {name: server.turns(steps, name) for name, steps in (("large", 3), ("small", 2))}
    assert result["result"].startswith("large heard: ")
    assert "I am small." in result["result"]
    assert {*result["modelUsage"]} == {*turns}
    assert [(claude.project / f"{name}.txt").read_text() for name in turns] == [*turns]
    for each in turns.values():
        check_extensions(each)


def test_prompt_that_fits_no_context_ends_the_request(claude: Launched, server: Server) -> None:
    """Claude Code counts by characters, and the server by tokens: each may be the one that refuses."""
    tiny = replace(claude, url=server.url, model="tiny-gpt-oss")
    for text in ("word " * 9000, "αβγδ " * 3500):
        ended = tiny.run(*AS_JSON, prompt=text)
        assert json.loads(ended.out)["result"].startswith("Prompt is too long")


def test_claude_code_works_with_a_real_engine(claude: Launched, server: Server) -> None:
    """The tiny model does not know what is asked in so long a prompt, and says something."""
    result = asked(replace(claude, url=server.url, model="tiny-gpt-oss"), "Say hello.")
    assert result["result"]
    assert result["usage"]["output_tokens"] > 5
    assert prompt_tokens(result) > 8000


FILE = "part.txt"


def part(number: int, project: Path) -> str:
    """Return the orders of one part of the session: four calls of four tools, and an answer."""
    path = str(project / FILE)
    return "\n".join(
        (
            call("Write", file_path=path, content=f"{number}\n"),
            call("Bash", command=f"cat {FILE}", description="Show"),
            call("Read", file_path=path),
            call("Edit", file_path=path, old_string=str(number), new_string=f"part {number}"),
            f"say Part {number} is done.",
        )
    )


PARTS, STEPS = 4, 5


def test_each_prompt_of_a_session_begins_with_the_one_before(penstock: str, claude: Launched, tmp_path: Path) -> None:
    """Token by token, with the thoughts of the model, over restarts of Claude Code.

    Two places differ: Claude Code adds a default to the arguments of ``Edit``, and gpt-oss does not read the thoughts
    of the user's earlier requests.
    """
    with agent_server(penstock, tmp_path) as server:
        with capturing(server.url) as (url, bodies):
            session = replace(claude, url=url)
            for number in range(1, PARTS + 1):
                result = asked(session, part(number, claude.project), *(["--continue"] if number > 1 else []))
                assert (result["result"], result["num_turns"]) == (f"Part {number} is done.", STEPS)
            assert (claude.project / FILE).read_text() == f"part {PARTS}\n"
            keep(bodies)
        assert len(bodies) == PARTS * STEPS
        turns = server.turns(len(bodies))
        check_extensions(turns, STEPS - 1)
        answers: list[list[Json]] = []
        for _ in bodies:
            answers.append(answered(server, next_body(captured(), answers)))
        again = server.turns(2 * len(bodies))[len(turns) :]
    assert [answer for _, answer in again] == [answer for _, answer in turns]
    check_extensions(again)


def check_extensions(turns: list[tuple[list[int], list[int]]], edited: int | None = None) -> None:
    """Check the prompts of a session, in which the client has edited the last call before the step ``edited``."""
    for at in range(1, len(turns)):
        (before, answer), (prompt, _) = turns[at - 1], turns[at]
        alike = common([*before, *answer], prompt)
        if at % STEPS == 0:  # a new request of the user
            assert alike >= len(turns[at - STEPS][0])
        elif at % STEPS == edited:
            assert alike > len(before)
        else:
            assert alike == len(before) + len(answer)


def answered(server: AgentServer, body: Json) -> list[Json]:
    """Return the content of the answer to one body, which is not streamed."""
    headers = {"x-api-key": KEY}
    answer = httpx.post(f"{server.url}/v1/messages", json=body | {"stream": False}, headers=headers, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["content"])
