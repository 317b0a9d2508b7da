"""Parsers of the operator's, with vLLM and without it: descriptions, functions, and plug-ins of vLLM."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import CliApp

from penstock.api.settings import Settings
from penstock.api.start.backends import stages
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.frames import ChatTurn, GenerationFinished
from penstock.pipeline.plugins import WrongPlugin
from penstock.stages.models.chat.load import ChatOptions, load_chat_model, read_config
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.registry import operator_parser
from penstock.stages.models.chat.standalone import ModelFiles, load_from_files
from tests.support import parsed_output
from tests.support.paths import TINY_QWEN
from tests.support.plugins import forget_modules

pytestmark = pytest.mark.vllm

OWN = """
from penstock.stages.models.chat.marked_calls import CallForm
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, ReasoningPiece
from penstock.stages.models.chat.thoughts import ThoughtForm

calls = CallForm(("<call>",), ("</call>",))
thoughts = ThoughtForm("<muse>", "</muse>")

class Shouting:
    def __init__(self, start):
        self.words = ""

    def feed(self, text):
        self.words += text
        *words, self.words = self.words.split(" ")
        for word in words:
            yield from self.read(word)

    def finish(self, *, cut=False):
        yield from self.read(self.words)

    def read(self, word):
        if word.startswith("?"):
            yield ReasoningPiece(word[1:])
        elif word.startswith("!"):
            yield CallPiece(word[1:])
            yield ArgumentsPiece("{}")
        else:
            yield ContentPiece(word)

class Failing(Shouting):
    def read(self, word):
        raise ZeroDivisionError(word)

class Half:
    def __init__(self, start):
        pass

    def feed(self, text):
        return ()

def needs(start, more):
    return Half(start)

def fails(start):
    return 1 / 0
"""

PLUGIN = """
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

@ToolParserManager.register_module("own_hermes")
class OwnHermes(Hermes2ProToolParser):
    pass
"""

REASONING_PLUGIN = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

@ReasoningParserManager.register_module("own_thoughts")
class OwnThoughts(DeepSeekR1ReasoningParser):
    pass
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in (("own_parsers", OWN), ("own_plugin", PLUGIN), ("own_reasoning", REASONING_PLUGIN)):
        (tmp_path / f"{name}.py").write_text(text)
    info = tmp_path / "own_parsers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parsers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.parsers]\nshouting = own_parsers:Shouting\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    forget_modules(tmp_path)


def with_vllm(**options: Any) -> ChatModel:
    return load_chat_model(read_config(str(TINY_QWEN)), ChatOptions(**options))


def without_vllm(**options: Any) -> ChatModel:
    return load_from_files(ModelFiles(str(TINY_QWEN)), ChatOptions(**options))


either = pytest.mark.parametrize("load", [with_vllm, without_vllm])
Load = Callable[..., ChatModel]


def read(model: ChatModel, text: str, turn: ChatTurn | None = None) -> list[tuple[str, str, str]]:
    started = parsed_output.turn_started(tools=parsed_output.CHAT_TOOLS, chat=turn or ChatTurn())
    end = GenerationFinished("stop", 0, 0.0)
    written = [parsed_output.token_chunks(model.vocabulary.encode(text), size) for size in (1, 3, 1000)]
    first, *others = (
        parsed_output.items_in_brief(
            parsed_output.parsed_items(parsed_output.parse_chat_frames(model, [started, *chunks, end]))
        )
        for chunks in written
    )
    assert others == [first, first]
    return first


CALL = '<call>{"name": "get_weather", "arguments": {"city": "Paris"}}</call>'
PARIS = ("FunctionCall", "get_weather", '{"city": "Paris"}')


@either
@pytest.mark.parametrize("form", ["own_parsers.py:calls", "own_parsers:calls"])
def test_description_of_calls_reads_them(here: Path, load: Load, form: str) -> None:
    model = load(tool_call_parser=form)
    thought = ("Reasoning", "", "Hm")
    assert read(model, f"Hm</think>I look.{CALL}") == [thought, ("Message", "", "I look."), PARIS]
    assert model.parser_names == ("qwen3", form)
    assert model.parsers.calls([], parallel=True) is None
    listed = '[{"name": "get_weather", "parameters": {"city": "Paris"}}]'
    assert read(model, f"Hm</think>{listed}", ChatTurn(calls="list")) == [thought, PARIS]


@either
def test_description_of_thoughts_reads_them(here: Path, load: Load) -> None:
    model = load(reasoning_parser="own_parsers.py:thoughts", tool_call_parser="own_parsers.py:calls")
    assert read(model, f"<muse>Hm <call>.</muse>Yes.{CALL}") == [
        ("Reasoning", "", "Hm <call>."),
        ("Message", "", "Yes."),
        PARIS,
    ]
    assert read(model, f"Yes.{CALL}", ChatTurn(continues=True)) == [("Message", "", "Yes."), PARIS]
    assert model.parsers.thinking == ("<muse>", "</muse>")


@either
def test_function_reads_a_whole_output(here: Path, load: Load) -> None:
    model = load(reasoning_parser="shouting", tool_call_parser="shouting")
    assert read(model, "?Hm Yes !get_time") == [
        ("Reasoning", "", "Hm"),
        ("Message", "", "Yes"),
        ("FunctionCall", "get_time", "{}"),
    ]


@either
def test_parser_that_fails_leaves_text(here: Path, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    model = load(reasoning_parser="none", tool_call_parser="own_parsers.py:Failing")
    with caplog.at_level(logging.WARNING):
        assert [item[0] for item in read(model, "Yes and no")] == ["Message"]
    assert "own_parsers.py:Failing failed" in caplog.text


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own_parsers.py", "name its function, too: own_parsers.py:needs or own_parsers.py:fails"),
        ("own_parsers.py:form", "own_parsers.py has no function form"),
        ("absent.py:calls", "there is no file absent.py"),
        ("absent:calls", "there is no module absent"),
        ("own_parsers.py:needs", "it takes one argument, the OutputStart"),
        ("own_parsers.py:fails", "it raised ZeroDivisionError: division by zero"),
        ("own_parsers.py:Half", "the method finish of Half is missing: write it as `def finish"),
    ],
)
@pytest.mark.parametrize("option", ["reasoning_parser", "tool_call_parser"])
def test_wrong_parser_ends_the_start_with_one_sentence(here: Path, option: str, name: str, problem: str) -> None:
    flag = f"--{option.replace('_', '-')}"
    for start in (
        lambda: without_vllm(**{option: name}),
        lambda: stages(CliApp.run(Settings, cli_args=["tiny", flag, name]), None),
    ):
        with pytest.raises(WrongPlugin) as wrong:
            start()
        assert str(wrong.value).startswith(f"{flag} {name}: ")
        assert problem in str(wrong.value)


def test_other_names_are_not_the_operators(here: Path) -> None:
    assert operator_parser("hermes", "--tool-call-parser") is None
    assert operator_parser("shouting", "--tool-call-parser") is not None


def test_calls_after_thoughts_of_ones_own_are_not_read_by_vllm(here: Path, plugged: str) -> None:
    with pytest.raises(CannotStart, match=r"own_parsers.py:thoughts is not vLLM's, .*: plugged is vLLM's"):
        with_vllm(reasoning_parser="own_parsers.py:thoughts", tool_call_parser=plugged)


@pytest.fixture
def registered() -> Iterator[None]:
    from vllm.reasoning import ReasoningParserManager  # noqa: PLC0415 - takes seconds
    from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415 - takes seconds

    yield
    for known in (
        *(ReasoningParserManager.reasoning_parsers, ReasoningParserManager.lazy_parsers),
        *(ToolParserManager.tool_parsers, ToolParserManager.lazy_parsers),
    ):
        known.pop("own_thoughts", None)
        known.pop("own_hermes", None)


@pytest.mark.usefixtures("registered")
def test_plugins_of_vllm_register_parsers(here: Path) -> None:
    model = with_vllm(
        reasoning_parser_plugin="own_reasoning.py",
        tool_parser_plugin="own_plugin.py",
        reasoning_parser="own_thoughts",
        tool_call_parser="own_hermes",
    )
    call = CALL.replace("call>", "tool_call>")
    assert read(model, f"Hm</think>{call}") == [("Reasoning", "", "Hm"), PARIS]


@pytest.mark.parametrize("option", ["reasoning_parser_plugin", "tool_parser_plugin"])
def test_plugin_that_is_missing_ends_the_start(here: Path, option: str) -> None:
    with pytest.raises(WrongPlugin, match=f"--{option.replace('_', '-')} absent: there is no module absent"):
        with_vllm(**{option: "absent"})
    with pytest.raises(CannotStart, match="registers its parser with vLLM: pip install 'vllm"):
        without_vllm(**{option: "own_plugin"})
