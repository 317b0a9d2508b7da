"""A fake vLLM in a process of its own that says a text: ``python -m tests.support.harmony_server TEXT --port N``."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from pathlib import Path

from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.fake_vllm import FakeVllm, running_fakes
from tests.support.paths import ROOT


def saying(text: str, *options: str) -> str:
    """Return a command that starts one, from any folder."""
    words = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.support.harmony_server", text, *options]
    return shlex.join(words)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--endless", action="store_true", help="say it again and again")
    parser.add_argument("--waits-for", type=Path, help="listen only once this file is there")
    options = parser.parse_args()
    markup = f"<|channel|>final<|message|>{options.text}" + ("" if options.endless else "<|return|>")
    tokens = load_encoding().encode_markup(markup)
    server = FakeVllm(tokens, endless=options.endless, latency=0.01 if options.endless else 0.0, port=options.port)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    while options.waits_for and not options.waits_for.exists():
        await asyncio.sleep(0.02)
    async with running_fakes(server):
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(main())
