"""Lines of batches take the places that others leave, and give them back between two steps of the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.dialects.named import spoken
from penstock.api.peers import Peers
from penstock.api.resources.resources import ServerParts
from penstock.api.runs.scheduler import Scheduler
from penstock.extensions.batches.answering import Answering
from penstock.extensions.batches.batch import LineAnswer
from penstock.extensions.batches.line_runs import LineRequest
from penstock.extensions.batches.places import Rule
from penstock.extensions.batches.yielding import PRIORITY, HoldLines, Yielding
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import EngineFailed, EngineOverloaded, ServerStopping
from penstock.pipeline.frames import GenerationFinished, ParsedFrame, ResolvedRequest, TokenFrame
from penstock.pipeline.halfway import handed_over
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.slots import LINES, Slots
from penstock.services.store.database import NullDatabase
from penstock.services.tools import Toolbox
from penstock.stages.optional.admit import Admit, Places
from penstock.stages.responses import responses_pipeline, text_stages
from tests.support.api_clients import wait_until
from tests.support.server import HELLO, Server, running_server, script
from tests.support.several import says, several_models
from tests.support.stepping_engine import SteppingEngine

BODY: dict[str, Any] = {"input": "Hi", "store": False}
TOKENS = len(script(HELLO).token_ids)


@dataclass
class Shift:
    """A server with lines and requests of others, which run in its process."""

    served: Server[SteppingEngine]
    slots: Slots
    yielding: Yielding
    lines: list[asyncio.Task[LineAnswer]] = field(default_factory=list)
    others: list[asyncio.Task[LineAnswer]] = field(default_factory=list)
    ends: list[GenerationFinished] = field(default_factory=list)

    @property
    def engine(self) -> SteppingEngine:
        return self.served.engine

    def begin_line(self, **fields: Any) -> asyncio.Task[LineAnswer]:
        return self._begin(self.lines, Answering(self.served.parts, self.yielding), fields)

    def begin_other(self, **fields: Any) -> asyncio.Task[LineAnswer]:
        return self._begin(self.others, Answering(self.served.parts, None), fields)

    def _begin(
        self, tasks: list[asyncio.Task[LineAnswer]], answering: Answering, fields: dict[str, Any]
    ) -> asyncio.Task[LineAnswer]:
        identity = f"batch_a:{len(tasks)}"
        body = json.dumps(BODY | fields).encode()
        asked = LineRequest(id=identity, owner="", key_name="", team="", path="/v1/responses", body=body)
        tasks.append(asyncio.create_task(answering.answer(asked)))
        return tasks[-1]

    @property
    def lines_running(self) -> int:
        return self.slots.held[LINES]

    @property
    def others_running(self) -> int:
        return self.slots.in_use - self.lines_running

    async def settle(self) -> None:
        """Wait until nothing happens before the next step."""
        state: Any = None
        for quiet in range(10_000):
            await asyncio.sleep(0)
            if quiet % 25 == 0:
                now = (self.slots.in_use, self.slots.waiting, self.engine.running, self.ended, len(self.engine.prompts))
                if now == state:
                    return
                state = now
                await asyncio.sleep(0.001)  # for threads

    @property
    def ended(self) -> int:
        return sum(task.done() for task in (*self.lines, *self.others))

    async def step(self) -> None:
        self.engine.step()
        await self.settle()

    async def finish(self) -> None:
        """Step until all have ended."""
        for _ in range(10_000):
            if self.ended == len(self.lines) + len(self.others):
                return
            await self.step()
        raise AssertionError


@asynccontextmanager
async def shift(rule: Rule, places: int = 4, **engine: Any) -> AsyncGenerator[Shift, None]:
    slots, ends = Slots(places), list[GenerationFinished]()

    async def noting(source: AsyncIterator[TokenFrame]) -> AsyncGenerator[TokenFrame, None]:
        async for frame in source:
            if isinstance(frame, GenerationFinished):
                ends.append(frame)
            yield frame

    def admitting(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        runs = pipeline.stage("persist").runs
        admit = Admit(lambda _: Places(slots), runs.is_accepted, lambda _: None)
        return pipeline.insert_before("generate", "admit", admit).insert_after("generate", "note", noting)

    async with running_server(
        SteppingEngine(script(HELLO), places=places, **engine), NullDatabase(), edit=admitting
    ) as served:
        yield Shift(served, slots, Yielding(served.scheduler, rule), ends=ends)


def text_of(answer: LineAnswer) -> tuple[Any, Any]:
    """Return the output of an answer without ids, and its usage."""
    body = json.loads(answer.body)
    assert (answer.status, body["status"]) == (200, "completed")
    return [(item["type"], item["content"]) for item in body["output"]], body["usage"]


@given(
    places=st.integers(1, 5),
    reserve=st.none() | st.integers(0, 5),
    beside=st.none() | st.integers(0, 3),
    events=st.lists(st.sampled_from(["line", "line", "other", "step", "step", "leave", "cut"]), max_size=30),
    data=st.data(),
)
async def test_others_never_wait_for_lines_and_lines_go_on_exactly(
    places: int, reserve: int | None, beside: int | None, events: list[str], data: st.DataObject
) -> None:
    rule = Rule(reserve, beside)
    async with shift(rule, places) as now:
        for event in events:
            match event:
                case "line":
                    now.begin_line()
                case "other":
                    now.begin_other()
                case "step":
                    now.engine.step()
                case "leave" | "cut" if tasks := (now.others if event == "leave" else now.lines):
                    data.draw(st.sampled_from(tasks)).cancel()
            await now.settle()
            assert not now.slots.waiting or now.others_running == places  # no line holds a place that others wait for
            assert now.lines_running <= rule.most(places, now.others_running, is_idle=True)
            assert now.slots.in_use == now.engine.running <= places
        await now.finish()
        whole, usage = text_of(await begun_alone(now))
        for task in (*now.lines, *now.others):
            if not task.cancelled():
                answered, used = text_of(task.result())
                assert (answered, used) == (whole, usage)
        assert now.slots.in_use == now.slots.waiting == now.engine.running == 0
        most = rule.most(places, 0, is_idle="line" not in events)  # others before the first line are not seen
        assert now.yielding.room() == most + max(1, most // 4)


async def begun_alone(now: Shift) -> LineAnswer:
    task = now.begin_other()
    await now.finish()
    return task.result()


async def test_paused_line_is_one_generation_for_its_client() -> None:
    async with shift(Rule(beside=0)) as now:
        line = now.begin_line(max_output_tokens=TOKENS + 5)
        await now.settle()
        for _ in range(5):
            await now.step()
        other = now.begin_other()
        await now.settle()
        assert (now.lines_running, now.others_running) == (0, 1)
        assert now.yielding.room() == 0
        await now.finish()
        [part] = now.engine.parts
        assert len(part.token_ids) == len(now.engine.prompts[0].token_ids) + 5
        assert part.facts.sampling.max_tokens == TOKENS
        assert text_of(line.result()) == text_of(other.result())
        use = line.result().use
        assert use is not None
        assert (use.output_tokens, use.cached_tokens) == (TOKENS, now.engine.cached)
        assert use.input_tokens == len(now.engine.prompts[0].token_ids)


@pytest.mark.parametrize("version", ["one", "two"])
async def test_paused_line_names_the_weights_of_its_parts(version: str) -> None:
    async with shift(Rule(beside=0)) as now:
        now.begin_line()
        await now.settle()
        for _ in range(5):
            await now.step()
        now.begin_other()
        await now.settle()
        now.engine.version = version
        await now.finish()
        parts = (WeightSpan("one", 0, 5), WeightSpan("two", 5, TOKENS))
        whole = (WeightSpan("one", 0, TOKENS),)
        assert now.ends[-1].weights == (whole if version == "one" else parts)


async def test_limit_of_tokens_holds_over_pauses() -> None:
    async with shift(Rule(beside=0)) as now:
        line = now.begin_line(max_output_tokens=16)
        await now.settle()
        for _ in range(TOKENS):
            await now.step()
            now.begin_other().cancel()
            leaving = now.begin_other()
            await now.settle()
            leaving.cancel()
            await now.settle()
        await now.finish()
        body = json.loads(line.result().body)
        assert body["usage"]["output_tokens"] == min(16, TOKENS)


UNPAUSED: list[dict[str, Any]] = [
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"seed": 5},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}},
    {"min_tokens": TOKENS},
    {"bad_words": ["no"]},
    {"vllm_xargs": {"a": 1}},
]
PAUSED: list[dict[str, Any]] = [
    {},
    {"seed": 5, "temperature": 0},
    {"top_k": 5, "min_p": 0.1, "top_p": 0.5},
    {"min_tokens": 1},
    {"logit_bias": {"5": 1.0}},
    {"stop": ["never"]},
    {"top_logprobs": 0},
]


@pytest.mark.parametrize(
    ("fields", "pauses"), [*((each, True) for each in PAUSED), *((each, False) for each in UNPAUSED)]
)
async def test_only_lines_whose_distribution_stays_the_same_pause(fields: dict[str, Any], pauses: bool) -> None:
    async with shift(Rule(beside=0)) as now:
        now.begin_line(**fields)
        await wait_until(lambda: now.engine.running == 1)  # a thread makes the prompts of some
        await now.step()
        now.begin_other()
        await now.settle()
        assert now.lines_running == (not pauses)
        await now.finish()
        for task in now.lines:
            assert task.result().status == 200


async def test_latest_line_pauses_first_and_goes_on_first() -> None:
    async with shift(Rule(reserve=0), places=3) as now:
        for _ in range(4):
            now.begin_line()
            await now.settle()
            await now.step()
        other = now.begin_other()
        await now.settle()
        assert (now.lines_running, now.others_running) == (2, 1)
        other.cancel()
        await now.settle()
        third = now.engine.prompts[2]
        [part] = now.engine.parts
        assert part.facts.response_id == third.facts.response_id
        assert len(part.token_ids) == len(third.token_ids) + 2
        await now.finish()
        assert len(now.engine.prompts) == 6  # four lines, of which one in two parts, and the other response


async def test_engine_without_places_runs_few_lines_beside_others() -> None:
    engine = SteppingEngine(script(HELLO))
    async with running_server(engine, NullDatabase()) as served:
        now = Shift(served, Slots(99), Yielding(served.scheduler, Rule(beside=1), at_once=3))
        for _ in range(5):
            now.begin_line()
        await now.settle()
        assert engine.running == 3
        await now.step()
        other = asyncio.create_task(served.post(BODY))  # a line is told from it by its origin
        await wait_until(lambda: engine.running == 2)
        while not other.done():
            await now.step()
        assert (await other)[0] == 200
        await now.finish()
        assert engine.most_running == 4


@pytest.mark.parametrize(
    ("by_priority", "setting", "own", "sent"),
    [
        (True, None, 0, PRIORITY),
        (True, 7, 0, 7),
        (True, None, 3, PRIORITY + 3),
        (False, None, 0, 0),
        (False, 7, 0, 0),
        (False, None, 3, 3),
    ],
)
async def test_lines_have_a_low_priority_at_an_engine_that_schedules_by_it(
    by_priority: bool, setting: int | None, own: int, sent: int
) -> None:
    engine = SteppingEngine(script(HELLO), schedules_by_priority=by_priority)
    async with running_server(engine, NullDatabase()) as served:
        now = Shift(served, Slots(99), Yielding(served.scheduler, Rule(), priority=setting))
        now.begin_line(priority=own)
        await now.settle()
        await now.finish()
        now.begin_other()
        await now.finish()
        assert [prompt.facts.scheduling.priority for prompt in engine.prompts] == [sent, 0]


async def test_line_tries_again_at_an_engine_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.extensions.batches.yielding.RETRY_SECONDS", 0.001)
    async with shift(Rule()) as now:
        now.engine.script = script(HELLO, refusal=EngineOverloaded("full"))
        line = now.begin_line()
        for _ in range(20):
            await now.settle()
            await asyncio.sleep(0.001)
        assert not line.done()
        now.engine.script = script(HELLO)
        await wait_until(lambda: now.engine.running == 1)
        await now.finish()
        text_of(line.result())


async def test_line_that_waits_is_left_to_others_when_the_server_stops() -> None:
    async with shift(Rule(reserve=0), places=1) as now:
        running, waiting = now.begin_line(), now.begin_line()
        await now.settle()
        assert (now.lines_running, now.yielding.room()) == (1, 0)
        now.served.scheduler.in_flight.stopping = True
        await wait_until(waiting.done)
        assert isinstance(waiting.exception(), ServerStopping)
        assert now.yielding.room() == 0
        await now.finish()
        text_of(running.result())


async def test_cancelled_response_of_a_line_stays_cancelled() -> None:
    async with shift(Rule(beside=0)) as now:
        line = now.begin_line()
        await now.settle()
        await now.step()
        [run] = now.served.scheduler.runs.running
        await now.served.scheduler.cancel(run)
        await now.settle()
        assert json.loads(line.result().body)["status"] == "cancelled"


@given(
    places=st.integers(1, 100),
    reserve=st.none() | st.integers(0, 120),
    beside=st.none() | st.integers(0, 9),
    is_idle=st.booleans(),
)
def test_rule_leaves_places_to_others(places: int, reserve: int | None, beside: int | None, *, is_idle: bool) -> None:
    rule = partial(Rule(reserve, beside).most, is_idle=is_idle)
    alone = rule(places, 0)
    assert 1 <= alone <= places
    for others in range(1, places + 2):
        most = rule(places, others)
        assert 0 <= most <= max(0, places - others)
        assert beside is None or most <= beside
        assert most <= rule(places, others - 1)


async def test_each_model_has_places_for_lines_of_its_own(tmp_path: Path) -> None:
    engines = {name: says("la " * 9, context_length=4000) for name in ("one", "two")}
    for engine in engines.values():
        engine.hold(1)
    async with several_models(tmp_path, engines) as served:
        yielding = Yielding(served.scheduler, Rule(beside=0), at_once=2)
        parts = ServerParts(served.settings, served.scheduler, Toolbox(), Peers(), dialects=spoken())
        answering = Answering(parts, yielding)
        assert (yielding.room(), yielding.room("one")) == (6, 3)
        lines = [
            asyncio.create_task(
                answering.answer(
                    LineRequest(
                        id=f"batch_a:{number}",
                        owner="",
                        key_name="",
                        team="",
                        path="/v1/responses",
                        body=json.dumps(BODY | {"model": name}).encode(),
                    )
                )
            )
            for number, name in enumerate(("one", "one", "one", "two"))
        ]
        await wait_until(lambda: [engine.running for engine in engines.values()] == [2, 1])
        assert (yielding.room(), yielding.room("one"), yielding.room("two")) == (2, 0, 2)
        other = asyncio.create_task(served.post({**BODY, "model": "one"}))
        await wait_until(lambda: [engine.running for engine in engines.values()] == [1, 1])
        for engine in engines.values():
            engine.say_all()
        assert (await other)[0] == 200
        for line in lines:
            assert (await line).status == 200
        assert {prompt.facts.model for prompt in engines["one"].prompts} == {"upstream"}


async def test_line_whose_model_goes_away_waits_again_if_it_fails(tmp_path: Path) -> None:
    """Others of its model, which go on, are none of the models that stay."""
    gone, stays = says("la", error=lambda: EngineFailed("It broke.")), says("la")
    gone.hold()
    async with several_models(tmp_path, {"gone": gone, "stays": stays}) as served:
        yielding = Yielding(served.scheduler, Rule(beside=1))
        parts = ServerParts(served.settings, served.scheduler, Toolbox(), Peers(), dialects=spoken())
        body = json.dumps(BODY | {"model": "gone"}).encode()
        asked = LineRequest("batch_a:1", owner="", key_name="", team="", path="/v1/responses", body=body)
        line = asyncio.create_task(Answering(parts, yielding).answer(asked))
        other = asyncio.create_task(served.post({**BODY, "model": "gone"}))
        await wait_until(lambda: gone.running == 2)
        models: Any = served.scheduler.engine
        models.catalogue.take({"stays": models.catalogue.all["stays"]}, {})
        assert yielding.room("stays") > 1
        gone.say_all()
        assert (await line).may_pass
        await other


async def test_lines_of_a_backend_of_texts_wait_before_their_turn() -> None:
    backend: Any = Texts()
    async with running_server(SteppingEngine(script(HELLO)), NullDatabase()) as served:
        texts = responses_pipeline(text_stages(), backend, served.scheduler.runs)
        scheduler = Scheduler(texts, backend, served.scheduler.runs, served.store)
        yielding = Yielding(scheduler, Rule(), at_once=1)
        names = yielding.edit(texts.following("normalize")).names()
        assert names[names.index("hold lines") + 1] == "parse"
        holding = HoldLines(yielding)
        held = [holding(handed_over([SimpleNamespace(facts=served_facts(str(number)))])) for number in range(2)]
        assert await anext(held[0])
        waiting = asyncio.create_task(anext(held[1]))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        await held[0].aclose()
        assert await waiting
        await held[1].aclose()


class Texts(ScriptedEngine):
    """A backend of texts."""

    async def answer(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
        async for _ in source:
            raise NotImplementedError
            yield


def served_facts(response_id: str) -> Any:
    return SimpleNamespace(response_id=response_id, model="tiny")
