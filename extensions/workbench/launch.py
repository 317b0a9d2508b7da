"""Launch: start a coding agent on a server that runs, with all that it has to know of it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPException
from typing import Annotated, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, build_opener

import msgspec

from penstock.api.cli.arguments import Parser
from penstock.api.settings.sources import CLIENT_KEY
from penstock.extensions.workbench.agents import AGENTS, Agent, Served, Start
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.protocol.params.json_body import NO_JSON
from penstock.services.model_names import in_words, served_instead

DEFAULT_URL = "http://127.0.0.1:8000"

ANYWAY = "--anyway"
"""The option that starts an agent in a context that is too short for it."""

ANSWER_WAIT = 10.0
"""Seconds to wait for the server's answer."""

LOAD_WAIT = 900.0
"""Seconds to wait for a model that the server loads."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None
    input_modalities: tuple[str, ...] = ("text",)
    tools: tuple[str, ...] = ()
    state: str = "ready"
    kind: str = "generate"

    def at(self, url: str, key: str, name: str) -> Served:
        """Return the model as an agent has to know it."""
        sees_images, searches = "image" in self.input_modalities, "web_search" in self.tools
        return Served(url, name, self.max_model_len, key, sees_images=sees_images, searches=searches)


class _Tokens(msgspec.Struct):
    max_model_len: int | None


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class _Problem(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Problem


class _NotFound(Exception):
    """The server does not have the model."""


Answer = TypeVar("Answer", _Model, _Models, _Tokens)


def main(arguments: Sequence[str]) -> None:
    """Start Claude Code, Codex or opencode on a server that runs."""
    words = [*arguments]
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    agent, more = AGENTS[options.agent], words[cut + 1 :]
    key = options.api_key or os.environ.get(CLIENT_KEY, "")
    served = _served(_base(options.url), key, options.model)
    if options.small_model:
        if agent.program == "codex":
            raise CannotRun("--small-model: Codex uses one model for all of its tasks")
        served = replace(served, small=_served(served.url, key, options.small_model).model)
    start = agent.start(served)
    if shortage := agent.shortage(served):
        if not (served.holds(agent.prompt) or options.anyway or options.print):
            raise CannotRun(f"{shortage}; {ANYWAY} starts {agent.program} all the same")
        print(f"penstock: {shortage}", file=sys.stderr)
    if not options.print and shutil.which(agent.program) is None:
        raise CannotRun(f"{agent.program} is not installed: npm install -g {agent.package}")
    for path, text in start.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if options.print:
        print("\n".join(shell_lines(agent, start, more, key)))
        return
    environment = {name: value for name, value in os.environ.items() if name not in start.removed}
    sys.stdout.flush()
    command = [agent.program, *start.arguments, *more]
    os.execvpe(agent.program, command, environment | dict(start.environment))  # noqa: S606 - so the terminal is its own


def _parser() -> Parser:
    parser = Parser(
        prog="penstock launch",
        description="Start a coding agent on a penstock that runs, with its model, context and key set.",
        usage="penstock launch {claude,codex,opencode} [options] [-- ARGUMENTS OF THE AGENT]",
    )
    parser.add_argument("agent", choices=AGENTS, help="the agent to start")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", metavar="KEY", help=f"a key of the server; by default, the variable {CLIENT_KEY}")
    parser.add_argument("--model", metavar="NAME", help="a model of the server; by default, its first")
    parser.add_argument("--small-model", metavar="NAME", help="a model for small tasks; by default, the same")
    parser.add_argument(ANYWAY, action="store_true", help="start it even if the model's context is too short for it")
    parser.add_argument("--print", action="store_true", help="print the start as lines for a shell, without the key")
    return parser


def _base(url: str) -> str:
    """Return the URL of a server, which may be given with ``/v1``."""
    if not url.startswith(("http://", "https://")):
        raise CannotRun(f"--url {url} must begin with http:// or https://")
    if "@" in urlsplit(url).netloc or "?" in url or "#" in url:
        raise CannotRun(f"--url: give the address alone; the key is in the variable {CLIENT_KEY}")
    return url.rstrip("/").removesuffix("/v1")


def _served(url: str, key: str, name: str | None) -> Served:
    """Ask the server for the model called ``name``, or for its first one."""
    models = _asked(url, key, _Models).data
    if name is None:
        model, *others = models
        name = model.id
        if others:
            names = in_words([other.id for other in others])
            print(f"penstock: {name!r} is used; --model takes another: {names}", file=sys.stderr)
    else:
        try:
            model = _asked(url, key, _Model, f"/{quote(name)}")
        except _NotFound:
            instead = served_instead(name, [model.id for model in models])
            raise CannotRun(f"the server at {url} serves {instead}") from None
    writing = (each for each in models if each.kind == "generate" and each.id != name)
    served = _loaded(model, url, key).at(url, key, name)
    return replace(served, others=tuple(each.at(url, key, each.id) for each in writing))


def _loaded(model: _Model, url: str, key: str) -> _Model:
    """Return a model as the server knows it once it is loaded: before that, its context is not known."""
    if model.state == "ready" or model.max_model_len is not None:
        return model
    print(f"penstock: the server loads {model.id!r}, which may take minutes", file=sys.stderr)
    _answered(url, key, _Tokens, "/tokenize", {"model": model.id, "prompt": ""})
    return _asked(url, key, _Model, f"/{quote(model.id)}")


def _asked(url: str, key: str, answer: type[Answer], path: str = "") -> Answer:
    """Return what the server answers about its models."""
    return _answered(url, key, answer, f"/v1/models{path}")


def _answered(url: str, key: str, answer: type[Answer], path: str, body: Mapping[str, str] | None = None) -> Answer:
    """Return what the server answers at a path, to a ``body`` if there is one, which may take long."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else msgspec.json.encode(body)
    sent = Request(f"{url}{path}", data, headers | ({} if data is None else {"Content-Type": "application/json"}))  # noqa: S310 - `_base` has checked it
    try:
        with build_opener().open(sent, timeout=ANSWER_WAIT if data is None else LOAD_WAIT) as answered:
            received = answered.read()
    except HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            reason = "does not know this key" if key else f"needs a key: set the variable {CLIENT_KEY}"
            raise CannotRun(f"the server at {url} {reason}") from None
        if error.code == HTTPStatus.NOT_FOUND and path != "/v1/models":
            raise _NotFound from None
        raise CannotRun(f"the server at {url} answers {error.code}{_reason(error.read())}") from None
    except (OSError, HTTPException, ValueError) as error:  # ValueError: the key is not for a header
        cause = getattr(error, "reason", error)
        advice = "start one with penstock serve, or name another with --url"
        raise CannotRun(f"no server answers at {url} ({cause}): {advice}") from None
    try:
        return msgspec.json.decode(received, type=answer)
    except NO_JSON:
        raise CannotRun(f"{url} does not answer as a penstock does") from None


def _reason(body: bytes) -> str:
    """Return the message of a refusal, after a colon, if it has one."""
    try:
        return f": {msgspec.json.decode(body, type=_Refusal).error.message}"
    except NO_JSON:
        return ""


def shell_lines(agent: Agent, start: Start, more: Sequence[str], key: str) -> Iterator[str]:
    """Yield the start of an agent for a shell.  The variable of the key stands for the key."""
    if key:
        yield f"# {CLIENT_KEY} holds the key of the server"
    yield from (f"unset {name}" for name in start.removed)
    for name, value in start.environment.items():
        if not key or value != key:
            yield f"export {name}={shlex.quote(value)}"
        else:
            yield f"export {name}" if name == CLIENT_KEY else f'export {name}="${CLIENT_KEY}"'
    yield shlex.join([agent.program, *start.arguments, *more])
