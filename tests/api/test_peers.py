"""Several servers over one store: each answers for the others, and ends what a dead one has left."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from api.peers import Relayed
from api.settings import Settings
from pipeline.protocol.events import DONE, KEEP_ALIVE, Event, to_sse
from tests.building import turns, written


def settings(**options: Any) -> Settings:
    return Settings.model_validate({"engine_arguments": [], **options})


def body(events: Iterable[Event], *, silences: bool) -> bytes:
    """A stream as it goes over the wire."""
    return b"".join(KEEP_ALIVE * silences + to_sse(event) for event in events) + DONE


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """The same bytes, cut in those places."""
    places = sorted({0, *(cut % len(data) for cut in cuts), len(data)})
    return [data[start:end] for start, end in pairwise(places)]


@given(turns(), st.lists(st.integers(0), max_size=20), st.booleans())
def test_row39_only_whole_frames_are_passed_on(frames: Any, cuts: list[int], silences: bool) -> None:
    """However the bytes of a stream come, they go on as they are, never a part of a frame, and each event counts."""
    events = written(frames)
    data, relayed, passed = body(events, silences=silences), Relayed(), bytearray()
    for piece in pieces(data, cuts):
        whole = relayed.feed(piece)
        assert not whole or whole.endswith(b"\n\n")
        passed += whole
        assert relayed.last == passed.count(b"\ndata: ") - 1
        assert relayed.ended is (relayed.last == len(events) - 1)
    assert passed == data.removesuffix(DONE)


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, "http://127.0.0.1:81"),
        ({"host": "10.0.0.7"}, "http://10.0.0.7:81"),
        ({"host": "fe80::1"}, "http://[fe80::1]:81"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:81"),
        ({"host": "0.0.0.0", "store": "postgresql://db/it", "peer_url": "http://one:8000"}, "http://one:8000"),
    ],
)
def test_a_server_says_where_it_is_reached(options: dict[str, str], url: str) -> None:
    """Without a word from the operator it is where it listens, and one file of SQLite is never left by a machine."""
    assert settings(**options).reached_at(81) == url


@pytest.mark.parametrize(
    "options", [{"host": "::", "store": "postgresql://db/it"}, {"peer_url": "one:8000"}, {"peer_url": "http:///x"}]
)
def test_a_server_that_nobody_would_find_is_refused(options: dict[str, str]) -> None:
    """All addresses are none for the other servers of a PostgreSQL store, and neither is what is no URL."""
    with pytest.raises(ValidationError, match="peer_url"):
        settings(**options)
