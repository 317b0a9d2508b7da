"""Loading a model in a process of its own; a child process writes what vLLM's workers write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

pytestmark = pytest.mark.io

WORKER = r"""
import logging, os, sys

def log(level, text):
    if getattr(logging, level) >= getattr(logging, os.environ.get("VLLM_LOGGING_LEVEL", "INFO")):
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
import logging, os, subprocess, sys, tempfile, time
from penstock.api.start import loading
from penstock.pipeline.errors import CannotStart, Stopped
from penstock.pipeline.logs import log_to_stderr

log_to_stderr("INFO")
lines = []
if "slow" in sys.argv:
    loading.PERIOD = 0.01
    loading.logger.addFilter(lambda line: lines.append(line) or True)
fifo = os.path.join(tempfile.mkdtemp(), "fifo")
os.mkfifo(fifo)
try:
    with loading.Loading("tiny", is_verbose="verbose" in sys.argv) as block:
        worker = subprocess.Popen([sys.executable, "-c", os.environ["WORKER"], fifo], stdin=subprocess.PIPE)
        open(fifo).read()
        while "slow" in sys.argv and len(lines) < 4:
            time.sleep(0.01)
        logging.getLogger("other").info("of another library")
        print("of this process")
        if "fails" in sys.argv:
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        if "ours" in sys.argv:
            raise CannotStart("There is a wrong option.")
        if "stopped" in sys.argv:
            raise Stopped(0)
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
    def lines(self) -> list[str]:
        """The lines about loading."""
        return re.findall(r"penstock\.api\.start\.loading: (.*)", self.err)


def loaded(*flags: str) -> Output:
    command, environment = [sys.executable, "-c", COMMAND, *flags], {**os.environ, "WORKER": WORKER}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return Output(ended.returncode, ended.stdout, ended.stderr)


def test_lines_of_vllm_are_hidden() -> None:
    output = loaded()
    assert (output.status, output.out) == (0, "serving\n")
    assert output.lines[0] == "Loading tiny"
    assert output.lines[-1].startswith("Loaded tiny in ")
    for hidden in ("It may be slow", "It is too large", "library", "of this process", "It lives", "30%"):
        assert hidden not in output.err


@pytest.mark.parametrize("mode", ["slow", "verbose"])
def test_long_start_says_for_how_long(mode: str) -> None:
    lines = loaded("slow", mode).lines
    assert len(lines) > 3
    hint = "" if mode == "verbose" else r" \(--verbose shows vLLM's lines\)"
    assert all(re.fullmatch(r"Loading tiny, for [\d.]+ m?s" + hint, line) for line in lines[1:-1])


def test_later_warnings_of_workers_are_shown() -> None:
    """Workers write to the pipe as long as they live."""
    assert "WARNING 11-22 23:53:24 [x.py:1] It complains." in loaded().err


def test_operator_may_choose_the_level_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert "INFO 11-22 23:53:24 [x.py:1] It lives." in loaded().err


def test_failure_ends_with_its_cause_after_all_lines() -> None:
    output = loaded("fails")
    assert (output.status, output.out) == (1, "")
    lines = output.err.splitlines()
    for kept in ("from a library in C", "terminate called", "of this process"):
        assert any(kept in line for line in lines)
    assert any("of another library" in line for line in lines)
    assert any("It may be slow." in line for line in lines)
    assert sum("Capturing CUDA graphs" in line for line in lines) == 1  # a bar, of which only the last state is left
    assert sum("RuntimeError: Engine core" in line for line in lines) == 1
    assert lines[-1] == "penstock: tiny cannot be served: Engine core initialization failed. See root cause above."
    assert lines.index(next(line for line in lines if line.startswith("RuntimeError"))) < lines.index(
        "(Worker pid=7) ERROR 11-22 23:53:24 [x.py:1] ValueError: It is too large."
    )


def test_mistake_of_the_operator_is_not_buried_under_lines_of_vllm() -> None:
    output = loaded("ours")
    assert output.err.endswith("penstock: There is a wrong option.\n")
    assert "It may be slow" not in output.err


def test_verbose_shows_each_line_once() -> None:
    for output in (loaded("verbose"), loaded("verbose", "fails")):
        for shown in ("It may be slow.", "of this process", "ValueError: It is too large."):
            assert output.err.count(shown) == 1
        assert output.lines[0] == "Loading tiny"


def test_command_ended_by_a_signal_is_quiet() -> None:
    output = loaded("stopped")
    assert output.status == 0
    assert "It may be slow" not in output.err
