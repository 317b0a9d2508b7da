"""`penstock batch` beside vLLM's ``run-batch``: the same file on the same engine settings, in turns.

``python -m tests.bench.batch_files`` takes some minutes: each round loads the tiny model twice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT

WORDS = ("engine", "forest", "garden", "harbor", "market", "paper", "river", "signal", "stone", "window")

RATES = {
    "penstock batch": re.compile(r"([\d.]+) lines/s in this run"),
    "vllm run-batch": re.compile(r"100% Completed .* ([\d.]+)req/s"),
}
"""The number of requests per second after the load, in the output of each command."""


def requests(number: int, tokens: int) -> str:
    """Return the lines of a file of short chats."""

    def line(at: int) -> str:
        text = f"Say something about {WORDS[at % 10]} and {WORDS[at // 10 % 10]}, number {at}."
        body = {"model": "tiny-gpt-oss", "messages": [{"role": "user", "content": text}], "temperature": 0}
        body["max_completion_tokens"] = tokens
        asked = {"custom_id": f"request-{at}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        return f"{json.dumps(asked)}\n"

    return "".join(map(line, range(number)))


def rate(name: str, file: Path, options: list[str]) -> float:
    """Run a command over a file, and return its requests per second."""
    out = file.with_suffix(".out")
    out.unlink(missing_ok=True)
    program, command = name.split()
    arguments: list[str | Path] = ["-i", file, "-o", out]
    arguments += [CHECKPOINT] if program == "penstock" else ["--model", CHECKPOINT]
    run = subprocess.run(
        [Path(sys.executable).with_name(program), command, *arguments, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    output = run.stdout + run.stderr
    results = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if any(result["error"] for result in results) or len(results) != len(file.read_text().splitlines()):
        raise SystemExit(f"{name} did not answer all requests:\n{output[-4000:]}")
    return float(RATES[name].findall(output)[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    ratios = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "requests.jsonl")
        file.write_text(requests(chosen.requests, chosen.tokens))
        for _ in range(chosen.rounds):
            rates = {name: rate(name, file, list(ARGUMENTS)) for name in RATES}
            ratios.append(rates["penstock batch"] / rates["vllm run-batch"])
            shown = [f"{name}: {each:.1f}/s" for name, each in rates.items()]
            sys.stdout.write(f"{', '.join(shown)}, ratio {ratios[-1]:.3f}\n")
    sys.stdout.write(f"The median ratio is {statistics.median(ratios):.3f}; the goal is at least 0.95.\n")


if __name__ == "__main__":
    main()
