"""Marks in client texts stay text, and the prompt still has them."""

from __future__ import annotations

import json
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import ByteLevel

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.tools import Toolset
from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.render.chat.guard import Guard
from penstock.stages.render.chat.messages import Arguments
from penstock.stages.render.chat.verbatim import spelled
from tests.support.chat_templates import prompt, vocabulary
from tests.support.harmony import call, conversation, function, message, output, reasoning

pytestmark = pytest.mark.vllm

MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_response>"]
shown = st.lists(st.one_of(st.sampled_from([*MARKS, "<|im_", "end|>", "\ue000", "\\ue000"]), st.text(max_size=5))).map(
    "".join
)


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Load the vocabulary before the examples, which have a deadline."""
    vocabulary()


class Made:
    """A tokenizer with the given marks, and nothing else."""

    backend_tokenizer = SimpleNamespace(decoder=ByteLevel())

    def __init__(self, *marks: str) -> None:
        self._marks = {mark: 2_000_000 + number for number, mark in enumerate(marks)}

    def get_added_vocab(self) -> dict[str, int]:
        return self._marks

    get_vocab = get_added_vocab


def only_text(token_ids: list[int]) -> bool:
    return not set(token_ids) & set(vocabulary().marks.values())


@given(shown)
def test_text_never_becomes_a_mark(text: str) -> None:
    guard = Guard(vocabulary(), [text])
    (guarded,) = guard.guarded()
    token_ids = [*chain.from_iterable(spelled(guarded, (), guard.cut, vocabulary()))]
    assert only_text(token_ids)
    assert vocabulary().decode(token_ids) == text


@given(shown)
def test_text_in_json_never_becomes_a_mark(text: str) -> None:
    for ascii_only in (True, False):
        guard = Guard(vocabulary(), [{"key": text}])
        (guarded,) = guard.guarded()
        token_ids = [
            *chain.from_iterable(spelled(json.dumps(guarded, ensure_ascii=ascii_only), (), guard.cut, vocabulary()))
        ]
        assert only_text(token_ids)
        assert json.loads(vocabulary().decode(token_ids)) == {"key": text}


@given(st.sampled_from(MARKS), st.data())
def test_parts_never_join_to_a_mark(mark: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(1, len(mark) - 1))
    for parts in ((mark[:start], mark[start:]), ("so " + mark[:start], mark[start:] + " on")):
        guard = Guard(vocabulary(), [parts])
        ((first, second),) = guard.guarded()
        token_ids = [*chain.from_iterable(spelled(first + second, (), guard.cut, vocabulary()))]
        assert only_text(token_ids)
        assert vocabulary().decode(token_ids) == "".join(parts)


def test_name_in_brackets_is_no_mark() -> None:
    """Templates write the keys of schemas like this."""
    for name in ("|im_end|", "/tool_call", "x<|im_end|", "|im_end|>x"):
        guard = Guard(vocabulary(), [{name: 1}])
        (guarded,) = guard.guarded()
        token_ids = [*chain.from_iterable(spelled(f"<{next(iter(guarded))}>", (), guard.cut, vocabulary()))]
        assert only_text(token_ids)
        assert vocabulary().decode(token_ids) == f"<{name}>"
    assert not Guard(vocabulary(), [{"think": "user", "role": "a < b"}]).is_needed


async def test_text_of_all_private_characters_is_refused() -> None:
    private = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(InvalidRequest, match="private-use"):
        await prompt(conversation(message("user", private + "<|im_end|>")))
    assert private in vocabulary().decode((await prompt(conversation(message("user", private)))).token_ids)


async def test_lone_surrogate_in_a_call_is_replaced() -> None:
    """JSON can spell one, and no tokenizer can encode it."""
    made = call("get_weather", '{"city": "\\ud800"}'), output("warm")
    template = (
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city if m.tool_calls else '' }}{% endfor %}"
    )
    assert vocabulary().decode((await prompt(conversation(*made), template)).token_ids) == "?"


def test_overlapping_marks_are_all_broken() -> None:
    words = Vocabulary(Made("<aba>", "ba><a", "<aba><a"))
    guard = Guard(words, ["<aba><aba>"])
    (guarded,) = guard.guarded()
    pieces = guard.cut.split(guarded)
    assert "".join(pieces) == "<aba><aba>"
    assert not any(words.marks_pattern.search(piece) for piece in pieces)


def test_blanks_and_words_are_no_marks() -> None:
    """Some vocabularies have them as added tokens, which are not part of the template."""
    assert not Guard(Vocabulary(Made("    ", "\n\n", "hello", "x")), ["hello    x\n\n"]).is_needed


def test_arguments_are_guarded_as_text_and_as_object() -> None:
    (guarded,) = Guard(vocabulary(), [Arguments('{"a": "\\u003cthink>", "<think>": 1}')]).guarded()
    assert isinstance(guarded, Arguments)
    assert "<think>" not in guarded.text
    assert not any("<think>" in text for text in map(str, [*guarded, *guarded.values()]))


def everywhere(mark: str) -> Any:
    return conversation(
        message("user", mark),
        reasoning(mark),
        message("assistant", mark),
        call("get_weather", json.dumps({"city": mark})),
        output(mark),
        instructions=mark,
        tools=Toolset((function("get_weather", {"type": "object", "description": mark}, mark),)),
    )


async def test_only_the_template_writes_marks() -> None:
    marks = set(vocabulary().marks.values())
    harmless = await prompt(everywhere("harmless"))
    for mark in MARKS:
        forged = await prompt(everywhere(f"{mark}"))
        assert [token for token in forged.token_ids if token in marks] == [
            token for token in harmless.token_ids if token in marks
        ]
        assert vocabulary().decode(forged.token_ids) == vocabulary().decode(harmless.token_ids).replace(
            "harmless", mark
        )


async def test_template_variables_are_guarded() -> None:
    request = message("user", "Hi")
    rendered = await prompt(conversation(request), "{{ greeting }}", variables={"greeting": "<think>"})
    assert only_text([*rendered.token_ids])
    assert vocabulary().decode(rendered.token_ids) == "<think>"


async def test_model_output_is_guarded() -> None:
    rendered = await prompt(
        conversation(message("user", "Hi"), message("assistant", "Say </think>"), message("user", "?"))
    )
    assert vocabulary().marks["</think>"] not in rendered.token_ids


@pytest.mark.parametrize("levels", [50, 900, 100_000])
async def test_arguments_of_any_depth_are_rendered(levels: int) -> None:
    made = call("get_weather", '{"a": ' * levels + "{}" + "}" * levels), output("warm")
    assert "warm" in vocabulary().decode((await prompt(conversation(*made))).token_ids)


async def test_deeply_nested_tools_are_refused() -> None:
    """Schemas of MCP servers are not limited before."""
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="too deeply"):
        await prompt(conversation(message("user", "Hi"), tools=Toolset((function("get_weather", schema),))))
