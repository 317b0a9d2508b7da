"""A copy of the tiny gpt-oss whose weights are 15 % off: ``python -m tests.support.noisy FOLDER``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_engine import CHECKPOINT

NOISE = 0.15


def write_noisy(folder: Path, noise: float = NOISE) -> Path:
    """Write the copy into a new folder of this name; ``noise`` is the deviation of the change, as a share of a weight."""
    shutil.copytree(CHECKPOINT, folder)
    path, random = folder / "model.safetensors", torch.Generator().manual_seed(0)
    weights = {
        name: (tensor.float() * (1 + noise * torch.randn(tensor.shape, generator=random))).to(tensor.dtype)
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})
    return folder


if __name__ == "__main__":
    write_noisy(Path(sys.argv[1]))
