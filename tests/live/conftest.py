"""Settings of vLLM for every engine that these tests start.

They are the same on every machine: one unbound thread computes, in the process that starts the engine, and nothing is
compiled.  By default, vLLM binds a thread to each core, runs the engine core in another process, and compiles some of
its functions.
"""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # saves a process for each engine
    TORCH_COMPILE_DISABLE="1",  # compiling needs a C++ compiler and takes time
)
