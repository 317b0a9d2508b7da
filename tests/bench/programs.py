"""Measure what programs save: ten tasks of agents, by calls of the model and by a program that makes the calls.

    python -m tests.bench.programs [TASK...]

A scripted model of the gpt-oss vocabulary works on each task behind a whole server, over HTTP, by the loop of openai's
SDK.  It thinks nothing, and reads all results from its prompt.  ``usage`` counts the tokens.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import openai
from openai.types.responses import ResponseFunctionToolCall

from penstock.api.http.connections import bind, serving
from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.server import application
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages
from tests.bench.program_tasks import TASKS, Json, Task, schema_of
from tests.support.paths import ROOT

MODEL, LABEL = "scripted", "office"
ONE, SEVERAL, PROGRAM = WAYS = ("one by one", "at once", "program")
"""How the model calls: once in a turn, as gpt-oss does; as often as it can, as others may; or by a program."""

AT_ONCE = 64
"""Calls that the model makes in a turn, if it makes several: as many as a program in a round."""

SETTLED = 10
"""Turns of the event loop after which every task of a program waits."""

RESULT = re.compile(r"<\|start\|>(\S+) to=assistant.*?<\|message\|>(.*?)<\|end\|>", re.DOTALL)
"""The result of a call in a prompt."""


# The model


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Json


async def thought(task: Task, results: Sequence[str], at_once: int) -> list[Call] | str:
    """Do what the program of a task does, with the results so far; return the next calls, or the answer."""
    waiting, printed, left = list[tuple[Call, asyncio.Future[Any]]](), list[str](), iter(results)

    def called(name: str) -> Callable[..., asyncio.Future[Any]]:
        def call(**arguments: Any) -> asyncio.Future[Any]:
            waiting.append((Call(name, arguments), asyncio.get_running_loop().create_future()))
            return waiting[-1][1]

        return call

    names = {each.__name__: called(each.__name__) for each in task.functions}
    code = compile(task.program, task.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = asyncio.ensure_future(_run(eval(code, names | {"print": lambda *words: printed.append(" ".join(words))})))
    while True:
        if not waiting:
            for _ in range(SETTLED):
                await asyncio.sleep(0)
        if running.done():
            running.result()
            return "\n".join(printed)
        group, waiting[:] = waiting[:at_once], waiting[at_once:]
        answers = list(islice(left, len(group)))
        if not answers:
            running.cancel()
            return [call for call, _ in group]
        for (_, future), answer in zip(group, answers, strict=True):
            future.set_result(json.loads(answer))


async def _run(coroutine: Any) -> None:
    await coroutine


def calls(group: Sequence[Call], label: str) -> str:
    """Return calls as gpt-oss writes them."""
    return "<|start|>assistant".join(
        f"<|channel|>commentary to={label}.{call.name} <|constrain|>json<|message|>{json.dumps(call.arguments)}<|call|>"
        for call in group
    )


def program_of(task: Task, label: str) -> str:
    """Return the program of a task, with the functions where its tools are."""
    names = "|".join(each.__name__ for each in task.functions)
    return task.program if label == "functions" else re.sub(rf"\b({names})\(", rf"{label}.\1(", task.program)


class WorkingEngine(ScriptedEngine):
    """Work on the task that the metadata of a request names, in the way that they name."""

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        encoding = load_encoding()
        about, results = prompt.facts.response.metadata, RESULT.findall(encoding.decode(prompt.token_ids))
        text = await turn(about["way"], about["label"], about["task"], results)
        self.script = Script(encoding.encode_markup(text), chunk_size=1000)
        async with super().open(prompt) as frames:
            yield frames


async def turn(way: str, label: str, name: str, results: Sequence[tuple[str, str]]) -> str:
    """Return what the model writes after some results: calls, a program, or the answer."""
    task = next(task for task in TASKS if task.name == name)
    texts = [text for _, text in results]
    if way == PROGRAM:
        if not texts:
            return f"<|channel|>commentary to=python code<|message|>{program_of(task, label)}<|call|>"
        found: list[Call] | str = texts[-1].strip()
    else:
        found = await thought(task, texts, 1 if way == ONE else AT_ONCE)
    return f"<|channel|>final<|message|>{found}<|return|>" if isinstance(found, str) else calls(found, label)


# The server, and a client


@dataclass
class Cost:
    """What a task has cost in one way."""

    answer: str = ""
    turns: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


Costs: TypeAlias = Mapping[tuple[bool, str], Cost]
"""The costs of a task, by where its functions are (True for the server) and how they are called."""


@dataclass
class Bench:
    """A server with a scripted model, and a client."""

    engine: WorkingEngine
    client: openai.AsyncOpenAI

    async def work(self, task: Task, way: str, *, served: bool) -> Cost:
        """Let the model work on a task, and return what it costs; the functions are the client's, or ``served``."""
        callers = {"allowed_callers": ["programmatic"]} if way == PROGRAM else {}
        tools = [{**tool, **callers} for tool in (served_tools(task) if served else client_tools(task))]
        if way == PROGRAM:
            tools.append({"type": "programmatic_tool_calling"})
        about = {"task": task.name, "way": way, "label": LABEL if served else "functions"}
        options: Any = {"model": MODEL, "tools": tools, "metadata": about}
        cost, before = Cost(), len(self.engine.prompts)
        given: Any = task.question
        previous: str | openai.Omit = openai.omit
        while given:
            response = await self.client.responses.create(input=given, previous_response_id=previous, **options)
            assert response.status == "completed", response.incomplete_details
            assert response.usage
            cost.requests += 1
            cost.prompt_tokens += response.usage.input_tokens
            cost.output_tokens += response.usage.output_tokens
            cost.answer = response.output_text
            given = [output_of(task, item) for item in response.output if item.type == "function_call"]
            previous = response.id
        cost.turns = len(self.engine.prompts) - before
        return cost


def output_of(task: Task, call: ResponseFunctionToolCall) -> Json:
    """Run the function of a call, as its client does."""
    output = task.call(call.name, call.arguments)
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}


def client_tools(task: Task) -> list[Json]:
    return [
        {
            "type": "function",
            "name": each.__name__,
            "description": inspect.getdoc(each),
            "parameters": schema_of(each),
            "strict": False,
        }
        for each in task.functions
    ]


def served_tools(task: Task) -> list[Json]:
    names = [each.__name__ for each in task.functions]
    return [{"type": "mcp", "server_label": LABEL, "allowed_tools": names, "require_approval": "never"}]


@asynccontextmanager
async def bench() -> AsyncGenerator[Bench, None]:
    """Run a server whose model works on the tasks, for the length of a block."""
    engine = WorkingEngine(models=(MODEL,))

    @asynccontextmanager
    async def start(_: Settings) -> AsyncGenerator[RunningEngine, None]:
        yield RunningEngine(engine, harmony_stages(load_encoding()))

    async with AsyncExitStack() as closing:
        folder = Path(closing.enter_context(TemporaryDirectory()))
        command = {"command": sys.executable, "args": ["-m", "tests.bench.program_tasks"], "cwd": str(ROOT)}
        (folder / "mcp.json").write_text(json.dumps({"mcpServers": {LABEL: command}}))
        settings = Settings(
            engine=["tests.bench.programs:WorkingEngine"],
            store=str(folder / "store.sqlite3"),
            mcp_config=folder / "mcp.json",
            max_turns=1000,
        )
        bound = bind("127.0.0.1", 0)
        await closing.enter_async_context(serving(await application(settings, start), bound))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        yield Bench(
            engine, await closing.enter_async_context(openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
        )


async def costs(running: Bench, task: Task) -> Costs:
    """Return what a task costs in each way."""
    return {
        (served, way): await running.work(task, way, served=served)
        for served in (False, True)
        for way in WAYS
        if way != ONE or not served  # it is the same as with functions of the client
    }


# The tables


def table(found: Mapping[Task, Costs], *, served: bool) -> str:
    """Return all figures of the tasks, with functions of the client or with an MCP server."""
    ways = [way for way in WAYS if all((served, way) in each for each in found.values())]
    figures = "turns requests  prompt output"
    lines = [
        f"{'':15}" + "".join(f"{way:32}" for way in ways),
        f"{'task':8} calls  " + "   ".join([figures] * len(ways)) + "   share",
    ]
    for task, each in found.items():
        costs = [each[served, way] for way in ways]
        shown = [f"{c.turns:5} {c.requests:8} {c.prompt_tokens:7} {c.output_tokens:6}" for c in costs]
        lines.append(f"{task.name:8} {task.calls:5}  {'   '.join(shown)}   {share(each, SEVERAL, served=served):5.3f}")
    return "\n".join(line.rstrip() for line in lines)


def short_table(found: Mapping[Task, Costs]) -> str:
    """Return the tokens of the tasks with functions of the client, and the share of a program in those at once."""
    lines = [f"{'task':8} calls  one by one  at once  program  share"]
    for task, each in found.items():
        one, several, program = (each[False, way].tokens for way in WAYS)
        lines.append(f"{task.name:8} {task.calls:5} {one:11,} {several:8,} {program:8,}  {program / several:5.3f}")
    return "\n".join(lines)


def share(costs: Costs, way: str, *, served: bool) -> float:
    """Return the tokens with a program over those with calls of the model."""
    return costs[served, PROGRAM].tokens / costs[served, way].tokens


def tables(found: Mapping[Task, Costs]) -> str:
    """Return the file with all figures."""
    return (
        "Written by `pytest tests/bench/test_programs.py --regen`.  The share is that of the tokens at once.\n\n"
        f"Functions of the client:\n\n{table(found, served=False)}\n\n"
        f"Functions of an MCP server of the operator's:\n\n{table(found, served=True)}\n"
    )


async def measure(names: Sequence[str] = ()) -> dict[Task, Costs]:
    """Return what the tasks of these names cost, or all tasks."""
    async with bench() as running:
        return {task: await costs(running, task) for task in TASKS if not names or task.name in names}


if __name__ == "__main__":
    sys.stdout.write(tables(asyncio.run(measure(sys.argv[1:]))))
