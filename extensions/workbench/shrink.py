"""Shrink: cut a failing recording down to the smallest one that still fails.

Without --fails, a recording fails if a stage raises an error on it or its events break a rule of the protocol.  With
--fails, the shell runs COMMAND in the working directory for each candidate, with the candidate's folder in place of {},
or as the last argument if there is no {}.  Exit status 0 means that the recording is fine, any other status that it
fails.  125 means that COMMAND cannot judge the recording, which counts as fine; so do 126, 127 and a timeout.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from penstock.api.cli.arguments import PLUGINS, Parser, chosen_stages
from penstock.api.cli.recorded_model import RecordedModel, model_of
from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import CannotRun, StageFault
from penstock.pipeline.faults import name_stage
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.lifecycle.checker import check
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.logs import counted
from penstock.pipeline.plugins import Install
from penstock.pipeline.protocol.events import ResponseFailed, TerminalEvent
from penstock.pipeline.recordings.ddmin import shrink
from penstock.pipeline.recordings.failing_case import TOKENS, FailingCase, read_case, request_of
from penstock.pipeline.recordings.format import (
    FILES,
    Abandoned,
    End,
    Recording,
    in_words,
    read_recording,
    source_of_recording,
    write_frames,
)
from penstock.pipeline.recordings.response_folder import private_files
from penstock.pipeline.recordings.wire import is_wire
from penstock.pipeline.trace import traced
from penstock.services.runs.run import RunRegistry

CANNOT_SAY = (125, 126, 127)
"""Exit statuses that count as no failure: 125 skips a recording, as for ``git bisect run``.

The shell exits with 126 or 127 if it cannot run the command.
"""


def main(arguments: Sequence[str]) -> None:
    """Cut a failing recording to the smallest one that fails."""
    parser = Parser(
        prog="penstock shrink",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[PLUGINS],
    )
    parser.add_argument("recording", type=Path, help="a folder with a tokens.jsonl")
    parser.add_argument("--fails", metavar="COMMAND", help="exits with 0 if a recording is fine")
    parser.add_argument("--saying", metavar="TEXT", help="a recording fails only if COMMAND also prints TEXT")
    parser.add_argument(
        "-o", "--out", type=Path, help="the folder to write (default: NAME-small, beside the recording)"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that COMMAND may take (60)")
    parser.add_argument("--tries", type=int, default=2000, help="the most candidates to try (2000)")
    chosen = parser.parse_args(arguments)
    if chosen.fails and chosen.plugins:
        parser.error("--with is for the stages of this command: COMMAND may take its own")
    if chosen.saying and not chosen.fails:
        parser.error("--saying is about what --fails COMMAND writes")
    out: Path = chosen.out or chosen.recording.with_name(f"{chosen.recording.resolve().name}-small")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CannotRun(f"{out} already exists")
    if is_wire(chosen.recording) and not (chosen.recording / TOKENS).is_file():
        raise CannotRun(f"{chosen.recording}: it has no tokens to shrink: the server did not send them")
    case = read_case(chosen.recording)
    model = model_of(case.header)
    fails = CommandTest(chosen.fails, chosen.timeout, chosen.saying or "") if chosen.fails else None
    if not fails and not model.spelling:
        raise CannotRun(f"{model.problem}; give --fails COMMAND")
    trial = Trial(fails or Stages(model.pipeline, chosen_stages(chosen.plugins), model.runs), chosen.tries)
    if not trial(case):
        subject, how = ("command does", f": {fails.ended}") if fails else ("stages do", ended_itself(case.end))
        raise CannotRun(f"the {subject} not fail on the recording as it is{how}")
    if isinstance(trial.fails, Stages):
        print(f"penstock: {chosen.recording}: {trial.fails.described}", file=sys.stderr)
    ended = smallest(trial, model)
    with private_files():
        write(trial, case, out, chosen.recording)
    tries = f"{counted(trial.tries, 'try')}{ended}"
    print(f"{counted(case.size, 'token')} -> {trial.best.size}, {tries}: {out}", file=sys.stderr)
    if ended == STOPPED:
        sys.exit(128 + signal.SIGINT)


def ended_itself(end: End) -> str:
    """Return what else than a stage ended a recording, for the message that no stage fails; empty if nothing did."""
    if end.failure:
        return f"; it ends with a recorded failure: {end.failure.error}: {end.failure.message}"
    return f"; it ends early: {in_words(end.cause)}" if end.abandoned else ""


# Tests for failure


@dataclass
class CommandTest:
    """A recording fails if the command exits with a failure within ``seconds``, and its output has ``saying``."""

    text: str
    seconds: float
    saying: str = ""
    ended: str = ""
    """The latest outcome, in words."""

    def __call__(self, folder: Path) -> bool:
        """Run the command, then kill its process group.  Return True if it fails."""
        path = shlex.quote(str(folder))
        line = self.text.replace("{}", path) if "{}" in self.text else f"{self.text} {path}"
        with subprocess.Popen(  # noqa: S602 - the command is the user's own
            line,
            shell=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            process_group=0,
        ) as process:
            try:
                output, _ = process.communicate(timeout=self.seconds)
            except subprocess.TimeoutExpired:
                self.ended = f"it takes longer than {self.seconds:g} s"
                return False
            finally:
                with suppress(ProcessLookupError):  # the whole process group has already exited
                    os.killpg(process.pid, signal.SIGKILL)
        self.ended = f"it exits with {process.returncode}"
        return process.returncode not in (0, *CANNOT_SAY) and self.saying.encode() in output


@dataclass
class Stages:
    """A recording fails if the stages show the same fault as on the first one, so that shrinking keeps to one fault."""

    pipeline: Pipeline[Any, Any]
    install: Install
    runs: RunRegistry
    fault: str = ""
    """The first fault found: the stage and its error, or the broken rule; empty before that."""
    described: str = ""
    """The same with its place, and the last frames before it."""

    def __call__(self, folder: Path) -> bool:
        """Run the stages on the recording in ``folder``.  Return True if they show the fault."""
        recording = read_recording(folder / TOKENS, FILES["generate"][1])
        with _unlogged():
            fault, described = asyncio.run(self._tried(recording))
        if not self.fault:
            self.fault, self.described = fault, described
        return bool(fault) and fault == self.fault

    async def _tried(self, recording: Recording) -> tuple[str, str]:
        async with self.install(self.pipeline) as pipeline:
            return await self._fault(pipeline, recording)

    async def _fault(self, installed: Pipeline[Any, Any], recording: Recording) -> tuple[str, str]:
        """Return the fault of the stages, and its description.

        The stages before `emit` run alone first, as `emit` turns errors into events.
        """
        steps = installed.following("generate").steps
        before_emit = Pipeline[Any, Any](steps[: [step.name for step in steps].index("emit")])
        whole = Pipeline[Any, Any](steps).then("check", check)
        for run in self.runs:  # left by a failure after ``persist``; the next try has the same id
            self.runs.discard(run)
        for pipeline in (before_emit, whole):
            trace = await traced(pipeline, source_of_recording(recording), "generate")
            if recording.end.failure and pipeline is before_emit and trace.error:
                return "", ""  # the engine failed, not a stage
            if isinstance(trace.error, StageFault):
                return trace.error.message, str(trace.error)
            if trace.error and not isinstance(trace.error, Abandoned):  # the recorded reader left, no stage failed
                detail = f": {trace.error}" if isinstance(trace.error, InvariantBroken) else ""
                fault = f"the stage {name_stage(trace.error)!r} raised {type(trace.error).__name__}{detail}"
                return fault, fault
        return "", ""


@contextmanager
def _unlogged() -> Iterator[None]:
    before = logging.root.manager.disable  # every candidate would log the same failure
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)


# Trying


class TooManyTries(Exception):
    """The maximum number of tries is reached."""


@dataclass
class Trial:
    """Tries each candidate once, and keeps the latest that failed, which is the smallest."""

    fails: Callable[[Path], bool]
    most: int
    tries: int = 0
    best: FailingCase = field(init=False)
    _known: dict[bytes, bool] = field(default_factory=dict)

    def __call__(self, case: FailingCase) -> bool:
        """Return True if the case fails.  Raise `TooManyTries` if ``most`` cases have been tried."""
        files = case.files()
        digest = sha256(b"".join(files.values())).digest()
        if digest not in self._known:
            if self.tries == self.most:
                raise TooManyTries
            self.tries += 1
            with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
                for name, data in files.items():
                    (Path(folder) / name).write_bytes(data)
                self._known[digest] = self.fails(Path(folder))
        if self._known[digest]:
            is_smaller = self.tries > 1 and case.size < self.best.size
            self.best = case
            if is_smaller:
                print(f"{counted(case.size, 'token')}, {counted(self.tries, 'try')}", file=sys.stderr)
        return self._known[digest]


STOPPED = ", stopped"


def smallest(trial: Trial, model: RecordedModel) -> str:
    """Try smaller and smaller cases.  Return the reason if this ended early, for the summary, or an empty string."""
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # sent by `timeout` in CI
    try:
        shrink(trial.best, trial, model.is_mark, letter_of(model))
    except TooManyTries:
        return ", the limit"
    except KeyboardInterrupt:
        return STOPPED
    finally:
        signal.signal(signal.SIGTERM, handler)
    return ""


def letter_of(model: RecordedModel) -> int | None:
    """Return the token id of the letter a, to replace other tokens; None if the vocabulary is not available."""
    if not model.spelling:
        return None
    for token in range(100_000):
        try:
            if model.spelling(token) == b"a":
                return token
        except LookupError:
            return None
    return None


# Writing


def write(trial: Trial, original: FailingCase, out: Path, folder: Path) -> None:
    """Write the smallest case to ``out``, with all files of a fixture.

    The prompt, the parsed frames, the events and the response are derived anew if the case has a single turn and the
    server's own stages can process it.  They end early if the case does.
    """
    out.mkdir(parents=True, exist_ok=True)
    case, model = trial.best, model_of(original.header, out / TOKENS)
    _write_files(case, out)
    if case.conversation:
        request_file = folder / "request.json"
        same = request_file.is_file() and case.conversation == original.conversation
        request = request_file.read_bytes() if same else _pretty(request_of(case.conversation))
        (out / "request.json").write_bytes(request)
        if len(case.turns) == 1 and model.spelling:
            _derive_prompt(trial, case.conversation, out, model)
    if len(case.turns) == 1 and model.spelling:
        _derive(case, out, model)


def _write_files(case: FailingCase, out: Path) -> None:
    for name, data in case.files().items():
        (out / name).write_bytes(data)


def _derive_prompt(trial: Trial, conversation: ResolvedRequest, out: Path, model: RecordedModel) -> None:
    through_engine = model.pipeline.inner("converse").through("generate")
    trace = asyncio.run(traced(through_engine, source_of([conversation]), "normalize"))
    if trace.error or not trace.after("generate").frames:
        return
    write_frames(out / FILES["render"][0], trace.after("render").frames, trial.best.header)
    turn = replace(trial.best.turns[0], started=trace.after("generate").frames[0])
    with suppress(TooManyTries):  # the best one of the others is written
        trial(replace(trial.best, turns=(turn,)))
    _write_files(trial.best, out)


def _derive(case: FailingCase, out: Path, model: RecordedModel) -> None:
    """Write the output of the server's own stages after the tokens; nothing if they fail, as the case is about that."""
    recording = read_recording(out / TOKENS, FILES["generate"][1])
    trace = asyncio.run(traced(model.pipeline.from_stage("parse"), source_of_recording(recording), "generate"))
    ends_early = isinstance(trace.error, Abandoned)
    end = End(0, abandoned=ends_early, cause=case.end.cause)
    last = trace.junctions[-1].frames[-1:]
    if (trace.error and not ends_early) or any(isinstance(event, ResponseFailed) for event in last):
        return
    for stage in ("parse", "emit"):
        write_frames(out / FILES[stage][0], trace.after(stage).frames, case.header, end)
    for event in last:
        if isinstance(event, TerminalEvent):
            (out / "response.json").write_bytes(_pretty(event.response))


def _pretty(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"
