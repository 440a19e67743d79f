"""The step of training: one operation and one of the optimiser, played back from a CUDA graph on a GPU."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import mul
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import ops
from .._common import check, torch_compat
from .._common.indexing import GraphIds, graph_ids, without_waiting
from ..features.power_features import PowerFeatures
from ..features.shards import ShardedFeatures, sharded
from ..nn import SPIN, GraphClassifier
from ..ops import native
from .losses import check_labels, loss_of, scaled, shares_of
from .ranks import GradientOf, ranks_of

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed import ProcessGroup


Steps = Callable[..., Tensor]
"""Makes a step on each batch of graphs, given by their numbers in the storage, the size of a batch, and the weights of
these graphs where there are any; returns the losses."""

CALL_SECONDS = 0.05
"""That one call of an operation should take, in which nothing can interrupt training."""


class _Adam(torch.optim.Adam):
    """torch's fused Adam for a single parameter, with a step that does not prepare for lists of them at every call.

    ``quick_step`` runs no hooks of the optimiser. Where it is captured, the learning rate is a tensor on the device,
    which learning-rate schedulers fill: what is captured then follows them.
    """

    def __init__(self, parameter: nn.Parameter, *, learning_rate: float, weight_decay: float) -> None:
        super().__init__([parameter], lr=learning_rate, weight_decay=weight_decay, fused=True)
        self._rate: Tensor | None = None
        self.follow(parameter)

    def follow(self, flat: Tensor) -> None:
        """Take ``flat`` as the parameter, and have what belongs to it where it is."""
        (group,) = self.param_groups
        (parameter,) = group["params"]
        if parameter.data_ptr() != flat.data_ptr():
            parameter.grad = None
            parameter.data = flat.detach()
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            state |= {name: torch.zeros_like(flat, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        state["step"] = state["step"].to(flat.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(flat)
        if not _is_captured(flat.device):
            group["lr"] = float(group["lr"])
        elif self._rate is None or self._rate.device != flat.device:
            group["lr"] = self._rate = torch.tensor(float(group["lr"]), dtype=torch.float32).to(flat.device)
        elif group["lr"] is not self._rate:
            self._rate.fill_(group["lr"])
            group["lr"] = self._rate

    @property
    def arguments(self) -> ops.Adam:
        """What ``ops.training_steps`` takes of this; its gradient is that of the parameter from then on."""
        (group,) = self.param_groups
        (parameter,) = group["params"]
        state = self.state[parameter]
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
        tensors = (parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
        beta1, beta2 = group["betas"]
        return ops.Adam(*tensors, group["lr"], beta1, beta2, group["weight_decay"], group["eps"])

    @property
    def memory(self) -> list[Any]:
        """What a step reads and writes, and the numbers that it takes as they are."""
        (group,) = self.param_groups
        state = self.state[group["params"][0]]
        numbers = [group[name] for name in ("betas", "weight_decay", "eps")]
        return [group["lr"], *(state[name] for name in ("step", "exp_avg", "exp_avg_sq")), *numbers]

    def quick_step(self) -> None:
        (group,) = self.param_groups
        (parameter,) = group["params"]
        state = self.state[parameter]
        torch_compat.mark_stepped(self)
        state["step"] += 1
        torch_compat.fused_adam(parameter.detach(), parameter.grad, state, group)


def _is_captured(device: torch.device) -> bool:
    """Whether steps on this kind of device are played back from a graph."""
    return device.type == "cuda"


def _capture(step: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """Record what ``step`` launches without running it: what runs it, and the result, which every run overwrites."""
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(device),
        torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"),
    ):
        result = step()
    return graph.replay, result


class _Captured:
    """A step that is played back from a CUDA graph, in one launch, for each of a few numbers of graphs in a batch.

    What is captured has fixed addresses: the ids are copied into a buffer, and what ``memory`` lists, all else that the
    step reads and writes, must stay where it is (:meth:`holds`). The first step of a size is made as it is, because a
    kernel that has never run is loaded first, which must not happen in a capture. That needs no stream of its own:
    neither autograd nor cuBLAS, which remember streams, take part.
    """

    MOST_SIZES = 8  # full batches and the last one are two; steps of ever other sizes are made as they are

    def __init__(self, step: Callable[[Tensor], Tensor], memory: Sequence[Any]) -> None:
        self._step, self._memory = step, memory
        self._buffers: dict[int, Tensor] = {}
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}

    def holds(self, memory: Sequence[Any]) -> bool:
        """Whether what has been captured works on ``memory``: the same tensors, equal numbers."""
        pairs = zip(self._memory, memory, strict=True)
        return all(one is other if isinstance(one, Tensor) else one == other for one, other in pairs)

    def __call__(self, ids: Tensor) -> Tensor:
        size = len(ids)
        if size not in self._buffers:
            if len(self._buffers) < self.MOST_SIZES:
                self._buffers[size] = torch.empty_like(ids)
            return self._step(ids)
        buffer = self._buffers[size].copy_(ids)
        if size not in self._graphs:
            self._graphs[size] = _capture(lambda: self._step(buffer), ids.device)
        replay, loss = self._graphs[size]
        replay()
        return loss.clone()


class Trainer:
    """A model in training: its parameters as one flat tensor, and Adam on that.

    A step of the standard model (no dropout, no BatchNorm, classes as labels, and exactly what the constructor made,
    see ``SPIN.is_as_constructed``) is one operation that returns the loss and the gradient of every parameter,
    ``ops.training_step``, and one of the optimiser; on a GPU both are captured in a CUDA graph, on the CPU many such
    steps are one operation, ``ops.training_steps``. Other models take autograd's way, which is decided at each epoch;
    both agree to rounding. All modules are put in training mode, so BatchNorm's running statistics change even where
    its parameters are frozen. Batches are ids of graphs in the features: nothing is collated. Model and features are on
    one device; the order of the graphs is drawn on the host, so it does not depend on the device, and the host waits
    for a GPU once an epoch, to read the loss.

    With a process group of several ranks all make the same calls, and each computes a range of every batch, see
    :func:`fit`; their steps are not captured.

    Args:
        model, learning_rate, weight_decay: as in :func:`fit`.
        class_weight: see :func:`loss_of`; floats ``[C]`` or ``[T]``.
        process_group: as in :func:`fit`; the model of each rank gets the parameters and buffers of the first.

    Attributes:
        optimizer: ``torch.optim.Adam`` with a single parameter; learning-rate schedulers take it.
    """

    def __init__(
        self,
        model: GraphClassifier,
        *,
        learning_rate: float = 5e-3,
        weight_decay: float = 0.0,
        class_weight: Tensor | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.class_weight = class_weight
        self._ranks = ranks_of(process_group)
        self._ranks.unify(model)
        self._flat = nn.Parameter(model.flatten_parameters())
        self._shapes = _shapes(model)
        self._captured: _Captured | None = None
        self._step_seconds: dict[tuple[int, int], float] = {}  # of the last features and size of batches
        self._num_outputs: int | None = None
        self.optimizer = _Adam(self._flat, learning_rate=learning_rate, weight_decay=weight_decay)

    def epoch(
        self,
        features: PowerFeatures | ShardedFeatures,
        ids: GraphIds,
        batch_size: int,
        generator: torch.Generator | None = None,
        graph_weight: Tensor | None = None,
    ) -> float:
        """One pass over the graphs ``ids`` in random order; returns their mean loss, as :func:`loss_of` weighs them.

        Of sharded features one shard after the other, in random order; a batch is of graphs of one shard.
        ``generator`` draws the order; several ranks must have one each, seeded alike.
        ``graph_weight [len(features)]``, floats, is how often each graph counts, of which only the ratios matter; steps
        with it are those of autograd.
        """
        features = sharded(features)
        ids, batch_size = graph_ids(ids, len(features)), check.integer("batch_size", batch_size, 1)
        if len(ids) == 0:
            return 0.0
        order = ids[self._ranks.order(len(ids), generator)]
        if graph_weight is not None:
            check.tensor("graph_weight", graph_weight, (len(features),), check.FLOATS)
            graph_weight = scaled(graph_weight[order])
        loss = weight = 0.0
        for shard, of_shard, places in features.parts(order):
            weights = None if graph_weight is None else graph_weight[places].to(shard.rows.device)
            of_batches, of_all = self._pass(shard, of_shard, batch_size, weights)
            loss, weight = loss + of_batches, weight + of_all
        return loss / max(weight, sys.float_info.min)

    def _pass(
        self, features: PowerFeatures, order: Tensor, batch_size: int, graph_weight: Tensor | None
    ) -> tuple[float, float]:
        """A step on each batch of the graphs ``order``; returns the sum of their losses, and of what they weigh."""
        steps = self._prepared(features, graph_weight is not None)
        stored = without_waiting(order, features.node_ptr.device)
        if features.ids is not None:
            stored = features.ids[stored]
        losses = self._ranks.sum(steps(stored, batch_size, *([] if graph_weight is None else [graph_weight])))
        assert features.labels is not None
        if features.labels.is_floating_point() or self.class_weight is not None or graph_weight is not None:
            shares = shares_of(features.labels[stored], self.class_weight, graph_weight)
            assert shares is not None
            weights = torch.stack([share.sum() for share in shares.split(batch_size)]).tolist()
        else:
            weights = [min(batch_size, len(stored) - i) for i in range(0, len(stored), batch_size)]
        return sum(map(mul, losses.tolist(), weights)), sum(weights)

    def step(self, features: PowerFeatures) -> Tensor:
        """One step on all selected graphs; returns their mean loss."""
        (loss,) = self._ranks.sum(self._prepared(features)(features.storage_ids(slice(None)), max(len(features), 1)))
        return loss

    def _prepared(self, features: PowerFeatures, is_weighted: bool = False) -> Steps:
        """A function that makes steps; the losses of all ranks add up to those of the batches."""
        model = self.model
        model.check_training(features)
        if self._num_outputs is None:
            self._num_outputs = model.num_outputs(features)
        check_labels(features.y, self._num_outputs)
        assert features.labels is not None
        facts = {"operator": features.operator, "multilabel": features.labels.is_floating_point()}
        facts["node_features"] = features.node_features
        for name, fact in facts.items():
            if getattr(model, name) != fact:  # which a module tells faster than it takes the same once more
                setattr(model, name, fact)
        if not all(module.training for module in model.modules()):  # telling each anew takes longer than a small step
            model.train()
        flat = model.flatten_parameters()
        is_same = flat.data_ptr() == self._flat.data_ptr()  # memory that this still holds
        if not is_same and _shapes(model) != self._shapes:
            raise ValueError(
                "model must have the parameters to train that it had when the Trainer was made; make another"
            )
        self.optimizer.follow(flat)  # wherever the model has been moved
        if self.class_weight is not None:
            check.tensor("class_weight", self.class_weight, (self._num_outputs,), check.FLOATS)
            self.class_weight = self.class_weight.to(features.rows)
        if isinstance(model, SPIN) and not is_weighted and self._is_standard(model, features):
            return self._fused(model, features)
        return _one_by_one(self._by_autograd(features))

    def _is_standard(self, model: SPIN, features: PowerFeatures) -> bool:
        config, labels = model.config, features.labels
        return (
            model.is_as_constructed(to_train=True)
            and not torch_compat.has_optimizer_hooks(self.optimizer)
            and native.available(features.rows.device)
            and features.rows.dtype == self._flat.dtype
            and labels is not None
            and labels.dtype == torch.int64
            and not (config["dropout"] > 0 or config["size_aware"])
            and len(config["classifier_features"]) < ops.MOST_LAYERS
        )

    def _fused(self, model: SPIN, features: PowerFeatures) -> Steps:
        assert features.labels is not None
        flat, sizes = self._flat.detach(), model.sizes
        joint = None if model.joint is None else features.joint
        bound = ops.bind_training_step(
            features.rows,
            flat,
            features.labels,
            features.ptr,
            model=sizes,
            index=features.index,
            count=features.count,
            joint=joint,
            class_weight=self.class_weight,
            check_invariants=False,
        )

        is_captured = _is_captured(flat.device)
        if flat.is_cpu and self._ranks.number == 1 and not is_captured:
            return partial(self._steps, bound.steps, id(features))
        gradient_of = self._shared(bound.step, features)

        def step(ids: Tensor) -> Tensor:
            loss, self._flat.grad = gradient_of(ids)
            self.optimizer.quick_step()
            return loss

        if self._ranks.number > 1 or not is_captured:
            return _one_by_one(step)
        data = (features.rows, features.labels, features.ptr, features.index, features.count, self.class_weight)
        memory = (model.flatten_parameters(), *data, joint, *self.optimizer.memory, sizes, ops.may_use_tf32())
        if self._captured is None or not self._captured.holds(memory):
            self._captured = _Captured(step, memory)
        return _one_by_one(self._captured)

    def _steps(
        self, call: Callable[[Tensor, int, ops.Adam], Tensor], features_id: int, ids: Tensor, batch_size: int
    ) -> Tensor:
        """Steps by ``ops.training_steps``, in a call as many as take ``CALL_SECONDS`` at the rate of the last call."""
        adam, begin, of = self.optimizer.arguments, 0, (features_id, batch_size)
        losses: list[Tensor] = []
        torch_compat.mark_stepped(self.optimizer)
        while begin < len(ids) or not losses:
            seconds = self._step_seconds.get(of, math.inf)
            end = begin + max(1, int(CALL_SECONDS / seconds)) * batch_size
            start, some = time.perf_counter(), ids[begin:end]
            losses.append(call(some, batch_size, adam))
            begin = end
            self._step_seconds = {of: max(time.perf_counter() - start, 1e-6) * batch_size / max(len(some), 1)}
        return torch.cat(losses)

    def _by_autograd(self, features: PowerFeatures) -> Callable[..., Tensor]:
        grad = torch.zeros_like(self._flat)
        parameters = [*self.model.trained_parameters().values()]
        parts = grad.split([parameter.numel() for parameter in parameters])
        views = [part.view_as(parameter) for parameter, part in zip(parameters, parts, strict=True)]
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view

        def gradient(ids: Tensor, graph_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
            selected = features.of_storage(ids)
            assert selected.y is not None
            grad.zero_()
            loss = loss_of(self.model(selected), selected.y, self.class_weight, graph_weight)
            loss.backward()
            for parameter, view in zip(parameters, views, strict=True):
                if parameter.grad is not view:  # a hook has replaced it, or taken it away
                    view.copy_(view.new_zeros(()) if parameter.grad is None else parameter.grad)
                    parameter.grad = view
            return loss.detach(), grad

        gradient_of = self._shared(gradient, features)

        def step(*batch: Tensor) -> Tensor:
            loss, self._flat.grad = gradient_of(*batch)
            self.optimizer.step()
            return loss

        return step

    def _shared(self, gradient_of: GradientOf, features: PowerFeatures) -> GradientOf:
        def shares(ids: Tensor, graph_weight: Tensor | None = None) -> Tensor | None:
            assert features.labels is not None
            return shares_of(features.labels[ids], self.class_weight, graph_weight)

        return self._ranks.sharing(gradient_of, shares, self._flat)


def _one_by_one(step: Callable[..., Tensor]) -> Steps:
    """Of a function of the graphs of one batch, and their weights, one of several batches."""

    def steps(ids: Tensor, batch_size: int, *graph_weight: Tensor) -> Tensor:
        batches = zip(*(values.split(batch_size) for values in (ids, *graph_weight)), strict=True)
        return torch.stack([step(*batch) for batch in batches])

    return steps


def _shapes(model: GraphClassifier) -> list[tuple[str, torch.Size]]:
    return [(name, parameter.shape) for name, parameter in model.trained_parameters().items()]
