from __future__ import annotations

import pytest

from penstock.stages.services.engines.vllm_lines import UNFIT, cause_of, is_explained, level_of

INFO = "(Worker pid=4659) INFO 11-22 23:53:24 [default_loader.py:501] "
ERROR = "(EngineCore pid=4633) ERROR 11-22 23:53:25 [core.py:1510] "
REFERRING = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
)


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


@pytest.mark.parametrize(
    "message",
    [
        "operator torchvision::nms does not exist",
        "Could not load this library: /venv/torchaudio/lib/_torchaudio.abi3.so",
        "Could not load this library: /venv/torchcodec/libtorchcodec_image.so",
    ],
)
def test_packages_that_do_not_fit_together_need_no_traceback(message: str) -> None:
    """Those of the default index do not load beside PyTorch's CPU build."""
    wrapper = RuntimeError("Failed to import transformers.models.qwen3")
    wrapper.__cause__ = RuntimeError(message)
    for error in (wrapper, wrapper.__cause__):
        assert cause_of(error, []) == UNFIT
        assert is_explained(error, [])
