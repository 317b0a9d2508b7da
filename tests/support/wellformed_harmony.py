"""Well-formed output, and openai_harmony's own parser to read it with."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding


@cache
def package() -> HarmonyEncoding:
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


@st.composite
def completions(draw: st.DrawFn) -> str:
    """A turn of a few messages, each on its channel."""
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(lambda t: "<|" not in t)
    headers = [
        "<|channel|>analysis",
        "<|channel|>commentary",
        "<|channel|>final",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        " to=functions.f<|channel|>commentary json",
    ]
    messages = draw(st.lists(st.tuples(st.sampled_from(headers), text), min_size=1, max_size=5))
    return "<|end|><|start|>assistant".join(f"{header}<|message|>{text}" for header, text in messages) + "<|return|>"
