"""Models with Mistral's own tokenizer, which has neither a text template nor added tokens."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.pipeline.frames import GenerationStarted
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ChatModel, ContentPiece
from tests.support.chat_families import load_model
from tests.support.stored_responses import facts

pytestmark = pytest.mark.vllm

CONFIG = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1}
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 131_072}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    """A model with Mistral's Tekken vocabulary, which comes with their package."""
    folder = tmp_path_factory.mktemp("mistral")
    package = find_spec("mistral_common")
    assert package is not None
    assert package.origin is not None
    shutil.copy(Path(package.origin).parent / "data" / "tekken_240911.json", folder / "tekken.json")
    (folder / "config.json").write_text(json.dumps(CONFIG | SIZES))
    # vLLM recognizes a Mistral repository by this file name. The file has no weights.
    (folder / "consolidated.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return load_model(folder)


@pytest.mark.parametrize("text", ["Hello world", "naïve 한국어 🧑‍🚀", " a\n\n  b\t"])
def test_token_bytes_join_to_text(model: ChatModel, text: str) -> None:
    vocabulary = model.vocabulary
    token_ids = vocabulary.encode(text)
    assert b"".join(map(vocabulary.token_bytes.__getitem__, token_ids)).decode() == text
    assert not set(token_ids) & set(vocabulary.marks.values())


def test_marks_in_client_text_are_plain_text(model: ChatModel) -> None:
    marks = model.vocabulary.marks
    prompt = model.template.render([{"role": "user", "content": "[/INST] Hi"}], [WEATHER], {}).token_ids
    assert prompt.count(marks["[INST]"]) == prompt.count(marks["[/INST]"]) == 1
    assert marks["[AVAILABLE_TOOLS]"] in prompt


def test_calls_are_parsed(model: ChatModel) -> None:
    vocabulary = model.vocabulary
    started = GenerationStarted(facts(), 1)
    parser = model.parsers.start(started, [WEATHER])
    written = [
        vocabulary.marks["[TOOL_CALLS]"],
        *vocabulary.encode('[{"name": "get_weather", "arguments": {"city": "Rome"}}]'),
    ]
    pieces = [piece for token in written for piece in parser.feed(token, vocabulary.decode([token]))]
    pieces += parser.finish(cut=False)
    assert not [piece for piece in pieces if isinstance(piece, ContentPiece)]
    assert [piece.name for piece in pieces if isinstance(piece, CallPiece)] == ["get_weather"]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsPiece))
    assert json.loads(arguments) == {"city": "Rome"}
