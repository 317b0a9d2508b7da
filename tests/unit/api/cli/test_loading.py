"""Loading a model in a process of its own; a child process writes what vLLM's workers write."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

pytestmark = pytest.mark.io

WORKER = r"""
import sys

def log(level, text):
    print(f"(Worker pid=7) {level} 11-22 23:53:24 [x.py:1] {text}", file=sys.stderr, flush=True)

log("INFO", "Starting to load model tiny...")
for percent in (0, 30, 33, 100):
    print(f"Loading safetensors checkpoint shards: {percent:3}% Completed", file=sys.stderr, flush=True)
for percent in range(0, 101, 10):
    print(f"\rCapturing CUDA graphs (decode): {percent:3}%|", end="", file=sys.stderr, flush=True)
print("\nfrom a library in C", flush=True)
log("WARNING", "It may be slow.")
log("ERROR", "ValueError: It is too large.")
print("terminate called", end="", flush=True)
print("done", file=open(sys.argv[1], "w"), flush=True)
sys.stdin.read()
log("INFO", "It lives.")
log("WARNING", "It complains.")
"""

COMMAND = r"""
import logging, os, subprocess, sys, tempfile
from penstock.api.cli import loading
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.logs import log_to_stderr

def fail(line):
    raise ValueError("the fault of a test")

if "FAULT" in os.environ:
    loading.step_of = fail
log_to_stderr("INFO")
fifo = os.path.join(tempfile.mkdtemp(), "fifo")
os.mkfifo(fifo)
try:
    with loading.Loading("tiny", is_verbose="verbose" in sys.argv) as block:
        worker = subprocess.Popen([sys.executable, "-c", os.environ["WORKER"], fifo], stdin=subprocess.PIPE)
        open(fifo).read()
        logging.getLogger("other").info("of another library")
        print("of this process")
        if "fails" in sys.argv:
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        if "ours" in sys.argv:
            raise CannotStart("There is a wrong option.")
        if sys.argv[-1].isdecimal():
            sys.exit(int(sys.argv[-1]))
        block.finish()
        print("serving", flush=True)
        worker.communicate(b"")
except CannotStart as error:
    worker.kill()
    worker.wait()
    sys.exit(f"penstock: {error}")
"""


@dataclass
class Output:
    status: int
    out: str
    err: str

    @property
    def steps(self) -> list[str]:
        return re.findall(r"penstock\.api\.cli\.loading: Loading tiny: (.*) \(\d of \d\)", self.err)


def loaded(*flags: str, **variables: str) -> Output:
    command, environment = [sys.executable, "-c", COMMAND, *flags], {**os.environ, "WORKER": WORKER, **variables}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return Output(ended.returncode, ended.stdout, ended.stderr)


def test_steps_are_shown_instead_of_the_lines_of_vllm() -> None:
    output = loaded()
    assert (output.status, output.out) == (0, "serving\n")
    first = [
        "reading the configuration",
        "loading the weights",
        "loading the weights, 30 %",
        "loading the weights, 100 %",
    ]
    assert output.steps[:4] == first
    assert output.steps[-1] == "capturing CUDA graphs, 100 %"
    for hidden in ("It may be slow", "library", "of this process", "It lives"):
        assert hidden not in output.err
    assert "1 warning among them" in output.err


def test_errors_and_later_warnings_of_workers_are_shown() -> None:
    """Workers write to the pipe as long as they live."""
    err = loaded().err
    assert "ERROR 11-22 23:53:24 [x.py:1] ValueError: It is too large." in err
    assert "WARNING 11-22 23:53:24 [x.py:1] It complains." in err


def test_failure_ends_with_its_cause_after_all_lines() -> None:
    output = loaded("fails")
    assert (output.status, output.out) == (1, "")
    lines = output.err.splitlines()
    for kept in ("from a library in C", "terminate called", "of this process"):
        assert any(kept in line for line in lines)
    assert any("of another library" in line for line in lines)
    assert any("It may be slow." in line for line in lines)
    assert sum("Capturing CUDA graphs" in line for line in lines) == 1  # a bar, of which only the last state is left
    assert lines[-1] == "penstock: tiny cannot be served: It is too large."


def test_mistake_of_the_operator_is_not_buried_under_lines_of_vllm() -> None:
    output = loaded("ours")
    assert output.err.endswith("It is too large.\npenstock: There is a wrong option.\n")
    assert "It may be slow" not in output.err


def test_verbose_shows_each_line_once() -> None:
    for output in (loaded("verbose"), loaded("verbose", "fails")):
        for shown in ("It may be slow.", "of this process", "ValueError: It is too large."):
            assert output.err.count(shown) == 1
        assert "loading the weights, 30 %" in output.steps


@pytest.mark.parametrize("signal", [signal.SIGTERM, signal.SIGINT])
def test_command_ended_by_a_signal_is_quiet(signal: int) -> None:
    output = loaded(str(128 + signal))
    assert output.status == 128 + signal
    assert "It may be slow" not in output.err


def test_fault_in_the_progress_does_not_stop_the_workers() -> None:
    """They would wait for ever to write a line if nothing read the pipe."""
    output = loaded(FAULT="1")
    assert (output.status, output.out) == (0, "serving\n")
    assert "It complains." in output.err
    assert "the fault of a test" in output.err


def test_terminal_shows_a_bar() -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "WORKER": WORKER, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND], stdout=follower, stderr=follower, env=environment
    ) as process:
        os.close(follower)
        shown = b""
        try:
            while piece := os.read(leader, 65536):
                shown += piece
        except OSError:  # the end of a pseudo-terminal on Linux
            pass
        os.close(leader)
    assert process.returncode == 0
    text = shown.decode()
    assert "Loading tiny" in text
    assert "\u2501" in text
    for hidden in ("(1 of 8)", "It may be slow", "of this process", "of another library"):
        assert hidden not in text
    assert text.index("Loaded tiny in") < text.index("serving")
