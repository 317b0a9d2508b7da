"""``make trainers``: the forms of rollouts, read by the classes and functions of the trainers that they are for.

The released wheels are fetched from pip's index.  Of their modules, only the definitions named here run: the modules
import much that no test needs.  The rows are those of fixtures with log probabilities, and of branches made by hand, as
a reader of JSON and one of Parquet have them.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter

from penstock.extensions.rollouts.forms import NO_LABEL, TRIED, rows
from penstock.extensions.rollouts.paths import Branch, Reward, TokenPath
from penstock.extensions.rollouts.rewards import rewarded
from penstock.extensions.rollouts.sessions import rollouts
from penstock.extensions.rollouts.writing import written
from tests.oracles.sources import Release
from tests.support.paths import HARMONY
from tests.support.token_paths import token_path

TRL = Release("trl", TRIED["trl"], ".whl", ("trl/trainer/grpo_", "trl/trainer/sft_", "trl/trainer/utils.py"))
VERL = Release("verl", TRIED["verl"], ".whl", ("verl/experimental/agent_loop/agent_loop.py",))
SKYRL = Release("skyrl", TRIED["skyrl"], ".whl", ("skyrl/train/generators/", "skyrl/train/utils/trainer_utils.py"))

Rows: TypeAlias = Sequence[dict[str, Any]]


def columns(found: Rows, names: Sequence[str]) -> dict[str, Any]:
    """The columns of rows, of which one that is never known is None."""
    made = {name: [row[name] for row in found] for name in names}
    return {name: None if all(each is None for each in column) else column for name, column in made.items()}


def defined(path: Path, *names: str, **given: Any) -> SimpleNamespace:
    """What a module defines under these names, at any depth, with ``given`` in place of what it imports."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "name", "") in names]
    assert {*names} <= {getattr(node, "name", "") for node in nodes}, f"{path} has not all of {names}"
    body = [node for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)) if isinstance(node, ast.stmt)]
    known = {
        **vars(typing),
        "__name__": __name__,
        "np": np,
        "torch": torch,
        "dataclass": dataclasses.dataclass,
        **given,
    }
    exec(compile(ast.Module(body, []), str(path), "exec", dont_inherit=True), known)
    return SimpleNamespace(**{name: known[name] for name in names})


def try_trl(found: Rows) -> None:
    """TRL: the keys of a ``rollout_func``, the tensors that its GRPO makes of them, and the batch of its SFT."""
    folder = TRL.folder() / "trl/trainer"
    grpo = ast.parse((folder / "grpo_trainer.py").read_text())
    required = next(
        ast.literal_eval(node.value)
        for node in ast.walk(grpo)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "required_keys"
    )
    assert 'extra_fields.pop("env_mask", None)' in (folder / "grpo_trainer.py").read_text()
    output = columns(found, (*sorted(required), "env_mask"))
    pad = defined(folder / "utils.py", "pad").pad
    tensors = {name: pad([torch.tensor(each) for each in output[name]]) for name in ("completion_ids", "env_mask")}
    known = [[float("nan") if each is None else each for each in row] for row in output["logprobs"]]
    assert tensors["completion_ids"].shape == tensors["env_mask"].shape == pad([*map(torch.tensor, known)]).shape
    collator = defined(
        folder / "sft_trainer.py", "DataCollatorForLanguageModeling", DataCollatorMixin=object, pad=pad
    ).DataCollatorForLanguageModeling
    batch = collator(pad_token_id=0).torch_call(found)
    for row, labels, mask in zip(found, batch["labels"], tensors["env_mask"], strict=True):
        trained = [token for token, own in zip(row["completion_ids"], mask.tolist(), strict=False) if own]
        assert labels[labels != NO_LABEL].tolist() == trained
        assert row["input_ids"] == row["prompt_ids"] + row["completion_ids"]


def try_verl(found: Rows) -> None:
    """verl: an ``AgentLoopOutput`` of each row, and the tensors that it becomes."""
    names = ("AgentLoopMetrics", "AgentLoopOutput")
    module = VERL.folder() / "verl/experimental/agent_loop/agent_loop.py"
    output = defined(module, *names, BaseModel=BaseModel, ConfigDict=ConfigDict).AgentLoopOutput
    for row in found:
        assert row.keys() <= output.model_fields.keys()
        made = output.model_validate(row, strict=True).as_dict()
        assert made["prompts"].tolist() + made["responses"].tolist() == row["prompt_ids"] + row["response_ids"]
        assert made["response_mask"].shape == made["responses"].shape
        if row["response_logprobs"] is not None:
            assert made["rollout_log_probs"].shape == made["responses"].shape
            assert not made["rollout_log_probs"].isnan().any()
        if row["reward_score"] is not None:
            assert made["rm_scores"].sum().item() == row["reward_score"]


def try_skyrl(found: Rows) -> None:
    """SkyRL: the columns are a ``GeneratorOutput``, which its own checks of step-wise training accept."""
    folder = SKYRL.folder() / "skyrl/train"
    base = defined(folder / "generators/base.py", "TrajectoryID", "GeneratorOutput")
    ids = [base.TrajectoryID(**row["trajectory_ids"]) for row in found]
    output = columns(found, [*found[0]]) | {"trajectory_ids": ids}
    assert output.keys() <= base.GeneratorOutput.__annotations__.keys()
    for name, column in output.items():
        TypeAdapter(base.GeneratorOutput.__annotations__[name]).validate_python(column, strict=True)
    checks = ("validate_generator_output", "_validate_step_wise_fields")
    given = {"GeneratorOutput": dict, "logger": SimpleNamespace(warning=sys.exit)}
    check = defined(folder / "utils/trainer_utils.py", *checks, **given)
    check.validate_generator_output(len(ids), output, step_wise=True)


TRAINERS: Mapping[str, Callable[[Rows], None]] = {"trl": try_trl, "verl": try_verl, "skyrl": try_skyrl}


def made_by_hand() -> Iterator[list[TokenPath]]:
    """Sessions with one path, with a branch, with a path that nothing was written of, and with rewards."""
    begun, more = ([1, 2], {3: -0.5, 4: -1.5}), ([5, 6], {7: -0.25})
    for at in range(3):
        facts: dict[str, Any] = {"session": f"s{at}", "rewards": [Reward(float(at))]}
        yield [token_path(begun, more, **facts)]
        facts["key"] = "two"
        branch = token_path(begun, ([8], {9: -0.125}), branch_at=1, number=1, branch=Branch(0, 4), **facts)
        yield [token_path(begun, more, **facts), branch, token_path(([1], []), number=2, **facts)]


def of_fixtures() -> Iterator[list[TokenPath]]:
    """The recorded sessions of fixtures whose log probabilities are all known, with a reward each."""
    for session in rollouts([HARMONY]):
        paths = rewarded(session.paths, [Reward(0.5)])
        if paths and all(sum(map(isnan, path.logprobs)) == path.mask.count(0) for path in paths):
            yield [*paths]


def read_back(form: str, sessions: Sequence[Sequence[TokenPath]]) -> Iterator[Rows]:
    """The rows of sessions, as a file of JSON lines has them, and as one of Parquet has them."""
    with TemporaryDirectory() as folder:
        for name in ("out.jsonl", "out.parquet"):
            with written(f"{folder}/{name}", form) as write:
                for paths in sessions:
                    for row in rows(form, paths):
                        write(row)
        yield [json.loads(line) for line in Path(folder, "out.jsonl").read_text().splitlines()]
        yield pq.read_table(f"{folder}/out.parquet").to_pylist()


def main() -> int:
    """Print what each trainer has read."""
    for name, read in TRAINERS.items():
        for found in read_back(name, [*made_by_hand(), *of_fixtures()]):
            read(found)
            sys.stdout.write(f"{name} {TRIED[name]} reads {len(found)} rows\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
