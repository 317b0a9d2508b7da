"""Raw prompts: the tokens of a text as a tokenizer encodes it, and constraints on what follows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher
from msgspec.structs import replace
from tokenizers.processors import TemplateProcessing

from penstock.pipeline.errors import ContextTooLong, InvalidRequest
from penstock.pipeline.frames import Prompt
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.models.harmony.vocabulary import END, START, load_encoding
from penstock.stages.models.text_pieces import PIECE_CHARACTERS
from penstock.stages.render.raw import PromptEncoder, raw_prompt
from penstock.stages.render.truncation import COUNTED
from tests.support.chat_families import fast_tokenizer
from tests.support.chat_templates import vocabulary
from tests.support.paths import TINY_QWEN
from tests.support.stored_responses import facts

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)


def rendered(text: str, encoder: PromptEncoder, *, adds_special: bool = True, **of_request: Any) -> Prompt:
    known = replace(facts(), **of_request)
    return raw_prompt(known, RawPrompt(text, adds_special=adds_special), encoder, 1_000)


def beginning_with_a_mark() -> Vocabulary:
    """The tiny Qwen's vocabulary, with a token that begins each text, as Llama has one."""
    tokenizer = fast_tokenizer(tokenizer_file=str(TINY_QWEN / "tokenizer.json"), eos_token="<|im_end|>")
    begin = ("<|endoftext|>", 0)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    return Vocabulary(tokenizer)


@pytest.mark.vllm
@given(TEXTS)
@example("<|start|>user<|message|>Hi<|end|>")
def test_text_is_spelled_by_its_tokens(text: str) -> None:
    for encoder in (load_encoding(), vocabulary()):
        assert encoder.decode(rendered(text, encoder).token_ids) == text


@pytest.mark.vllm
def test_markers_are_special_tokens() -> None:
    assert rendered("<|start|>a<|end|>", load_encoding()).token_ids == (START, 64, END)
    marks = vocabulary().marks
    assert rendered("<|im_start|>", vocabulary()).token_ids == (marks["<|im_start|>"],)


@pytest.mark.vllm
@pytest.mark.parametrize("adds", [True, False])
def test_vocabulary_adds_its_token_unless_the_client_says_no(adds: bool) -> None:
    encoder = beginning_with_a_mark()
    plain = tuple(encoder.encode("Hi"))
    assert rendered("Hi", encoder, adds_special=adds).token_ids == ((0, *plain) if adds else plain)


@pytest.mark.slow
@pytest.mark.vllm
def test_long_text_is_encoded_in_pieces() -> None:
    text = "word " * (PIECE_CHARACTERS // 4)
    for encoder in (load_encoding(), vocabulary(), beginning_with_a_mark()):
        ids = raw_prompt(facts(), RawPrompt(text), encoder, 10**7).token_ids
        assert encoder.decode(ids).removeprefix("<|endoftext|>") == text
        assert ids.count(0) <= 1


@pytest.mark.slow
def test_far_too_long_a_text_is_refused_before_it_is_encoded_whole() -> None:
    with pytest.raises(ContextTooLong) as refused:
        rendered("a " * (4 * COUNTED), load_encoding())
    assert COUNTED < refused.value.prompt_tokens < 2 * COUNTED


def test_tokens_are_passed_as_they_are() -> None:
    assert raw_prompt(facts(), RawPrompt(token_ids=(3, START, 5)), load_encoding(), 9).token_ids == (3, START, 5)


@pytest.mark.parametrize(
    "structured",
    [{"regex": "[a-z]+"}, {"choice": ["yes", "no"]}, {"json": {"type": "object"}}, {"grammar": 'start: "a" | "b"'}],
)
def test_output_is_held_to_a_constraint(structured: dict[str, Any]) -> None:
    grammar = rendered("Hi", load_encoding(), structured=structured).grammar
    assert grammar is not None
    assert LLMatcher.validate_grammar(grammar) == ""
    assert rendered("Hi", load_encoding()).grammar is None


@pytest.mark.parametrize(
    ("structured", "param"),
    [
        ({"regex": "["}, "structured_outputs.regex"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"structural_tag": {"format": {}}}, "structured_outputs.structural_tag"),
    ],
)
def test_constraint_that_cannot_be_enforced_is_refused(structured: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rendered("Hi", load_encoding(), structured=structured)
    assert refused.value.param == param
