"""What belongs to an op is where its name says: kernels, binding, gradient, reference, test and benchmark."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from helpers import ROOT

from spin_fast import reference

pytestmark = pytest.mark.skipif(
    not (ROOT / "csrc").is_dir(), reason="no csrc/ beside the tests: this is not a checkout"
)

SUBJECTS = ("power", "distinct", "branch", "readout", "training_step", "subtree")
REGISTERED = sorted(
    name.removeprefix("spin_fast::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("spin_fast::") and "squares" not in name  # that of the guide
)
NOT_DIFFERENTIABLE = {"power_features_out", "distinct_rows", "training_step", "training_steps", "subtree_keys"}
ON_THE_CPU_ALONE = {"training_steps"}  # a GPU plays back what has been captured
BENCHMARKS = {"distinct": "test_ours.py", "training_step": "test_training.py"}  # of others: test_<subject>.py


def subject_of(op: str) -> str:
    """The first of the subjects that is in the name."""
    return next(subject for subject in SUBJECTS if subject in op)


def public_name(op: str) -> str:
    """An op may be the backward pass of another, or write to a given tensor."""
    return op.removesuffix("_backward").removesuffix("_out")


def registrations(subject: str) -> dict[str, int]:
    """The ops that a module registers, and with how many functions."""
    tree = ast.parse((ROOT / f"spin_fast/ops/{subject}.py").read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("native.register", "_register")
    ]
    named = [call for call in calls if isinstance(call.args[0], ast.Constant)]  # a helper gets the name
    return {ast.literal_eval(call.args[0]): len(call.args) - 1 for call in named}


def test_there_are_ops(native) -> None:
    schemas = re.findall(r'"(\w+)\(', (ROOT / "csrc/library.cpp").read_text())
    assert sorted(schemas) == REGISTERED


@pytest.mark.parametrize("op", REGISTERED)
def test_everything_is_where_the_name_says(op: str) -> None:
    subject, public = subject_of(op), public_name(op)
    bindings = (f"csrc/cpu/{subject}.cpp", f"csrc/cuda/{subject}.cu")
    for binding in bindings[:1] if op in ON_THE_CPU_ALONE else bindings:
        assert f'm.impl("{op}"' in (ROOT / binding).read_text(), f"{binding} does not bind {op}"
    functions = registrations(subject)[op]  # the fake kernel; the gradient and what it saves
    assert functions == (1 if op in NOT_DIFFERENTIABLE else 3)
    module = ast.parse((ROOT / f"spin_fast/ops/{subject}.py").read_text())
    assert public in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    assert callable(getattr(reference, public))
    assert public in (ROOT / f"tests/ops/test_{subject}.py").read_text()
    assert (ROOT / "benchmarks" / BENCHMARKS.get(subject, f"test_{subject}.py")).is_file()
