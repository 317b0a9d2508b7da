"""The responses that this server runs: begun, followed, cancelled, and ended when the server stops.

A response runs in one of three ways.  In the foreground: in the task of the request itself, so that no token has
to pass between tasks.  In the background: queued, and limited in number.  Detached: at once, but in a task of its own,
so that it survives its client.  In all cases, `Persist` keeps the log of its events, and all other readers follow that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

from msgspec import UNSET
from msgspec.structs import replace
from opentelemetry.trace import INVALID_SPAN, Span

from penstock.api.limits.admission import Admission
from penstock.api.runs.background import BackgroundQueue, InFlight, Waiting
from penstock.api.runs.opened import Opened, ends_at_once, opened
from penstock.api.runs.recovery import UNSERVED_AFTER, OrphanRecovery
from penstock.pipeline import errors, hot_path, metrics
from penstock.pipeline.core import Pipeline
from penstock.pipeline.faults import first, log_failure
from penstock.pipeline.frames import Prompt, ResolvedRequest, with_facts
from penstock.pipeline.halfway import handed_over
from penstock.pipeline.lifecycle.rules import rule
from penstock.pipeline.plugins import Edit
from penstock.pipeline.protocol.events import ResponseEvent, TerminalEvent
from penstock.pipeline.protocol.items import AdditionalTools
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import Cause
from penstock.pipeline.tasks import MANY_VALUES, let_go, shielded
from penstock.services import tracing
from penstock.services.engines.engine import Backend, Engine, TextBackend, engine_of, reads_tokens
from penstock.services.model_names import in_words, resolved_name, served_name, usable_names
from penstock.services.runs.run import Mode, Run, RunRegistry, RunReleased
from penstock.services.runs.turns import HoldPrompts, hold_first
from penstock.services.slots import Slots
from penstock.services.store.store import Server, Store, StoredResponse
from penstock.stages.generate import Generate
from penstock.stages.normalize.frames import ModelTraits
from penstock.stages.normalize.recall import all_models, usual_traits
from penstock.stages.parse.parser import sees_tokens

logger = logging.getLogger(__name__)

_parameter = cache(metrics.PARAMETERS.labels)

UNENDED = frozenset({"queued", "in_progress"})
"""The statuses of a response that has not ended."""

CANCEL_WAIT = 1.0
"""Seconds that a cancelled response gets to end by itself."""

FIND_ATTEMPTS, FIND_PAUSE = 40, 0.25
"""The number of attempts to find a response that is between two servers, and the seconds between attempts."""

STOP_WAIT = 0.5
"""Seconds for responses to end after the engine has stopped; a response that runs a tool does not notice that."""

FINISH_WAIT = 5.0
"""Seconds for stopped responses to send and store their last events."""


@dataclass(slots=True)
class _Foreground:
    """A request that runs its response itself: its task, and the last stage of the pipeline that it reads."""

    task: asyncio.Task[Any] | None
    events: Any
    is_interrupted: bool = False

    def interrupt(self) -> None:
        """Cancel the wait for a stage; a wait for the client ends by itself and is left alone."""
        if self.task and self.events.ag_running:
            self.is_interrupted = True
            self.task.cancel()

    def has_been_interrupted(self) -> bool:
        """Return True if a `CancelledError` came from `interrupt` alone; that cancellation is then undone."""
        return self.task is not None and self.is_interrupted and not self.task.uncancel()


@dataclass(slots=True)
class _Traced:
    """A response that is traced: its request with the context of its span, that span, and its run once it has begun."""

    request: ResolvedRequest
    span: Span = INVALID_SPAN
    run: Run | None = None


def _traced(request: ResolvedRequest, mode: Mode) -> AbstractContextManager[_Traced]:
    """Trace a response for the length of a block, if responses are traced."""
    return _in_span(request, mode) if tracing.is_on() else nullcontext(_Traced(request))


@contextmanager
def _in_span(request: ResolvedRequest, mode: Mode) -> Iterator[_Traced]:
    """Trace a response; one in the background has a trace of its own, with a link to its request."""
    response, headers = request.facts.response, request.facts.scheduling.trace_headers
    attributes: tracing.Attributes = {
        "gen_ai.request.model": response.model,
        "gen_ai.response.id": response.id,
        "penstock.response.mode": mode,
    }
    parent, links = (tracing.ROOT, tracing.links_to(headers)) if mode == "background" else (None, ())
    with tracing.span("response", attributes, parent=parent, links=links) as span:
        traced = _Traced(tracing.within(request, span), span)
        try:
            yield traced
        finally:
            if traced.run is not None:
                ended = traced.run.response
                tracing.note(
                    span, {"penstock.response.outcome": "released" if ended.status in UNENDED else ended.status}
                )
                if ended.error:
                    tracing.fail(span, ended.error.code)


@dataclass(eq=False, slots=True)
class _Responding:
    """The block of a response that takes a ``place``; if it gets none, its conversation is unlocked."""

    request: ResolvedRequest
    place: AbstractAsyncContextManager[None]
    unlock: Callable[[Response], None]

    async def __aenter__(self) -> None:
        try:
            await self.place.__aenter__()
        except BaseException:
            self.unlock(self.request.facts.response)
            _let_go_of_resolved(self.request)
            raise

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self.place.__aexit__(*raised)
        finally:
            _let_go_of_resolved(self.request)


@dataclass
class Scheduler:
    """The runs of one pipeline.

    At most ``limit`` run in the background at once.  With ``detaches``, stored responses survive their clients.  With
    ``restarts``, background responses that a server left unfinished start over.
    """

    pipeline: Pipeline[CreateResponse, ResponseEvent]
    engine: Backend
    runs: RunRegistry
    store: Store
    limit: int = 64
    detaches: bool = False
    restarts: bool = False
    admission: Admission = field(default_factory=Admission)
    in_flight: InFlight = field(default_factory=InFlight)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Patterns of other names for the engine's models, each with a model."""
    traits_of: Callable[[str, str], Awaitable[ModelTraits]] = usual_traits
    """Gives the traits of a model, by a name that is served, after it has loaded it if that is needed."""
    sees_images: Callable[[str], bool] = lambda _: False
    """Tells if a model reads images, as the list of models says, by a name that is served."""
    allowed: Callable[[str], Collection[str] | None] = all_models
    """Gives the patterns of the names of models that an owner may use; None for all."""
    tools_of: Callable[[str], Iterable[str]] = lambda _: ()
    """Gives the built-in tools that an owner may use, by namespace."""
    unserved_after: float = UNSERVED_AFTER
    """Seconds after which a background response fails that waits for a server of its model."""
    closing: Callable[[str, Cause], None] = lambda _, __: None
    """Called with the id of a response whose stages are about to be closed before their end, and the cause."""

    def __post_init__(self) -> None:
        self.runs.at_end.append(self.admission.end)
        self._normalizing: Pipeline[CreateResponse, ResolvedRequest] = self.pipeline.through("normalize")
        self._normalizing_ends = ends_at_once(self._normalizing)
        self._after_normalize: Pipeline[ResolvedRequest, ResponseEvent] = self.pipeline.following("normalize")
        self._holding = self._with_holds(self._after_normalize)
        self._interrupts: dict[str, Callable[[], Any]] = {}
        """Functions that interrupt the runs outside of the background, by response id."""
        self.background = BackgroundQueue(
            self._run_queued,
            run_opened=self._run_opened,
            runs=self.runs,
            store=self.store,
            in_flight=self.in_flight,
            slots=Slots(self.limit),
        )
        self.recovery = OrphanRecovery(
            self.store,
            runs=self.runs,
            background=self.background,
            restarts=self.restarts,
            served=self.served,
            unserved_after=self.unserved_after,
        )

    # Models

    def served(self, name: str | None) -> str | None:
        """Return the name by which the engine serves a model, by default the first; None if it does not."""
        return self.engine.models[0] if name is None else served_name(name, self.engine.models, self.aliases)

    def usable(self, owner: str) -> Sequence[str]:
        """Return the names under which the engine serves the models that an owner may use."""
        return usable_names(self.engine.models, self.aliases, self.allowed(owner))

    def resolved(self, owner: str, name: str | None) -> str:
        """Return the served name of a model that an owner may use, by default the first; raises `ModelNotFound`."""
        usable = self.usable(owner)
        return usable[0] if name is None else resolved_name(name, usable, self.aliases)

    async def loaded(self, owner: str, name: str | None) -> Backend:
        """Return the engine of a model that an owner may use, which is loaded if that is needed."""
        served = self.resolved(owner, name)
        await self.traits_of(served, owner)
        return engine_of(self.engine, served)

    # Starting

    async def prepare(self, create_request: CreateResponse) -> Opened:
        """Open the pipeline for a request, through `normalize`; the caller closes it, after its response.

        Raises the `StageError` for what is wrong with the request, or `EngineDead`.  If its response will be added to a
        conversation, the conversation is locked from here on.
        """
        for name in create_request.model_fields_set & CreateResponse.model_fields.keys():
            _parameter(name).inc()
        if not self.engine.is_alive:  # it may take prompts all the same
            raise errors.EngineDead("The engine has died.")
        for name in ("return_token_ids", "return_weight_versions"):
            if getattr(create_request, name) and not sees_tokens(self.pipeline):
                message = "This server sees no tokens: they are made elsewhere."
                raise errors.UnsupportedParameter(message, param=name)
        if not self.store.keeps:
            create_request = _unstored(create_request)
        elif create_request.store is not False:
            self.store.check()
            await self.admission.storing(create_request.envelope.owner, self.store)
        try:
            prepared = await opened(self._normalizing, create_request, ends=self._normalizing_ends)
        finally:
            let_go_of(create_request)
        try:
            await self._lock(prepared.request)
        except BaseException:
            await prepared.aclose()
            raise
        return prepared

    async def _lock(self, request: ResolvedRequest) -> None:
        response, origin = request.facts.response, request.facts.origin
        if response.conversation is not UNSET and response.store:
            with self._unlocking(response):  # a client that disconnects here leaves no lock
                await self.store.conversations.lock(
                    response.conversation.id, origin.owner, response.id, origin.position
                )

    def run(self, prepared: Opened, mode: Mode = "stream") -> AsyncGenerator[ResponseEvent, None]:
        """Start a response, and return its events; an error before the first event keeps it from beginning."""
        response = prepared.request.facts.response
        if response.background:
            return self._in_background(prepared)
        if self.detaches and response.store:
            return self._detached(prepared, mode)
        return self._in_foreground(prepared, mode, self._after_normalize)

    def run_edited(
        self, prepared: Opened, edit: Edit, mode: Mode = "stream", *, counts: bool = True
    ) -> AsyncGenerator[ResponseEvent, None]:
        """Start a response in the foreground, through the stages after `normalize` as ``edit`` returns them.

        Unless it ``counts``, it is not among those that its owner may have at once.
        """
        return self._in_foreground(prepared, mode, edit(self._after_normalize), counts=counts)

    async def queue(self, prepared: Opened) -> Run:
        """Queue a response for the background; it is stored before this returns.

        Its pipeline stays open and waits for the response's turn, unless too many do.  Raises the errors of its prompt
        if it waits, `EngineOverloaded` and `StoreFailed`.
        """
        request = prepared.request
        queued = replace(request.facts.response, status="queued")
        with self._unlocking(queued):
            self.background.check(request.facts.origin.owner)
            waiting = await self.background.open(prepared)
        stored = StoredResponse(queued, request.facts.input, request.facts.origin)
        try:
            return await shielded(self._accept(stored, request, waiting))  # the client may disconnect
        finally:
            _let_go_of_resolved(request)

    async def _accept(self, stored: StoredResponse, request: ResolvedRequest, waiting: Waiting | None) -> Run:
        try:
            with self._unlocking(stored.response):
                async with self.admission.queueing(stored.origin.owner, self.store):
                    await self.store.accept(stored, request)
        except BaseException:
            if waiting:
                await waiting.close()
            raise
        run = self.runs.queue(stored)
        self.background.add(run, request.facts.tools.servers, waiting)
        return run

    def _with_holds(self, stages: Pipeline[ResolvedRequest, ResponseEvent]) -> Pipeline[ResolvedRequest, ResponseEvent]:
        """Return the stages with those in which a queued response waits: in front of the engine and of its first event.

        It waits before it takes one of the engine's places.  A backend of texts is the stage `parse`.
        """
        names, engine = stages.names(), self.engine
        is_text = isinstance(engine, TextBackend)
        for asking in ("parse",) if is_text else ("admit", "generate"):
            if asking in names:
                stages = stages.insert_before(asking, "hold prompts", HoldPrompts(self._checked))
                break
        return stages.insert_before("emit" if "emit" in names else "persist", "hold events", hold_first)

    async def _checked(self, prompt: Prompt) -> Prompt:
        """Check a prompt as `Generate` does; none passes before a backend of texts."""
        return await Generate(cast("Engine", engine_of(self.engine, prompt.facts.model))).checked(prompt)

    def _responding(self, request: ResolvedRequest, *, counts: bool = True) -> _Responding:
        """Count a response for the length of a block, if it ``counts``; raise `LimitReached` if too many run."""
        place = self.admission.responding(request.facts.origin.owner) if counts else nullcontext()
        return _Responding(request, place, self._unlock)

    @contextmanager
    def _unlocking(self, response: Response) -> Iterator[None]:
        """Unlock the conversation of a response if the block raises, as the response then cannot begin."""
        try:
            yield
        except BaseException:
            self._unlock(response)
            raise

    def _unlock(self, response: Response) -> None:
        """Unlock the conversation of a response that cannot begin."""
        if response.conversation is not UNSET and response.store:
            self.store.conversations.unlock(response.conversation.id, response.id)

    # Running

    async def _in_foreground(
        self, prepared: Opened, mode: Mode, stages: Pipeline[ResolvedRequest, ResponseEvent], *, counts: bool = True
    ) -> AsyncGenerator[ResponseEvent, None]:
        """Run a response in the task that reads its events; the stream has a terminal event even if a stage fails."""
        request = prepared.request
        response_id = request.facts.response_id
        async with self._responding(request, counts=counts):
            with _traced(request, mode) as traced:
                path = hot_path.begin(stages)
                async with stages.open(prepared.source(traced.request)) as events:
                    event, run, foreground = None, None, _Foreground(asyncio.current_task(), events)
                    self._interrupts[response_id] = foreground.interrupt
                    try:
                        with self._unlocking(request.facts.response):
                            event = await first(events)
                        run = traced.run = self._run_of(request)
                        run.mode = mode
                        yield event
                        async for event in events:
                            yield event
                        _check_ended(run)
                    except (asyncio.CancelledError, GeneratorExit) as left:
                        if isinstance(left, GeneratorExit) or not foreground.has_been_interrupted():
                            self.closing(response_id, "unsent" if prepared.is_unsent else "client_left")
                            raise
                        if run is None or event is None:  # its beginning is not stored: its client knows no id
                            raise errors.ServerStopping from None
                    except Exception as error:
                        if run is None or event is None:
                            raise
                        _fail(run, error)
                    finally:
                        del self._interrupts[response_id]
                        hot_path.end(path)
            if not isinstance(event, TerminalEvent):  # interrupted or failed: the log has the rest of the events
                sent = max(event.sequence_number, path.upto if path else -1)
                async with aclosing(run.follow(sent)) as rest:
                    async for event in rest:
                        yield event

    async def _in_background(self, prepared: Opened) -> AsyncGenerator[ResponseEvent, None]:
        run = await self.queue(prepared)
        async with aclosing(run.follow()) as events:
            async for event in events:
                yield event

    async def _detached(self, prepared: Opened, mode: Mode) -> AsyncGenerator[ResponseEvent, None]:
        """Run a response in a task of its own; the client follows its log, and may disconnect."""
        request = prepared.request
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run_detached(prepared.taken(), begun, mode))
        self._interrupts[request.facts.response_id] = task.cancel
        task.add_done_callback(lambda _: self._interrupts.pop(request.facts.response_id))
        await asyncio.shield(begun)  # a client that leaves must not cancel what `_run_detached` sets
        run = self._run_of(request)
        async with aclosing(run.follow()) as events:
            async for event in events:
                yield event

    async def _run_detached(self, prepared: Opened, begun: asyncio.Future[None], mode: Mode) -> None:
        request = prepared.request
        try:
            async with prepared, self._responding(request):
                with self._unlocking(request.facts.response), self.in_flight:
                    await self._run(
                        request, prepared.source, mode, self._after_normalize, partial(begun.set_result, None)
                    )
        except asyncio.CancelledError:
            if begun.done():
                raise
            begun.set_exception(errors.ServerStopping())  # interrupted while the store wrote its beginning
        except Exception as error:  # noqa: BLE001 - it is raised where `begun` is awaited
            begun.set_exception(error)

    async def _run_opened(self, prepared: Opened) -> None:
        """Run a response of the background, which waits for its turn in the middle of its stages."""
        try:
            await self._run(prepared.request, prepared.source, "background", self._holding)
        finally:
            _let_go_of_resolved(prepared.request)

    async def _run_queued(self, request: ResolvedRequest) -> None:
        """Run a response of the background from the request in the store on: its turn has come.

        Another server may have accepted it.  Raises `ModelAway` if its model is no longer served.
        """
        try:
            asked = request.facts.response.model
            if (model := self.served(asked)) is None:
                raise errors.ModelAway(in_words([asked]))
            origin = replace(request.facts.origin, model="" if model == asked else model)
            if not reads_tokens(self.engine, request.facts.model, model):
                request = replace(request, tokens={})
            await self._run(with_facts(request, origin=origin), _from_store, "background", self._after_normalize)
        finally:
            _let_go_of_resolved(request)

    async def _run(
        self,
        request: ResolvedRequest,
        source: Callable[[ResolvedRequest], AsyncGenerator[ResolvedRequest, None]],
        mode: Mode,
        stages: Pipeline[ResolvedRequest, ResponseEvent],
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Run a response whose readers follow its log; raise only errors that keep it from beginning."""
        with _traced(request, mode) as traced, tracing.current(traced.span):
            path = hot_path.begin(stages, is_read=False)
            async with stages.open(source(traced.request)) as events:
                with self._releasing(request.facts.response_id, path):
                    try:
                        await first(events)
                    except Exception as error:
                        run = self.runs.get(request.facts.response_id, request.facts.origin.owner)
                        if run and run.response.status == "in_progress":
                            _fail(run, error)
                        raise
                    run = traced.run = self._run_of(request)
                    run.mode = mode
                    begun()
                    try:
                        async for _ in events:
                            pass
                        _check_ended(run)
                    except Exception as error:  # noqa: BLE001 - it is logged, and ends the stream as failed
                        _fail(run, error)

    @contextmanager
    def _releasing(self, response_id: str, path: hot_path.HotPath | None) -> Iterator[None]:
        """End the path of a response after the block, which runs it, and note its release if that is cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            self.closing(response_id, "released")
            raise
        finally:
            hot_path.end(path)

    def _run_of(self, request: ResolvedRequest) -> Run:
        run = self.runs.get(request.facts.response_id, request.facts.origin.owner)
        if run is None:
            raise RuntimeError("a response that has begun is among the live ones")
        return run

    # Finding and ending

    async def find(self, response_id: str, owner: str, *, ends: bool = False) -> Run | StoredResponse | Server:
        """Find a response: the live run, its stored copy once it has ended, or the peer that is running it.

        If the server that ran it is dead, wait until another server has recovered it; but take it over at once if it
        waits for a server of its model, and the caller ``ends`` it.  Raises `ResponseNotFound`, and `ServerUnreachable`
        or `ModelAway` if that takes too long.
        """
        stored: StoredResponse | None = None
        for _ in range(FIND_ATTEMPTS):
            if run := self.runs.get(response_id, owner):
                return run
            stored = await self.store.get(response_id, owner)
            if stored is None:
                raise errors.ResponseNotFound(shortened(response_id), keeps=self.store.keeps)
            if stored.response.status not in UNENDED:
                return stored
            server = await self.store.runner(response_id)
            if server and server.is_alive and server.id != self.store.server_id:
                return server
            if ends and (run := await self.recovery.taken(stored, server)):
                return run
            await asyncio.sleep(FIND_PAUSE)
        if stored and self.recovery.waits(stored):
            raise errors.ModelAway(in_words([stored.response.model]))
        raise errors.ServerUnreachable

    async def cancel(self, run: Run) -> Response:
        """Cancel a response, unless it ends by itself first; return it as it ended, usually once that is stored.

        If the engine is generating, it ends the generation, and `emit` ends the response as cancelled, with all its
        tokens.  Otherwise, or if that takes too long, `Run.cancel` ends it.  Raises `RunReleased` if another server has
        taken it over by then.
        """
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_WAIT):
                    if await self.engine.cancel(run.response.id):
                        await run.wait()
        finally:  # also if the client that cancels it leaves
            self._end_early(run, None)
        if run.response.status in UNENDED:
            raise RunReleased
        await run.committed()
        return run.response

    async def drain(self, seconds: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Refuse new responses, wait up to ``seconds`` for the running ones, and end the rest as failed.

        The wait ends early once ``is_hurried`` returns True.
        Queued responses, and with ``restarts`` also running background ones, are left to the next server instead.
        """
        self.in_flight.stopping = True
        await self.background.release_queued()
        await self.in_flight.drain(seconds, is_hurried)
        if self.restarts:
            self.background.release_running()
        await self.engine.stop()
        for wait in (STOP_WAIT, FINISH_WAIT):  # twice, as a request may still begin during the first
            await self.in_flight.drain(wait)
            for run in self.runs:
                self._end_early(run, errors.RunInterrupted())
        self.in_flight.refuse()

    async def release_lost(self) -> None:
        """Release the responses that other servers took over when this one seemed dead; clients can resume there."""
        for run in self.runs:
            is_lost = run.response.store and not await self._is_still_here(run.response.id)
            if is_lost and not run.ended:  # it may have ended while the store answered
                logger.warning("Response %s is another server's now: this one was silent", run.response.id)
                run.release()
                self._interrupt(run, "released")

    async def _is_still_here(self, response_id: str) -> bool:
        server = await self.store.runner(response_id)
        return server is not None and server.id == self.store.server_id

    def _end_early(self, run: Run, error: errors.StageError | None) -> None:
        """Cancel a response that has not ended, or fail it with ``error``; then stop its pipeline."""
        if run.ended:
            return
        if error is None:
            run.cancel()
        else:
            run.fail(error)
        self._interrupt(run, "interrupted" if error else "cancelled")

    def _interrupt(self, run: Run, cause: Cause) -> None:
        self.closing(run.response.id, cause)
        self.background.interrupt(run)
        if interrupt := self._interrupts.get(run.response.id):
            interrupt()


def let_go_of(create_request: CreateResponse) -> None:
    """Free the lists of a request, which may be long, in a thread (see `let_go`)."""
    items = create_request.input_items
    tools = (tool for item in items[:MANY_VALUES] if isinstance(item, AdditionalTools) for tool in item.tools)
    let_go((*items, *(create_request.tools or ()), *tools, *(create_request.previous_input_messages or ())))


def _let_go_of_resolved(request: ResolvedRequest) -> None:
    let_go((*request.history, *request.facts.input, *request.facts.tools.tools))


def _from_store(request: ResolvedRequest) -> AsyncGenerator[ResolvedRequest, None]:
    return handed_over([request])


def _unstored(create_request: CreateResponse) -> CreateResponse:
    """Return the request with ``store: false``, for a server that stores nothing."""
    if create_request.background:
        message = "This server stores nothing (--store none), so no response can run in the background."
        raise errors.UnsupportedParameter(message, param="background")
    return create_request.model_copy(update={"store": False})


def _check_ended(run: Run) -> None:
    rule(run.ended, "a stream ends with a terminal event: a stage after persist has lost it")


def _fail(run: Run, error: Exception) -> None:
    """End a response after a bug in a stage after `emit`, which itself handles the bugs of the stages before it."""
    log_failure(logger, run.response.id, error)
    run.fail(error)
