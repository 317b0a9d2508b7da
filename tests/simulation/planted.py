"""Faults that this project once had, or nearly had, each put back by a small change: a simulation must find them."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from msgspec.structs import replace

from penstock.api.dialects.responses.routes import Responses
from penstock.api.limits.allowance import OwnAllowances
from penstock.api.runs.scheduler import Scheduler
from penstock.extensions.accounts import ledger
from penstock.extensions.batches import tables
from penstock.extensions.batches.stored_batches import StoredBatches, Totals
from penstock.extensions.models.catalogue import Catalogue, Model
from penstock.extensions.programs.running import Opening, RunningProgram
from penstock.extensions.programs.sleeping import Sleeping
from penstock.extensions.tools.files import stored_files
from penstock.pipeline.frames import ResolvedRequest, with_facts
from penstock.pipeline.lifecycle.outcome import last_event
from penstock.pipeline.protocol.events import ResponseFailed, ResponseIncomplete
from penstock.pipeline.protocol.items import FunctionCallOutput, ProgramOutput
from penstock.services.runs import run as runs
from penstock.services.runs.run import Run, RunRegistry
from penstock.services.store import postgres, statements
from penstock.services.store.key_limits import StoredAllowances, StoredReservations
from penstock.services.store.store import Store
from penstock.services.tools import PastCall
from penstock.services.webhooks import Webhooks
from penstock.stages.converse import tool_loop
from penstock.stages.converse.programs import open_programs, past_calls

Fault = AbstractContextManager[Any]


def lost_ids() -> Fault:
    """Send the id of a response before it is stored: a killed server loses it."""
    begin = RunRegistry.begin

    def begun(registry: RunRegistry, started: Any) -> Run:
        run = begin(registry, started)
        run._commit = None
        return run

    return patch.object(RunRegistry, "begin", begun)


def further_readers() -> Fault:
    """Give a reader who was further than its killed server had stored an end with a number that it has seen."""

    def end_for(after: int, last: int, response: Any) -> Iterator[Any]:
        if after > last:
            yield last_event(last, response)

    return patch.object(runs, "_end_for", end_for)


def early_cancels() -> Fault:
    """Answer a cancel before it is stored: after a kill the response has another end."""

    async def not_awaited(_: Run) -> None:
        """Return at once."""

    cancel = Scheduler.cancel

    async def cancelled(scheduler: Scheduler, run: Run) -> Any:
        with patch.object(run, "committed", not_awaited.__get__(run)):
            return await cancel(scheduler, run)

    return patch.object(Scheduler, "cancel", cancelled)


def other_owners() -> Fault:
    """Let each owner find the running responses of all."""
    return patch.object(RunRegistry, "get", lambda registry, response_id, _: registry._runs.get(response_id))


def double_ends() -> Fault:
    """Send the last event of a response again if it is not completed."""
    in_foreground = Scheduler._in_foreground

    async def doubled(scheduler: Scheduler, *arguments: Any) -> AsyncGenerator[Any, None]:
        event: Any = None
        async for event in in_foreground(scheduler, *arguments):
            yield event
        if isinstance(event, ResponseIncomplete | ResponseFailed):
            yield event

    return patch.object(Scheduler, "_in_foreground", doubled)


def locked_conversations() -> Fault:
    """Keep the lock of a conversation whose response was refused."""
    return patch.object(Scheduler, "_unlocking", lambda *_: contextmanager(_nothing)())


def own_counts() -> Fault:
    """Have each server count the responses of a key alone."""

    async def reserve(_: Any, __: str, ___: str, count: int, most: int) -> bool:
        return count <= most

    return patch.object(StoredReservations, "reserve", reserve)


def refused_runs() -> Fault:
    """Leave a response in the queue of the store although its client was refused."""
    queue = Store._queue

    def queued(store: Store, stored: Any, changes: Any) -> Any:
        is_withdrawal = isinstance(changes, list) and [each.sql for each in changes] == [*statements.WITHDRAWAL]
        return None if is_withdrawal else queue(store, stored, changes)

    return patch.object(Store, "_queue", queued)


def mixed_runs() -> Fault:
    """Let a stream of another server go on with the events of a response that has run again."""

    async def never(*_: Any) -> bool:
        return False

    return patch.object(Responses, "_may_have_run_again", never)


def lost_webhooks() -> Fault:
    """Try to deliver each webhook once."""
    return patch.object(Webhooks, "_failed", lambda webhooks, notification, _: webhooks._forget(notification))


def foreign_files() -> Fault:
    """Let each owner read the files of all."""
    return patch.object(stored_files, "_GET", stored_files._GET.replace("owner = $1", "$1 <> ''"))


def own_rates() -> Fault:
    """Have each server count the requests of a key alone."""

    async def take(stored: StoredAllowances, *arguments: Any) -> tuple[bool, float]:
        own = vars(stored).setdefault("own", OwnAllowances())
        taken: tuple[bool, float] = await own.take(*arguments)
        return taken

    return patch.object(StoredAllowances, "take", take)


def refused_outages() -> Fault:
    """Take a PostgreSQL without space for one that will never accept the change, which is then lost."""
    return patch.object(postgres, "_FOR_EVER", (*postgres._FOR_EVER, "53"))


def swapped_models() -> Fault:
    """Let a response hold its model only while its generation begins: another model takes its place under it."""
    held = Catalogue.held

    async def let_go(catalogue: Catalogue, facts: Any) -> Model:
        model = await held(catalogue, facts)
        catalogue.release(facts.response_id)
        return model

    return patch.object(Catalogue, "held", let_go)


def wrong_models() -> Fault:
    """Run work in the background on the model that is up, whichever it is for."""
    held = Catalogue.held

    async def up(catalogue: Catalogue, facts: Any) -> Model:
        names = [model.name for model in catalogue.all.values() if model.engine and facts.response.background]
        return await held(catalogue, replace(facts, origin=replace(facts.origin, model=names[0])) if names else facts)

    return patch.object(Catalogue, "held", up)


def left_children() -> Fault:
    """Stop a server without ending the processes of its models."""

    async def close(_: Catalogue) -> None:
        """End nothing."""

    return patch.object(Catalogue, "close", close)


def repeated_sums() -> Fault:
    """Leave what was added to the sums of the ledger, so that it is added again."""
    return patch.object(ledger, "_CLEAR", f"{ledger._CLEAR} and hour < 0")


def lost_uses() -> Fault:
    """Note what a response has used once its end is stored: a server that is killed in between notes nothing."""
    end = Store.end

    def ended(store: Store, stored: Any, block: Any, use: Any = None) -> Any:
        saved = end(store, stored, block)
        notes = store.statements_of(use, stored.response.id) if use else ()
        saved.add_done_callback(lambda _: store.writer.queue(notes, stored.response.id))
        return saved

    return patch.object(Store, "end", ended)


def shared_lines() -> Fault:
    """Let a server claim lines that another one runs."""
    is_free = " and (server_id is null or server_id = $3)"
    assert is_free in tables.CLAIM
    return _together(
        patch.object(tables, "WAITING", tables.WAITING.replace(" and server_id is null", "")),
        patch.object(tables, "CLAIM", tables.CLAIM.replace(is_free, "")),
    )


def late_results() -> Fault:
    """Take the result of a line from a server that has lost it, even if the line has one."""
    fence = " and server_id = $3 and kind is null"
    assert fence in tables.FINISH
    return patch.object(tables, "FINISH", tables.FINISH.replace(fence, " and cast($3 as text) <> ''"))


def missed_counts() -> Fault:
    """Leave one line out of the counts of a batch."""
    totals = StoredBatches.totals

    async def missed(stored: StoredBatches, batch_id: str) -> Totals:
        whole = await totals(stored, batch_id)
        first, *others = whole.counts
        return whole._replace(counts=(max(0, first - 1), *others))

    return patch.object(StoredBatches, "totals", missed)


def late_lines() -> Fault:
    """Begin lines of a batch that is to be cancelled."""
    look, is_open = StoredBatches.look, "status = 'in_progress' and expires_at > $4"
    assert is_open in tables.CLAIM

    async def unaware(stored: StoredBatches) -> Any:
        return [
            each._replace(batch=replace(each.batch, status="in_progress", cancelling_at=None))
            if each.batch.status == "cancelling"
            else each
            for each in await look(stored)
        ]

    return _together(
        patch.object(tables, "CLAIM", tables.CLAIM.replace(is_open, "expires_at > $4")),
        patch.object(StoredBatches, "look", unaware),
    )


def lost_lines() -> Fault:
    """Leave the lines of a dead server to it."""
    return patch.object(tables, "RECOVER", tables.RECOVER[1:])


def mixed_branches() -> Fault:
    """Let the process of a program go on for any answers of the client, also after other ones."""
    return patch.object(RunningProgram, "fits", lambda program, *_: program.is_alive)


def foreign_programs() -> Fault:
    """Let each owner go on with the programs of all, by the call id alone."""
    take, put = Sleeping.take, Sleeping.put
    return _together(
        patch.object(Sleeping, "take", lambda sleeping, key: take(sleeping, ("", key[1]))),
        patch.object(Sleeping, "put", lambda sleeping, key, program: put(sleeping, ("", key[1]), program)),
        patch.object(Opening, "__eq__", lambda *_: True),
    )


def shared_processes() -> Fault:
    """Let two responses go on with one process."""

    def take(sleeping: Sleeping, key: Any) -> RunningProgram | None:
        sleeper = sleeping._sleepers.get(key)
        return sleeper.program if sleeper else None

    return patch.object(Sleeping, "take", take)


def kept_programs() -> Fault:
    """Keep the process of each program until its server ends."""
    put = Sleeping.put

    def kept(sleeping: Sleeping, *arguments: Any) -> None:
        sleeping._seconds = 1e6
        put(sleeping, *arguments)

    return patch.object(Sleeping, "put", kept)


def lost_outcomes() -> Fault:
    """Forget what the calls of the server have returned to a program."""

    def of_client(*arguments: Any) -> list[PastCall]:
        return [past for past in past_calls(*arguments) if past.call.tool[0] is None]

    return patch.object(tool_loop, "past_calls", of_client)


def unordered_outcomes() -> Fault:
    """Give a program the outputs of a round in the order in which the client has sent them."""

    def as_sent(request: Any, call_id: str) -> list[PastCall]:
        past = past_calls(request, call_id)
        sent = [item.text for item in request.facts.input if isinstance(item, FunctionCallOutput)]
        given = iter([text for text in sent if any(each.result == text for each in past)])
        return [dataclasses.replace(each, result=next(given)) if each.result in sent else each for each in past]

    return patch.object(tool_loop, "past_calls", as_sent)


def repeated_programs() -> Fault:
    """Let a program go on that has ended, if its client sends its outputs again."""

    def repeated(request: ResolvedRequest) -> Any:
        kept, given = (
            tuple(item for item in them if not isinstance(item, ProgramOutput))
            for them in (request.history, request.facts.input)
        )
        return open_programs(replace(with_facts(request, input=given), history=kept))

    return patch.object(tool_loop, "open_programs", repeated)


@contextmanager
def _together(*faults: Fault) -> Iterator[None]:
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault)
        yield


def _nothing() -> Iterator[None]:
    yield


class Planted(NamedTuple):
    """A fault, the kinds of actions that find it soon, and a seed that finds it with today's plans."""

    fault: Callable[[], Fault]
    kinds: tuple[str, ...]
    seed: int
    on_postgres: bool = False
    """True for a fault of the store in PostgreSQL."""


PLANTED = {
    "lost-ids": Planted(lost_ids, ("ask", "strike"), 0),
    "further-readers": Planted(further_readers, ("ask", "read", "strike", "doom"), 3),
    "early-cancels": Planted(early_cancels, ("ask", "cancel", "strike"), 7),
    "other-owners": Planted(other_owners, ("ask", "snoop"), 6),
    "double-ends": Planted(double_ends, ("ask", "cancel"), 2),
    "locked-conversations": Planted(locked_conversations, ("talk",), 0),
    "own-counts": Planted(own_counts, ("ask", "burst"), 1),
    "refused-runs": Planted(refused_runs, ("ask", "lost commits"), 1),
    "mixed-runs": Planted(mixed_runs, ("ask", "read", "kill"), 18),
    "lost-webhooks": Planted(lost_webhooks, ("ask", "unhook"), 0),
    "foreign-files": Planted(foreign_files, ("file",), 0),
    "own-rates": Planted(own_rates, ("flood",), 1),
    "swapped-models": Planted(swapped_models, ("ask", "models"), 0),
    "wrong-models": Planted(wrong_models, ("ask", "models"), 0),
    "left-children": Planted(left_children, ("ask", "models"), 0),
    "repeated-sums": Planted(repeated_sums, ("ask", "stop"), 0),
    "lost-uses": Planted(lost_uses, ("ask", "strike", "doom"), 0),
    "shared-lines": Planted(shared_lines, ("batch", "message batch"), 1),
    "late-results": Planted(late_results, ("batch", "message batch", "pause"), 3),
    "missed-counts": Planted(missed_counts, ("batch",), 0),
    "late-lines": Planted(late_lines, ("batch", "message batch"), 6),
    "lost-lines": Planted(lost_lines, ("batch", "message batch", "kill"), 0),
    "mixed-branches": Planted(mixed_branches, ("program",), 1),
    "foreign-programs": Planted(foreign_programs, ("program",), 2),
    "shared-processes": Planted(shared_processes, ("program",), 0),
    "kept-programs": Planted(kept_programs, ("program",), 0),
    "lost-outcomes": Planted(lost_outcomes, ("program",), 0),
    "unordered-outcomes": Planted(unordered_outcomes, ("program",), 0),
    "repeated-programs": Planted(repeated_programs, ("program",), 0),
    "refused-outages": Planted(refused_outages, ("ask", "full disk"), 1, on_postgres=True),
}
"""The faults by name."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Put a fault back for the length of a block, if there is a name."""
    if name is None:
        yield
        return
    with PLANTED[name].fault():
        yield
