"""vLLM's frontend in Rust: `python -m tests.bench.rust_frontend` takes the program out of vLLM's wheel for GPUs.

It needs neither a GPU nor the other files of the wheel.
"""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

RELEASE = "0.33.0"
SHA256 = "ee53a9eec77b858799f7526ad0f284df808d9350b8b4d6f1754583f9f8782c62"
"""Of the program for Linux on x86-64."""

PROGRAM = Path(f".cache/vllm-rs-{RELEASE}")


def missing() -> str:
    """Return why the program cannot be measured; empty if it can."""
    return "" if PROGRAM.exists() else f"no vllm-rs {RELEASE}: pip's index did not give vLLM's wheel, or another one"


def fetch() -> None:
    """Write the program to `PROGRAM`."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    with TemporaryDirectory(dir=PROGRAM.parent) as folder:
        subprocess.run((*pip, "download", "-q", "--no-deps", "-d", folder, f"vllm=={RELEASE}"), check=True)
        (wheel,) = Path(folder).iterdir()
        with ZipFile(wheel) as archive:
            program = archive.read("vllm/vllm-rs")
        if sha256(program).hexdigest() != SHA256:
            raise SystemExit(f"{wheel.name} has another vllm-rs than the one that was measured before")
        unpacked = Path(folder) / PROGRAM.name
        unpacked.write_bytes(program)
        unpacked.chmod(0o755)
        unpacked.rename(PROGRAM)


if __name__ == "__main__" and not PROGRAM.exists():
    fetch()
