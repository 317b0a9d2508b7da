"""A copy of a tiny model whose weights are 15 % off: ``python -m tests.support.noisy FOLDER`` is that of gpt-oss."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.paths import TINY_QWEN
from tests.support.tiny_engine import CHECKPOINT

NOISE = 0.15
"""The standard deviation of the change, as a share of each weight."""


def write_noisy(folder: Path, noise: float = NOISE, source: Path = CHECKPOINT) -> Path:
    """Write the copy of a model into a new folder of this name."""
    shutil.copytree(source, folder)
    path, random = folder / "model.safetensors", torch.Generator().manual_seed(0)
    weights = {
        name: (tensor.float() * (1 + noise * torch.randn(tensor.shape, generator=random))).to(tensor.dtype)
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})
    return folder


def write_untied(folder: Path) -> Path:
    """Write the tiny Qwen with an output layer of its own, whose weights vLLM can change on a CPU."""
    shutil.copytree(TINY_QWEN, folder)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


if __name__ == "__main__":
    write_noisy(Path(sys.argv[1]))
