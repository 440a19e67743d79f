"""SPIN: from the rows of the branches to class scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from .. import ops
from .._common import check, torch_compat
from .._common.rows import values_of
from ..features.chunks import PowerChunk
from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from ..ops import native
from .base import GraphClassifier, Scorer
from .branches import Branches, deviation_and_mean
from .layers import Rows, is_plain

READOUT_BYTES = 8 << 20
CALIBRATION_GRAPHS = 512  # enough to estimate means and deviations


class SPIN(GraphClassifier):
    """Graph classifier with parallel neighbourhood aggregation (Doshi & Chepuri, arXiv 2111.11482).

    Per branch: an MLP of ``Linear -> (BatchNorm) -> LeakyReLU -> (Dropout)`` layers, then the attention-weighted or
    plain sum of its rows over each graph; the branches side by side go into an MLP classifier.

    The branches of the paper read one hop each, so that hops meet only after the readout, where a graph is one multiset
    of rows per hop. A *joint* branch reads all hops of a node side by side (SIGN's combination, before the readout): a
    graph is then one multiset of nodes with all their hops, of which more can be told apart.

    Fused operations compute this as long as the modules are what the constructor made (:meth:`is_as_constructed`). A
    model that was changed since (layers wrapped or replaced, hooks, parametrizations, pruning, ...) is computed module
    by module with one row per node, which is slower.

    Args:
        in_features: ``d``.
        hidden_features: ``h``, the width of every branch layer.
        out_features: number of classes (or of tasks, for binary tasks side by side).
        num_hops: ``R``; the features must have been made with the same.
        num_operators: ``k``, how many graph operators stand side by side in the features: there are ``1 + k R``
            branches, ``R + 1`` with one operator.
        branches: ``"hops"`` for a branch of each hop, as in the paper; ``"joint"`` for a single one of joint rows, for
            which the features must know the rows of their nodes; ``"both"`` for both.
        attention: SPIN-att; False for SPIN-non-att. The attention is a softmax, so it sees proportions only: where all
            nodes of a graph look alike it is their mean, which cannot tell graphs of unlike size apart; the sum can.
        size_aware: multiply the attention readout by the number of nodes of the graph, so that it sees sizes too.
        num_layers: linear layers per branch, 1 to 8.
        batch_norm: BatchNorm after each linear layer of the branches.
        dropout: probability of zeroing an activation of a node in the branches, in ``[0, 1)``.
        negative_slope: of the LeakyReLU, finite and at least 0.
        classifier_features: widths of the classifier's hidden layers.

    Attributes:
        hops: the branches of hops, a module with their ``layers``, ``norms`` and ``attention``; None without.
        joint: the joint branch, likewise.
        classifier: the MLP on their readouts.
        calibrated: whether :meth:`calibrate` has scaled the parameters.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """

    calibrated: bool = False

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        num_hops: int,
        *,
        num_operators: int = 1,
        branches: Literal["hops", "joint", "both"] = "hops",
        attention: bool = True,
        size_aware: bool = False,
        num_layers: int = 3,
        batch_norm: bool = False,
        dropout: float = 0.0,
        negative_slope: float = 0.01,
        classifier_features: Sequence[int] = (32, 32),
    ) -> None:
        super().__init__()
        check.integer("in_features", in_features, 0)
        check.integer("hidden_features", hidden_features, 1)
        check.integer("out_features", out_features, 1)
        check.integer("num_hops", num_hops, 0)
        check.integer("num_operators", num_operators, 1)
        if not isinstance(branches, str) or branches not in ops.BRANCHES:
            raise ValueError(f"branches must be one of {', '.join(ops.BRANCHES)}, got {branches!r}")
        attention, size_aware = check.flag("attention", attention), check.flag("size_aware", size_aware)
        batch_norm = check.flag("batch_norm", batch_norm)
        if check.integer("num_layers", num_layers, 1) > ops.MOST_LAYERS:
            raise ValueError(f"num_layers must be at most {ops.MOST_LAYERS}, got {num_layers}")
        classifier_features = check.integers("classifier_features", classifier_features, 1)
        negative_slope = check.number("negative_slope", negative_slope, 0)
        if size_aware and not attention:
            raise ValueError("size_aware must come with attention: the sum sees sizes already")
        if (dropout := check.number("dropout", dropout, 0)) >= 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.config: dict[str, Any] = {
            "in_features": in_features,
            "hidden_features": hidden_features,
            "out_features": out_features,
            "num_hops": num_hops,
            "num_operators": num_operators,
            "branches": branches,
            "attention": attention,
            "size_aware": size_aware,
            "num_layers": num_layers,
            "batch_norm": batch_norm,
            "dropout": dropout,
            "negative_slope": negative_slope,
            "classifier_features": classifier_features,
        }
        self.in_features, self.out_features = in_features, out_features
        self.num_branches = 1 + num_operators * num_hops
        self.hops: Branches | None = None
        self.joint: Branches | None = None
        columns = 0
        for name, (number, width) in self.sizes.groups(in_features).items():
            setattr(self, name, Branches(number, width, self.config))
            columns += number * hidden_features
        widths = [columns, *classifier_features]
        hidden = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.LeakyReLU(negative_slope))]
        self.classifier = nn.Sequential(*hidden, nn.Linear(widths[-1], out_features))

    def forward(self, features: PowerFeatures) -> Tensor:
        """Class scores ``[G, out_features]`` of the selected graphs."""
        self.check(features)
        if self._drops_out() or not self.is_as_constructed():  # equal rows may become different
            return self.forward_tensors(features.dense_rows(), features.selected_ptr, check_invariants=False)
        if self._has_batch_statistics():  # those of a layer need all rows before the next layer
            selected = features if self.joint is None else features.take()
            joint_rows = None if self.joint is None else selected.joint
            return self.forward_tensors(*selected.branch_rows(), joint=joint_rows, check_invariants=False)
        sizes = features.selected_ptr.diff() if self.config["size_aware"] else None
        readouts = []
        if self.hops is not None:
            hops = {"index": features.index, "count": features.count, "ids": features.ids}
            readouts.append(self.hops.fused(features.rows, features.ptr, sizes, **hops))
        if self.joint is not None:
            of = features.joint
            joint = {"index": of.index, "count": of.count, "ids": features.ids, "parts": of.parts}
            readouts.append(self.joint.fused(features.rows, of.ptr, sizes, **joint))
        return self._classify(readouts)

    def check(self, features: PowerFeatures) -> None:
        """Check that ``features`` are of the kind that the model was made for.

        Raises:
            TypeError, ValueError: what is wrong.
        """
        if isinstance(features, PowerFeatures):
            config = self.config
            if features.num_hops != config["num_hops"] or features.num_features != config["in_features"]:
                raise ValueError(
                    f"features must have {config['num_hops']} hops and {config['in_features']} features as the model "
                    f"has, got {features.num_hops} and {features.num_features}"
                )
            if features.num_operators != config["num_operators"]:
                raise ValueError(
                    f"features must be of {config['num_operators']} operator(s) as the model is, "
                    f"got {features.operator!r}"
                )
        super().check(features)

    def check_operator(self, operator: str | Sequence[str] | None = None) -> str:
        """Check for as many graph operators as the model was made for; returns them with commas between them.

        Arguments and errors are those of :meth:`GraphClassifier.check_operator`.
        """
        name, wanted = super().check_operator(operator), self.config["num_operators"]
        if name.count(",") + 1 != wanted:
            raise ValueError(f"operator must name {wanted} operator(s) as the model has, got {operator!r}")
        return name

    @property
    def graphs_at_once(self) -> int:
        """As many as have 8 MB of readouts in float64, all that fused operations store of them, or a thousand."""
        if not self.is_as_constructed():
            return super().graphs_at_once
        columns = sum(group.num_branches for group in self._groups) * self.config["hidden_features"]
        return max(super().graphs_at_once, READOUT_BYTES // (8 * columns))

    @property
    def sizes(self) -> ops.ModelSizes:
        """What the fused operations are told about the model beside its parameters."""
        config = self.config
        return ops.ModelSizes(
            self.num_branches,
            [config["hidden_features"]] * config["num_layers"],
            [*config["classifier_features"], config["out_features"]],
            config["attention"],
            config["negative_slope"],
            config["branches"],
        )

    @property
    def _groups(self) -> list[Branches]:
        return [group for group in (self.hops, self.joint) if group is not None]

    def _classify(self, readouts: list[Tensor]) -> Tensor:
        both = torch.cat(readouts, dim=1) if len(readouts) > 1 else readouts[0]
        return self._classifier_for(both)(both)

    def _classifier_for(self, like: Tensor) -> Callable[[Tensor], Tensor]:
        """What classifies readouts of such dtype and device: kernels, where these do what the modules would."""
        if (
            type(like) is not Tensor
            or not like.is_cpu
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or native.is_autocast(like)
            or not native.has_kernel(like)
            or torch_compat.module_calls_are_observed()
            or len(self.config["classifier_features"]) >= ops.MOST_LAYERS
            or not self._has_plain_classifier()
        ):
            return self.classifier
        layers = [layer for layer in self.classifier.children() if isinstance(layer, nn.Linear)]
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        if any(value is None or value.dtype != like.dtype or not value.is_cpu for value in (*weights, *biases)):
            return self.classifier
        return ops.classifier_of(weights, biases, self.config["negative_slope"])

    def _has_plain_classifier(self) -> bool:
        hidden = [nn.Linear, nn.LeakyReLU] * len(self.config["classifier_features"])
        parts = [self.classifier, *self.classifier.children()]
        return (
            len(parts) == len(hidden) + 2
            and all(map(is_plain, parts, [nn.Sequential, *hidden, nn.Linear]))
            and all(layer.negative_slope == self.config["negative_slope"] for layer in parts[2::2])
        )

    def is_as_constructed(self, *, to_train: bool = False) -> bool:
        """Whether fused operations compute what the modules would, because these are what the constructor made.

        What a forward pass replaces are the layers and norms of the branches: none may be wrapped, replaced,
        parametrized, pruned, hooked, or have a ``forward`` of its own. Values, dtype and device do not matter.

        Args:
            to_train: ask for the training step, which replaces everything: the classifier and the model itself must be
                plain, too, and the parameters exactly those of the flat parameters, in their order, none tied, added
                or frozen, and without gradient hooks. A model with BatchNorm never is.
        """
        config = self.config
        if torch_compat.module_calls_are_observed() or not all(group.is_as_constructed() for group in self._groups):
            return False
        if not to_train:
            return True
        parameters = torch_compat.parameters_by_name(self)
        shapes = ops.parameter_shapes(config["in_features"], self.sizes)
        return (
            [(name, value.shape) for name, value in parameters.items()] == [*shapes.items()]
            and len({*map(id, parameters.values())}) == len(shapes)
            and all(type(value) is nn.Parameter and value.requires_grad for value in parameters.values())
            and not any(map(torch_compat.has_gradient_hooks, parameters.values()))
            and is_plain(self, SPIN)
            and self._has_plain_classifier()
        )

    def _drops_out(self) -> bool:
        return self.training and self.config["dropout"] > 0

    def _has_batch_statistics(self) -> bool:
        return any(group.has_batch_statistics() for group in self._groups)

    @torch.no_grad()
    def calibrate(self, features: PowerFeatures) -> None:
        """Scale new parameters by data: what BatchNorm does at every step, once, before the first.

        Layer by layer, weights and biases are changed so that what goes into each LeakyReLU has mean 0 and variance 1
        over the nodes of (at most 512 of) the selected graphs, and each readout over those graphs (layer-sequential
        unit-variance initialisation, Mishkin & Matas 2016), so that training starts as well scaled as with BatchNorm
        while its steps stay without. Values that hardly vary are not scaled. A model with BatchNorm is left as it is,
        and one that is not as constructed (:meth:`is_as_constructed`, ``to_train=True``).

        Raises:
            TypeError, ValueError: features that do not fit the model, or that are not finite.
        """
        self.check(features)
        selected = features[:CALIBRATION_GRAPHS].take()
        if selected.num_nodes == 0 or not self.is_as_constructed(to_train=True):
            return
        if not bool(values_of(selected.rows).isfinite().all()):
            raise ValueError("features must be finite to calibrate by, got NaN or infinity")
        with torch.autocast(selected.rows.device.type, enabled=False):
            self._calibrate(selected)
        self.calibrated = True

    def _calibrate(self, selected: PowerFeatures) -> None:
        rows, ptr, index, count = selected.branch_rows()
        readouts = [] if self.hops is None else [self.hops.calibrate(rows, ptr, index, count)]
        if self.joint is not None:
            of = selected.joint
            readouts.append(self.joint.calibrate([_side_by_side(rows, of.parts)], of.ptr, of.index, of.count))
        readout = torch.cat(readouts, dim=1)
        std, mean = deviation_and_mean(readout, torch.ones(len(readout), device=readout.device))
        first = cast(nn.Linear, self.classifier[0])
        first.weight.div_(std)
        first.bias.sub_(first.weight @ mean)

    def forward_tensors(
        self,
        rows: Rows,
        ptr: Tensor,
        index: Tensor | None = None,
        count: Tensor | None = None,
        *,
        joint: ops.JointRows | None = None,
        check_invariants: bool = True,
    ) -> Tensor:
        """Class scores ``[G, out_features]`` from plain tensors: what ``torch.compile`` takes.

        To export a model take ``nn.export``: by ``torch.export`` of this method alone, with ``ptr``, whose length is
        one more than the number of graphs, a program takes two graphs or more, but never one.

        Args:
            rows: dense ``[R + 1, N, d]`` with ``ptr [G + 1]``, or ``R + 1`` tensors ``[U_r, d]`` with the segments of
                the ragged form (see :func:`spin_fast.sum_readout`).
            ptr: int64 offsets.
            index: ``[nnz]`` row of each entry, one of its own branch; the rows of all are counted one after the other.
            count: ``[nnz]`` int32, how often.
            joint: with the ragged form the joint rows of a model that has a branch of them, see
                :attr:`spin_fast.PowerFeatures.joint`.
            check_invariants: check the contents of ``ptr``, ``index``, ``count`` and ``joint``. They are read on the
                CPU alone, and not in compiled code, which trusts them.

        Raises:
            TypeError, ValueError: name the argument and what is wrong with it.
        """
        self._check_tensors(rows, ptr, index, count, check_invariants)
        drops_out = self._drops_out()
        if drops_out and not isinstance(rows, Tensor):
            raise ValueError("rows must be dense [R + 1, N, d] to train with dropout: every node has its own mask")
        self._check_joint(rows, ptr, joint, check_invariants)
        if isinstance(rows, Tensor) and not drops_out and not self._has_batch_statistics() and self.is_as_constructed():
            return self._classify(self._readouts_of_dense(rows, ptr))
        readouts = [] if self.hops is None else [self.hops(rows, ptr, index, count)]
        if self.joint is not None and isinstance(rows, Tensor):
            readouts.append(self.joint(rows.transpose(0, 1).flatten(1)[None], ptr))
        elif self.joint is not None and joint is not None:
            readouts.append(self.joint([_side_by_side(rows, joint.parts)], joint.ptr, joint.index, joint.count))
        return self._classify(readouts)

    def _readouts_of_dense(self, rows: Tensor, ptr: Tensor) -> list[Tensor]:
        sizes = ptr.diff() if self.config["size_aware"] else None
        readouts = [] if self.hops is None else [self.hops.fused(rows, ptr, sizes)]
        if self.joint is not None:
            readouts.append(self.joint.fused(rows.flatten(0, 1), ptr, sizes, parts=_parts_of(rows)))
        return readouts

    def _scorer(self, x: Tensor, operator: str, num_nodes: int) -> Scorer:
        """Where it can be, equal rows of several chunks go through the branches of hops once; checks are made once."""
        if (
            type(self).forward_tensors is not SPIN.forward_tensors
            or "forward_tensors" in vars(self)
            or any(value.dtype != x.dtype for value in torch_compat.parameters_by_name(self).values())
            or self.training
            or torch.is_grad_enabled()
            or not x.is_cpu
            or not native.has_kernel(x)
            or not self.is_as_constructed()
        ):
            return super()._scorer(x, operator, num_nodes)
        joint = None if self.joint is None else self.joint.bound()
        hops = rows = None
        if self.hops is not None and self.in_features == 1:  # for which branch_readout has a faster way
            hops = self.hops.bound()
        elif self.hops is not None:
            rows = self.hops.evaluated_rows(num_nodes, operator if joint is None else "")  # else it gets powers
        classify = self._classifier_for(x)

        def sized(readouts: Tensor, ptrs: list[Tensor]) -> Tensor:
            if not self.config["size_aware"]:
                return readouts
            return readouts * torch.cat([ptr.diff() for ptr in ptrs])[:, None].to(readouts.dtype)

        def readout(chunk: PowerChunk) -> Tensor:
            if rows is not None and not rows.takes(chunk.num_nodes):
                return torch.cat(self._readouts_of_dense(chunk.powers, chunk.ptr), dim=1)
            readouts = [] if rows is None else [rows.readout(chunk.powers, chunk.ptr)]
            if hops is not None:
                readouts.append(hops(chunk.powers, None, chunk.ptr))
            if joint is not None:
                readouts.append(joint(chunk.powers, _parts_of(chunk.powers), chunk.ptr))
            return sized(torch.cat(readouts, dim=1) if len(readouts) > 1 else readouts[0], [chunk.ptr])

        def readouts_of(graphs: GraphBatch, chunks: list[PowerChunk]) -> Tensor:
            if rows is None or not rows.may_take(graphs):
                return torch.cat([*map(readout, chunks)])
            ptrs = [chunk.node_ptr for chunk in chunks]
            found, is_made = rows.readouts_of_graphs(graphs, ptrs)
            found = sized(found, ptrs)
            for number in [number for number, made in enumerate(is_made) if not made]:
                found.split([*map(len, chunks)])[number].copy_(readout(chunks[number]))
            return found

        def scores(graphs: GraphBatch, num_bytes: int) -> Iterator[Tensor]:
            bytes_of_powers = self.num_branches * graphs.num_features * graphs.x.element_size()
            bytes_beside = 0 if rows is None else max(rows.bytes_of_node(graphs, num_bytes) - bytes_of_powers, 0)
            chunks = self._chunks(graphs, operator, num_bytes, bytes_beside)
            while some := [*islice(chunks, ops.chunks_at_once())]:
                yield classify(readouts_of(graphs, some))

        return scores

    def _check_joint(self, rows: Rows, ptr: Tensor, joint: ops.JointRows | None, check_invariants: bool) -> None:
        if isinstance(rows, Tensor) or self.joint is None:
            if joint is not None:
                raise ValueError("joint must be left out with dense rows, and with a model without a joint branch")
            return
        if not isinstance(joint, ops.JointRows):
            got = type(joint).__name__
            raise TypeError(f"joint must be JointRows, with the ragged form of a model with a joint branch, got {got}")
        device, num_graphs = rows[0].device, (ptr.shape[0] - 1) // self.num_branches
        check.tensor("joint.parts", joint.parts, ("J", self.num_branches), check.INTEGERS, device)
        check.tensor("joint.ptr", joint.ptr, (num_graphs + 1,), (torch.int64,), device)
        if check_invariants:
            ops.check_parts("joint.parts", joint.parts, sum(x.shape[0] for x in rows))
            try:
                ops.check_segments(joint.ptr, joint.index, joint.count, joint.parts.shape[0])
            except (TypeError, ValueError) as error:  # its message begins with the name of the array
                raise (TypeError if isinstance(error, TypeError) else ValueError)(f"joint.{error}") from error


def _parts_of(rows: Tensor) -> Tensor:
    """The joint row of each node, from dense rows ``[R + 1, N, d]``: the numbers ``[N, R + 1]`` of its parts."""
    nodes = torch.arange(rows.shape[1], device=rows.device)
    return nodes[:, None] + rows.shape[1] * torch.arange(rows.shape[0], device=rows.device)


def _side_by_side(rows: Rows, parts: Tensor) -> Tensor:
    """The joint rows ``[J, (R + 1) * d]``, from the rows of each branch and the numbers of their parts."""
    return torch.cat([*rows])[parts.long()].flatten(1)
