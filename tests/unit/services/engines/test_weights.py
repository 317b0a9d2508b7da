"""The versions of weights: spans over tokens, and the version that an engine has now."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.protocol.generations import WeightSpan
from penstock.services.engines.weights import LONGEST_VERSION, LatestWeights, joined, moved, spans

versions = st.lists(st.sampled_from("abc"), max_size=30)
"""The version that wrote each token of an output."""


def named(written: list[str]) -> tuple[WeightSpan, ...]:
    """Return the spans as an engine names them: it begins one where the version changes."""
    starts = [at for at, version in enumerate(written) if at == 0 or written[at - 1] != version]
    return tuple(
        WeightSpan(written[start], start, end) for start, end in zip(starts, [*starts[1:], len(written)], strict=False)
    )


@given(written=versions, tokens=st.integers(0, 40))
def test_spans_are_those_of_the_tokens_that_were_passed_on(written: list[str], tokens: int) -> None:
    assert spans(named(written), tokens) == named(written[:tokens])


@given(parts=st.lists(versions, max_size=4))
def test_spans_of_joined_outputs_are_those_of_the_whole(parts: list[list[str]]) -> None:
    whole: tuple[WeightSpan, ...] = ()
    before = 0
    for part in parts:
        whole = joined(whole, moved(named(part), before))
        before += len(part)
    assert whole == named([version for part in parts for version in part])


def test_no_span_is_no_weights() -> None:
    assert spans(None, 5) == ()
    assert spans([WeightSpan("a", -1, 3), WeightSpan("b", 3, 3)], 5) == ()


def test_engine_has_the_weights_that_it_named_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    latest = LatestWeights("The engine at gpu1")
    began = time.monotonic()
    assert latest.note((), began) is None
    assert latest.note(named(["a"]), began) is None  # the first is no change
    before = time.monotonic()
    assert latest.note(named(["a"]), began) is None
    assert caplog.messages == []
    last = latest.note(named(["a", "b"]), time.monotonic())
    assert last is not None
    assert before <= last <= time.monotonic()
    assert (latest.version, caplog.messages) == ("b", ["The engine at gpu1 writes with weights b, no longer with a"])


def test_generation_that_ends_late_does_not_bring_back_old_weights() -> None:
    latest, began = LatestWeights("The engine"), time.monotonic()
    latest.note(named(["a"]), began)
    latest.note(named(["b"]), time.monotonic())
    assert latest.note(named(["a"]), began) is None
    assert latest.version == "b"
    assert latest.note(named(["a"]), time.monotonic()) is not None
    assert latest.version == "a"


def test_long_version_is_shown_in_short() -> None:
    latest = LatestWeights("The engine", "v" * 1000)
    assert latest.shown == "v" * LONGEST_VERSION
