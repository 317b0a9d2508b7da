"""Compare the prompts that penstock renders with those of vLLM's Rust frontend, token by token.

``vllm-rs render`` needs no GPU and no engine: it reads the same bodies as penstock's ``/tokenize``, with every chat
template that is shipped.  A difference needs an explanation in ``rendering.toml``, and an explanation a difference.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import convert

from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.models.chat.load import ChatOptions
from penstock.stages.models.chat.standalone import ModelFiles, load_from_files
from tests.oracles.conversations import TURNS, Body, generated, recorded, traits
from tests.oracles.sources import CACHE, RENDERER
from tests.oracles.templates import shipped
from tests.support.chat_templates import vocabulary
from tests.support.paths import TINY_QWEN
from tests.support.server import running_server

DIFFERENCES = Path(__file__).with_name("rendering.toml")
REPORT = CACHE / "rendering.json"
VERDICTS = ("ours", "theirs", "arguable")
GENERATED = 5
"""Generated conversations for each template."""
MODEL = "tiny"
_ADDRESS = re.compile(rb"127\.0\.0\.1:\d+")


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt, or why there is none."""

    tokens: tuple[int, ...] = ()
    refusal: str = field(default="", compare=False)


@dataclass
class Renderer:
    """A server that renders chats."""

    session: aiohttp.ClientSession
    url: str
    key: str

    async def render(self, body: Body) -> Prompt:
        async with self.session.post(self.url, json=body) as response:
            answer = await response.json()
        if response.status >= 500:
            raise RuntimeError(f"{self.url}: {answer}")
        return Prompt(tuple(answer[self.key])) if response.status == 200 else Prompt(refusal=json.dumps(answer))


@asynccontextmanager
async def vllm_renderer(session: aiohttp.ClientSession) -> AsyncGenerator[Renderer, None]:
    """Run vLLM's renderer for the length of the block."""
    program = RENDERER.folder() / "vllm" / "vllm-rs"
    program.chmod(0o755)
    options: tuple[str, ...] = ("--port", "0", "--trust-request-chat-template", "true", "--served-model-name", MODEL)
    options += ("--tool-call-parser", "hermes", "--exclude-tools-when-tool-choice-none", "true")
    process = await asyncio.create_subprocess_exec(
        program, "render", str(TINY_QWEN), *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout
    log = b""
    while not (found := _ADDRESS.search(log)):
        if not (line := await process.stdout.readline()):
            raise RuntimeError(f"vLLM's renderer did not start: {log.decode()}")
        log += line
    rest = asyncio.create_task(process.stdout.read())  # so that the process can go on writing
    try:
        yield Renderer(session, f"http://{found[0].decode()}/v1/chat/completions/render", "token_ids")
    finally:
        process.terminate()
        await process.wait()
        await rest


@asynccontextmanager
async def own_renderer(session: aiohttp.ClientSession) -> AsyncGenerator[Renderer, None]:
    """Serve penstock with the same model for the length of the block."""
    model = load_from_files(ModelFiles(str(TINY_QWEN)), ChatOptions(trust_request_chat_template=True))
    with tempfile.TemporaryDirectory() as folder:
        async with running_server(ScriptedEngine(), Path(folder), model=model, max_body_bytes=10**7) as served:
            yield Renderer(session, f"{served.url}/tokenize", "tokens")


@dataclass(frozen=True)
class Explanation:
    """The reason why a prompt of some traits differs with some templates, ``*`` being all.

    If ``same_as`` names another trait, penstock's prompt is that which vLLM makes of it.  With ``same_text``, the
    prompts differ in their tokens alone.
    """

    verdict: str
    reason: str
    traits: tuple[str, ...]
    templates: tuple[str, ...] = ("*",)
    same_as: str = ""
    same_text: bool = False


@dataclass
class Comparison:
    """The comparison of all conversations with all templates."""

    own: Renderer
    vllm: Renderer
    explanations: list[Explanation]
    counts: Counter[str] = field(default_factory=Counter)
    used: set[tuple[str, str, str]] = field(default_factory=set)
    """The verdicts that a difference has needed: reasons with their traits and templates."""
    unexplained: list[dict[str, Any]] = field(default_factory=list)

    async def of_template(self, name: str, source: str | None) -> None:
        """Compare the prompts of a template, with each trait, and with turns that have no difference."""
        bodies = dict(traits()) if source else dict(recorded()) | dict(traits())
        agreeing = [trait for trait in bodies if await self._compare(name, source, trait, bodies[trait])]
        for made_of, body in generated([trait for trait in agreeing if trait in TURNS], name, GENERATED):
            await self._compare(name, source, made_of, body)

    async def _compare(self, name: str, source: str | None, trait: str, body: Body) -> bool:
        sent = {"model": MODEL, **body} | ({"chat_template": source} if source else {})
        own, theirs = await asyncio.gather(self.own.render(sent), self.vllm.render(sent))
        if own == theirs:
            self.counts["agree"] += 1
            return True
        explanation = None
        for each in self._explanations(name, trait):
            if await self._holds(each, sent, own, theirs):
                explanation = each
                self.used.update(product([each.reason], {"*", trait} & {*each.traits}, {"*", name} & {*each.templates}))
                break
        self.counts[explanation.verdict if explanation else "unexplained"] += 1
        if explanation is None:
            self.unexplained.append(
                {"template": name, "trait": trait, "own": self._shown(own), "vllm": self._shown(theirs)}
            )
        return False

    def _explanations(self, name: str, trait: str) -> Iterator[Explanation]:
        for each in self.explanations:
            if {"*", trait} & {*each.traits} and {"*", name} & {*each.templates}:
                yield each

    async def _holds(self, explanation: Explanation, sent: Body, own: Prompt, theirs: Prompt) -> bool:
        if explanation.same_text:
            return not own.refusal and self._shown(own) == self._shown(theirs)
        if explanation.same_as:
            return own == await self.vllm.render({**sent, **traits()[explanation.same_as]})
        return True

    def unused(self) -> Iterator[str]:
        """Yield the explanations without a difference."""
        for each in self.explanations:
            for trait, template in product(each.traits, each.templates):
                if (each.reason, trait, template) not in self.used:
                    yield f"{trait} ({template}): {each.reason}"

    @staticmethod
    def _shown(prompt: Prompt) -> str:
        return prompt.refusal or vocabulary().decode(prompt.tokens)


def _timeless(template: str) -> str:
    """Return a template in which it is always the same day."""
    return (
        f"{{%- macro strftime_now(form) -%}}today{{%- endmacro -%}}{template}"
        if "strftime_now" in template
        else template
    )


def explanations() -> list[Explanation]:
    """Return the explanations of differences."""
    found: list[dict[str, Any]] = tomllib.loads(DIFFERENCES.read_text())["difference"]
    each = [convert(entry, Explanation) for entry in found]
    assert all(one.verdict in VERDICTS and one.reason for one in each)
    return each


async def compared(only: str) -> Comparison:
    """Compare all templates whose names contain ``only``."""
    async with aiohttp.ClientSession() as session, vllm_renderer(session) as vllm, own_renderer(session) as own:
        comparison = Comparison(own, vllm, explanations())
        sources = {
            f"{server}: {name}": _timeless(text) for (server, name), text in shipped().items() if server != "sglang"
        }
        for name, source in {TINY_QWEN.name: None, **sources}.items():
            if only in name:
                await comparison.of_template(name, source)
        return comparison


def report(only: str) -> tuple[list[str], bool]:
    """Compare the prompts of all templates whose names contain ``only``; return lines, and if all is explained.

    What is not is in a file as well.
    """
    comparison = asyncio.run(compared(only))
    REPORT.write_text(json.dumps(comparison.unexplained, indent=1, ensure_ascii=False))
    gone = [] if only else [*comparison.unused()]
    counts = ", ".join(f"{count} {name}" for name, count in comparison.counts.most_common())
    lines = [f"prompts: {counts}", f"{len(comparison.unexplained)} unexplained differences of prompts: {REPORT}"]
    lines += [f"{DIFFERENCES.name} explains a difference that is none: {line}" for line in gone]
    return lines, not (comparison.unexplained or gone)
