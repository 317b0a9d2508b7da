"""The tiny gpt-oss in tests, and the arguments with which vLLM runs it on a CPU."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.paths import ROOT

CHECKPOINT = ROOT / ".cache" / "tiny_gpt_oss"
CONTEXT_LENGTH = 8192
ARGUMENTS = (
    "--served-model-name=tiny-gpt-oss",
    "--dtype=bfloat16",
    "--enforce-eager",
    f"--max-model-len={CONTEXT_LENGTH}",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=67108864",
)
QUEUE = 12
"""Requests that the engine of the tests takes at a time."""
LORA_ARGUMENTS = ("--enable-lora", "--max-lora-rank=8", "--lora-target-modules=o_proj")

_LAYERS, _HIDDEN, _ATTENTION, _RANK = 4, 64, 128, 8


def write_adapter(folder: Path) -> Path:
    """Write a LoRA adapter, in the format of peft, that makes the tiny model talk nonsense."""
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = random.standard_normal((_RANK, _ATTENTION), np.float32)
        tensors[f"{name}.lora_B.weight"] = random.standard_normal((_HIDDEN, _RANK), np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_plugin(folder: Path) -> Path:
    """Write a folder that, once on ``sys.path``, makes `keep_experts_on_the_cpu` a plugin of vLLM and its workers."""
    metadata = folder / "experts_on_the_cpu-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: experts-on-the-cpu\nVersion: 0\n")
    entry = f"{__name__}:{keep_experts_on_the_cpu.__name__}"
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\nexperts_on_the_cpu = {entry}\n")
    return folder


def keep_experts_on_the_cpu() -> None:
    """Make vLLM run the experts on the CPU although LoRA is on.

    With LoRA, vLLM runs all experts with Triton, which does not support CPUs.  The adapters of the tests change the
    attention alone, so the experts can run without LoRA.
    """
    config = import_module("vllm.model_executor.layers.fused_moe.config")
    config.FusedMoEConfig.is_lora_enabled = property(lambda self: False, lambda self, value: None)
