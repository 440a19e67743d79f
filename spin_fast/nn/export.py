"""Models as programs of torch, for ``torch.export`` and AOTInductor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from .. import ops
from .._common import check, torch_compat
from .._common.indexing import offsets
from ..ops import native
from .ensemble import Ensemble
from .spin import SPIN
from .subtree_linear import SubtreeLinear

Member = SPIN | SubtreeLinear

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
    def __init__(self, model: Member | Ensemble, operators: Sequence[str | None]) -> None:
        super().__init__()
        self.model, self.operators = model, operators

    def forward(
        self, edge_index: Tensor, x: Tensor | tuple[Tensor, ...], sizes: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        inputs = (x,) if isinstance(x, Tensor) else x
        indptr, indices, ptr, order = _arrays(edge_index, inputs[0].shape[0], sizes)
        weight = None if edge_weight is None else edge_weight[order]
        members = zip(_members(self.model), self.operators, inputs, strict=True)
        scores = [_scores(member, name, (indptr, indices, of, ptr), weight) for member, name, of in members]
        return self.model.mean(scores).to(inputs[0].dtype) if isinstance(self.model, Ensemble) else scores[0]


def _scores(
    model: Member, operator: str | None, graphs: tuple[Tensor, Tensor, Tensor, Tensor], weight: Tensor | None
) -> Tensor:
    """Class scores from ``indptr``, ``indices``, ``x`` and ``ptr`` of a ``GraphBatch``."""
    if isinstance(model, SubtreeLinear):
        types = weight.long() if weight is not None and model.options["edge_types"] else None
        return model.forward_tensors(*graphs, types)
    indptr, indices, x, ptr = graphs
    arrays, names = (indptr, indices, x, model.config["num_hops"]), str(operator).split(",")
    first, *others = [ops.power_features(*arrays, name, ptr=ptr, edge_weight=weight) for name in names]
    rows = torch.cat([first, *(powers[1:] for powers in others)]) if others else first
    return model.forward_tensors(rows, ptr)


def _arrays(edge_index: Tensor, num_nodes: int, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``indptr``, ``indices`` and ``ptr`` of a ``GraphBatch``, and the places of its edges among those given."""
    edge_index = torch_compat.exported_long(edge_index)
    ptr = _checked_offsets(torch_compat.exported_long(sizes), "x", num_nodes)
    _require(
        ((edge_index >= 0) & (edge_index < num_nodes)).all(), "edge_index must be nodes, from 0 to N - 1, in int64"
    )
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
    model: SPIN | SubtreeLinear | Ensemble,
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

    The program of an ``Ensemble`` holds all members. In the place of ``x`` it takes a tuple of as many, since each
    member has node features of its own, and it returns scores whose probabilities are the mean.

    The result is torch's: ``torch.export.save`` and ``load`` keep it, ``torch._inductor.aoti_compile_and_package``
    compiles it. A process that loads it must import ``spin_fast`` first, which registers the operations.

    Args:
        model: a ``SPIN``; where its layers are not those that the constructor made, they are traced as they are. Or a
            ``SubtreeLinear``, whose program computes keys in the place of powers, and takes ``x`` in float32. Or an
            ``Ensemble`` of these.
        operator: the graph operator, or several; None for ``model.operator``. Of a ``SPIN`` alone.
        from_rows: export a program from ``rows [R + 1, N, d]``, as :func:`spin_fast.power_features` returns them, or of
            several operators side by side ``[1 + k R, N, d]``, as ``PowerFeatures.dense_rows`` does, and ``sizes``.
            Of a ``SPIN`` alone.
        edge_weight: export a program that takes the weights of the edges, too, in the order of ``edge_index``.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it. RuntimeError: there is no compiled library,
            whose operations a program names.
    """
    if native.library is None:
        why = native.missing_reason
        raise RuntimeError(f"export needs the compiled library, whose operations a program names; there is none: {why}")
    members = _members(model)
    check.flag("from_rows", from_rows)
    check.flag("edge_weight", edge_weight)
    if not isinstance(model, SPIN) and (from_rows or operator is not None):
        kind = type(model).__name__
        raise ValueError(f"from_rows must be False, and operator None: only a SPIN takes them, and model is of {kind}")
    of_types = [member.options["edge_types"] for member in members if isinstance(member, SubtreeLinear)]
    if edge_weight != any(of_types) and (any(of_types) or len(of_types) == len(members)):
        raise ValueError(f"edge_weight must be {any(of_types)}, as edge_types of the model")
    inputs = tuple(_input_like(member) for member in members)
    sizes = torch.tensor([3, 1, 3], device=inputs[0].device)
    any_length: dict[int, object] = {0: Dim.DYNAMIC}
    if isinstance(model, SPIN) and from_rows:
        if operator is not None:
            raise ValueError(f"operator must be None where the program takes rows, got {operator!r}")
        if edge_weight:
            raise ValueError("edge_weight must be False where the program takes rows, in which weights are already")
        program: nn.Module = _FromRows(model)
        arguments: tuple[object, ...] = (inputs[0].repeat(model.num_branches, 1, 1), sizes)
        dynamic: tuple[object, ...] = ({1: Dim.DYNAMIC}, any_length)
    else:
        program = _FromGraphs(model, [member.check_operator(operator) for member in members])
        x, lengths = (inputs, (any_length,) * len(inputs)) if isinstance(model, Ensemble) else (inputs[0], any_length)
        arguments, dynamic = (sizes.new_zeros(2, 5), x, sizes), ({1: Dim.DYNAMIC}, lengths, any_length)
        if edge_weight:
            arguments, dynamic = (*arguments, inputs[0].new_ones(5)), (*dynamic, any_length)
    training = {module: module.training for module in model.modules()}
    try:
        return torch.export.export(program.eval(), arguments, dynamic_shapes=dynamic)
    finally:
        for module, was in training.items():
            module.training = was


def _members(model: Member | Ensemble) -> Sequence[Member]:
    """Those of an ensemble, or the model alone."""
    members: Sequence[nn.Module] = model.members if isinstance(model, Ensemble) else [model]
    for member in members:
        kind = next((kind for kind in (SPIN, SubtreeLinear) if isinstance(member, kind)), None)
        if kind is None:
            got = type(member).__name__
            raise TypeError(f"model must be a SPIN, a SubtreeLinear or an Ensemble of these, got {got}")
        if type(member).forward is not kind.forward or "forward" in vars(member) or torch_compat.has_hooks(member):
            name = kind.__name__
            raise ValueError(
                f"model must have the forward of {name} and no hooks of its own: a program would leave them out"
            )
    return members  # type: ignore[return-value]


def _input_like(model: Member) -> Tensor:
    """Node features of seven nodes."""
    weight = next(model.parameters())
    dtype = torch.float32 if isinstance(model, SubtreeLinear) else weight.dtype
    return weight.new_zeros(7, model.config["in_features"], dtype=dtype)
