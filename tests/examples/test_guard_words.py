from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import TokenChunk, TokenFrame
from penstock.pipeline.plugins import Edit, WrongPlugin, load
from penstock.services.engines.scripted import ScriptedEngine
from tests.examples.guard_words import Guard
from tests.support.event_streams import final, read_sse
from tests.support.fixture_cases import FEW_EXAMPLES, any_case, item_texts, response_with, text_of, unedited
from tests.support.plugins import edit_of
from tests.support.server import Server, running_server, script

SAYS = "<|channel|>analysis<|message|>A riddle.<|end|><|start|>assistant<|channel|>final<|message|>"
TELLS = f"{SAYS}The word is sword" + "fish. " + "And so on. " * 50


def installed(words: list[str]) -> Edit:
    return edit_of(load(["tests.examples.guard_words:install"], {"guard_words": {"words": words}}))


def guarded(word: str, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.replace("parse", Guard(pipeline.stage("parse"), [word]))


def never(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return guarded("\0", pipeline)


def at_e(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return guarded("e", pipeline)


def at_the(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return guarded("th", pipeline)


@FEW_EXAMPLES
@given(any_case())
def test_guard_without_a_match_changes_nothing(frames: list[TokenFrame]) -> None:
    assert response_with(frames, never) == response_with(frames, unedited)


@FEW_EXAMPLES
@given(any_case(), st.sampled_from([(at_e, "e"), (at_the, "th")]))
def test_response_ends_at_the_word(frames: list[TokenFrame], guard: tuple[Any, str]) -> None:
    install_guard, word = guard
    before, after = response_with(frames, unedited), response_with(frames, install_guard)
    assert before.usage is not None
    assert after.usage is not None
    at = next((at for at, text in enumerate(item_texts(before)) if word in text.lower()), None)
    if at is None:
        assert after == before
        return
    assert after.incomplete_details is not None
    assert (after.status, after.incomplete_details.reason) == ("incomplete", "content_filter")
    assert after.output[:at] == before.output[:at]
    *_, cut = after.output
    assert (len(after.output), getattr(cut, "status", "incomplete")) == (at + 1, "incomplete")
    assert text_of(before.output[at]).startswith(text_of(cut))
    assert word not in text_of(cut).lower()
    assert 0 < after.usage.output_tokens <= sum(len(f.token_ids) for f in frames if isinstance(f, TokenChunk))
    assert after.usage.output_tokens_details.reasoning_tokens <= after.usage.output_tokens


def test_guard_needs_words() -> None:
    with pytest.raises(WrongPlugin, match=r": \[stages.guard_words\]: words: List should have at least 1 item"):
        installed([])


async def stopped(served: Server[ScriptedEngine], answer: dict[str, Any]) -> None:
    """Check that the response and its generation ended because of the word."""
    await served.wait_until_idle()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
    assert answer["output"][1]["content"][0]["text"].startswith("The word is ")
    assert "swordfish" not in answer["output"][1]["content"][0]["text"]
    assert 10 < answer["usage"]["output_tokens"] < 40
    assert 0 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] < 10


async def test_guard_stops_the_engine(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(TELLS, endless=True, latency=0.001))
    async with running_server(engine, tmp_path, edit=installed(["Swordfish", "open sesame"])) as served:
        body = await served.stream({"input": "Hi"})
        first = final(read_sse(body))
        await stopped(served, await served.get_response(first.id))
        assert await served.replay(first.id) == body
        await stopped(served, (await served.post({"input": "Hi"}))[1])
        await stopped(served, await served.wait_for_end(await served.start_background()))
        assert engine.aborted == 3
