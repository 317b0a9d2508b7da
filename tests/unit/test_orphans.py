"""No process is left of a program of the tests, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

import pytest

from tests.support.paths import ROOT
from tests.support.processes import wait_for
from tests.support.scripted_model import MARK, marked

pytestmark = pytest.mark.io

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1:]:
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(600)
"""

PROGRAM = """
import os, subprocess, sys
from tests.support.orphans import ending_with_us
command = [sys.executable, "-c", sys.argv[1], sys.argv[1]]
subprocess.Popen(command, env=os.environ | ending_with_us(), stdin=subprocess.DEVNULL)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_processes_end_with_their_program(number: signal.Signals | None) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", PROGRAM, STUBBORN]
    environment = os.environ | {MARK: mark, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as program:
        wait_for(lambda: len(marked(mark)) == 3)  # with the one that its child has started
        if number is not None:
            program.send_signal(number)
    wait_for(lambda: not marked(mark))
