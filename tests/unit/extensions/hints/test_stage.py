"""The stage ``hint`` in a server: what requests, ends and deletions tell the engine, which may fail at it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.api.settings import Settings
from penstock.extensions.batches.answering import Answering
from penstock.extensions.batches.line_runs import LineRequest
from penstock.extensions.batches.places import Rule
from penstock.extensions.batches.yielding import Yielding
from penstock.extensions.hints.stage import install
from penstock.pipeline import metrics
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import CannotStart, EngineOverloaded
from penstock.pipeline.frames import Origin, Scheduling
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.server import pipeline
from penstock.services.engines.affinity import hinted_session
from penstock.services.engines.engine import CacheHint
from penstock.services.engines.http_endpoints import LET_GO
from penstock.services.engines.replicas import Replica, Replicas
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.fake_vllm import FakeVllm, arguments_of, running_fakes
from tests.support.paths import HARMONY
from tests.support.server import WEATHER, Server, completed_response, running_server, script
from tests.support.stored_responses import facts

pytestmark = pytest.mark.io

CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Rome"}<|call|>'


@dataclass
class Hearing(ScriptedEngine):
    """An engine that keeps the hints that it hears, or fails at them."""

    heard: list[CacheHint] = field(default_factory=list)
    fails: bool = False

    def hint(self, hint: CacheHint) -> bool:
        if self.fails:
            raise RuntimeError("no hints today")
        self.heard.append(hint)
        return True

    def actions(self) -> list[tuple[str, str]]:
        """The actions since the last call, each with its response."""
        heard, self.heard = self.heard, []
        return [(hint.action, hint.response_id) for hint in heard]


def counted() -> Counter[tuple[str, str]]:
    """Return the hints that were counted, by their labels."""
    samples = (sample for family in metrics.HINTS.collect() for sample in family.samples)
    return Counter(
        {
            (sample.labels["action"], sample.labels["outcome"]): int(sample.value)
            for sample in samples
            if sample.name.endswith("_total")
        }
    )


async def called(served: Server[Hearing], **body: Any) -> str:
    served.engine.script = script(CALL)
    answer = await completed_response(served, tools=[WEATHER], **body)
    served.engine.script = script()
    return str(answer["id"])


async def test_call_and_its_output_are_one_conversation(tmp_path: Path) -> None:
    async with running_server(Hearing(), tmp_path, edit=install) as served:
        first = await called(served, input="Weather?")
        [kept] = served.engine.heard
        assert kept.session == hinted_session(served.engine.prompts[-1].facts)
        assert kept.tokens > len(served.engine.prompts[-1].token_ids)
        assert kept.seconds < 60
        assert served.engine.actions() == [("keep", first)]
        output = {"type": "function_call_output", "call_id": "", "output": "sun"}
        output["call_id"] = (await served.get_response(first))["output"][-1]["call_id"]
        second = await completed_response(served, previous_response_id=first, input=[output])
        fetched, again = served.engine.heard
        assert (fetched.action, fetched.session, fetched.response_id) == ("fetch", kept.session, first)
        assert (again.action, again.session, again.response_id) == ("keep", kept.session, second["id"])
        assert again.seconds > kept.seconds
    assert served.engine.running == 0


async def test_deletion_of_the_latest_response_or_of_the_conversation_lets_it_go(tmp_path: Path) -> None:
    async with running_server(Hearing(), tmp_path, edit=install) as served:
        first = (await completed_response(served, input="One"))["id"]
        second = (await completed_response(served, input="Two", previous_response_id=first))["id"]
        served.engine.actions()
        await served.delete(f"/v1/responses/{first}")
        assert served.engine.actions() == []
        await served.delete(f"/v1/responses/{second}")
        assert served.engine.actions() == [("let_go", second)]
        _, conversation = await served.post({}, "/v1/conversations")
        third = (await completed_response(served, input="Three", conversation=conversation["id"]))["id"]
        served.engine.actions()
        await served.delete(f"/v1/conversations/{conversation['id']}")
        assert served.engine.actions() == [("let_go", third)]


async def test_turn_that_was_refused_and_sent_again_is_no_other_conversation(tmp_path: Path) -> None:
    async with running_server(Hearing(), tmp_path, edit=install) as served:
        latest: dict[str, Any] = {}
        for text in ("One", "Two"):
            served.engine.script = script(refusal=EngineOverloaded("The engine is overloaded."))
            status, _ = await served.post({"input": text, **latest})
            assert status == 503
            served.engine.script = script()
            latest = {"previous_response_id": (await completed_response(served, input=text, **latest))["id"]}
        served.engine.actions()
        await served.delete(f"/v1/responses/{latest['previous_response_id']}")
        assert served.engine.actions() == [("let_go", latest["previous_response_id"])]


async def test_conversations_that_begin_alike_do_not_let_each_other_go(tmp_path: Path) -> None:
    async with running_server(Hearing(), tmp_path, edit=install) as served:
        first = (await completed_response(served, input="Hi" * 500))["id"]
        long = (await completed_response(served, input="Go on " * 500, previous_response_id=first))["id"]
        assert ("fetch", first) in served.engine.actions()
        other = (await completed_response(served, input="Hi" * 500))["id"]
        assert served.engine.actions() == [("fetch", long), ("keep", other)]
        await served.delete(f"/v1/responses/{other}")
        assert served.engine.actions() == []


async def test_engine_that_fails_at_hints_answers_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_server(Hearing(fails=True), tmp_path, edit=install) as served:
        for _ in range(3):
            await completed_response(served, input="Hi")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "The engine cannot take hints"
    ]


@pytest.mark.parametrize(
    ("engine", "outcome"), [(Hearing(), "heard"), (Hearing(fails=True), "unheard"), (ScriptedEngine(), "unheard")]
)
async def test_hints_are_counted_by_whether_the_engine_hears_them(
    tmp_path: Path, engine: ScriptedEngine, outcome: str
) -> None:
    before = counted()
    async with running_server(engine, tmp_path, edit=install) as served:
        first = (await completed_response(served, input="Hi"))["id"]
        await served.delete(f"/v1/responses/{first}")
    assert counted() - before == {("keep", outcome): 1, ("let_go", outcome): 1}


@pytest.mark.parametrize("scale_out", [True, False])
@pytest.mark.parametrize(("hints", "takes_hints"), [(True, True), (True, False), (False, True)])
async def test_server_over_http_hears_what_is_over_if_its_scheduler_says_so(
    hints: bool, takes_hints: bool, scale_out: bool
) -> None:
    before = counted()
    async with running_fakes(engine := FakeVllm(takes_hints=takes_hints, scale_out=scale_out)):
        settings = Settings(engine=[engine.url], store="none", sandbox=False, hints=hints)
        async with pipeline(settings) as responses:
            for text in ("a long question " * 50, "no", "no"):
                request = CreateResponse.model_validate({"input": text, "session_id": "same"})
                async with responses.open(source_of([request])) as events:
                    assert [event async for event in events]
    sessions = {headers["X-Session-ID"] for headers in engine.headers}
    assert len(sessions) == 1
    heard = [{LET_GO: [*sessions]}] if hints and takes_hints else []
    assert [given for body in engine.prompts if (given := arguments_of(body))] == heard
    assert (counted() - before)["let_go", "heard"] == len(heard)


def test_conversation_that_moves_is_over_where_it_was() -> None:
    one, two = (Replica(f"http://{name}", None) for name in "ab")  # type: ignore[arg-type]
    replicas = Replicas((one, two))
    assert replicas.place("s", one.cores[0]) == []
    assert replicas.place("s", two.cores[0]) == []
    assert replicas.place("t", one.cores[0]) == ["s"]
    assert replicas.let_go("t")
    assert not replicas.let_go("none")
    assert replicas.place("s", one.cores[0]) == ["t"]
    assert replicas.place("u", two.cores[0]) == ["s"]


def test_conversation_that_comes_back_is_not_over_where_it_was_before() -> None:
    one, two = (Replica(f"http://{name}", None) for name in "ab")  # type: ignore[arg-type]
    replicas = Replicas((one, two))
    for core in (one.cores[0], two.cores[0]):
        assert replicas.place("s", core) == []
    assert replicas.place("s", one.cores[0]) == []
    assert replicas.place("t", two.cores[0]) == ["s"]


def test_keys_have_conversations_of_their_own_and_lines_none() -> None:
    names = {
        hinted_session(facts(origin=Origin(owner=owner, line=line), scheduling=Scheduling(session="s")))
        for owner in ("", "one", "other")
        for line in ("", "line")
    }
    assert len(names) == 4


async def test_pipeline_without_tokens_stays_as_it_is_and_one_that_hides_its_engine_is_refused() -> None:
    async with pipeline(Settings(engine=[f"replay:{HARMONY / 'greeting'}"], store="none")) as responses:
        texts = responses.through("normalize")
        async with install(texts) as same:
            assert same is texts
        hidden = responses.replace("generate", responses.stage("generate").__call__)
        with pytest.raises(CannotStart, match="a plug-in has replaced it"):
            async with install(hidden):
                pass


async def test_line_of_a_batch_is_let_go_when_it_has_ended(tmp_path: Path) -> None:
    async with running_server(Hearing(script()), tmp_path, edit=install) as served:
        asked = LineRequest(
            id="batch_a:1", owner="", key_name="", team="", path="/v1/responses", body=b'{"input": "Hi"}'
        )
        answer = await Answering(served.parts, Yielding(served.scheduler, Rule())).answer(asked)
        response_id = json.loads(answer.body)["id"]
        assert served.engine.actions() == [("let_go", response_id)]
        assert hinted_session(served.engine.prompts[-1].facts) == response_id
