"""Thoughts that come back sealed: opened if they are ours, refused if they were changed, and else left out."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.core import source_of
from penstock.pipeline.errors import InvalidEncryptedContent, InvalidRequest
from penstock.pipeline.frames import ResolvedRequest, TokenIds
from penstock.pipeline.protocol.items import Item, Reasoning, ReasoningText, SummaryText
from penstock.pipeline.protocol.params.request import Envelope
from penstock.pipeline.protocol.params.validation import read_request
from penstock.services.engines.engine import reads_tokens
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.sealing import MOST_BYTES, SealedItem, SealedReasoning, SealedSummary, Sealer
from penstock.services.store.store import Store, StoredResponse
from penstock.stages.normalize.normalize import normalizing
from penstock.stages.normalize.recall import Recall, any_writer

OWNER = "owner"
SEALER = Sealer()
THOUGHT = SealedReasoning("I see.", (5, 200_000))
FOREIGN = "gAAAAABfrom-another-maker"
SUMMARY = [{"type": "summary_text", "text": "Seen."}]


def sealed(thought: SealedReasoning | SealedSummary = THOUGHT, owner: str = OWNER) -> str:
    return SEALER.seal(thought, owner)


def carried(encrypted_content: str | None, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "encrypted_content": encrypted_content, **fields}


async def normalize(
    store: Store, *sent: Any, suffix: str = "1", reads: Callable[[str, str], bool] = any_writer, **body: Any
) -> ResolvedRequest:
    stage = normalizing(Recall(store=store, models=("gpt-oss-20b",), reads=reads, sealer=SEALER, draw=lambda: suffix))
    request = read_request(json.dumps({"input": sent, **body}).encode(), Envelope(OWNER))
    async with aclosing(stage(source_of([request]))) as resolved:
        return await anext(resolved)


def texts(*thoughts: Item) -> list[str]:
    return [thought.text for thought in thoughts if isinstance(thought, Reasoning)]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"id": "rs_a"},
        {"summary": SUMMARY},
        {"content": None},
        {"content": [{"type": "reasoning_text", "text": "No."}]},
    ],
)
async def test_sealed_thought_has_its_text_and_tokens(store: Store, more: dict[str, Any]) -> None:
    resolved = await normalize(store, carried(sealed(), **more))
    (item,) = resolved.facts.input
    assert isinstance(item, Reasoning)
    assert item.content == (ReasoningText("I see."),)
    assert dict(resolved.tokens) == {item.id: (5, 200_000)}


@pytest.mark.parametrize(("writer", "is_read"), [("gpt-oss-20b", True), ("another", False), ("", True)])
async def test_tokens_are_read_by_their_writer_alone(store: Store, writer: str, is_read: bool) -> None:
    """An older release sealed no writer."""
    before = (SealedItem("ci_a", (1, 2), "42"),)
    thought = SealedReasoning("I see.", (5,), before, writer)
    engine = ScriptedEngine(models=("gpt-oss-20b", "adapter"))
    resolved = await normalize(store, carried(sealed(thought), id="rs_a"), reads=partial(reads_tokens, engine))
    assert dict(resolved.tokens) == ({"ci_a": (1, 2), "rs_a": (5,)} if is_read else {})
    assert (texts(*resolved.facts.input), dict(resolved.results)) == (["I see."], {"ci_a": "42"})


async def test_thought_without_tokens_has_its_text(store: Store) -> None:
    resolved = await normalize(store, carried(sealed(SealedReasoning("I see"))))
    assert (texts(*resolved.facts.input), dict(resolved.tokens)) == (["I see"], {})


async def test_items_before_a_thought_have_what_they_do_not_show(store: Store) -> None:
    before = (SealedItem("ci_a", (1, 2), "42"), SealedItem("msg_a", (3,)), SealedItem("ws_a", (), ""))
    resolved = await normalize(store, carried(sealed(SealedReasoning("I see.", (5,), before)), id="rs_a"))
    assert dict(resolved.tokens) == {"ci_a": (1, 2), "msg_a": (3,), "rs_a": (5,)}
    assert dict(resolved.results) == {"ci_a": "42", "ws_a": ""}


async def test_foreign_thoughts_are_read_from_what_is_plain(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    plain = [{"type": "reasoning_text", "text": "Plain."}]
    with caplog.at_level(logging.INFO):
        resolved = await normalize(
            store, carried(FOREIGN, summary=SUMMARY), carried(FOREIGN, content=plain), carried(FOREIGN)
        )
    assert texts(*resolved.facts.input) == ["Seen.", "Plain.", ""]
    assert all(item.encrypted_content is UNSET for item in resolved.facts.input if isinstance(item, Reasoning))
    (record,) = caplog.records
    assert "3 reasoning items" in record.getMessage()
    assert FOREIGN not in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        sealed()[:-5],
        sealed(owner="another"),
        Sealer().seal(THOUGHT, OWNER),
        sealed(SealedSummary("a")),
        "pst1.",
        "pst1.é",
    ],
    ids=["truncated", "another owner's", "another server's", "a summary", "empty", "no base64"],
)
async def test_thought_that_does_not_open_is_refused(store: Store, text: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidEncryptedContent) as refused:
        await normalize(store, {"role": "user", "content": "Hi"}, carried(text))
    assert (refused.value.code, refused.value.param) == ("invalid_encrypted_content", "input[1].encrypted_content")
    assert text[5:] not in refused.value.message or text == "pst1."
    assert not caplog.records


async def test_thoughts_of_a_request_have_a_bound(store: Store) -> None:
    """A short text may hold a long thought, and a request may repeat it."""
    length = 2**22
    long = carried(sealed(SealedReasoning("a" * length)))
    most = MOST_BYTES // length
    assert len(json.dumps(long)) < length // 100
    assert len((await normalize(store, *[long] * most)).facts.input) == most
    with pytest.raises(InvalidRequest, match="too long") as refused:
        await normalize(store, *[long] * (most + 1))
    assert refused.value.param == "input"


async def store_thought(store: Store, text: str, tokens: dict[str, TokenIds]) -> str:
    """Store a response that has read a sealed thought; return its id."""
    resolved = await normalize(store, {"role": "user", "content": "Hi"}, suffix="0")
    thought = Reasoning("rs_kept", (SummaryText("Seen."),), encrypted_content=text)
    ended = replace(resolved.facts.response, status="completed", output=(thought,))
    store.begin(StoredResponse(ended, resolved.facts.input, resolved.facts.origin))
    await store.end(StoredResponse(ended, resolved.facts.input, resolved.facts.origin, tokens), None)
    return ended.id


@pytest.mark.parametrize(
    ("text", "tokens", "read", "known", "read_by_reference"),
    [
        (sealed(), {}, "I see.", (5, 200_000), "I see."),
        (sealed(), {"rs_kept": (7,)}, "Seen.", (7,), "I see."),
        (sealed(owner="another"), {}, "Seen.", None, "Seen."),
        (FOREIGN, {}, "Seen.", None, "Seen."),
    ],
    ids=["sent sealed", "tokens are stored", "key is gone", "foreign"],
)
async def test_stored_thoughts_are_opened_if_possible(
    store: Store, text: str, tokens: dict[str, TokenIds], read: str, known: TokenIds | None, read_by_reference: str
) -> None:
    previous = await store_thought(store, text, tokens)
    resolved = await normalize(store, {"role": "user", "content": "And?"}, previous_response_id=previous)
    assert (texts(*resolved.history), resolved.tokens.get("rs_kept")) == ([read], known)
    referring = await normalize(store, {"type": "item_reference", "id": "rs_kept"}, suffix="2")
    assert texts(*referring.facts.input) == [read_by_reference]
