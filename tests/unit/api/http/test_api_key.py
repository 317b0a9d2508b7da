"""The lines of key files and of the store."""

from __future__ import annotations

import re
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.http.api_key import LEAST_LENGTH, ApiKey, key_of

KEY = "sk-alice-0123456789"
DIGEST = sha256(KEY.encode()).hexdigest()
VISIBLE = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=LEAST_LENGTH)


@given(VISIBLE.filter(lambda key: not key.startswith("sha256:")))
def test_line_with_a_key_and_line_with_its_digest_mean_the_same(key: str) -> None:
    digest = sha256(key.encode()).hexdigest()
    assert key_of(key) == key_of(f"sha256:{digest}") == key_of(f" sha256:{digest.upper()} ") == ApiKey(digest)


def test_words_of_a_line_describe_its_key() -> None:
    words = "name=alice@example.com team=lab limits=gold tools=web_search,shell expires=2027-01-31"
    key = key_of(f"{KEY}  {words}")
    tools = frozenset({"browser", "container"})
    assert key == ApiKey(
        DIGEST,
        words,
        name="alice@example.com",
        team="lab",
        limits="gold",
        tools=tools,
        expires=1801353600.0,
    )
    assert key_of(f"{KEY} models=big,Qwen/*").models == frozenset({"big", "Qwen/*"})
    assert key_of(KEY).models is None
    assert key_of(f"{KEY} tools=none").tools == frozenset()


@pytest.mark.parametrize(
    ("expires", "is_expired"),
    [("2020-01-01", True), ("2020-01-01T10:00:00Z", True), ("9020-01-01", False), ("9020-01-01T10:00:00+02:00", False)],
)
def test_key_expires_at_a_time(expires: str, is_expired: bool) -> None:
    assert key_of(f"{KEY} expires={expires}").is_expired is is_expired


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("alice", "a word after it that is none of name, team, limits, tools, models, webhook, record, expires"),
        ("owner=alice", "a word after it that is none of name, team, limits, tools, models, webhook, record, expires"),
        ("name=", "has an invalid name=: expected up to 64 letters"),
        ("name=al/ice", "has an invalid name=: expected up to 64 letters"),
        ("limits=" + "x" * 65, "has an invalid limits=: expected up to 64 letters"),
        ("tools=python,ALL", "has an invalid tools=: 'ALL' is not one of"),
        ("models=", "has an invalid models=: the name of a model cannot be empty"),
        ("models=big,,small", "has an invalid models=: the name of a model cannot be empty"),
        ("models=big\0", "has an invalid models=: 'big\\x00' has characters that cannot be printed"),
        ("models=" + "x" * 257, " is longer than 256 characters"),
        ("expires=tomorrow", "has an invalid expires=: expected a date such as 2027-01-31"),
        ("name=a name=b", "has name= twice"),
    ],
)
def test_wrong_words_are_refused_without_the_key(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        key_of(f"{KEY} {words}")
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("digest", ["", "0123", DIGEST[:-1] + "g", DIGEST + "0"])
def test_incomplete_digest_is_refused(digest: str) -> None:
    with pytest.raises(ValueError, match="has no 64 hexadecimal digits after sha256:"):
        key_of(f"sha256:{digest}")
