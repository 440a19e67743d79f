"""Models as programs of torch, for ``torch.export`` and AOTInductor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from .. import ops
from .._common import check, torch_compat
from .._common.indexing import offsets
from .spin import SPIN
from .subtree_linear import SubtreeLinear

# Programs take sizes, not offsets: a length that is one more than the number of graphs, or of nodes, would make a
# single one a special case, for which torch.export makes no room.


class _FromRows(nn.Module):
    def __init__(self, model: SPIN) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return self.model.forward_tensors(
            rows, _checked_offsets(torch_compat.exported_long(sizes), "rows", rows.shape[1])
        )


class _FromGraphs(nn.Module):
    def __init__(self, model: SPIN, operator: str) -> None:
        super().__init__()
        self.model, self.operator = model, operator

    def forward(self, edge_index: Tensor, x: Tensor, sizes: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        indptr, indices, ptr, order = _arrays(edge_index, x, sizes)
        arrays = (indptr, indices, x, self.model.config["num_hops"])
        weight, names = None if edge_weight is None else edge_weight[order], self.operator.split(",")
        first, *others = [ops.power_features(*arrays, name, ptr=ptr, edge_weight=weight) for name in names]
        rows = torch.cat([first, *(powers[1:] for powers in others)]) if others else first
        return self.model.forward_tensors(rows, ptr)


class _SubtreesFromGraphs(nn.Module):
    def __init__(self, model: SubtreeLinear) -> None:
        super().__init__()
        self.model = model

    def forward(self, edge_index: Tensor, x: Tensor, sizes: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        indptr, indices, ptr, order = _arrays(edge_index, x, sizes)
        types = None if edge_weight is None else edge_weight[order].long()
        return self.model.forward_tensors(indptr, indices, x, ptr, types)


def _arrays(edge_index: Tensor, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``indptr``, ``indices`` and ``ptr`` of a ``GraphBatch``, and the places of its edges among those given."""
    edge_index, num_nodes = torch_compat.exported_long(edge_index), x.shape[0]
    ptr = _checked_offsets(torch_compat.exported_long(sizes), "x", num_nodes)
    _require(((edge_index >= 0) & (edge_index < num_nodes)).all(), "edge_index must be nodes, from 0 to N - 1")
    graph = torch.bucketize(edge_index, ptr[1:], right=True)
    _require((graph[0] == graph[1]).all(), "edge_index must have both ends of an edge in one graph of sizes")
    source, target = edge_index.unbind()
    target, order = target.sort(stable=True)
    indptr = torch.searchsorted(target, torch.arange(num_nodes + 1, device=target.device))
    return indptr, source[order], ptr, order


def _checked_offsets(sizes: Tensor, name: str, num_nodes: int) -> Tensor:
    _require((sizes >= 0).all() & (sizes.sum() == num_nodes), f"sizes must add up to the nodes of {name}")
    return offsets(sizes)


def _require(condition: Tensor, message: str) -> None:
    """Have the program check an input on the CPU; on a GPU a failed check would leave it unusable."""
    if condition.is_cpu:
        torch_compat.assert_on_device(condition, message)


def export(
    model: SPIN | SubtreeLinear,
    operator: str | Sequence[str] | None = None,
    *,
    from_rows: bool = False,
    edge_weight: bool = False,
) -> ExportedProgram:
    """Export a model, as it evaluates, for any number of graphs and nodes: many, one, or none.

    The program computes the powers itself. It takes ``edge_index [2, E]`` int64 in PyG's convention, in any order
    (``graphs.edge_index.long()`` of a ``GraphBatch``), ``x [N, d]``, which must have gone through
    ``model.node_features.transform`` if the model has any, and ``sizes [G]`` int64, the number of nodes of each graph;
    and with ``edge_weight=True`` last ``edge_weight [E]`` in the dtype of ``x``. It returns class scores
    ``[G, out_features]``. Device and dtype are those that the model has now. A model does not know whether the graphs
    of its training had weights: ask for them if they had, otherwise scores are others, without an error.

    The result is torch's: ``torch.export.save`` and ``load`` keep it, ``torch._inductor.aoti_compile_and_package``
    compiles it. A process that loads it must import ``spin_fast`` first, which registers the operations.

    Args:
        model: a ``SPIN``; where its layers are not those that the constructor made, they are traced as they are. Or a
            ``SubtreeLinear``, whose program computes keys in the place of powers, and takes ``x`` in float32.
        operator: the graph operator, or several; None for ``model.operator``.
        from_rows: export a program from ``rows [R + 1, N, d]``, as :func:`spin_fast.power_features` returns them, or of
            several operators side by side ``[1 + k R, N, d]``, as ``PowerFeatures.dense_rows`` does, and ``sizes``.
        edge_weight: export a program that takes the weights of the edges, too, in the order of ``edge_index``.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """
    kind = next((kind for kind in (SPIN, SubtreeLinear) if isinstance(model, kind)), None)
    if kind is None:
        raise TypeError(f"model must be a SPIN or a SubtreeLinear, got {type(model).__name__}")
    if type(model).forward is not kind.forward or "forward" in vars(model) or torch_compat.has_hooks(model):
        raise ValueError(
            f"model must have the forward of {kind.__name__} and no hooks of its own: a program would leave them out"
        )
    check.flag("from_rows", from_rows)
    check.flag("edge_weight", edge_weight)
    like: Tensor = next(model.parameters())
    if isinstance(model, SubtreeLinear):
        if from_rows or operator is not None:
            raise ValueError("from_rows must be False, and operator None, as a SubtreeLinear takes graphs without one")
        if edge_weight != model.options["edge_types"]:
            raise ValueError(f"edge_weight must be {model.options['edge_types']}, as edge_types of the model")
        like = like.float()
    rows = like.new_zeros(model.num_branches if isinstance(model, SPIN) else 1, 7, model.config["in_features"])
    sizes = torch.tensor([3, 1, 3], device=like.device)
    any_length, any_width = {0: Dim.DYNAMIC}, {1: Dim.DYNAMIC}
    program: nn.Module = _FromRows(model) if isinstance(model, SPIN) else _SubtreesFromGraphs(model)
    arguments: tuple[Tensor, ...] = (rows, sizes)
    dynamic: tuple[object, ...] = (any_width, any_length)
    if from_rows:
        if operator is not None:
            raise ValueError(f"operator must be None where the program takes rows, got {operator!r}")
        if edge_weight:
            raise ValueError("edge_weight must be False where the program takes rows, in which weights are already")
    else:
        if isinstance(model, SPIN):
            program = _FromGraphs(model, model.check_operator(operator))
        arguments = (sizes.new_zeros(2, 5), rows[0], sizes)
        dynamic = (any_width, any_length, any_length)
        if edge_weight:
            arguments, dynamic = (*arguments, like.new_ones(5)), (*dynamic, any_length)
    training = model.training
    try:
        return torch.export.export(program.eval(), arguments, dynamic_shapes=dynamic)
    finally:
        model.train(training)
