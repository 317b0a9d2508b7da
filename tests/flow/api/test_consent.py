"""Keys that forbid recording: at no door is a response of theirs recorded, whatever else chooses it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.api.http.api_key import digest_of, key_of
from penstock.api.http.auth import Keys
from penstock.extensions.batches.answering import Answering
from penstock.extensions.batches.line_runs import LineRequest
from penstock.extensions.batches.places import Rule
from penstock.extensions.batches.yielding import Yielding
from penstock.extensions.sign_in.claims import grant_words
from penstock.extensions.sign_in.issuers import Grant
from penstock.pipeline.core import Pipeline
from penstock.pipeline.recordings.recorder import Recorder
from penstock.pipeline.recordings.sampling import Condition
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.responses import scoring
from tests.support.api_clients import wait_until
from tests.support.server import ENDLESS, ScriptedServer, running_server, script
from tests.support.socket_client import connected

ALICE, BOB, EVE = "sk-alice-0123456789", "sk-bob-0123456789ab", "sk-eve-0123456789ab"
"""Alice may be recorded and Bob may not; the server does not know Eve."""

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
URL = "http://127.0.0.1:9"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    (tmp_path / "keys").write_text(f"{ALICE} name=alice record=yes\n{BOB} name=bob record=no\n")
    return Keys(tmp_path / "keys")


@asynccontextmanager
async def recorded(
    folder: Path, keys: Keys, condition: str = "1", engine: ScriptedEngine | None = None, **options: Any
) -> AsyncGenerator[ScriptedServer, None]:
    """A server that records what the condition and the keys allow, with log probabilities."""
    parsed = Condition.parse(condition)
    chosen = Condition(parsed.header, parsed.value, parsed.rate, keys.may_record)
    taps = Recorder(folder / "recorded", condition=chosen)

    def edit(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        return taps.tapped(scoring(pipeline, chosen.chooses))

    engine = engine or ScriptedEngine(script())
    try:
        async with running_server(engine, folder, edit=edit, keys=keys, recorded_if=chosen, **options) as served:
            yield served
    finally:
        await taps.close()


def recordings(folder: Path) -> int:
    return len(list((folder / "recorded").iterdir()))


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "x-record": "yes"}


async def over_http(served: ScriptedServer, key: str, path: str, body: dict[str, Any]) -> Any:
    async with served.client.post(f"{served.url}{path}", json=body, headers=of(key)) as answer:
        assert answer.status == 200, await answer.text()
        return json.loads(await answer.read())


async def in_background(served: ScriptedServer, key: str) -> None:
    begun = await over_http(served, key, "/v1/responses", {"input": "Hi", "background": True})

    async def has_ended() -> bool:
        async with served.client.get(f"{served.url}/v1/responses/{begun['id']}", headers=of(key)) as answer:
            return bool((await answer.json())["status"] == "completed")

    while not await has_ended():
        await wait_until(lambda: served.engine.running == 0)


async def over_a_socket(served: ScriptedServer, key: str) -> None:
    async with connected(served, headers=of(key)) as client:
        await client.create(input="Hi")


async def in_a_batch(served: ScriptedServer, key: str) -> None:
    body, path = json.dumps(CHAT).encode(), "/v1/chat/completions"
    line = LineRequest(id="batch_a:1", owner=digest_of(key), key_name="", team="", path=path, body=body)
    answer = await Answering(served.parts, Yielding(served.scheduler, Rule())).answer(line)
    assert answer.status == 200


DOORS: dict[str, Callable[[ScriptedServer, str], Awaitable[Any]]] = {
    "responses": lambda served, key: over_http(served, key, "/v1/responses", {"input": "Hi"}),
    "chat": lambda served, key: over_http(served, key, "/v1/chat/completions", CHAT),
    "messages": lambda served, key: over_http(served, key, "/v1/messages", CHAT),
    "completions": lambda served, key: over_http(served, key, "/v1/completions", {"prompt": "Hi"}),
    "background": in_background,
    "socket": over_a_socket,
    "batch": in_a_batch,
}


@pytest.mark.parametrize("condition", ["1", "x-record"])
@pytest.mark.parametrize("door", DOORS)
async def test_no_door_records_a_key_that_forbids_it(tmp_path: Path, keys: Keys, door: str, condition: str) -> None:
    async with recorded(tmp_path, keys, condition) as served:
        await DOORS[door](served, BOB)
        assert [prompt.facts.sampling.logprobs for prompt in served.engine.prompts] == [None]
        await DOORS[door](served, ALICE)
    is_chosen = condition == "1" or door != "batch"  # a line has no headers
    assert recordings(tmp_path) == is_chosen


@pytest.mark.parametrize(("key", "found"), [(ALICE, 1), (BOB, 0)])
async def test_next_server_does_not_record_what_an_earlier_one_left(
    tmp_path: Path, keys: Keys, key: str, found: int
) -> None:
    endless = ScriptedEngine(script(ENDLESS, endless=True, latency=0.01))
    async with running_server(endless, tmp_path, keys=keys, url=URL, restarts=True) as served:
        await over_http(served, key, "/v1/responses", {"input": "Hi", "background": True})
        await wait_until(lambda: endless.running)
        await served.scheduler.drain(0.1)
    async with recorded(tmp_path, keys, url=URL, restarts=True) as served:
        await wait_until(lambda: len(served.engine.prompts) == 1 and served.engine.running == 0)
    assert recordings(tmp_path) == found


def test_owners_without_a_key_may_be_recorded_if_none_is_needed(keys: Keys) -> None:
    assert [keys.may_record(digest_of(key)) for key in (ALICE, BOB, EVE)] == [True, False, False]
    assert Keys().may_record("")
    assert Keys(given=(ALICE,), operator=BOB).may_record(digest_of(BOB))


def test_key_that_is_read_again_forbids_it_from_then_on(tmp_path: Path, keys: Keys) -> None:
    (tmp_path / "keys").write_text(f"{ALICE} record=no\n")
    keys.take(keys.read())
    assert not keys.may_record(digest_of(ALICE))


def test_owner_who_signed_in_keeps_the_word(keys: Keys) -> None:
    """A response that the owner left running goes on without a token."""
    words = " ".join(grant_words(Grant(team="research", record=False)))
    assert words == "team=research record=no"
    keys.remembered = {digest_of(EVE): words}.get
    assert not keys.may_record(digest_of(EVE))
    keys.remembered = {digest_of(EVE): "team=research"}.get
    assert keys.may_record(digest_of(EVE))


@pytest.mark.parametrize("word", ["record=", "record=maybe", "record=no record=yes"])
def test_wrong_word_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="record="):
        key_of(f"{ALICE} {word}")
