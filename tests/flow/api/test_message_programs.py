"""Programs that call tools, over the Messages API: the client has the conversation, and the server no store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Literal

import anthropic
import pytest

from penstock.extensions.programs.host import ProgramHost
from penstock.extensions.tools.browser.search_engines import search_backend
from penstock.extensions.tools.browser.session import BrowserHost
from penstock.extensions.tools.mcp.mcp_servers import McpServers
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.services.slots import Slots
from penstock.services.tools import Toolbox
from tests.support.agent_engine import AgentEngine
from tests.support.api_clients import PATIENCE
from tests.support.messages import PATH
from tests.support.server import ScriptedServer, running_server
from tests.support.tool_servers import LOOPBACK, Site, running_site

Json = dict[str, Any]

CODE: Json = {"type": "code_execution_20260120", "name": "code_execution"}
LOOK: Json = {
    "name": "look",
    "description": "Look a number up.",
    "input_schema": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    "allowed_callers": ["code_execution_20260120"],
}
FOUR = """\
import asyncio
found = await asyncio.gather(*(look(number=number) for number in range(3)))
found.append(await look(number=sum(found)))
print(found)
"""
"""A program of two rounds: three calls, and then one."""
FOUND = "[0, 7, 14, 147]"

Way = Literal["whole", "stream"]


@pytest.fixture
async def host(program_sandbox: Sandbox) -> AsyncGenerator[ProgramHost, None]:
    host = ProgramHost(program_sandbox, Slots(2))
    yield host
    await host.close()


@pytest.fixture
async def site() -> AsyncGenerator[Site, None]:
    async with running_site() as site:
        yield site


@pytest.fixture
async def served(tmp_path: Path, host: ProgramHost, site: Site) -> AsyncGenerator[ScriptedServer, None]:
    browser = BrowserHost(search_backend("searxng", site.url), LOOPBACK)
    toolbox = Toolbox({"program": host, "browser": browser}, McpServers({}))
    async with running_server(AgentEngine("tiny"), tmp_path, toolbox=toolbox, resources=["batches"]) as served:
        yield served
    await browser.close()


def asking(code: str, *said: str, **fields: Any) -> Json:
    """Return a request whose model runs a program, and then does more; it tells what the program printed."""
    orders = "\n".join([f"run {json.dumps(code)}", *said, "say {result}"])
    messages = [{"role": "user", "content": orders}]
    return {"model": "tiny", "max_tokens": 999, "messages": messages, "tools": [CODE, LOOK], **fields}


def looked_up(message: anthropic.types.Message) -> Json:
    """Return the message of a client that has looked up all numbers of a message."""
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": block["id"], "content": str(7 * block["input"]["number"])}
            for block in blocks(message, "tool_use")
        ],
    }


class Client:
    """A client that answers calls until the message ends; ``rounds`` are the messages that it got."""

    def __init__(self, claude: anthropic.AsyncAnthropic, way: Way = "whole") -> None:
        self._claude = claude
        self._way = way
        self.rounds: list[anthropic.types.Message] = []

    async def ask(self, body: Json) -> anthropic.types.Message:
        if self._way == "whole":
            return await self._claude.messages.create(**body)
        async with self._claude.messages.stream(**body) as stream:
            return await stream.get_final_message()

    async def finish(self, body: Json) -> anthropic.types.Message:
        """Return the last message."""
        while True:
            message = await self.ask(body)
            self.rounds.append(message)
            if message.stop_reason != "tool_use":
                return message
            body = {**body, "messages": [*body["messages"], *self.answered(message)]}

    def answered(self, message: anthropic.types.Message) -> list[Json]:
        return [{"role": "assistant", "content": message.to_dict()["content"]}, looked_up(message)]


def blocks(message: anthropic.types.Message, kind: str) -> list[Json]:
    return [block.to_dict() for block in message.content if block.type == kind]


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block["text"] for block in blocks(message, "text"))


def shown(message: anthropic.types.Message) -> list[str]:
    return [block.type for block in message.content if block.type not in ("thinking", "text")]


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("lives", [True, False])
async def test_program_goes_on_with_the_results_of_the_client(
    claude: anthropic.AsyncAnthropic, host: ProgramHost, way: Way, lives: bool
) -> None:
    """Its process is kept for some time, and nothing but time is lost with it."""
    client, body = Client(claude, way), asking(FOUR)
    begun = await client.ask(body)
    (used,) = blocks(begun, "server_tool_use")
    nested = blocks(begun, "tool_use")
    assert (used["name"], used["input"], used["caller"]) == ("code_execution", {"code": FOUR}, {"type": "direct"})
    assert [block["input"] for block in nested] == [{"number": number} for number in range(3)]
    assert [block["caller"] for block in nested] == [{"type": CODE["type"], "tool_id": used["id"]}] * 3
    assert begun.stop_reason == "tool_use"
    assert begun.container is not None
    assert begun.container.expires_at.tzinfo is not None
    assert len(host.sleeping) == 1
    if not lives:
        await host.sleeping.close()
    body = {**body, "messages": [*body["messages"], *client.answered(begun)], "container": begun.container.id}
    ended = await client.finish(body)
    assert [shown(message) for message in client.rounds] == [["tool_use"], ["code_execution_tool_result"]]
    assert blocks(ended, "code_execution_tool_result") == [
        {
            "type": "code_execution_tool_result",
            "tool_use_id": used["id"],
            "content": {
                "type": "code_execution_result",
                "stdout": f"{FOUND}\n",
                "stderr": "",
                "return_code": 0,
                "content": [],
            },
        }
    ]
    assert text_of(ended).strip() == FOUND


async def test_nested_calls_and_results_are_not_read(served: ScriptedServer, claude: anthropic.AsyncAnthropic) -> None:
    client, body = Client(claude), asking(FOUR)
    await client.finish(body)
    prompt = served.prompt_text()
    assert prompt.count("147") == prompt.count(FOUND) == 1
    assert "to=functions.look" not in prompt


async def test_tokens_are_counted_while_a_program_waits(claude: anthropic.AsyncAnthropic) -> None:
    client, body = Client(claude), asking(FOUR)
    begun = await client.ask(body)
    del body["max_tokens"]
    waiting = {**body, "messages": [*body["messages"], *client.answered(begun)]}
    first, second = [(await claude.messages.count_tokens(**each)).input_tokens for each in (body, waiting)]
    assert 0 < first <= second


async def test_result_of_a_failure_is_raised_in_the_program(claude: anthropic.AsyncAnthropic) -> None:
    code = "try:\n    await look(number=1)\nexcept ToolError as error:\n    print('caught', error)"
    client, body = Client(claude), asking(code)
    begun = await client.ask(body)
    told, failed = client.answered(begun)
    failed["content"][0].update(content="Not there.", is_error=True)
    ended = await client.finish({**body, "messages": [*body["messages"], told, failed]})
    assert text_of(ended).strip() == "caught Error: Not there."


async def test_calls_are_made_one_by_one_if_the_client_asks_for_it(claude: anthropic.AsyncAnthropic) -> None:
    client = Client(claude)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    ended = await client.finish(asking(FOUR, tool_choice=choice))
    assert text_of(ended).strip() == FOUND
    assert max(shown(message).count("tool_use") for message in client.rounds) == 1


async def test_exception_of_a_program_is_output(claude: anthropic.AsyncAnthropic) -> None:
    """So it is with the code interpreter."""
    ended = await Client(claude).finish(asking("print('begun')\nraise ValueError('no')"))
    (result,) = [block["content"] for block in blocks(ended, "code_execution_tool_result")]
    assert (result["type"], result["return_code"]) == ("code_execution_result", 0)
    assert all(words in result["stdout"] for words in ("begun", "ValueError: no"))


async def test_program_searches_the_web_and_goes_on_with_the_client(
    claude: anthropic.AsyncAnthropic, site: Site
) -> None:
    """Its blocks do not have all that a search has found: only the process that was kept knows it."""
    code = """\
found = await web_search.search(query="gates")
page = await web_search.open(id=0)
print(await look(number=1), "All about gates." in found, "A gate opens." in page)
"""
    search = {"type": "web_search_20260209", "name": "web_search", "allowed_callers": LOOK["allowed_callers"]}
    client, body = Client(claude), asking(code, tools=[CODE, LOOK, search])
    begun = await client.ask(body)
    assert shown(begun) == ["server_tool_use", *["server_tool_use", "web_search_tool_result"] * 2, "tool_use"]
    _, first, second = blocks(begun, "server_tool_use")
    assert (first["input"], second["input"]) == ({"query": "gates"}, {"url": f"{site.url}/gates"})
    assert first["caller"] == second["caller"] == blocks(begun, "tool_use")[0]["caller"]
    assert [block["caller"] for block in blocks(begun, "web_search_tool_result")] == [first["caller"]] * 2
    assert begun.usage.server_tool_use is not None
    assert begun.usage.server_tool_use.web_search_requests == 1
    body["messages"] += client.answered(begun)
    assert text_of(await client.finish(body)).strip() == "7 True True"
    ended = await client.finish(body)
    (result,) = [block["content"] for block in blocks(ended, "code_execution_tool_result")]
    assert result["return_code"] == 1
    assert "the result of its call 1 is no longer known" in result["stdout"]


async def test_conversation_goes_on_after_a_program(claude: anthropic.AsyncAnthropic) -> None:
    client, body = Client(claude), asking(FOUR)
    await client.finish(body)
    *rounds, ended = client.rounds
    messages = [*body["messages"], *(each for message in rounds for each in client.answered(message))]
    messages += client.answered(ended)[:1]
    again = await client.ask({**body, "messages": [*messages, {"role": "user", "content": "say again"}]})
    assert (shown(again), text_of(again), again.container) == ([], "again", None)


async def test_program_of_a_batch_goes_on_after_it(claude: anthropic.AsyncAnthropic) -> None:
    client, body = Client(claude), asking(FOUR)
    requests: Any = [{"custom_id": "a", "params": body}]
    batch = await claude.messages.batches.create(requests=requests)
    async with asyncio.timeout(PATIENCE):
        while (await claude.messages.batches.retrieve(batch.id)).processing_status != "ended":
            await asyncio.sleep(0.02)
    (line,) = [each async for each in await claude.messages.batches.results(batch.id)]
    assert line.result.type == "succeeded"
    begun = line.result.message
    assert (shown(begun), begun.stop_reason) == (["server_tool_use", *["tool_use"] * 3], "tool_use")
    body["messages"] += client.answered(begun)
    assert text_of(await client.finish(body)).strip() == FOUND


async def test_program_goes_on_in_a_thread(served: ScriptedServer) -> None:
    """The client sends the results alone, and what it began with stays."""
    body = asking(FOUR, tools=[{**CODE, "type": "code_execution_20250825"}, LOOK], thread={"type": "create"})
    _, answer = await served.post(body, PATH)
    rounds = 0
    while answer["stop_reason"] == "tool_use":
        message = anthropic.types.Message.model_validate(answer)
        assert {block["caller"]["type"] for block in blocks(message, "tool_use")} == {"code_execution_20250825"}
        thread = {"type": "continue", "previous_message_id": message.id}
        body = {"model": "tiny", "max_tokens": 999, "messages": [looked_up(message)], "thread": thread}
        status, answer = await served.post(body, PATH)
        assert status == 200, answer
        rounds += 1
    assert (rounds, text_of(anthropic.types.Message.model_validate(answer)).strip()) == (2, FOUND)


@pytest.mark.parametrize("streams", [False, True])
async def test_tool_runner_runs_the_calls_of_programs(claude: anthropic.AsyncAnthropic, streams: bool) -> None:
    """It goes on in a thread, so that the server has the program."""

    @anthropic.beta_async_tool(allowed_callers=["code_execution_20260120"])
    async def look(number: int) -> str:
        """Look a number up."""
        return str(7 * number)

    runner = claude.beta.messages.tool_runner(**asking(FOUR, tools=[CODE, look]), stream=streams)
    final = await runner.until_done()
    assert [block.text.strip() for block in final.content if block.type == "text"] == [FOUND]


async def test_program_that_the_client_gives_other_results_begins_anew(claude: anthropic.AsyncAnthropic) -> None:
    """A client may go back to an earlier message, and go on from there in another way."""
    client, body = Client(claude), asking("print(await look(number=1) + await look(number=2))")
    begun = await client.ask(body)
    answered = client.answered(begun)
    assert text_of(await client.finish({**body, "messages": [*body["messages"], *answered]})).strip() == "21"
    answered[1]["content"][0]["content"] = "100"
    assert text_of(await client.finish({**body, "messages": [*body["messages"], *answered]})).strip() == "114"


async def test_code_that_the_client_has_changed_runs_as_it_is(
    served: ScriptedServer, claude: anthropic.AsyncAnthropic
) -> None:
    """A program that asks something else than its history says is ended with the reason."""
    client, body = Client(claude), asking("print(await look(number=1))")
    told, found = client.answered(await client.ask(body))
    (used,) = [block for block in told["content"] if block["type"] == "server_tool_use"]
    used["input"]["code"] = "print(await look(number=2))"
    status, answer = await served.post({**body, "messages": [*body["messages"], told, found]}, PATH)
    assert status == 200
    (result,) = [block for block in answer["content"] if block["type"] == "code_execution_tool_result"]
    assert result["content"]["return_code"] == 1
