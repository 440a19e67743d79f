"""What training and prediction ask of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from .._common import check, torch_compat
from .._common.indexing import are_alike, prepared_by
from ..features.chunks import PowerChunk, power_chunks
from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from ..graphs.node_features import NodeFeatures, check_graphs
from ..ops import native
from .layers import Rows

Scorer = Callable[[GraphBatch, int], Iterator[Tensor]]  # from graphs and bytes of a chunk to the scores of chunks

GRAPHS_OF_VECTORS = 32  # a multiple of what torch takes at a time: two vectors
FEW_CLASSES = 16  # fewer fill no vector, so that torch's softmax of rows takes them one by one, at 7 times the cost


class GraphModel(nn.Module):
    """A model from graphs to class scores: what ``training.predict_chunks`` and ``predict_proba`` apply.

    A model has :meth:`score_chunks`, and :meth:`check_operator` if it is trained with one.

    Attributes:
        in_features: ``d``, or None where the model's modules decide.
        out_features: number of class scores, or None where the model's modules decide.
        node_features: what the graphs of its training went through first, which ``training.predict_proba`` does to
            those that it gets, and a checkpoint keeps; None for graphs as they are.
        multilabel: whether the scores are of binary tasks side by side, float ``y`` ``[G, T]``, and not of classes;
            ``training`` takes it from the labels, and a checkpoint keeps it. None if unknown.
    """

    in_features: int | None = None
    out_features: int | None = None
    node_features: NodeFeatures | None = None
    multilabel: bool | None = None

    @property
    def operator(self) -> str | None:
        """The graph operator that the model was trained with; None if unknown, or if there is none."""
        return None

    @property
    def _is_trained(self) -> bool:
        """Whether the model knows of the graphs of its training what has transformed them, None if nothing has."""
        return self.operator is not None

    def check_operator(self, operator: str | Sequence[str] | None = None) -> str | None:
        """Check for an operator that the model can be applied with, and return its name; here there is none.

        Raises:
            ValueError: an operator.
        """
        if operator is not None:
            raise ValueError(f"operator must be left out, as {type(self).__name__} has none, got {operator!r}")
        return None

    def check_training(self, features: PowerFeatures) -> None:
        """Refuse features, which are no input here.

        Raises:
            TypeError: always.
        """
        got = f"{type(self).__name__}, which takes graphs: predict_proba(model, graphs)"
        raise TypeError(f"model must be a GraphClassifier, as features are given, got {got}")

    def prepared(
        self, graphs: GraphBatch, operator: str | Sequence[str] | None = None
    ) -> tuple[GraphBatch, str | None]:
        """The graphs with the node features of the training, and the operator; the model evaluates from here on.

        Arguments and errors are those of ``training.predict_proba``.
        """
        check_graphs(graphs)
        if self.node_features is not None:
            graphs = self.node_features.transform(graphs)
        self._check_prepared("graphs", graphs)
        if self.in_features not in (None, graphs.num_features):
            raise ValueError(f"graphs must have {self.in_features} features as the model, got {graphs.num_features}")
        weight, device = torch_compat.first_parameter(self), graphs.x.device
        if weight is not None and device != weight.device:
            raise ValueError(f"graphs must be on {weight.device} as the model is, got {device}; move one of them")
        name = self.check_operator(operator)
        if not torch_compat.is_evaluating(self):  # telling each module anew takes longer than a small graph
            self.eval()
        return graphs, name

    def _check_prepared(self, name: str, graphs: GraphBatch | PowerFeatures) -> None:
        """Check that what has transformed the graphs of the training, if that is known, has transformed these."""
        is_known = self._is_trained or self.node_features is not None
        if is_known and not are_alike(self.node_features, graphs.node_features):
            raise ValueError(
                f"{name} must be prepared as the training graphs, by {prepared_by(self)}, got {name} prepared by "
                f"{prepared_by(graphs)}; if those were, too, model.node_features = {name}.node_features says so"
            )

    def score_chunks(self, graphs: GraphBatch, operator: str | None, num_bytes: int) -> Iterator[Tensor]:
        """Class scores ``[g, C]`` of consecutive chunks of graphs; of no graphs one chunk without rows.

        Args:
            graphs: with the node features that the model takes, on its device.
            operator: what :meth:`check_operator` has returned.
            num_bytes: bounds what is computed for a chunk, unless it is a single graph.
        """
        raise NotImplementedError

    def scorer(self, x: Tensor, operator: str | None, num_nodes: int) -> Scorer:
        """What computes :meth:`score_chunks` of graphs as long as the model does not change.

        Args:
            x: like that of the graphs, in dtype and device.
            operator: what :meth:`check_operator` has returned.
            num_nodes: of the graphs, at most.
        """
        return lambda graphs, num_bytes: self.score_chunks(graphs, operator, num_bytes)

    def has_tasks(self, scores: Tensor) -> bool:
        """``multilabel``; where that is unknown, a single score is taken for that of a task."""
        return scores.shape[1] == 1 if self.multilabel is None else self.multilabel

    def probabilities(self, scores: Tensor) -> Tensor:
        """``[G, C]`` of class scores ``[G, C]``: their softmax, or of binary tasks the sigmoid of each.

        A score that is not finite has no probability: the whole row, or of tasks the entry, is NaN. The same
        scores have the same bits, whatever others come with them.
        """
        scores = scores.add(scores, alpha=0)  # which is NaN where they are not finite
        if not self.has_tasks(scores) and scores.shape[1] >= FEW_CLASSES:
            return scores.softmax(1)
        # Where the last values, or the share of a thread, fill no vector, torch rounds exponentials differently.
        num_graphs = len(scores)
        if scores.is_cpu:
            scores = F.pad(scores, (0, 0, 0, -num_graphs % GRAPHS_OF_VECTORS))
        if self.has_tasks(scores):
            return native.on_this_thread(scores.sigmoid)[:num_graphs]
        return native.on_this_thread(partial(scores.t().softmax, 0)).t()[:num_graphs].contiguous()


class GraphClassifier(GraphModel):
    """A model from :class:`spin_fast.PowerFeatures` to class scores: what ``training`` trains, too.

    Attributes:
        num_branches: ``1 + k R``, of ``k`` operators and ``R`` hops; the features must have as many.
    """

    num_branches: int
    _operator: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self._flat: Tensor | None = None

    @property
    def operator(self) -> str | None:
        """The graph operator that the model was trained with, or several with commas between them; None if unknown.

        ``training.fit`` and ``Trainer`` take it from the features, as they do :attr:`node_features`; a training loop of
        your own says ``model.operator = features.operator``, and likewise of the other. Checkpoints keep it,
        ``training.predict_proba`` and ``nn.export`` use it, and features of another one are an error in ``training``.
        To go on training with those, or with features that something else has prepared, set both to None.
        """
        return self._operator

    @operator.setter
    def operator(self, operator: str | Sequence[str] | None) -> None:
        self._operator = None if operator is None else check.operators(operator)

    def forward(self, features: PowerFeatures) -> Tensor:
        """Class scores ``[G, C]`` of the selected graphs."""
        raise NotImplementedError

    def forward_tensors(
        self,
        rows: Rows,
        ptr: Tensor,
        index: Tensor | None = None,
        count: Tensor | None = None,
        *,
        check_invariants: bool = True,
    ) -> Tensor:
        """Class scores from plain tensors, as :meth:`spin_fast.SPIN.forward_tensors` takes them."""
        raise NotImplementedError

    def _check_tensors(
        self, rows: Rows, ptr: Tensor, index: Tensor | None, count: Tensor | None, check_invariants: bool
    ) -> None:
        """Check shapes and dtypes and, with ``check_invariants``, the contents of the segments."""
        check.flag("check_invariants", check_invariants)
        branches, width = self.num_branches, "d" if self.in_features is None else self.in_features
        if isinstance(rows, Tensor):
            check.tensor("rows", rows, (branches, "N", width), check.STORED)
            for name, value in (("index", index), ("count", count)):
                if value is not None:
                    raise ValueError(f"{name} must come with the ragged form, a sequence of rows, got dense rows")
            device, num_rows = rows.device, rows.shape[1]
        else:
            if not isinstance(rows, Sequence):
                raise TypeError(f"rows must be a tensor, or a sequence of one per branch, got {type(rows).__name__}")
            if len(rows) != branches:
                raise ValueError(f"rows must have {branches} branches, got {len(rows)}")
            for branch, x in enumerate(rows):
                like = None if branch == 0 else rows[0].device
                check.tensor(f"rows[{branch}]", x, ("U", width), check.STORED, like)
            device, num_rows = rows[0].device, sum(x.shape[0] for x in rows)
        check.offsets_shape("ptr", ptr, device)
        if not isinstance(rows, Tensor) and (ptr.numel() - 1) % branches:
            raise ValueError(f"ptr must have a multiple of {branches} segments (branches), got {ptr.numel() - 1}")
        if check_invariants:
            of_branches = None if isinstance(rows, Tensor) else [0, *accumulate(x.shape[0] for x in rows)]
            ops.check_segments(ptr, index, count, num_rows, of_branches)

    def check(self, features: PowerFeatures) -> None:
        """Check that ``features`` are of the kind that the model was made for.

        Raises:
            TypeError, ValueError: what is wrong.
        """
        if not isinstance(features, PowerFeatures):
            raise TypeError(f"features must be PowerFeatures, got {type(features).__name__}")
        if features.num_branches != self.num_branches:
            raise ValueError(
                f"features must have {self.num_branches} branches as the model has, got {features.num_branches}"
            )
        weight, rows = torch_compat.first_parameter(self), features.rows
        if weight is None:
            return
        if weight.dtype in (torch.bfloat16, torch.float16):
            raise TypeError(
                f"model must be torch.float32 or torch.float64 as features are, got {weight.dtype}; "
                "train and predict in float32 under torch.autocast instead"
            )
        if rows.dtype != weight.dtype:
            raise TypeError(
                f"features must be {weight.dtype} as the model is, got {rows.dtype}; "
                "convert the model, or load the graphs in its dtype"
            )
        if rows.device != weight.device:
            raise ValueError(
                f"features must be on {weight.device} as the model is, got {rows.device}; move one of them"
            )

    def check_training(self, features: PowerFeatures) -> None:
        """Check as :meth:`check` does, and that ``features`` are of the operator that the model was trained with.

        Also, where the model knows, that its ``node_features`` have transformed their graphs, or nothing if it is None.

        Raises:
            TypeError, ValueError: what is wrong.
        """
        self.check(features)
        self._check_prepared("features", features)
        if self.operator not in (None, features.operator):
            raise ValueError(
                f"features must be of {self.operator!r}, which the model was trained with, got {features.operator!r}; "
                "model.operator = None lets it forget"
            )

    def check_operator(self, operator: str | Sequence[str] | None = None) -> str:
        """Check for graph operators that can give the model its branches; returns them with commas between them.

        Args:
            operator: None for what the model was trained with.

        Raises:
            TypeError, ValueError: what is wrong: also one that the model was not trained with, or None where it does
                not know.
        """
        operator = self.operator if operator is None else operator
        if operator is None:
            raise ValueError("operator must be given: the model does not know which it was trained with")
        name = check.operators(operator)
        if self.operator not in (None, name):
            raise ValueError(f"operator must be {self.operator!r}, which the model was trained with, got {operator!r}")
        if (self.num_branches - 1) % (name.count(",") + 1):
            raise ValueError(f"operator must name operators that share {self.num_branches - 1} hops, got {operator!r}")
        return name

    def prepared(
        self, graphs: GraphBatch, operator: str | Sequence[str] | None = None
    ) -> tuple[GraphBatch, str | None]:
        """The graphs, which must be of the model's dtype unless under autocast; see :meth:`GraphModel.prepared`."""
        graphs, name = super().prepared(graphs, operator)
        weight, x = torch_compat.first_parameter(self), graphs.x
        if weight is not None and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"graphs must be {weight.dtype} as the model is, got {x.dtype}; "
                f"convert the model, or make the graphs of x.to({weight.dtype})"
            )
        return graphs, name

    def score_chunks(self, graphs: GraphBatch, operator: str | None, num_bytes: int) -> Iterator[Tensor]:
        """Class scores of consecutive chunks, through their powers; see :meth:`GraphModel.score_chunks`."""
        if len(graphs) == 0:
            rows = graphs.x.new_empty(self.num_branches, 0, graphs.num_features)
            yield self.forward_tensors(rows, graphs.ptr, check_invariants=False)
        yield from self._scorer(graphs.x, self.check_operator(operator), graphs.num_nodes)(graphs, num_bytes)

    def scorer(self, x: Tensor, operator: str | None, num_nodes: int) -> Scorer:
        """Class scores through powers, of one graph or more; see :meth:`GraphModel.scorer`."""
        if type(self).score_chunks is not GraphClassifier.score_chunks:
            return super().scorer(x, operator, num_nodes)
        return self._scorer(x, self.check_operator(operator), num_nodes)

    def _scorer(self, x: Tensor, operator: str, num_nodes: int) -> Scorer:
        """:meth:`scorer` for what :meth:`score_chunks` here computes."""

        def scores(graphs: GraphBatch, num_bytes: int) -> Iterator[Tensor]:
            for chunk in self._chunks(graphs, operator, num_bytes):
                yield self.forward_tensors(chunk.powers, chunk.ptr, check_invariants=False)

        return scores

    def _chunks(self, graphs: GraphBatch, operator: str, num_bytes: int, bytes_beside: int = 0) -> Iterator[PowerChunk]:
        num_hops = (self.num_branches - 1) // len(operator.split(","))
        any_edges = native.has_kernel(graphs.x)  # whose memory does not grow with them
        return power_chunks(graphs, num_hops, operator, num_bytes, bytes_beside, any_edges=any_edges)

    @property
    def graphs_at_once(self) -> int:
        """How many graphs ``training.predict`` scores together: some whose rows fit into memory module by module."""
        return 1024

    @torch.no_grad()
    def num_outputs(self, features: PowerFeatures) -> int:
        """How many class scores a graph gets: ``out_features``, or else found by scoring one of the graphs."""
        if self.out_features is not None:
            return self.out_features
        was_training = self.training
        try:
            return self.eval()(features[:1]).shape[1]
        finally:
            self.train(was_training)

    def flatten_parameters(self) -> Tensor:
        """Make all parameters views of one flat tensor, in the order of ``parameters()``, and return that.

        One tensor takes an optimiser one step, and is what ``training.Trainer`` works on. Parameters that require no
        gradient are left out. Calling it again gives the same tensor, unless something (``.to()``,
        ``load_state_dict(assign=True)``) has given the parameters other memory in the meantime.

        Raises:
            ValueError: no parameters, or of several dtypes or on several devices.
        """
        parameters = [*self.trained_parameters().values()]
        if self._flat is None or not _are_views(parameters, self._flat):
            if not parameters:
                raise ValueError("model must have parameters to train, got none that require a gradient")
            if len({(parameter.dtype, parameter.device) for parameter in parameters}) > 1:
                raise ValueError("model must have parameters of one dtype and on one device")
            self._flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
            parts = self._flat.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.data = part.view_as(parameter)
        return self._flat

    def unflatten_parameters(self) -> None:
        """Give every parameter memory of its own, as a new model has, which ``safetensors.torch.save_model`` asks for.

        A model that is pickled does this first: each view would take the whole flat tensor with it. A ``Trainer`` of
        the model goes on as if nothing had happened.
        """
        if self._flat is not None:
            self._flat = None
            for parameter in self.parameters():
                parameter.data = parameter.data.clone()

    def __getstate__(self) -> dict[str, Any]:
        self.unflatten_parameters()
        return self.__dict__.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphClassifier:
        """Copies have parameters of their own; those of this model stay where they are."""
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__dict__ | {"_flat": None}, memo))
        return copied

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient, by name, in the order of :meth:`flatten_parameters`."""
        unique: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in torch_compat.parameters_by_name(self).items():
            if parameter.requires_grad:
                unique.setdefault(id(parameter), (name, parameter))
        return dict(unique.values())


def _are_views(parameters: Sequence[Tensor], flat: Tensor) -> bool:
    """Whether the parameters stand in ``flat``, one after the other."""
    at = flat.data_ptr()
    for parameter in filter(Tensor.numel, parameters):  # one without values has no address
        if parameter.data_ptr() != at or parameter.dtype != flat.dtype or parameter.device != flat.device:
            return False
        at += parameter.nbytes
    return at == flat.data_ptr() + flat.nbytes
