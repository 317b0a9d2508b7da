"""Loading chat models: defaults from the model, and the operator's options."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.stages.models.chat import load
from penstock.stages.models.chat.families import Sign
from penstock.stages.models.chat.load import WrongChatOptions
from tests.support.chat_families import load_model
from tests.support.paths import TINY_QWEN

pytestmark = pytest.mark.vllm

LOG = "penstock.stages.models.chat.load"


def without_weights(folder: Path, **changed: Any) -> Path:
    """The tiny Qwen with other settings in its config."""
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY_QWEN / name, folder)
    config = json.loads((TINY_QWEN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def test_model_is_loaded_without_its_weights(tmp_path: Path) -> None:
    model = load_model(without_weights(tmp_path))
    assert model.vocabulary.decode(model.stop_token_ids) == "<|endoftext|><|im_end|>"
    prompt = model.template.render([{"role": "user", "content": "Say hello."}], [], model.variables)
    assert "Say hello." in prompt.text
    assert model.parsers.thinking == ("<think>", "</think>")
    assert not model.sees_images


def test_selected_parsers_and_reasons_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOG):
        load_model.__wrapped__()
    logged = [record.getMessage() for record in caplog.records if record.name == LOG]
    assert logged == [
        "The tool-call parser is hermes, as its template has <tool_call>",
        "The reasoning parser is qwen3, as its template has <think> and </think>",
    ]


def test_doubt_about_a_guess_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "other.jinja").write_text("{{ messages }}<tool_call><function=x><parameter=y>")
    with caplog.at_level(logging.WARNING, LOG):
        load_model(without_weights(tmp_path), chat_template=str(tmp_path / "other.jinja"))
    assert [record.getMessage() for record in caplog.records if record.name == LOG] == [
        "The tool-call parser may be wrong: the model's own template shows hermes; --tool-call-parser names it"
    ]


def test_tools_that_no_family_calls_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = without_weights(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ tools }}{{ messages }}")
    with caplog.at_level(logging.WARNING, LOG):
        load_model(folder)
    assert [record.getMessage() for record in caplog.records if record.name == LOG] == [
        "No tool-call parser: its template has tools, but shows no known way to call them; --tool-call-parser names one"
    ]


def test_parser_of_thoughts_suits_that_of_calls(tmp_path: Path, plugged: str) -> None:
    folder = without_weights(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{{ messages }}</think>{% if add_generation_prompt %}<think>{% endif %}"
    )
    assert load_model(folder).parser_names == ("think",)
    assert load_model(folder, tool_call_parser=plugged).parser_names == ("qwen3", plugged)


def test_parsers_can_be_switched_off() -> None:
    assert load_model(reasoning_parser="none", tool_call_parser="none").parsers.thinking is None


def test_guessed_parser_that_does_not_fit_is_dropped(
    tmp_path: Path, plugged: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load, "REASONING", (Sign(plugged, ("<ifm|",)),))
    folder = without_weights(tmp_path)
    (folder / "chat_template.jinja").write_text("<ifm|think>{{ messages }}")
    with caplog.at_level(logging.WARNING, LOG):
        assert load_model(folder).parsers.thinking is None
    (logged,) = [record.getMessage() for record in caplog.records if record.name == LOG]
    assert logged.startswith("No reasoning parser: plugged would fit, as its template has <ifm|, but ")


@pytest.mark.parametrize("option", ["reasoning_parser", "tool_call_parser"])
def test_unknown_parser_ends_the_start(option: str) -> None:
    with pytest.raises(WrongChatOptions, match=f"--{option.replace('_', '-')} hermez: .*there are .*qwen3"):
        load_model(**{option: "hermez"})


def test_parser_that_does_not_fit_ends_the_start(plugged: str) -> None:
    with pytest.raises(WrongChatOptions, match=r"--reasoning-parser plugged: .*tokenizer"):
        load_model(reasoning_parser=plugged)


def test_template_of_the_operator_takes_precedence(tmp_path: Path) -> None:
    source = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    (tmp_path / "other.jinja").write_text(source)
    for given in (str(tmp_path / "other.jinja"), source):
        model = load_model(chat_template=given)
        assert model.template.render([{"role": "user", "content": "Hi"}], [], {}).text == "<Hi>"
        assert model.parsers.thinking == ("<think>", "</think>")  # as the model's own template shows


def test_missing_template_ends_the_start() -> None:
    with pytest.raises(WrongChatOptions, match=r"--chat-template: .*lost\.jinja"):
        load_model(chat_template="lost.jinja")
