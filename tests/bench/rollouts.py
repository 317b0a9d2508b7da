"""The speed and the memory of `penstock rollouts`, and what a server pays for recordings that it can read.

    python -m tests.bench.rollouts [--turns 1000 10000 100000] [--rounds 5]

The export reads recordings that were made by hand, and counts the bytes of the files that it reads.  The costs are
those of a token in the process of a server whose engine answers at once; the ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from penstock.api.runs.housekeeping import tune_gc
from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import TokenLogprob
from penstock.pipeline.recordings.recorder import Recorder
from penstock.pipeline.recordings.sampling import ALWAYS
from penstock.stages.responses import scoring
from tests.bench.apis import APIS, CHAT, MESSAGES, RESPONSES
from tests.bench.figures import over
from tests.bench.many_recordings import write_recordings
from tests.bench.serving import STREAMS, TOKENS, talking
from tests.bench.sockets import Figures, spent, without_first
from tests.support.server import running_server

OUTPUTS = {"penstock": "out.jsonl", "verl": "out.parquet"}
"""The forms that are measured, each with its file."""

LEAST_RATE = 20.0
"""The goal of an export, in megabytes of recordings per second."""

EXPORT = """
import re, sys
from pathlib import Path
from penstock.extensions.rollouts.command import main
main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""
"""A program that exports as `penstock rollouts` does, and prints its peak of memory in kilobytes.

The system's own figure of a process that has ended includes that of the one that started it.
"""

RECORDED, SCORED = "--record", "--record --record-logprobs"
LOGPROBS = tuple(TokenLogprob(-number / 7) for number in range(50))

WITHOUT, WITH = "", " with return_token_ids"


class Exported(NamedTuple):
    """The megabytes that were read, the seconds and those of CPU, and the peak of memory in megabytes."""

    read: float
    seconds: float
    cpu: float
    peak: float


def exported(recordings: Path, form: str, out: str) -> Exported:
    """Export recordings in a process of its own."""
    read = sum(file.stat().st_size for file in recordings.rglob("*.jsonl"))
    command = [sys.executable, "-c", EXPORT, str(recordings), "-o", str(recordings.parent / out), "--form", form]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout:
        printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"penstock rollouts --form {form} failed")
    return Exported(read / 1e6, time.monotonic() - began, _cpu(used), float(printed) / 1e3)


def _cpu(used: resource.struct_rusage) -> float:
    return used.ru_utime + used.ru_stime


def export_table(several: Sequence[int]) -> Iterator[str]:
    """Yield a line for each number of turns and each form."""
    yield f"{'turns':>8s}  {'form':10s}{'MB read':>9s}{'seconds':>9s}{'MB/s':>7s}{'MB/CPU s':>10s}{'peak MB':>9s}"
    for turns in several:
        with TemporaryDirectory() as folder:
            recordings = Path(folder, "recordings")
            for _ in write_recordings(recordings, turns):
                pass
            for form, out in OUTPUTS.items():
                found = exported(recordings, form, out)
                rates = f"{found.read / found.seconds:7.1f}{found.read / found.cpu:10.1f}"
                yield f"{turns:8,}  {form:10s}{found.read:9.1f}{found.seconds:9.1f}{rates}{found.peak:9.0f}"


async def recording_costs(rounds: int, tokens: int = TOKENS) -> Figures:
    """Return microseconds of CPU per token of streams that are recorded, without and with log probabilities."""
    edits: Mapping[str, Callable[[Pipeline[Any, Any]], Pipeline[Any, Any]]] = {
        RECORDED: lambda pipeline: pipeline,
        SCORED: lambda pipeline: scoring(pipeline, ALWAYS.chooses),
    }
    measured: Figures = {name: [] for name in edits}
    async with AsyncExitStack() as closing:
        folder = Path(closing.enter_context(TemporaryDirectory()))
        recorder = Recorder(folder / "recordings")
        closing.push_async_callback(recorder.close)
        servers = {}
        for name, edit in edits.items():
            engine = talking(tokens)
            engine.script = replace(engine.script, logprobs=LOGPROBS)
            running = running_server(engine, folder / name, edit=lambda each, edit=edit: recorder.tapped(edit(each)))
            servers[name] = await closing.enter_async_context(running)
        body = json.dumps({"input": "Hi", "stream": True})
        for _ in range(1 + rounds):
            for name, served in servers.items():
                cpu, _ = await spent(served, "readers", str(STREAMS), body)
                measured[name].append(cpu * 1e6 / (STREAMS * tokens))
    return without_first(measured)


async def id_costs(rounds: int, tokens: int = TOKENS) -> Figures:
    """Return microseconds of CPU per token of streams of each API, without and with the ids of tokens."""
    bodies = {
        f"{name}{which}": (APIS[name].path, json.dumps({**APIS[name].asking("Hi"), "model": "tiny", **asked}))
        for name in (CHAT, RESPONSES, MESSAGES)
        for which, asked in ((WITHOUT, {"stream": True}), (WITH, {"stream": True, "return_token_ids": True}))
    }
    measured: Figures = {name: [] for name in bodies}
    with TemporaryDirectory() as folder:
        async with running_server(talking(tokens), Path(folder)) as served:
            for _ in range(1 + rounds):
                for name, (path, body) in bodies.items():
                    cpu, _ = await spent(served, "readers", str(STREAMS), body, "--path", path)
                    measured[name].append(cpu * 1e6 / (STREAMS * tokens))
    return without_first(measured)


def cost_table(costs: Figures, goal: float, beside: Callable[[str], str]) -> Iterator[str]:
    """Yield a line for each way, with the ratio to the one ``beside`` it."""
    yield f"{f'{STREAMS} streams, 1 token per step':44s}us per token   ratio (goal {goal:g})"
    for name, values in costs.items():
        ratio = f"{statistics.median(over(costs, name, beside(name))):8.3f}" if beside(name) != name else ""
        yield f"{name:44s}{statistics.median(values):12.2f}{ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    tune_gc()  # as a server does once it is up
    _print(cost_table(asyncio.run(recording_costs(chosen.rounds)), 1.05, lambda _: RECORDED))
    _print(cost_table(asyncio.run(id_costs(chosen.rounds)), 1.1, lambda name: name.removesuffix(WITH)))
    _print([f"The goal is at least {LEAST_RATE:g} MB/s."])
    _print(export_table(chosen.turns))


def _print(lines: Sequence[str] | Iterator[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
