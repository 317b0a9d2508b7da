"""Names of files: what is left of any name can be shown, saved in a folder, and stored."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.file_names import LONGEST_NAME, is_invisible, plain_name

UNSEEN = (
    "\u061c\u200b\u200d\u200e\u200f\u2028\u202e\u2060\u2066\ufeff\u00ad\u034f\u115f\u3164\ufe0f\U000e0041\U000e0101"
)
"""Marks of the direction, joiners, fillers, selectors, tags."""


@pytest.mark.parametrize("character", UNSEEN)
def test_characters_that_are_not_seen_are_replaced(character: str) -> None:
    assert plain_name(f"in{character}voice.pdf") == "in_voice.pdf"


@given(st.text(st.characters() | st.sampled_from(f"/\\.\0\n\ud800 {UNSEEN}"), max_size=400))
def test_any_name_becomes_one_of_a_file(given_name: str) -> None:
    name = plain_name(given_name)
    assert 0 < len(name.encode()) <= LONGEST_NAME
    assert not {"/", "\\"} & set(name)
    assert name.strip(". ")
    assert not any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in name)
    assert not any(map(is_invisible, name))
    assert name.encode()
    assert plain_name(name) == name


@pytest.mark.parametrize(
    ("given_name", "name"),
    [
        ("report.pdf", "report.pdf"),
        ("/srv/../etc/passwd", "passwd"),
        ("C:\\cv.docx", "cv.docx"),
        ("folder/", "folder"),
        ("", "file"),
        ("../..", "file"),
        ("x" * 500 + ".pdf", "x" * 196 + ".pdf"),
        ("x" * 500 + "." + "y" * 100, "x" * 200),
        ("é" * 300 + ".pdf", "é" * 98 + ".pdf"),
        ("日" * 100, "日" * 66),
    ],
)
def test_name_keeps_its_last_part_and_its_ending(given_name: str, name: str) -> None:
    assert plain_name(given_name) == name
