"""The tiny gpt-oss in tests, and how vLLM is asked to run it on a CPU."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parents[2] / ".cache" / "tiny_gpt_oss"
CONTEXT_LENGTH = 8192
ARGUMENTS = (
    "--served-model-name=tiny-gpt-oss",
    "--dtype=bfloat16",
    "--enforce-eager",
    f"--max-model-len={CONTEXT_LENGTH}",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=67108864",
)
