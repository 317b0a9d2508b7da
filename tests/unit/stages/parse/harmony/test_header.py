"""Headers and the text left in them; whole streams are in ``fixtures/harmony``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.frames import ItemDelta, TokenChunk
from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from penstock.stages.models.harmony.vocabulary import RETURN, HarmonyEncoding, load_encoding
from penstock.stages.parse.harmony.parse import HarmonyParser
from tests.support.examples import examples
from tests.support.parsed_output import parse_harmony, parse_harmony_text, turn_started

# Text in a header


@given(st.text(min_size=1, max_size=400), st.sampled_from(["", "<|channel|>final ", "<|channel|>analysis "]))
def test_text_without_its_marker_is_kept(text: str, header: str) -> None:
    encoding = load_encoding()
    words = [f"w{ord(letter):x}w" for letter in text]
    tokens = encoding.encode_markup(header) + encoding.encode(" ".join(words)) + [RETURN]
    (item,) = parse_harmony(encoding, [tokens])
    assert item.text.split() == words
    assert item.complete


def words(least: int) -> st.SearchStrategy[list[str]]:
    """No words, or at least ``least`` of them; the most are far more than a header can hold."""
    word = st.integers(0, 0xFFFF).map(lambda number: f"w{number:x}w")
    return st.one_of(st.just([]), st.lists(word, min_size=least, max_size=80))


@given(
    st.sampled_from(["", "<|start|>assistant ", "<|start|>"]),
    words(2),
    st.sampled_from(["", "<|channel|>analysis ", "<|channel|>commentary ", "<|channel|>final ", "<|channel|>"]),
    words(2),
    st.sampled_from(["", "<|constrain|>"]),
    words(1),
)
@examples(200)
def test_text_in_a_header_is_kept(
    start: str, ahead: list[str], channel: str, behind: list[str], constrain: str, content: list[str]
) -> None:
    header = f"{start}{' '.join(ahead)}{channel}{' '.join(behind)}{constrain}"
    parsed = parse_harmony_text(load_encoding(), f"{header}<|message|>{' '.join(content)}<|return|>")
    joined = "".join(item.text for item in parsed)
    assert "".join(joined.split()) == "".join([*ahead, *behind, *content])


@given(
    st.sampled_from(["analysis", "commentary", "final", "assistant", "user", "system:x", "json"]),
    st.text(min_size=1, max_size=100),
)
def test_text_may_begin_with_a_header_word(first: str, text: str) -> None:
    answer = " ".join([first, *(f"w{ord(letter):x}w" for letter in text)])
    (item,) = parse_harmony_text(load_encoding(), f"{answer}<|return|>")
    assert (item.kind, item.name, item.text) == ("Message", "final_answer", answer)


@pytest.mark.parametrize("noise", ["junk", "??", "––commentary", "analysis commentary", "–– ? 42"])
def test_single_word_in_a_header_is_noise(noise: str, encoding: HarmonyEncoding) -> None:
    parsed = parse_harmony_text(encoding, f"<|channel|>commentary {noise}<|message|>one<|end|>")
    (item,) = parsed
    assert (item.kind, item.name, item.text, item.repairs) == ("Message", "commentary", "one", ("unexpected header",))


def test_words_without_spaces_are_text(encoding: HarmonyEncoding) -> None:
    parsed = parse_harmony_text(encoding, "<|channel|>final答案是四十二<|message|>是<|return|>")
    assert [item.text for item in parsed] == ["答案是四十二 是"]


@pytest.mark.parametrize(
    "layout", ["<|channel|>commentary to={} <|constrain|>json", " to={}<|channel|>commentary json"]
)
@pytest.mark.parametrize(
    "name", ["functions." + "0123456789abcdef" * 4, "functions." + "a1" * 32, "functions." + "_7Q" * 21]
)
def test_longest_name_is_a_name(layout: str, name: str, encoding: HarmonyEncoding) -> None:
    tools = Toolset((FunctionTool(name.removeprefix("functions.")),))
    (item,) = parse_harmony_text(encoding, f"{layout.format(name)}<|message|>{{}}<|call|>", tools=tools)
    assert (item.kind, item.name, item.text) == ("FunctionCall", name.removeprefix("functions."), "{}")


@pytest.mark.parametrize("length", range(50, 64))
def test_channel_after_long_text_is_read_whole(length: int, encoding: HarmonyEncoding) -> None:
    parsed = parse_harmony_text(encoding, f"{' a' * length}<|channel|>commentary<|message|>one<|end|>")
    assert [(item.kind, item.text.strip()) for item in parsed] == [
        ("Reasoning", ("a " * length).strip()),
        ("Message", "one"),
    ]


@pytest.mark.parametrize(("text", "tokens"), [("a1" * 200, 300), ("word " * 200, 80)])
def test_header_without_end_is_streamed(text: str, tokens: int, encoding: HarmonyEncoding) -> None:
    parser = HarmonyParser(encoding, turn_started())
    frames = [frame for token in encoding.encode(text)[:tokens] for frame in list(parser.feed(TokenChunk((token,))))]
    assert len([frame for frame in frames if isinstance(frame, ItemDelta)]) > 10


# The recipient and the content type


@pytest.mark.parametrize("place", ["role", "channel"])
@pytest.mark.parametrize("content_type", ["", " json", " <|constrain|>json", "<|constrain|>json", " code"])
@pytest.mark.parametrize("channel", ["analysis", "commentary", "final"])
def test_recipient_makes_a_call(place: str, content_type: str, channel: str, encoding: HarmonyEncoding) -> None:
    recipient = " to=functions.f"
    role, behind = (recipient, "") if place == "role" else ("", recipient)
    (item,) = parse_harmony_text(encoding, f"{role}<|channel|>{channel}{behind}{content_type}<|message|>{{}}<|call|>")
    assert (item.kind, item.name, item.text, item.repairs) == ("FunctionCall", "f", "{}", ())


@pytest.mark.parametrize("place", ["<|message|>", "<|message|>text"])
def test_each_kind_of_repair_is_noted_once(place: str, encoding: HarmonyEncoding) -> None:
    markers = [200_013] * 1000
    tokens = encoding.encode_markup("<|channel|>final") + markers + encoding.encode_markup(place) + markers
    (item,) = parse_harmony(encoding, [tokens])
    assert item.repairs == ("stray marker",)


@pytest.mark.parametrize(
    "form", [" json", "  json", "<|constrain|>json", " <|constrain|>json", "<|constrain|> json", " <|constrain|> json"]
)
@pytest.mark.parametrize("ahead", ["", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"])
def test_structured_output_header_makes_a_message(ahead: str, form: str, encoding: HarmonyEncoding) -> None:
    """The word between the final channel and the JSON is the content type, not a name."""
    *_, item = parse_harmony_text(encoding, f'{ahead}<|channel|>final{form}<|message|>{{"a":1}}<|return|>')
    assert (item.kind, item.name, item.text, item.complete) == ("Message", "final_answer", '{"a":1}', True)
    assert item.repairs == ()


@pytest.mark.parametrize("name", ["analysis", "commentary", "final"])
@pytest.mark.parametrize("end", ["<|return|>", "<|end|>", "<|call|>", ""])
def test_beginning_of_a_channel_name_is_no_message(name: str, end: str, encoding: HarmonyEncoding) -> None:
    for length in range(1, len(name)):
        assert parse_harmony_text(encoding, f"<|channel|>{name[:length]}{end}") == []
