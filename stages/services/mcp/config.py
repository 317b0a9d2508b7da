"""Read the operator's MCP servers from a file, in the format that most MCP clients share.

    {"mcpServers": {"files": {"command": "npx", "args": ["-y", "some-server"], "env": {"TOKEN": "${FILES_TOKEN}"}},
                    "wiki": {"url": "https://wiki.example/mcp", "headers": {"Authorization": "Bearer ${WIKI}"}}}}

``${NAME}`` is replaced from the environment, so that the file need not hold secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from penstock.pipeline.protocol.params.mcp import is_web_url

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


class WrongServers(ValueError):
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
        entries = msgspec.json.decode(path.read_bytes(), type=_File).mcpServers
    except OSError as error:
        raise WrongServers(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise WrongServers(f"{path}: {error}") from None
    return {label: _server(f"{path}: {label}", label, entry) for label, entry in entries.items()}


def _server(place: str, label: str, raw: msgspec.Raw) -> ServerConfig:
    if not _LABEL.fullmatch(label):
        raise WrongServers(f"{place}: a label has letters, digits, - and _, and begins with a letter")
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except msgspec.MsgspecError as error:
        raise WrongServers(f"{place}: {error}") from None
    if (entry.command is None) == (entry.url is None):
        raise WrongServers(f"{place}: it has either a command or a url")
    return _child(place, entry) if entry.command is not None else _remote(place, entry)


def _child(place: str, entry: _Entry) -> StdioServer:
    if entry.headers or (entry.type or entry.transport or "stdio") != "stdio":
        raise WrongServers(f"{place}: headers and transports other than stdio are for a url")
    args = tuple(_filled(f"{place}: args[{index}]", arg) for index, arg in enumerate(entry.args))
    return StdioServer(entry.command or "", args, _all_filled(f"{place}: env", entry.env), entry.cwd)


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
