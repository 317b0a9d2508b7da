"""Yielding: lines of batches run where others leave room, and give it back within a step of the engine.

A line waits for a place in front of the engine, with its prompt made.  If others need the place, the generation ends
between two steps, and goes on later from the prompt and its tokens so far, which the engine has in its prefix cache.
The stages after it do not notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from penstock.api.resources.resources import ServerParts
from penstock.api.runs.scheduler import Scheduler
from penstock.extensions.batches.places import LinePlaces, Rule, Turn
from penstock.pipeline.core import Pipeline, Stage
from penstock.pipeline.errors import EngineOverloaded
from penstock.pipeline.frames import (
    FinishReason,
    GenerationFinished,
    GenerationStarted,
    Prompt,
    TokenFrame,
    with_facts,
)
from penstock.pipeline.halfway import handed_over
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.services.engines.engine import Prioritizing, engine_of, sampling_parameters, state_of, title_of
from penstock.services.engines.weights import joined, moved
from penstock.services.slots import Slots
from penstock.stages.optional.admit import Admit

PRIORITY = 1_000_000
"""The priority of lines at an engine that knows that it schedules by priority: the lowest numbers run first."""

RETRY_SECONDS = 1.0
"""Seconds after which a line tries again for which the engine had no room."""


class Yielding:
    """The places that lines have at the engines of a server."""

    def __init__(self, scheduler: Scheduler, rule: Rule, at_once: int = 32, priority: int | None = None) -> None:
        self._scheduler, self._rule = scheduler, rule
        self._at_once, self._priority = at_once, priority
        names = scheduler.pipeline.names()
        self._admit: Admit | None = scheduler.pipeline.stage("admit") if "admit" in names else None
        self._known: dict[object, LinePlaces] = {}
        self._edited: tuple[Pipeline[Any, Any], Pipeline[Any, Any]] | None = None
        self._pausing: set[asyncio.Task[None]] = set()
        self._present = 0

    @classmethod
    def of(cls, parts: ServerParts) -> Yielding:
        """Return the places that the settings of a server leave to lines."""
        settings = parts.settings
        at_once = max(1, settings.batch_at_once // settings.frontends)
        rule = Rule(settings.batch_reserve, settings.batch_beside)
        return cls(parts.scheduler, rule, at_once, settings.batch_priority)

    def room(self, model: str | None = None) -> int:
        """Return the number of lines that may begin now, of a model if it is given by a name that is served."""
        if model is not None:
            places = self.places(model)
            return max(0, places.room - len(places.running) - len(places.waiting))
        of_all = dict.fromkeys(map(self.places, self._scheduler.engine.models))
        return max(0, sum(places.room for places in of_all) - self._present)

    @property
    def idle_share(self) -> float:
        """The share of the places that others leave idle which lines have now, of all engines with lines."""
        used = [places for places in self._known.values() if places.running or places.waiting]
        idle = sum(max(0, places.slots.limit - places.others()) for places in used)
        return sum(len(places.running) for places in used) / idle if idle else 0.0

    @contextmanager
    def present(self) -> Iterator[None]:
        """Count a line for the length of a block, which answers it."""
        self._present += 1
        try:
            yield
        finally:
            self._present -= 1

    @asynccontextmanager
    async def passing(self) -> AsyncGenerator[None, None]:
        """Hold a place for a line that another server answers, for the length of a block."""
        places, turn = self._of_lines(None), Turn("")
        await places.enter(turn)
        try:
            yield
        finally:
            places.leave(turn)

    def edit(self, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        """Return the stages after `normalize` for a line."""
        if self._edited is None or self._edited[0] is not pipeline:
            self._edited = pipeline, self._edit(pipeline)
        return self._edited[1]

    def _edit(self, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        names = pipeline.names()
        if "generate" in names:
            generate = GenerateBehind(pipeline.stage("generate"), self)
            return pipeline.replace("generate", generate, first="admit" if "admit" in names else None)
        if "parse" in names:
            return pipeline.insert_before("parse", "hold lines", HoldLines(self))
        return pipeline

    def places(self, model: str) -> LinePlaces:
        """Return the places for lines of a model, by a name that is served."""
        engine = self._scheduler.engine
        title = title_of(engine, model)
        is_open = state_of(engine, model) == "ready"
        found = self._admit.places_of(model) if self._admit and is_open else None
        if found is None:
            return self._of_lines(title)
        slots = found.slots
        return self._of(slots, slots, lambda: slots.load.others)

    def _of_lines(self, title: str | None) -> LinePlaces:
        """Return the places of lines alone, at an engine that does not say how many it has."""
        if (known := self._known.get(title)) is not None:
            return known
        counted = title is not None and self._rule.beside is not None
        return self._of(title, Slots(self._at_once), lambda: self._others(title or "") if counted else 0)

    def _of(self, key: object, slots: Slots, others: Callable[[], int]) -> LinePlaces:
        if (known := self._known.get(key)) is None:
            in_flight = self._scheduler.in_flight
            rule = self._rule if key is slots else Rule(0, self._rule.beside)
            known = self._known[key] = LinePlaces(
                slots, rule=rule, others=others, pause=self._pause, is_stopping=lambda: in_flight.stopping
            )
        return known

    def _others(self, title: str) -> int:
        """Return the number of responses of a model that run and are no lines."""
        engine = self._scheduler.engine
        running = (run.model for run in self._scheduler.runs.running if not run.origin.line)
        return sum(model in engine.models and title_of(engine, model) == title for model in running)

    def _pause(self, places: LinePlaces, turn: Turn) -> None:
        task = asyncio.create_task(self._cancel(places, turn))
        self._pausing.add(task)
        task.add_done_callback(self._pausing.discard)

    async def _cancel(self, places: LinePlaces, turn: Turn) -> None:
        if turn in places.running:  # it may have ended by now, and another turn of its response may run
            turn.is_cancelled = await self._scheduler.engine.cancel(turn.response_id)

    def behind(self, prompt: Prompt) -> Prompt:
        """Return a prompt with the priority of lines, if its engine schedules by priority."""
        engine: object = engine_of(self._scheduler.engine, prompt.facts.model)
        priority = self._priority or 0
        if isinstance(engine, Prioritizing):
            chosen = PRIORITY if self._priority is None else self._priority
            priority = chosen if engine.schedules_by_priority else 0
        if not priority:
            return prompt
        scheduling = prompt.facts.scheduling
        return with_facts(prompt, scheduling=replace(scheduling, priority=priority + scheduling.priority))

    def most_tokens(self, prompt: Prompt) -> float:
        """Return the most tokens that an engine may write for a prompt."""
        room = engine_of(self._scheduler.engine, prompt.facts.model).context_length - len(prompt.token_ids)
        return min(prompt.facts.sampling.max_tokens or inf, room)


@dataclass(frozen=True)
class HoldLines:
    """A stage before a backend of texts: a line waits here for a place, and holds it until its turn has ended."""

    yielding: Yielding

    async def __call__(self, source: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Yield each request when there is a place for it."""
        async for request in source:
            places, turn = self.yielding.places(request.facts.model), Turn(request.facts.response_id)
            await places.enter(turn)
            try:
                yield request
            finally:
                places.leave(turn)


@dataclass(frozen=True)
class GenerateBehind:
    """The stages ``admit`` and ``generate`` for lines: a generation runs while others leave it a place."""

    generate: Stage[Prompt, TokenFrame]
    yielding: Yielding

    async def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[TokenFrame, None]:
        """Yield the tokens of each prompt as if one generation had made them."""
        async for prompt in source:
            places = self.yielding.places(prompt.facts.model)
            going = Going(self.yielding.behind(prompt), self.yielding.most_tokens(prompt))
            del prompt
            while going.goes_on:
                await places.enter(going.turn, is_first=going.has_begun)
                is_refused = False
                try:
                    async with aclosing(self.generate(handed_over([going.next_prompt()]))) as frames:
                        async for frame in frames:
                            if (passed := going.feed(frame)) is not None:
                                yield passed
                            if going.is_left:
                                break
                except EngineOverloaded:
                    is_refused = going.goes_on = True
                finally:
                    places.leave(going.turn)
                if is_refused:
                    await asyncio.sleep(RETRY_SECONDS)


def can_pause(prompt: Prompt) -> bool:
    """Return True if a generation that is cut and goes on has the same distribution as one that is not cut.

    It has if no parameter looks at the tokens so far, and if it is known by which tokens the model ends by itself.
    """
    sampling = prompt.facts.sampling
    is_unbiased = all(getattr(sampling, name) == neutral for name, neutral in _NEUTRAL.items())
    is_random = sampling.seed is not None and sampling.temperature > 0
    knows_end = bool(prompt.stop_token_ids) or sampling.ignore_eos is True
    return is_unbiased and not is_random and knows_end and prompt.grammar is None and not prompt.images


_NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bad_words": UNSET,
    "watermarking": UNSET,
    "extra_args": UNSET,
    "thinking_token_budget": UNSET,
    "prompt_logprobs": UNSET,
}
"""The sampling parameters that look at the tokens so far, or at where the prompt ends, with values that do not."""


@dataclass(eq=False)
class Going:
    """A generation, in one part or several.  ``most`` are the tokens that all parts together may have."""

    prompt: Prompt
    most: float
    turn: Turn = field(init=False)
    tokens: list[int] = field(default_factory=list)
    has_begun: bool = False
    goes_on: bool = True
    """True if another part follows."""
    is_left: bool = False
    """True if the part is over, though the engine does not end it."""
    _can_pause: bool = False
    _least: int = 0
    _parts: int = 0
    _cached: int = 0
    _seconds: float = 0.0
    _weights: tuple[WeightSpan, ...] = ()
    _before: int = 0
    """The tokens of the parts before."""

    def __post_init__(self) -> None:
        sampling = self.prompt.facts.sampling
        self._can_pause, self._least = can_pause(self.prompt), sampling.min_tokens or 0
        self.turn = Turn(self.prompt.facts.response_id, can_pause=self._can_pause and not self._least)

    def next_prompt(self) -> Prompt:
        """Return the prompt of the next part."""
        self.goes_on, self.is_left = False, False
        self._parts += 1
        self._before = len(self.tokens)
        if not self.tokens:
            return self.prompt
        given = self.prompt.facts.sampling
        left = None if given.max_tokens is None else given.max_tokens - len(self.tokens)
        prompt = with_facts(self.prompt, sampling=replace(given, max_tokens=left, min_tokens=UNSET))
        return replace(prompt, token_ids=(*self.prompt.token_ids, *self.tokens))

    def feed(self, frame: TokenFrame) -> TokenFrame | None:
        """Take a frame of a part; return that of the whole, if there is one."""
        if isinstance(frame, GenerationFinished):
            return self._finish(frame)
        if self.turn.is_asked and not self.turn.is_cancelled:
            self.goes_on = self.is_left = True
        if isinstance(frame, GenerationStarted):
            has_begun, self.has_begun = self.has_begun, True
            return None if has_begun else frame
        if not self.tokens:
            self._cached = frame.cached_tokens
        elif frame.cached_tokens:
            frame = replace(frame, cached_tokens=self._cached)
        self.tokens += frame.token_ids
        self.turn.can_pause = self._can_pause and self._least <= len(self.tokens) < self.most
        return frame

    def _finish(self, frame: GenerationFinished) -> GenerationFinished | None:
        self._seconds += frame.duration
        self._weights = joined(self._weights, moved(frame.weights, self._before))
        reason = self._own_end if self.turn.is_asked and frame.reason == "cancelled" else frame.reason
        if reason is None:
            self.goes_on = True
            return None
        if self._parts == 1:
            return replace(frame, reason=reason)
        return replace(frame, reason=reason, cached_tokens=self._cached, duration=self._seconds, weights=self._weights)

    @property
    def _own_end(self) -> FinishReason | None:
        """The reason for its end, if it had ended by itself when it was to pause."""
        if len(self.tokens) >= self.most:
            return "length"
        ends = sampling_parameters(self.prompt)["stop_token_ids"]
        return "stop" if self.tokens and self.tokens[-1] in ends else None
