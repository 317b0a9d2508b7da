from __future__ import annotations

import pytest

from penstock.stages.services.engines.vllm_lines import Step, cause_of, is_explained, level_of, step_of

INFO = "(Worker pid=4659) INFO 11-22 23:53:24 [default_loader.py:501] "
ERROR = "(EngineCore pid=4633) ERROR 11-22 23:53:25 [core.py:1510] "
REFERRING = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("(MainProcess pid=1) INFO 11-22 23:51:28 [model.py:733] Resolved architecture: X", (1, None)),
        ("model-00001-of-00003.safetensors:  12%|█▏        | 600M/4.98G [00:10<01:02]", (2, 12)),
        ("(EngineCore pid=1) INFO 11-22 23:51:49 [core.py:133] Initializing a V1 LLM engine (v0.32.0)", (3, None)),
        (f"{INFO}Starting to load model tiny...", (4, None)),
        ("Loading safetensors checkpoint shards:  67% Completed | 2/3 [00:01<00:00,  1.05s/it]", (4, 67)),
        ("Multi-thread loading shards:  50% Completed | 1/2 [00:01<00:00,  1.05s/it]", (4, 50)),
        (f"{INFO}Using cache directory: /x for vLLM's torch.compile", (5, None)),
        (f"{INFO}GPU KV cache size: 102,300 tokens", (6, None)),
        ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  40%|████      | 2/5 [00:01<00:01]", (7, 40)),
        (f"{INFO}init engine (profile, create kv cache, warmup model) took 0.04 s", (8, None)),
        (f"{INFO}Using MoEPrepareAndFinalizeNoDPEPModular", None),
    ],
)
def test_line_reports_its_step(line: str, step: tuple[int, int | None] | None) -> None:
    found = step_of(line)
    assert (found and (found.number, found.percent)) == step
    assert found is None or isinstance(found, Step)


@pytest.mark.parametrize(
    ("line", "level"),
    [(f"{ERROR}x", "ERROR"), (f"{INFO}x", "INFO"), ("INFO is here", None), ("(Worker pid=1) x", None)],
)
def test_level_of_a_line_of_vllm_is_read(line: str, level: str | None) -> None:
    assert level_of(line) == level


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            [
                f"{ERROR}EngineCore failed to start.",
                f"{ERROR}Traceback (most recent call last):",
                f"{ERROR}    raise ValueError(",
                f"{ERROR}ValueError: No available memory for the cache blocks.",
                "Process EngineCore:",
                "BrokenPipeError: another",
            ],
            "No available memory for the cache blocks.",
        ),
        (
            [
                "(Worker_TP1 pid=9) ERROR 11-22 23:53:25 [x.py:1] torch.OutOfMemoryError: CUDA out of memory.",
                f"{ERROR}Exception: WorkerProc initialization failed due to an exception in a background process. "
                "See stack trace for root cause.",
            ],
            "OutOfMemoryError: CUDA out of memory.",
        ),
        (
            [
                f"{ERROR}KeyError: 'llama9'",
                f"{ERROR}",
                f"{ERROR}During handling of the above exception, another exception occurred:",
                f"{ERROR}ValueError: The model type llama9 is not known.",
            ],
            "The model type llama9 is not known.",
        ),
    ],
)
def test_cause_is_found_in_the_log_of_a_worker(lines: list[str], cause: str) -> None:
    assert cause_of(REFERRING, lines) == cause
    assert is_explained(REFERRING, lines)


def test_killed_worker_is_reported_with_its_signal() -> None:
    error = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {'E': -9}")
    assert cause_of(error, []) == "a process of the engine was ended by SIGKILL; is there enough memory?"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError("x is not a local folder\nand is not a valid model identifier"), None),
        (KeyError("architectures"), "KeyError: 'architectures'"),
        (
            ValueError("['Foo'] are not supported. Supported architectures: dict_keys(['A'])"),
            "['Foo'] are not supported.",
        ),
    ],
)
def test_cause_is_one_line(error: Exception, cause: str | None) -> None:
    assert cause_of(error, []) == (cause or "x is not a local folder and is not a valid model identifier")


def test_error_of_the_hub_is_explained_wherever_it_was_wrapped() -> None:
    gated = type("GatedRepoError", (OSError,), {})
    wrapper = OSError("You are trying to access a gated repo. Make sure to have access to it at")
    wrapper.__cause__ = gated("401 Client Error")
    assert cause_of(wrapper, []).startswith("it is gated: accept its terms")
