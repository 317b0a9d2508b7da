"""Models of recordings."""

from __future__ import annotations

from penstock.api.cli.recorded_model import model_of
from penstock.pipeline.recordings.format import FORMAT, Header


def test_options_of_another_version_are_named() -> None:
    model = model_of(Header(FORMAT, encoding="chat", source="somewhere", options={"bogus": 1, "absent": 2}))
    assert model.spelling is None
    assert model.missing == "this version does not know its options absent, bogus"
