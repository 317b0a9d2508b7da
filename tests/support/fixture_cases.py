"""Fixture cases: one folder each with one file per junction, and the runs from one file to the next."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st

from penstock.extensions.workbench.timeline.timeline import Timeline, replayed_or_recorded
from penstock.pipeline import frames
from penstock.pipeline.core import Pipeline
from penstock.pipeline.plugins import Edit
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.items import OutputItem
from penstock.pipeline.protocol.params.validation import read_request
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import FORMAT, Header, read_frames, read_header, write_frames
from penstock.pipeline.tap import Tap
from penstock.services.engines.token_replay import TokenReplayEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.store.store import Store
from penstock.stages.converse.converse import Converse
from penstock.stages.emit.emit import Emit
from penstock.stages.generate import Generate
from penstock.stages.models.harmony.vocabulary import RETURN, STOP_TOKENS, load_encoding
from penstock.stages.normalize.normalize import normalizing
from penstock.stages.normalize.recall import Recall
from penstock.stages.parse.harmony.parse import ParseHarmony
from penstock.stages.persist import Persist
from penstock.stages.render.harmony.render import RenderHarmony
from penstock.stages.responses import recorded_responses
from tests.support.event_streams import checked, final, run_pipeline, run_stage
from tests.support.examples import examples
from tests.support.paths import HARMONY
from tests.support.scripted_tools import RecordedTools
from tests.support.toolboxes import toolbox_of

CREATED_AT = 1_790_000_000.0

HARMONY_HEADER = Header(FORMAT, "tiny-gpt-oss")


class Case:
    """The files of one fixture.  ``regen`` writes expected files anew, but not those that a server recorded."""

    def __init__(self, folder: Path, *, regen: bool, header: Header = HARMONY_HEADER) -> None:
        self.folder = folder
        self.regen = regen and not is_recorded_by_server(folder)
        self.header = header

    def path(self, junction: str) -> Path:
        return self.folder / junction

    def read(self, junction: str, sequence: Any) -> list[Any]:
        return list(read_frames(self.path(junction), sequence))

    def write(self, junction: str, sequence: Iterable[Any]) -> None:
        write_frames(self.path(junction), sequence, self.header)

    def has(self, junction: str) -> bool:
        return self.regen or self.path(junction).is_file()

    def expect(self, junction: str, sequence: list[Any], types: Any) -> None:
        """Check that the frames equal those of the file; a recording may lack the file of a junction."""
        if self.regen:
            self.write(junction, sequence)
        if self.has(junction):
            assert sequence == self.read(junction, types)

    @property
    def identity(self) -> tuple[str, float, str]:
        """The suffix of its ids, its time and its model: as recorded, else a suffix from its name, and defaults."""
        if self.regen or not self.has("conversation.jsonl"):
            return suffix_of(self.folder), CREATED_AT, self.header.model
        response = self.read("conversation.jsonl", frames.ResolvedRequest)[0].facts.response
        return response.id.removeprefix("resp_"), float(response.created_at), response.model


def is_recorded_by_server(folder: Path) -> bool:
    """Only a server gives its recordings a time."""
    tokens = folder / "tokens.jsonl"
    return tokens.exists() and read_header(tokens).recorded_at is not None


def suffix_of(folder: Path) -> str:
    return folder.name.encode().hex()[:32].ljust(32, "0")


async def check_events(case: Case, store: Store, source: str) -> None:
    """Emit and persist the items in the file ``source``, and compare the events and the stored response."""
    case.expect("events.jsonl", await run_stage(Emit(), case.read(source, frames.ConversedFrame)), frames.EmittedFrame)
    emitted = case.read("events.jsonl", frames.EmittedFrame)
    events = await run_stage(Persist(RunRegistry(store)), emitted)
    response = final(checked(events))
    if not case.has("response.json"):
        return
    if case.regen:
        case.path("response.json").write_bytes(msgspec.json.format(msgspec.json.encode(response)) + b"\n")
    assert response == msgspec.json.decode(case.path("response.json").read_bytes(), type=Response)
    stored = await store.get(response.id, "")
    assert stored is not None
    assert stored.response == response
    assert stored.tokens == {
        frame.item_id: frame.token_ids for frame in emitted if isinstance(frame, frames.ItemTokens)
    }
    assert stored.results == {frame.item_id: frame.result for frame in emitted if isinstance(frame, frames.ItemResult)}


HARMONY_CASES = sorted(HARMONY.glob("*/"), key=lambda case: case.name)


async def check_conversation(case: Case, store: Store, tools: RecordedTools | None) -> None:
    suffix, created_at, model = case.identity
    toolbox = toolbox_of(tools.toolbox.namespaces if tools else ())
    recall = Recall(store=store, models=(model,), draw=lambda: suffix, clock=lambda: created_at)
    request = read_request(case.path("request.json").read_bytes())
    case.expect("conversation.jsonl", await run_stage(normalizing(recall, toolbox), [request]), frames.ResolvedRequest)


async def check_turns(case: Case, tools: RecordedTools | None) -> None:
    """Make the turns of a case, and compare the frames at each junction."""
    given = case.read("conversation.jsonl", frames.ResolvedRequest)
    render, parse = RenderHarmony(load_encoding()), ParseHarmony(load_encoding())
    if case.regen and completion_files(case.folder):
        prompt = (await run_stage(render, given))[0]
        case.write("tokens.jsonl", handwritten_frames(case.folder, prompt))
    prompts, tokens, parsed = Tap(), Tap(), Tap()
    turn = (
        Pipeline.start("render", render)
        .then("see prompts", prompts)
        .then("generate", Generate(TokenReplayEngine(case.path("tokens.jsonl"))))
        .then("see tokens", tokens)
        .then("parse", parse)
        .then("see items", parsed)
    )
    conversed = await run_pipeline(with_tools(turn, tools) if tools else turn, given)
    case.expect("prompt.jsonl", prompts.frames, frames.Prompt)
    case.expect("tokens.jsonl", tokens.frames, frames.TokenFrame)
    case.expect("parsed.jsonl", parsed.frames, frames.ParsedFrame)
    assert await run_stage(parse, case.read("tokens.jsonl", frames.TokenFrame)) == parsed.frames
    if tools:
        tools.check()
        assert len(prompts.frames) == len(completion_files(case.folder))
        case.expect("conversed.jsonl", conversed, frames.ConversedFrame)


def with_tools(
    turn: Pipeline[frames.ResolvedRequest, Any], tools: RecordedTools
) -> Pipeline[frames.ResolvedRequest, frames.ConversedFrame]:
    return Pipeline.start("converse", Converse(turn, tools.toolbox, clock=lambda: 0.0))


def completion_files(folder: Path) -> list[Path]:
    """Return the files of a case with one completion per turn; a recorded case has none."""
    return sorted(folder.glob("completion*.txt"), key=lambda path: int(path.stem.partition("_")[2] or 1))


def handwritten_frames(folder: Path, prompt: frames.Prompt) -> Iterator[frames.TokenFrame]:
    """Token frames of all turns; ``prompt`` gives the first frame of each."""
    for completion in completion_files(folder):
        yield from _handwritten_turn(completion.read_text(), prompt)


def _handwritten_turn(text: str, prompt: frames.Prompt) -> list[frames.TokenFrame]:
    token_ids = encode_completion(text)
    stopped = set(token_ids[-6:]) & {*STOP_TOKENS, 199_999} or text.endswith(prompt.facts.sampling.stop or "\0")
    reason: frames.FinishReason = "stop" if stopped else "length"
    logprobs = handwritten_logprobs(token_ids, prompt.facts.sampling.logprobs)
    return [
        frames.GenerationStarted(prompt.facts, len(prompt.token_ids)),
        *(frames.TokenChunk((token,), logprobs[at : at + 1]) for at, token in enumerate(token_ids)),
        frames.GenerationFinished(reason, cached_tokens=0, duration=0.0),
    ]


OTHER_LOGPROBS = ((RETURN, -1.0625), (9552, -2.0625), (40, -3.0625), (200_014, -4.0625), (13, -inf))
"""Alternatives in handwritten cases: a marker, part of a character, a word, no token at all, a dot."""


def handwritten_logprobs(token_ids: list[int], top: int | None) -> tuple[frames.TokenLogprob, ...]:
    """A logprob for each token if ``top`` is not None: 0, -1/8, -2/8 and so on down to -15/8, then from 0 again."""
    if top is None:
        return ()
    found = [(token, -(position % 16) / 8) for position, token in enumerate(token_ids)]
    likeliest = (sorted([own, *OTHER_LOGPROBS], key=itemgetter(1), reverse=True) for own in found)
    return tuple(frames.TokenLogprob(own[1], tuple(others[:top])) for own, others in zip(found, likeliest, strict=True))


def encode_completion(text: str) -> list[int]:
    r"""The tokens of text with markers; ``<|123|>`` is the token of that id, ``<\|`` a literal ``<|``."""
    token_ids: list[int] = []
    for piece in re.split(r"(<\|\w+\|>)", text):
        if marker := re.fullmatch(r"<\|(\d+)\|>", piece):
            token_ids.append(int(marker[1]))
        elif re.fullmatch(r"<\|\w+\|>", piece):
            token_ids += load_encoding().encode_markup(piece)
        else:
            token_ids += load_encoding().encode(piece.replace("<\\|", "<|"))
    return token_ids


ONE_TURN_CASES = [case for case in sorted(HARMONY.glob("*/")) if not (case / "tools.json").exists()]
"""Cases of one turn.  The recorded tokens of other cases lack the results of tools."""


@cache
def recorded_tokens(case: Path) -> tuple[frames.TokenFrame, ...]:
    return tuple(read_frames(case / "tokens.jsonl", frames.TokenFrame))


def generation_of(text: str) -> tuple[frames.TokenFrame, ...]:
    """A generation of that text, which may hold markers, in one chunk."""
    start = recorded_tokens(HARMONY / "direct_answer")[0]
    return (
        start,
        frames.TokenChunk(tuple(load_encoding().encode_markup(text))),
        frames.GenerationFinished("stop", 0, 1.0),
    )


def in_any_chunks(sequence: Sequence[frames.TokenFrame]) -> st.SearchStrategy[list[frames.TokenFrame]]:
    start, *chunks, end = sequence
    token_ids = [token for chunk in chunks if isinstance(chunk, frames.TokenChunk) for token in chunk.token_ids]
    logprobs = [one for chunk in chunks if isinstance(chunk, frames.TokenChunk) for one in chunk.logprobs]

    def cut(borders: list[int]) -> list[frames.TokenFrame]:
        ends = sorted({*borders, 0, len(token_ids)})
        pairs = pairwise(ends)
        return [start, *(frames.TokenChunk(tuple(token_ids[a:b]), tuple(logprobs[a:b])) for a, b in pairs), end]

    return st.lists(st.integers(0, len(token_ids)), max_size=40).map(cut)


def any_case() -> st.SearchStrategy[list[frames.TokenFrame]]:
    return st.sampled_from(ONE_TURN_CASES).flatmap(lambda case: in_any_chunks(recorded_tokens(case)))


@cache
def pipeline_after_parse(edit: Edit) -> Pipeline[Any, Any]:
    """The stages from ``parse`` to ``emit``, with a plug-in."""
    return edit(recorded_responses()).from_stage("parse").through("emit")


def emit_with(sequence: Sequence[frames.TokenFrame], edit: Edit) -> list[Any]:
    return asyncio.run(run_pipeline(pipeline_after_parse(edit), sequence))


def events_with(sequence: Sequence[frames.TokenFrame], edit: Edit) -> list[ResponseEvent]:
    kept = frames.ResponseStarted | frames.ItemTokens | frames.ItemResult
    return checked(frame for frame in emit_with(sequence, edit) if not isinstance(frame, kept))


def response_with(sequence: Sequence[frames.TokenFrame], edit: Edit) -> Response:
    return final(events_with(sequence, edit))


def unedited(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline


def text_of(item: OutputItem) -> str:
    return str(getattr(item, "text", ""))


def item_texts(response: Response) -> list[str]:
    return [*map(text_of, response.output)]


FEW_EXAMPLES = examples(60)
"""Fewer examples than usual, because each one makes a whole response."""

Result = TypeVar("Result")


def run_in_thread(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a thread of its own: Playwright's loop runs in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def timeline_at(folder: Path) -> Timeline:
    return run_in_thread(replayed_or_recorded(folder))
