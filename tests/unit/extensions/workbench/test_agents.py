from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.settings.sources import CLIENT_KEY
from penstock.extensions.workbench.agents import AGENTS, NO_KEY, Served, Start
from penstock.extensions.workbench.launch import shell_lines
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "CLIENTS.md").read_text()
_, CLAUDE_CODE, CODEX, OPENCODE = re.split("\n### (?:Claude Code|Codex|opencode)\n", PAGE)
CATALOG = json.loads(re.findall(r"```json\n(.*?)```", CODEX, re.DOTALL)[0])
SETTINGS = tomllib.loads(re.findall(r"```toml\n(.*?)```", CODEX, re.DOTALL)[0])
SERVED = Served("http://127.0.0.1:8000", "openai/gpt-oss-20b", 131_072)
LOCKED = Served("https://gpu.example/llm", "tiny", 8192, "k" * 20)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


def installed(name: str) -> dict[str, str]:
    """The package of an agent that is tested, and its version."""
    file = ROOT / "tests" / "live" / name / "node" / "package.json"
    return dict(json.loads(file.read_text())["dependencies"])


def codex_settings(start: Start) -> dict[str, Any]:
    flags, values = start.arguments[::2], start.arguments[1::2]
    assert set(flags) == {"-c"}
    return tomllib.loads("\n".join(values))


def test_claude_code_gets_one_model_for_all_its_tasks() -> None:
    environment = AGENTS["claude"].start(SERVED).environment
    models = {name for name in environment if "MODEL" in name}
    assert {environment[name] for name in models} == {SERVED.model}
    assert {name.split("_")[2] for name in models if "DEFAULT" in name} == {"OPUS", "SONNET", "HAIKU", "FABLE"}
    assert environment["ANTHROPIC_BASE_URL"] == SERVED.url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == NO_KEY
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    assert AGENTS["claude"].start(LOCKED).environment["ANTHROPIC_AUTH_TOKEN"] == LOCKED.key


@pytest.mark.parametrize(("window", "output"), [(8192, 1024), (131_072, 16_384), (262_144, 32_000), (None, 32_000)])
def test_output_leaves_most_of_the_context_to_the_prompt(window: int | None, output: int) -> None:
    assert Served("http://gpu", "tiny", window).output == output


@pytest.mark.parametrize(("name", "title"), [("claude", "Claude Code"), ("codex", "Codex"), ("opencode", "opencode")])
def test_page_says_what_the_tested_release_needs(name: str, title: str) -> None:
    """`tests/live` counts the tokens, and compares them with the page."""
    agent, [(_, version)] = AGENTS[name], installed(name).items()
    assert agent.version == version
    assert re.search(rf" {agent.prompt:,}( tokens)? in {title} {version}\W", PAGE)


def test_page_has_the_variables_of_claude_code() -> None:
    start = AGENTS["claude"].start(SERVED)
    assert {*start.environment, *start.removed} <= {*re.findall(r"`([A-Z_]+)`", CLAUDE_CODE)}


def test_page_has_the_configuration_of_opencode() -> None:
    [config] = re.findall(r"```json\n(.*?)```", OPENCODE, re.DOTALL)
    made = AGENTS["opencode"].start(SERVED).environment["OPENCODE_CONFIG_CONTENT"]
    assert json.loads(config) == json.loads(made)


def test_codex_gets_the_settings_of_its_page() -> None:
    settings = codex_settings(AGENTS["codex"].start(SERVED))
    assert settings.keys() == SETTINGS.keys()
    provider = settings["model_providers"]["penstock"]
    assert provider == SETTINGS["model_providers"]["penstock"]
    assert (settings["model"], settings["model_context_window"]) == (SERVED.model, SERVED.window)


def test_codex_gets_the_catalog_of_its_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start = AGENTS["codex"].start(SERVED)
    [(path, text)] = start.files.items()
    assert codex_settings(start)["model_catalog_json"] == str(path)
    assert path.is_relative_to(tmp_path)
    [model], [documented] = json.loads(text)["models"], CATALOG["models"]
    own = {"slug": SERVED.model, "display_name": SERVED.model, "context_window": SERVED.window}
    assert model == documented | own


@pytest.mark.parametrize("name", AGENTS)
def test_unknown_context_is_in_no_setting(name: str) -> None:
    def numbers(window: int | None) -> set[str]:
        start = AGENTS[name].start(replace(SERVED, window=window))
        words = " ".join((*start.environment.values(), *start.arguments, *start.files.values()))
        return {*re.findall(r"\bnull\b|\bNone\b|\b123457\b", words)}

    assert (numbers(123_457), numbers(None)) == ({"123457"}, set())


def test_key_is_in_no_argument_and_no_file() -> None:
    for agent in AGENTS.values():
        start = agent.start(LOCKED)
        assert LOCKED.key in start.environment.values()
        assert LOCKED.key not in "".join((*start.arguments, *start.files.values()))
    assert codex_settings(AGENTS["codex"].start(LOCKED))["model_providers"]["penstock"]["env_key"] == CLIENT_KEY


def test_opencode_gets_the_model_with_its_limits() -> None:
    config = json.loads(AGENTS["opencode"].start(SERVED).environment["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["penstock"]
    assert (config["model"], provider["options"]["baseURL"]) == (f"penstock/{SERVED.model}", f"{SERVED.url}/v1")
    assert provider["models"][SERVED.model]["limit"] == {"context": SERVED.window, "output": SERVED.output}
    locked = json.loads(AGENTS["opencode"].start(LOCKED).environment["OPENCODE_CONFIG_CONTENT"])
    assert locked["provider"]["penstock"]["options"]["apiKey"] == f"{{env:{CLIENT_KEY}}}"


@given(name=st.sampled_from(sorted(AGENTS)), model=names, words=st.lists(names))
def test_printed_start_is_quoted_and_has_no_key(name: str, model: str, words: list[str]) -> None:
    agent = AGENTS[name]
    start = agent.start(replace(LOCKED, model=model))
    *settings, command = shell_lines(agent, start, words, LOCKED.key)
    assert shlex.split(command) == [agent.program, *start.arguments, *words]
    assert LOCKED.key not in "".join(settings)
    assert {line.split("=")[0].split()[1] for line in settings[1:]} == {*start.removed, *start.environment}
