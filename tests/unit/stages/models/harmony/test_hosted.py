"""The built-in tools as the model was taught them, word for word as in openai_harmony."""

from __future__ import annotations

from itertools import chain

import pytest
from openai_harmony import ToolNamespaceConfig

from penstock.pipeline import hosted_kinds
from penstock.pipeline.protocol.tools import (
    ANY_NAME,
    FunctionTool,
    HostedTool,
    McpTool,
    Tool,
    Toolset,
)
from penstock.stages.models.harmony.hosted import hosted_section
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.harmony import (
    conversation,
    function,
    message,
    prompt_ids,
    reference_developer,
    reference_ids,
    reference_message,
    reference_system,
)

TAUGHT = {"browser": ToolNamespaceConfig.browser(), "python": ToolNamespaceConfig.python()}
CLOCK = function("clock", None, "What time it is.")


def built_in(*kinds: str) -> list[Tool]:
    return [*chain.from_iterable(hosted_kinds.kinds()[kind].tools for kind in kinds)]


def prompt(*tools: Tool, choice: str = "auto") -> str:
    request = conversation(message("user", "?"), tools=Toolset(tuple(tools), choice))  # type: ignore[arg-type]
    return load_encoding().decode(prompt_ids(request))


KINDS: list[tuple[str, ...]] = [("browser",), ("python",), ("browser", "python"), ("python", "browser")]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("functions", [[], [CLOCK]], ids=["alone", "with functions"])
def test_built_in_tools_have_their_trained_descriptions(kinds: tuple[str, ...], functions: list[FunctionTool]) -> None:
    request = conversation(message("user", "?"), tools=[*functions, *built_in(*kinds)])
    system = reference_system("Medium", *(TAUGHT[kind] for kind in kinds))
    assert prompt_ids(request) == reference_ids(
        [system, *([reference_developer(tools=functions)] if functions else []), reference_message("user", "?")]
    )


def test_container_is_described_like_the_others() -> None:
    sections = prompt(*built_in("python", "container", "browser"), CLOCK).split("\n## ")
    assert [section.partition("\n")[0] for section in sections[1:]] == ["browser", "container", "python", "functions"]
    assert (
        sections[2]
        == """container

// Tool for running commands in a sandbox.
// What one command leaves in its files is there for the next.
namespace container {

// Runs the program `cmd[0]` with the rest of `cmd` as its arguments, and returns what it writes.
// `env` adds to its environment, and `timeout` is in milliseconds.
type exec = (_: {
cmd: string[],
workdir?: string,
env?: object,
timeout?: number,
}) => any;

} // namespace container
"""
    )


def test_hidden_built_in_tools_are_not_described() -> None:
    tools = built_in("browser", "python", "container")
    assert prompt(*tools, choice="none") == prompt()
    some = Toolset(tuple(tools), allowed=(("python", ANY_NAME),))
    assert prompt_ids(conversation(tools=some)) == prompt_ids(conversation(tools=tools))


def test_only_offered_functions_are_described() -> None:
    section = hosted_section([HostedTool("browser", "open"), HostedTool("browser", "find")], {})
    assert "type open" in section
    assert "type find" in section
    assert "type search" not in section


CHARS = {"type": "object", "properties": {"chars": {"type": "string"}}, "required": ["chars"]}


def test_tools_of_an_operators_server_are_described_in_its_words() -> None:
    tools = [
        HostedTool("python", "python", "Run it.", {"type": "object"}),
        HostedTool("container", "exec", "Run a program.", CHARS),
        HostedTool("container", "feed_chars", "Type.", CHARS),
    ]
    assert (
        hosted_section(tools, {"container": "A terminal.", "python": "Python with numpy."})
        == """# Tools

## container

// A terminal.
namespace container {

// Run a program.
type exec = (_: {
chars: string,
}) => any;

// Type.
type feed_chars = (_: {
chars: string,
}) => any;

} // namespace container

## python

Python with numpy."""
    )


def test_mcp_tools_are_namespaces() -> None:
    page = {"type": "object", "properties": {"page": {"type": "string"}}, "required": ["page"]}
    tools = Toolset(
        (
            McpTool("my.wiki-2", "page/get", "Get a page.", page),
            McpTool("my.wiki-2", "list.all", None, None, needs_approval=True),
            McpTool("docs", "read", None, {}),
            CLOCK,
        ),
        descriptions={"my.wiki-2": "The wiki\nof us."},
    )
    text = load_encoding().decode(prompt_ids(conversation(tools=tools)))
    head, declared = text.split("<|start|>developer<|message|>")
    assert head.endswith(
        "Calls to these tools must go to the commentary channel: 'functions', 'my.wiki-2', 'docs'.<|end|>"
    )
    assert (
        declared
        == """# Tools

## functions

namespace functions {

// What time it is.
type clock = () => any;

} // namespace functions

## my.wiki-2

// The wiki
// of us.
namespace my.wiki-2 {

// Get a page.
type page/get = (_: {
page: string,
}) => any;

type list.all = () => any;

} // namespace my.wiki-2

## docs

namespace docs {

type read = (_: any) => any;

} // namespace docs<|end|><|start|>assistant"""
    )
