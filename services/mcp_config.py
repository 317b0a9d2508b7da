"""The configuration of MCP servers, and the secrets in it, which models and clients must not read.

The operator's servers are read from a file, in the format that most MCP clients share.

    {"mcpServers": {"files": {"command": "npx", "args": ["-y", "some-server"], "env": {"TOKEN": "${FILES_TOKEN}"}},
                    "wiki": {"url": "https://wiki.example/mcp", "headers": {"Authorization": "Bearer ${WIKI}"}}}}

``${NAME}`` is replaced from the environment, so that the file need not hold secrets.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import unquote, urlsplit

import msgspec

from penstock.pipeline.errors import CannotStart
from penstock.pipeline.logs import nearest
from penstock.pipeline.protocol.params.tools import is_web_url

HttpTransport: TypeAlias = Literal["http", "sse"]


@dataclass(frozen=True)
class StdioServer:
    """A program that runs as a child process, and communicates over its stdin and stdout."""

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None


@dataclass(frozen=True)
class HttpServer:
    """A server at a URL; with no ``transport``, it is detected on connecting."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    transport: HttpTransport | None = None


ServerConfig: TypeAlias = StdioServer | HttpServer


class WrongServers(CannotStart):
    """The file cannot be read or is invalid; the message is for the operator."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    type: Literal["stdio", "http", "streamable-http", "sse"] | None = None
    transport: Literal["stdio", "http", "streamable-http", "sse"] | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mcpServers: dict[str, msgspec.Raw]  # noqa: N815 - the key in the file


_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def read_servers(path: Path) -> dict[str, ServerConfig]:
    """Return the servers in a file by label; raise `WrongServers` if it is unreadable or invalid."""
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)  # its errors name the line
        entries = msgspec.json.decode(text, type=_File).mcpServers
    except OSError as error:
        raise WrongServers(f"--mcp-config {path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise WrongServers(f"--mcp-config {path}: {error.msg} ({place})") from None
    except (UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise WrongServers(f"--mcp-config {path}: {error}") from None
    return {label: _server(f"--mcp-config {path}: {label}", label, entry) for label, entry in entries.items()}


def _server(place: str, label: str, raw: msgspec.Raw) -> ServerConfig:
    if not _LABEL.fullmatch(label):
        raise WrongServers(f"{place}: a label has letters, digits, - and _, and begins with a letter")
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except msgspec.MsgspecError as error:
        unknown = re.search("unknown field `(.*)`", str(error))
        near = nearest(unknown[1], _Entry.__struct_fields__) if unknown else ""
        raise WrongServers(f"{place}: {error}{near}") from None
    if (entry.command is None) == (entry.url is None):
        raise WrongServers(f"{place}: it has either a command or a url")
    return _child(place, entry) if entry.command is not None else _remote(place, entry)


def _child(place: str, entry: _Entry) -> StdioServer:
    if entry.headers or (entry.type or entry.transport or "stdio") != "stdio":
        raise WrongServers(f"{place}: headers and transports other than stdio are for a url")
    args = tuple(_filled(f"{place}: args[{index}]", arg) for index, arg in enumerate(entry.args))
    env = _all_filled(f"{place}: env", entry.env)
    command = entry.command or ""
    here = Path(entry.cwd or ".") / command if os.sep in command else command
    if shutil.which(here, path=env.get("PATH")) is None:
        raise WrongServers(f"{place}: there is no program {command}")
    return StdioServer(command, args, env, entry.cwd)


def _remote(place: str, entry: _Entry) -> HttpServer:
    transport = entry.type or entry.transport
    if entry.args or entry.env or entry.cwd or transport == "stdio":
        raise WrongServers(f"{place}: args, env, cwd and stdio are for a command")
    url = _filled(f"{place}: url", entry.url or "")
    if not is_web_url(url):
        raise WrongServers(f"{place}: url: it begins with http:// or https://, and names a host")
    headers = _all_filled(f"{place}: headers", entry.headers)
    return HttpServer(url, headers, None if transport is None else "sse" if transport == "sse" else "http")


def _all_filled(place: str, texts: Mapping[str, str]) -> dict[str, str]:
    return {name: _filled(f"{place}.{name}", text) for name, text in texts.items()}


def _filled(place: str, text: str) -> str:
    """Replace each ``${NAME}`` in ``text``; raise `WrongServers` if it is not in the environment."""

    def value(match: re.Match[str]) -> str:
        if (variable := os.environ.get(match[1])) is None:
            raise WrongServers(f"{place}: there is no {match[1]} in the environment")
        return variable

    return re.sub(r"\$\{(\w+)\}", value, text)


_SHORTEST = 8
"""Minimum length of a secret in characters.  A shorter text may be part of an ordinary word."""

_PUBLIC = frozenset(
    ("accept", "accept-encoding", "accept-language", "cache-control", "content-type", "origin", "referer", "user-agent")
)

_SECRETIVE = re.compile("key|token|secret|passw|pwd|auth|credential", re.IGNORECASE)
"""Names of environment variables that hold secrets.  Other values may appear in tool results."""


class SecretMask:
    """Secrets to be removed from texts."""

    def __init__(self, secrets: Iterable[str]) -> None:
        longest_first = sorted({secret for secret in secrets if len(secret) >= _SHORTEST}, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def mask(self, text: str) -> str:
        """Return ``text`` with each secret replaced by ``[hidden]``."""
        return self._found.sub("[hidden]", text) if self._found else text


def mask_secrets(config: ServerConfig) -> SecretMask:
    """Return a mask of the secrets in a server's configuration.

    They are the header values except for well-known public headers, the password and query of the URL, and environment
    variables with a name that suggests a secret.
    """
    if isinstance(config, HttpServer):
        return SecretMask((*_of_headers(config.headers), *_of_url(config.url)))
    return SecretMask(value for name, value in config.env.items() if _SECRETIVE.search(name))


def _of_headers(headers: Mapping[str, str]) -> Iterable[str]:
    for name, value in headers.items():
        if name.lower() not in _PUBLIC:
            yield value
            yield value.partition(" ")[2]


def _of_url(url: str) -> Iterable[str]:
    parts = urlsplit(url)
    yield parts.query
    yield parts.password or ""
    yield unquote(parts.password or "")
    for pair in parts.query.split("&"):
        yield pair.partition("=")[2]
        yield unquote(pair.partition("=")[2])
