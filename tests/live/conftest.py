"""Settings of vLLM for every engine that these tests start.

They are the same on every machine: one thread computes, on whichever core is free, in the process of the engine core,
and nothing is compiled.  By itself vLLM takes a thread for each core and binds it there, has one more process that
computes, and compiles some of its functions.
"""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # one process less for each engine
    TORCH_COMPILE_DISABLE="1",  # or it needs a C++ compiler, and time
)
