from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import TokenFrame
from penstock.pipeline.protocol.events import OutputTextDelta
from penstock.pipeline.protocol.items import Message, Reasoning
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.optional.rewrite import Rewrite
from tests.examples.redact_emails import ADDRESS, install, redacted
from tests.support import fixture_cases
from tests.support.event_streams import final, read_sse
from tests.support.server import running_server, script

SECRET = "joe.doe+x@mail.example.co.uk"
ANSWER = (
    f"<|channel|>analysis<|message|>It is {SECRET}.<|end|><|start|>assistant<|channel|>final<|message|>"
    f"Write to {SECRET}, or to no one@all.<|return|>"
)

pieces = st.one_of(
    st.sampled_from(
        [SECRET, "a@b.c", "@", ".", " ", "a", "-", "é", "。", "名前", "\n", "a@b", "@b.c", "mailto:", "a@b.c@d.e"]
    ),
    st.text(max_size=8),
)


@fixture_cases.FEW_EXAMPLES
@given(st.lists(pieces, max_size=12).map("".join).flatmap(lambda text: st.tuples(st.just(text), st.data())))
def test_chunks_do_not_change_the_redaction(drawn: tuple[str, st.DataObject]) -> None:
    text, data = drawn
    frames = fixture_cases.generation_of(f"<|channel|>final<|message|>{_harmless(text)}<|return|>")
    answer = fixture_cases.response_with(data.draw(fixture_cases.in_any_chunks(frames)), install)
    assert fixture_cases.item_texts(answer) == [redacted(_harmless(text))]


def _harmless(text: str) -> str:
    return text.replace("<", "").encode(errors="replace").decode()


def marked(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.insert_after("parse", "mark", Rewrite(_mark, held=re.compile(r"[a-z]{1,320}")))


def _mark(text: str) -> str:
    return re.sub(r"[a-z]+", "~", text)


@fixture_cases.FEW_EXAMPLES
@given(fixture_cases.any_case())
def test_messages_and_reasoning_are_redacted(frames: list[TokenFrame]) -> None:
    before, after = (
        fixture_cases.response_with(frames, fixture_cases.unedited),
        fixture_cases.response_with(frames, marked),
    )
    for old, new in zip(before.output, after.output, strict=True):
        assert type(old) is type(new)
        if isinstance(old, Message | Reasoning):
            assert fixture_cases.text_of(new) == _mark(old.text)
        else:
            assert new == old
    assert (before.status, before.usage) == (after.status, after.usage)


@fixture_cases.FEW_EXAMPLES
@given(fixture_cases.any_case())
def test_texts_without_addresses_are_unchanged(frames: list[TokenFrame]) -> None:
    before, after = (
        fixture_cases.response_with(frames, fixture_cases.unedited),
        fixture_cases.response_with(frames, install),
    )
    assert fixture_cases.item_texts(before) == fixture_cases.item_texts(after)
    assert (before.status, before.usage) == (after.status, after.usage)


def test_only_a_possible_address_is_held() -> None:
    sent = fixture_cases.events_with(
        fixture_cases.generation_of("<|channel|>final<|message|>One two three four<|return|>"), install
    )
    deltas = [event.delta for event in sent if isinstance(event, OutputTextDelta)]
    assert deltas == ["One two three ", "four"]


async def test_no_address_leaves_the_server(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(ANSWER))
    async with running_server(engine, tmp_path, edit=install) as served:
        wanted = {"input": "Hi", "enable_response_messages": True, "include": ["message.output_text.logprobs"]}
        body = await served.stream(wanted)
        first = final(read_sse(body))
        assert fixture_cases.item_texts(first) == ["It is [e-mail].", "Write to [e-mail], or to no one@all."]
        background = await served.start_background()
        assert (await served.wait_for_end(background))["status"] == "completed"
        seen = [body, await served.replay(first.id, "&starting_after=3")]
        seen += [await served.replay(background)]
        seen += [json.dumps(await served.post({"input": "And?", "previous_response_id": first.id})).encode()]
        assert not any(SECRET.encode() in answer or b"joe" in answer for answer in seen)
        prompt = load_encoding().decode(engine.prompts[-1].token_ids)
    assert "Write to [e-mail], or to no one@all." in prompt
    assert not ADDRESS.search(prompt)


@pytest.mark.parametrize("chunk_size", [1, 3, 50])
async def test_arguments_of_calls_are_unchanged(tmp_path: Path, chunk_size: int) -> None:
    """A tool needs the address."""
    call = f'<|channel|>commentary to=functions.send<|constrain|>json<|message|>{{"to":"{SECRET}"}}<|call|>'
    tool = {"type": "function", "name": "send", "parameters": {"type": "object"}, "strict": False}
    engine = ScriptedEngine(script(call, chunk_size=chunk_size))
    async with running_server(engine, tmp_path, edit=install) as served:
        answer = final(read_sse(await served.stream({"input": "Hi", "tools": [tool]})))
    assert json.loads(fixture_cases.text_of(answer.output[0])) == {"to": SECRET}
