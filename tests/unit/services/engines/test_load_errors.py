from __future__ import annotations

import pytest

from penstock.services.engines.load_errors import UNFIT, cause_of, is_explained


def test_killed_worker_is_reported_with_its_signal() -> None:
    error = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {'E': -9}")
    assert cause_of(error) == "a process of the engine was ended by SIGKILL; is there enough memory?"


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
    assert cause_of(error) == (cause or "x is not a local folder and is not a valid model identifier")


def test_error_of_the_hub_is_explained_wherever_it_was_wrapped() -> None:
    gated = type("GatedRepoError", (OSError,), {})
    wrapper = OSError("You are trying to access a gated repo. Make sure to have access to it at")
    wrapper.__cause__ = gated("401 Client Error")
    assert cause_of(wrapper).startswith("it is gated: accept its terms")


@pytest.mark.parametrize(
    "message",
    [
        "operator torchvision::nms does not exist",
        "Could not load this library: /venv/torchaudio/lib/_torchaudio.abi3.so",
        "Could not load this library: /venv/torchcodec/libtorchcodec_image.so",
    ],
)
def test_packages_that_do_not_fit_together_need_no_traceback(message: str) -> None:
    """Packages of the default index do not load beside PyTorch's CPU build."""
    wrapper = RuntimeError("Failed to import transformers.models.qwen3")
    wrapper.__cause__ = RuntimeError(message)
    for error in (wrapper, wrapper.__cause__):
        assert cause_of(error) == UNFIT
        assert is_explained(error)
