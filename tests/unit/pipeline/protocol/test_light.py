"""Which items are light enough for the event loop."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.light import FEW_ITEMS, SHORT_CHARACTERS, are_light
from tests.support.harmony import call, message, output, reasoning

TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(["a" * SHORT_CHARACTERS, "b" * (SHORT_CHARACTERS // 2)]))
PLAIN = st.one_of(
    st.builds(lambda texts: message("user", *texts), st.lists(TEXTS, min_size=1, max_size=3)),
    st.builds(lambda text: message("assistant", text), TEXTS),
    st.builds(reasoning, TEXTS),
)
LIGHT = [message("user", "Hi"), message("assistant", "Hello")]


@given(st.lists(PLAIN, max_size=FEW_ITEMS + 2), st.none() | TEXTS)
def test_few_short_texts_are_light(given_items: list[Any], instructions: str | None) -> None:
    characters = sum(len(item.text) for item in given_items) + len(instructions or "")
    assert are_light(given_items, instructions) == (len(given_items) <= FEW_ITEMS and characters <= SHORT_CHARACTERS)


def test_what_is_not_text_alone_is_not_light() -> None:
    image = items.InputImage(image_url="data:image/png;base64,AA==")
    answer = items.OutputText("Hi", logprobs=(items.Logprob("Hi", (72, 105), -0.1),))
    cited = items.OutputText("Hi", annotations=({"type": "url_citation"},))
    others: list[Any] = [
        call("f", "{}"),
        output("1"),
        *(msgspec.structs.replace(LIGHT[0], content=(part,)) for part in (image, items.InputFile(), answer, cited)),
        msgspec.structs.replace(LIGHT[0], content=(items.InputText("a"),) * (FEW_ITEMS + 1)),
        msgspec.structs.replace(reasoning("Hm"), encrypted_content="a" * SHORT_CHARACTERS),
    ]
    assert are_light(LIGHT)
    for other in others:
        assert not are_light([*LIGHT, other]), other
