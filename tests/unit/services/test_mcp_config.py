"""The file of the configured servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.services.mcp_config import HttpServer, StdioServer, WrongServers, read_servers


def config_file(folder: Path, servers: Any) -> Path:
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def test_programs_and_urls_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FILES_TOKEN", "f1")
    monkeypatch.setenv("WIKI", "w2")
    path = config_file(
        tmp_path,
        {
            "files": {"command": "npx", "args": ["-y", "it"], "env": {"TOKEN": "${FILES_TOKEN}"}, "cwd": "/srv"},
            "wiki": {"url": "https://wiki.example/mcp", "headers": {"Authorization": "Bearer ${WIKI}"}},
            "old": {"type": "sse", "url": "http://old.example:8080/events"},
            "new": {"transport": "streamable-http", "url": "http://new.example/mcp?key=${WIKI}"},
        },
    )
    assert read_servers(path) == {
        "files": StdioServer("npx", ("-y", "it"), {"TOKEN": "f1"}, "/srv"),
        "wiki": HttpServer("https://wiki.example/mcp", {"Authorization": "Bearer w2"}),
        "old": HttpServer("http://old.example:8080/events", transport="sse"),
        "new": HttpServer("http://new.example/mcp?key=w2", transport="http"),
    }
    assert "w2" not in repr(read_servers(path))
    assert "f1" not in repr(read_servers(path))


@pytest.mark.parametrize(
    ("servers", "says"),
    [
        ({"a": {"commandx": "npx"}}, "unknown field `commandx` .did you mean command"),
        ({"a": {}}, "a: it has either a command or a url"),
        ({"a": {"command": "x", "url": "http://x"}}, "a: it has either"),
        ({"a": {"command": "x", "args": "-y"}}, r"a: Expected `array`, got `str` - at `\$.args`"),
        ({"a": {"command": "x", "env": {"K": 1}}}, r"a: Expected `str`, got `int`"),
        ({"a": {"command": "x", "arguments": []}}, "a: .*`arguments`"),
        ({"a": {"command": "x", "headers": {"K": "v"}}}, "a: headers"),
        ({"a": {"command": "x", "type": "http"}}, "a: headers and transports"),
        ({"a": {"url": "http://x", "cwd": "/"}}, "a: args, env, cwd"),
        ({"a": {"url": "http://x", "type": "stdio"}}, "a: args, env, cwd and stdio"),
        ({"a": {"url": "ftp://x"}}, "a: url: it begins"),
        ({"a": {"url": "http://"}}, "a: url: it begins"),
        ({"a": {"url": "http://x", "headers": {"K": "${NOT_SET}"}}}, "a: headers.K: there is no NOT_SET"),
        ({"a": {"command": "x", "args": ["", "${NOT_SET}"]}}, r"a: args\[1\]: there is no NOT_SET"),
        ({"a b": {"command": "x"}}, "a b: a label has"),
        ({"9": {"command": "x"}}, "9: a label has"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_error_names_label_and_key(tmp_path: Path, servers: Any, says: str) -> None:
    with pytest.raises(WrongServers, match=says):
        read_servers(config_file(tmp_path, servers))


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WrongServers, match=r"none\.json: No such file"):
        read_servers(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(WrongServers, match=r"bad\.json: "):
        read_servers(tmp_path / "bad.json")
