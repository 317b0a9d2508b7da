"""A server that answers the examples of the HTTP API, and what it answered."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from string import Template
from typing import Any

from aiohttp import ClientSession, FormData, web
from aiohttp.test_utils import BaseTestServer, TestServer
from pydantic import SecretStr

from docs.site.gather import ROOT
from docs.site.http_examples import ANTHROPIC, CLIENT, EMBEDDER, LONG, METRICS, MODEL, OPERATOR, Example
from penstock.api.cli.command_line import read_settings
from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.pipeline.frames import EngineFrame, Prompt, TokenChunk
from penstock.pipeline.recordings.format import FILES, read_recording
from penstock.server import application
from penstock.services.engines.scripted import Script
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages
from tests.support.deciding_engine import DecidingEngine

KEYS = {name: f"{name.lower()}-of-an-example" for name in (CLIENT, ANTHROPIC, OPERATOR, METRICS)}
"""The keys that requests need, by the variables that have them."""

TEA = "# Tea\n\nGreen tea is steeped for two minutes. Black tea takes longer.\n"
LINE = {"model": MODEL, "input": "Say hello."}
FORM_FILES = {
    "lines.jsonl": json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": LINE}),
}
"""The files of forms; any other is about tea."""
PROMPT = '+++\nmodel = "tiny-gpt-oss"\ninput = "What is the weather in {{city}}?"\n+++\nAnswer in a {{tone}} tone.\n'
STORY = " there was a river that ran to the sea."

RANKED = {
    "model": "tiny-reranker",
    "results": [
        {"index": 0, "relevance_score": 0.96, "document": {"text": "Green tea"}},
        {"index": 1, "relevance_score": 0.02, "document": {"text": "The moon"}},
    ],
    "usage": {"total_tokens": 6},
}
SCORED = {
    "object": "list",
    "model": "tiny-reranker",
    "data": [{"index": 0, "object": "score", "score": 0.96}, {"index": 1, "object": "score", "score": 0.02}],
    "usage": {"prompt_tokens": 6, "total_tokens": 6},
}


@dataclass
class ExampleEngine(DecidingEngine):
    """An engine that greets as a recording has it, decides, continues a text by a story, and takes long to count."""

    busy: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it counts."""

    async def _frames(self, script: Script, prompt: Prompt, run: Any) -> AsyncGenerator[EngineFrame, None]:
        if LONG in load_encoding().decode(prompt.token_ids):
            script = replace(script, latency=600.0)
            self.busy.set()
        if prompt.facts.raw is not None:
            script = Script(load_encoding().encode_markup(STORY))
        async with aclosing(super()._frames(script, prompt, run)) as frames:
            async for frame in frames:
                yield frame


def _engine() -> ExampleEngine:
    recorded = read_recording(ROOT / "fixtures/harmony/greeting/tokens.jsonl", FILES["generate"][1]).frames
    tokens = [token for frame in recorded if isinstance(frame, TokenChunk) for token in frame.token_ids]
    likely = {"complains": {"A": 0.75, "B": 0.25}, "team": {"A": 0.8, "B": 0.2}, "urgent": {"A": 0.3, "B": 0.7}}
    return ExampleEngine(Script(tokens), models=(MODEL,), likely=likely)


SPOKEN = b"RIFF"
UNREAD: Mapping[str, Any] = {
    "models": {"object": "list", "data": [{"id": EMBEDDER}]},
    "rerank": RANKED,
    "score": SCORED,
    "embed": {"id": "embd-1", "embeddings": {"float": [[0.5, -0.25, 0.125]]}, "texts": ["Say hello."]},
    "classify": {
        "object": "list",
        "model": "tiny-classifier",
        "data": [{"index": 0, "label": "greeting", "probs": [0.9, 0.1], "num_classes": 2}],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    },
    "pooling": {
        "object": "list",
        "model": EMBEDDER,
        "data": [{"index": 0, "object": "pooling", "data": [0.5, -0.25, 0.125]}],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    },
    "transcriptions": {"text": "Guten Tag."},
    "translations": {"text": "Good day."},
    "generations": {"created": 1_800_000_000, "data": [{"b64_json": "aVZCT1J3MEtHZ28="}]},
    "edits": {"created": 1_800_000_000, "data": [{"b64_json": "aVZCT1J3MEtHZ28="}]},
}
"""Answers of a server whose answers penstock passes on, by the ends of paths."""

PASSED = """
[tiny-gpt-oss]
engine = "{url}"

[tiny-classifier]
kind = "classify"
engine = "{url}"

[tiny-speaker]
kind = "audio"
engine = "{url}"

[tiny-painter]
kind = "image"
engine = "{url}"
"""


async def _answer_unread(request: web.Request) -> web.Response:
    """Answer as the server of ``--embeddings`` does, and those of other models; all texts have one vector."""
    end = request.path.rpartition("/")[2]
    if end in UNREAD:
        return web.json_response(UNREAD[end])
    if end == "speech":
        return web.Response(body=SPOKEN, content_type="audio/wav")
    given = (await request.json())["input"]
    texts = [given] if isinstance(given, str) else given
    data = [{"object": "embedding", "index": at, "embedding": [0.5, -0.25, 0.125]} for at, _ in enumerate(texts)]
    usage = {"prompt_tokens": 3 * len(texts), "total_tokens": 3 * len(texts)}
    return web.json_response({"object": "list", "model": EMBEDDER, "data": data, "usage": usage})


@dataclass
class ExampleServer:
    """A server with every route of penstock, in process, at ``url``."""

    app: web.Application
    url: str
    client: ClientSession
    engine: ExampleEngine

    async def document(self) -> dict[str, Any]:
        """Return its ``/openapi.json``."""
        async with self.client.get(f"{self.url}/openapi.json") as answer:
            described: dict[str, Any] = await answer.json()
            return described


@asynccontextmanager
async def example_server(folder: Path) -> AsyncGenerator[ExampleServer, None]:
    """Serve all routes for the length of a block; what is stored and recorded is in ``folder``."""
    engine, prompts = _engine(), folder / "prompts"

    @asynccontextmanager
    async def start(_: Settings) -> AsyncGenerator[RunningEngine, None]:
        yield RunningEngine(engine, harmony_stages(load_encoding()))

    prompts.mkdir(parents=True)
    (prompts / "weather.md").write_text(PROMPT)
    recordings = folder / "recordings"
    shutil.copytree(ROOT / "fixtures/harmony/weather", recordings / "weather")
    async with AsyncExitStack() as closing:
        embedder = web.Application()
        embedder.router.add_route("*", "/{path:.*}", _answer_unread)
        upstream = await closing.enter_async_context(TestServer(embedder))
        options = [f"--embeddings={_url(upstream)}", f"--store={folder / 'store.sqlite3'}", f"--prompts={prompts}"]
        (folder / "models.toml").write_text(PASSED.format(url=_url(upstream)))
        options += [f"--model-config={folder / 'models.toml'}"]
        options += [f"--record={recordings}", "--record-if=x-record", "--log-level=WARNING"]
        settings = read_settings(options)
        keys = {"api_keys": (KEYS[CLIENT], KEYS[ANTHROPIC])} | {
            "operator_key": SecretStr(KEYS[OPERATOR]),
            "metrics_key": SecretStr(KEYS[METRICS]),
        }
        app = await application(settings.model_copy(update=keys), start)
        served = await closing.enter_async_context(TestServer(app))
        client = await closing.enter_async_context(ClientSession())
        yield ExampleServer(app, _url(served), client, engine)


def _url(server: BaseTestServer) -> str:
    return str(server.make_url("")).rstrip("/")


# What differs from one run to the next

_ID = re.compile(r"\b((?:[a-z]+[_-])+)[0-9a-f]{16,}\w*")
_SEALED = re.compile(r"[\w+/=-]{80,}")
_SECONDS = re.compile(r"\b1[7-9]\d{8}(?:\.\d+)?\b")
_INSTANT = re.compile(r"\b20\d\d-\d\d-\d\dT[\d:.]+(?:Z|\+00:00)")
_SINCE = re.compile(r'("(?:at|seconds|duration)": ?)\d+(?:\.\d+)?(?:e-\d+)?')
_COUNTED = re.compile(r'("tokens_(?:read|cached|written)": ?)\d+')


@dataclass
class Names:
    """Stable names of what a server draws: ids by their order, and one moment for all times."""

    given: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def stable(self, text: str) -> str:
        """Return a text of the server with stable names."""
        text = _ID.sub(lambda found: self._name(found[0], found[1]), text)
        text = _SEALED.sub(lambda found: self._name(found[0], "sealed_"), text)
        text = _COUNTED.sub(r"\g<1>100", _SINCE.sub(r"\g<1>0.5", text))
        return _INSTANT.sub("2027-01-15T08:00:00Z", _SECONDS.sub("1800000000", text))

    def _name(self, drawn: str, prefix: str) -> str:
        if drawn not in self.given:
            self.counts[prefix] += 1
            self.given[drawn] = f"{prefix}{self.counts[prefix]}"
        return self.given[drawn]

    def drawn(self, text: str) -> str:
        """Return a text with the names that the server has drawn."""
        back = {name: drawn for drawn, name in self.given.items()}
        return re.sub(r"[\w-]+", lambda found: back.get(found[0], found[0]), text)


# Requests

ADDRESS = "http://127.0.0.1:8000"
"""Where the commands of the pages find a server."""

LONGEST = 88
"""Characters of a line of a page before it is broken."""


@dataclass(frozen=True)
class Request:
    """A request, as a command or a client sends it."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """The headers, in which ``$NAME`` is the key that the variable has."""
    body: str = ""
    form: Mapping[str, str] = field(default_factory=dict)
    """The parts of a form; ``@`` and the name of a file stand for the file."""
    upgrades: bool = False

    @property
    def command(self) -> str:
        """The line of a shell that sends it."""
        parts = [f"{_quoted(name + ': ' + value)}" for name, value in self.headers.items()]
        if self.upgrades:
            address = ADDRESS.replace("http", "ws")
            lines = [f"npx wscat --connect {address}{self.path}", *(f"--header {part}" for part in parts)]
            return " \\\n    ".join([*lines, f"--wait 1 --execute {_quoted(self.body)}"])
        implied = "POST" if self.body or self.form else "GET"
        method = f" -X {self.method}" if self.method != implied else ""
        address = f"{ADDRESS}{self.path}"
        lines = [f"curl{method} {_quoted(address) if '?' in address else address}", *(f"-H {part}" for part in parts)]
        lines += [f"-d {_quoted(self.body)}"] if self.body else []
        lines += [f"-F {name}={value}" for name, value in self.form.items()]
        return " \\\n    ".join(lines)


def _quoted(text: str) -> str:
    return f'"{text}"' if "$" in text else f"'{text}'"


def request_of(example: Example, kept: Mapping[str, str]) -> Request:
    """Return the request of an example, with values of earlier answers."""
    path = example.path.format_map(kept) + (f"?{example.query}" if example.query else "")
    headers = {}
    if example.key:
        name, scheme = ("x-api-key", "") if example.key == ANTHROPIC else ("Authorization", "Bearer ")
        headers[name] = f"{scheme}${example.key}"
    if example.accept:
        headers["Accept"] = example.accept
    upgrades = example.status == HTTPStatus.SWITCHING_PROTOCOLS
    if example.body is None:
        return Request(example.method, path, headers, form=example.form)
    if not upgrades:
        headers["Content-Type"] = "application/json"
    body = Template(indented(example.body)).substitute(kept)
    return Request(example.method, path, headers, body, upgrades=upgrades)


async def sent(server: ExampleServer, request: Request) -> tuple[int, str, str]:
    """Send a request; return the status, the media type and the text of its answer."""
    headers = {name: Template(value).substitute(KEYS) for name, value in request.headers.items()}
    url = f"{server.url}{request.path}"
    if request.upgrades:
        async with server.client.ws_connect(url, headers=headers) as socket:
            await socket.send_str(request.body)
            events = [await socket.receive_str()]
            while '"response.completed"' not in events[-1]:
                events.append(await socket.receive_str())
        return HTTPStatus.SWITCHING_PROTOCOLS, "", "\n".join(events)
    data: Any = request.body or None
    if request.form:
        data = FormData()
        for name, value in request.form.items():
            is_file = value.startswith("@")
            data.add_field(
                name, FORM_FILES.get(value[1:], TEA) if is_file else value, filename=value[1:] if is_file else None
            )
    async with server.client.request(request.method, url, headers=headers, data=data) as answer:
        return answer.status, answer.content_type, await answer.text()


def indented(value: Any, depth: int = 0, name: str = "") -> str:
    """Return JSON after the name of its field; what fits on a line stands on it."""
    line = name + json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, dict | list) or 2 * depth + len(line) <= LONGEST:
        return line
    fields = [(f"{json.dumps(key)}: ", each) for key, each in value.items()] if isinstance(value, dict) else []
    inner = fields or [("", each) for each in value]
    lines = ",\n".join("  " * (depth + 1) + indented(each, depth + 1, key) for key, each in inner)
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{name}{start}\n{lines}\n{'  ' * depth}{end}"


# Running


@dataclass(frozen=True)
class Ran:
    """An example that has run: its request and the answer, both with stable names."""

    example: Example
    request: Request
    status: int
    kind: str
    """The media type of the answer."""
    answer: str


async def run_examples(server: ExampleServer, examples: Iterable[Example]) -> AsyncIterator[Ran]:
    """Run the examples one after the other; raise `RuntimeError` for one with another status."""
    names, kept = Names(), {"model": MODEL, "prompt_id": "weather"}
    for example in examples:
        stable = {name: names.stable(value) for name, value in kept.items()}
        status, kind, text = await answer_to(example, request_of(example, kept), server)
        if status != example.status:
            raise RuntimeError(f"{example.route} is answered by {status}: {text}")
        for name, place in example.keeps.items():
            kept[name] = _at(json.loads(text), place)
        yield Ran(example, request_of(example, stable), status, kind, names.stable(text))


async def answer_to(example: Example, request: Request, server: ExampleServer) -> tuple[int, str, str]:
    """Send the request of an example when the time has come for it; return status, media type and text."""
    if example.interrupts:
        await server.engine.busy.wait()
    while True:
        status, kind, text = await sent(server, request)
        if not example.until or _stage(json.loads(text)) == example.until:
            return status, kind, text
        await asyncio.sleep(0.05)


def _stage(told: Any) -> Any:
    """Return the status of what an answer is about; Anthropic's batches have it under another name."""
    return told.get("status", told.get("processing_status"))


def _at(value: Any, place: str) -> str:
    for part in place.split("."):
        value = value[int(part) if part.isdigit() else part]
    return str(value)
