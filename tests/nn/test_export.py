"""Exported models: torch.export and AOTInductor."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import random_graphs
from torch._inductor import cpp_builder

import spin_fast
from spin_fast import PAGNN, SPIN, GraphBatch, NodeFeatures, training
from spin_fast.nn import Ensemble, SubtreeLinear, export

SIZES = ([4, 0, 1, 6, 3], [5, 9], [2] * 30, [3], [1], [0], [])


def arguments_of(graphs: GraphBatch, operator: str | None) -> tuple[torch.Tensor, ...]:
    if operator is None:
        return powers(graphs), graphs.ptr.diff()
    weight = () if graphs.edge_weight is None else (graphs.edge_weight.flip(0),)
    return graphs.edge_index.flip(1), graphs.x, graphs.ptr.diff(), *weight


def powers(graphs: GraphBatch) -> torch.Tensor:
    return spin_fast.power_features(graphs.indptr, graphs.indices, graphs.x, 2, "sym+adj", ptr=graphs.ptr)


def assert_same(program, model: SPIN, operator: str | None) -> None:
    for seed, sizes in enumerate(SIZES):
        graphs = random_graphs(sizes, dtype=torch.float32, seed=seed)
        expected = model.eval().forward_tensors(powers(graphs), graphs.ptr)
        torch.testing.assert_close(program(*arguments_of(graphs, operator)), expected)


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        (None, {"size_aware": True}),
        (None, {"branches": "both"}),
        ("sym+adj", {"attention": False, "batch_norm": True, "dropout": 0.1}),
        ("sym+adj", {"branches": "joint"}),
    ],
)
def test_programs_take_any_number_of_graphs(native, operator: str | None, options: dict) -> None:
    """As exported, decomposed, saved and loaded."""
    model = SPIN(3, 8, 2, 2, **options)
    model.operator = "sym+adj"
    program = export(model, from_rows=operator is None)
    assert model.training
    assert_same(program.module(), model, operator)
    program = program.run_decompositions()
    assert_same(program.module(), model, operator)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_same(torch.export.load(file).module(), model, operator)


def test_the_ragged_form_is_exported_too(native) -> None:
    """By a module of one's own; then at least two graphs."""

    class Ragged(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = SPIN(3, 8, 2, 2).eval()

        def forward(self, rows, ptr, index, count):
            return self.model.forward_tensors(rows, ptr, index, count)

    batches = []
    for seed, sizes in enumerate(([9, 0, 1, 12, 7], [2] * 12, [30, 4])):
        graphs = random_graphs(sizes, dtype=torch.float32, signs=True, seed=seed)
        batches.append(spin_fast.PowerFeatures.from_graphs(graphs, 2).branch_rows())
    module, any_length = Ragged(), {0: torch.export.Dim.DYNAMIC}
    dynamic = ((any_length,) * 3, any_length, any_length, any_length)
    program = torch.export.export(module, batches[0], dynamic_shapes=dynamic).module()
    for batch in batches:
        torch.testing.assert_close(program(*batch), module(*batch))


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match="model must be a SPIN, a SubtreeLinear or an Ensemble of these, got Linear"):
        export(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="operator must be one of adj, sym"):
        export(SPIN(3, 4, 2, 2), "gcn")
    with pytest.raises(ValueError, match="operator must be given"):
        export(SPIN(3, 4, 2, 2))
    with pytest.raises(TypeError, match="edge_weight must be a bool, got Tensor"):
        export(SPIN(3, 4, 2, 2), "sym", edge_weight=torch.ones(3))
    with pytest.raises(ValueError, match="edge_weight must be False where the program takes rows"):
        export(SPIN(3, 4, 2, 2), from_rows=True, edge_weight=True)
    with pytest.raises(ValueError, match="operator must be None where the program takes rows, got 'sym'"):
        export(SPIN(3, 4, 2, 2), "sym", from_rows=True)
    model = SPIN(3, 4, 2, 2)
    model.operator = "rw"
    with pytest.raises(ValueError, match="operator must be 'rw', which the model was trained with, got 'sym'"):
        export(model, "sym")


def test_weights_of_edges(native) -> None:
    model = SPIN(3, 8, 2, 2)
    program = export(model, "sym", edge_weight=True).module()
    for seed, sizes in enumerate(SIZES):
        graphs = random_graphs(sizes, dtype=torch.float32, seed=seed, weighted=True)
        expected = model.eval()(spin_fast.PowerFeatures.from_graphs(graphs, 2))
        torch.testing.assert_close(program(*arguments_of(graphs, "sym")), expected)


def test_programs_name_wrong_input(native) -> None:
    model = SPIN(3, 8, 2, 2).eval()
    program, of_rows = export(model, "sym").module(), export(model, from_rows=True).module()
    edge_index, x, sizes = torch.tensor([[0, 1], [1, 0]]), torch.ones(3, 3), torch.tensor([2, 1])
    expected = program(edge_index, x, sizes)
    assert torch.equal(program(edge_index.int(), x, sizes.int()), expected)
    for arguments, message in (
        ((edge_index + 2, x, sizes), "edge_index must be nodes, from 0 to N - 1"),
        ((edge_index - 1, x, sizes), "edge_index must be nodes, from 0 to N - 1"),
        ((edge_index + 1, x, sizes), "edge_index must have both ends of an edge in one graph"),
        ((edge_index, x, sizes + 1), "sizes must add up to the nodes of x"),
        ((edge_index, x, torch.tensor([4, -1])), "sizes must add up to the nodes of x"),
    ):
        with pytest.raises(RuntimeError, match=message):
            program(*arguments)
    with pytest.raises(RuntimeError, match="sizes must add up to the nodes of rows"):
        of_rows(torch.ones(3, 3, 3), sizes * 1_000_000)


RUN = """
import sys, torch
{first}
program = torch._inductor.aoti_load_package(sys.argv[1])
scores = program(torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 3), torch.tensor([2]))
print(scores.shape)
"""


@pytest.mark.slow
def test_compiled_ahead_of_time(native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in another process, which must import spin_fast."""
    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"no C++ compiler: {error}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model = SPIN(3, 8, 2, 2)
    path = torch._inductor.aoti_compile_and_package(
        export(model, "sym+adj"),
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
    assert_same(torch._inductor.aoti_load_package(path), model, "sym+adj")
    for first, said in (("import spin_fast", "torch.Size([1, 2])"), ("", "Could not find schema for spin_fast::")):
        result = subprocess.run(
            [sys.executable, "-c", RUN.format(first=first), path],
            cwd=Path(__file__).parent,
            env=os.environ.copy(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (result.returncode == 0) == bool(first), result.stderr
        assert said in (result.stdout if first else result.stderr)


@pytest.mark.parametrize("operator", [None, "sym,adj"])
def test_operators_side_by_side(native, operator: str | None) -> None:
    model = SPIN(3, 8, 2, 2, num_operators=2)
    program = export(model, operator, from_rows=operator is None).module()
    for sizes in SIZES[:2]:
        graphs = random_graphs(sizes, dtype=torch.float32)
        features = spin_fast.PowerFeatures.from_graphs(graphs, 2, "sym,adj")
        arguments = arguments_of(graphs, operator) if operator else (features.dense_rows(), graphs.ptr.diff())
        torch.testing.assert_close(program(*arguments), model.eval()(features))
    with pytest.raises(ValueError, match=r"operator must name 2 operator\(s\) as the model has, got 'sym'"):
        export(model, "sym")


@pytest.mark.parametrize("options", [{}, {"norm": "l1", "features": [0, 2]}, {"norm": None, "edge_types": True}])
def test_a_linear_model_of_subtree_counts(native, options: dict) -> None:
    columns = torch.arange(0, 512, 2)
    model = SubtreeLinear(3, 2, len(columns), num_hops=2, num_columns=512, **options)
    state = {name: torch.randn(value.shape).double() for name, value in model.state_dict().items()}
    model.load_state_dict(state | {"columns": columns})
    weighted = bool(options.get("edge_types"))
    program = export(model, edge_weight=weighted)
    for seed, sizes in enumerate(SIZES):
        graphs = random_graphs(sizes, dtype=torch.float32, seed=seed)
        types = torch.arange(graphs.num_edges) % 3.0 if weighted else None
        graphs = replace(graphs, x=graphs.x.sign(), edge_weight=types)
        torch.testing.assert_close(program.module()(*arguments_of(graphs, "sym")), model(graphs))
    with pytest.raises(ValueError, match="operator None: only a SPIN takes them, and model is of SubtreeLinear"):
        export(model, "sym", edge_weight=weighted)
    with pytest.raises(ValueError, match=f"edge_weight must be {weighted}"):
        export(model, edge_weight=not weighted)


def ensemble_of(out_features: int, edge_types: bool = False) -> Ensemble:
    """Members of unlike operators, hops, branches and node features."""
    torch.manual_seed(0)
    graphs = random_graphs([9, 20], dtype=torch.float32)
    wide = NodeFeatures("log", keep_x=True, standardize=True).fit(graphs)
    one, two = SPIN(4, 8, out_features, 1), SPIN(3, 4, out_features, 2, num_operators=2, branches="both", dropout=0.5)
    one.node_features, one.operator, two.operator = wide, "rw", "sym,adj"
    linear = SubtreeLinear(3, out_features, 64, num_hops=2, num_columns=64, features=[0], edge_types=edge_types)
    torch.nn.init.normal_(linear.weight)
    return Ensemble([linear, one, two])


def ensemble_arguments(model: Ensemble, graphs: GraphBatch) -> tuple:
    x = tuple(member.prepared(graphs)[0].x for member in model.members)
    weight = () if graphs.edge_weight is None else (graphs.edge_weight,)
    return graphs.edge_index.long(), x, graphs.ptr.diff(), *weight


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("multilabel", [False, True])
def test_ensembles(native, weighted: bool, multilabel: bool) -> None:
    """One program, with node features for each member; as exported, saved and loaded."""
    model = ensemble_of(3, edge_types=weighted)
    model.multilabel = multilabel
    model.members[1].train()
    model.members[2].eval()
    file = io.BytesIO()
    torch.export.save(export(model, edge_weight=weighted), file)
    assert [member.training for member in model.members] == [True, True, False]
    file.seek(0)
    program = torch.export.load(file).module()
    for seed, sizes in enumerate(SIZES):
        graphs = random_graphs(sizes, dtype=torch.float32, seed=seed)
        types = torch.arange(graphs.num_edges) % 3 + 1.0 if weighted else None
        graphs = replace(graphs, x=graphs.x.sign(), edge_weight=types)
        scores = program(*ensemble_arguments(model, graphs))
        assert scores.dtype == torch.float32
        torch.testing.assert_close(model.probabilities(scores), training.predict_proba(model, graphs))


def test_ensembles_name_wrong_input(native) -> None:
    model = ensemble_of(2)
    edge_index, x, sizes = ensemble_arguments(model, random_graphs([3, 2], dtype=torch.float32))
    program = export(model, edge_weight=True).module()  # which the linear model does not read
    with pytest.raises((RuntimeError, AssertionError)):
        program(edge_index, (x[0], x[1][:4], x[2]), sizes, torch.ones(edge_index.shape[1]))
    for options in ({"from_rows": True}, {"operator": "sym"}):
        with pytest.raises(ValueError, match="only a SPIN takes them, and model is of Ensemble"):
            export(model, **options)
    with pytest.raises(ValueError, match="edge_weight must be True, as edge_types of the model"):
        export(ensemble_of(2, edge_types=True))
    with pytest.raises(ValueError, match="edge_weight must be False, as edge_types of the model"):
        export(Ensemble([model.members[0]]), edge_weight=True)
    with pytest.raises(TypeError, match="an Ensemble of these, got PAGNN"):
        export(Ensemble([PAGNN([torch.nn.Linear(3, 10) for _ in range(3)])]))
    model.members[1].register_forward_hook(print)
    with pytest.raises(ValueError, match="model must have the forward of SPIN and no hooks"):
        export(model)


def test_without_the_compiled_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spin_fast.ops.native.library", None)
    monkeypatch.setattr("spin_fast.ops.native.missing_reason", "no compiler")
    with pytest.raises(RuntimeError, match="a program names; there is none: no compiler"):
        export(SPIN(3, 8, 2, 2), "sym")
