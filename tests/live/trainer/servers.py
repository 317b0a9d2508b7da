"""The servers of a training: vLLM, which writes with the weights of today, and penstock before it, which records."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import free_port, running_process

MODEL = "tiny-qwen"

ENGINE = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager", "--seed", "0"),
    *("--max-model-len", "2048", "--max-num-seqs", "64", "--kv-cache-memory-bytes", "134217728"),
    *("--generation-config", "vllm", "--reasoning-parser", "qwen3"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out"),
)
"""Options of vLLM, which computes with the numbers of the trainer."""

OPERATOR = "operator-of-a-training"

ENVIRONMENT = {
    "PENSTOCK_OPERATOR_KEY": OPERATOR,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""Variables of both; the last opens the routes by which a trainer gives vLLM other weights."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Servers:
    """A running vLLM, and a running penstock that generates with it."""

    engine: str
    penstock: str
    """Their base URLs."""
    command: Path
    """The program ``penstock``."""
    recordings: Path

    def load(self, weights: Path, version: str) -> None:
        """Let vLLM write with the weights of a folder, and name their version."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        post(f"{self.engine}/collective_rpc", reload)
        assert post(f"{self.engine}/reset_prefix_cache", {}) == {"success": True}
        post(f"{self.engine}/update_weight_version", {"new_version": version})

    def reward(self, session: str, reward: float) -> None:
        """Say what a session was worth."""
        post(f"{self.penstock}/v1/rollouts/{session}/reward", {"reward": reward})

    def rollouts(self) -> list[Row]:
        """Return the paths of all recorded sessions, as TRL reads them."""
        out = self.recordings.with_name("rollouts.jsonl")
        exported = (self.command, "rollouts", self.recordings, "-o", out, "--form", "trl")
        subprocess.run(exported, check=True, capture_output=True)
        return [json.loads(line) for line in out.read_text().splitlines()]

    def versions(self, session: str) -> list[str]:
        """Return the versions of the weights that wrote a session."""
        lines = sent(f"{self.penstock}/v1/rollouts/{session}").splitlines()
        turns = [turn for line in lines for turn in json.loads(line)["turns"]]
        return sorted({span["version"] for turn in turns for span in turn["weights"]})

    def forget(self) -> None:
        """Delete the recordings, which have been read."""
        for recording in self.recordings.glob("resp_*"):
            shutil.rmtree(recording)


def post(url: str, body: Row) -> Any:
    """Send JSON, and return the JSON of the answer."""
    return json.loads(sent(url, json.dumps(body).encode()) or b"null")


def sent(url: str, body: bytes | None = None) -> bytes:
    """Send a request with the key of the operator, and return the answer."""
    headers = {"Authorization": f"Bearer {OPERATOR}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return bytes(answer.read())


@contextmanager
def running_servers(programs: Path, weights: Path, folder: Path) -> Iterator[Servers]:
    """Run ``vllm`` and ``penstock`` of a folder of programs for the length of the block; yield them."""
    engine, server = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    recordings = folder / "recordings"
    recordings.mkdir()
    vllm = (programs / "vllm", "serve", weights, *ENGINE, *at(engine))
    kept = ("--store", folder / "responses.sqlite3", "--record", recordings, "--record-logprobs")
    penstock = (programs / "penstock", "serve", "--engine", engine, *kept, *at(server))
    with (
        running_process(vllm, f"{engine}/health", folder / "vllm.log", ENVIRONMENT),
        running_process(penstock, f"{server}/health", folder / "penstock.log", ENVIRONMENT),
    ):
        yield Servers(engine, server, programs / "penstock", recordings)


def at(url: str) -> tuple[str, ...]:
    """The options that name an address."""
    return ("--host", "127.0.0.1", "--port", url.rpartition(":")[2])
