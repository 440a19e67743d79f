"""Index arithmetic on flat arrays: graph ids, offsets, ragged ranges; the base of what holds graphs in such arrays.

Whether graphs were prepared alike is told here, too, for all that knows ``node_features``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

GraphIds = int | slice | list[int] | range | np.ndarray | Tensor  # or one of these with an Ellipsis: graphs[ids, ...]
CPU = torch.device("cpu")


def as_tensor(values: Any) -> Tensor:
    """A tensor of anything array-like; arrays are copied, since torch takes none of negative strides."""
    is_array = hasattr(values, "__array__") and not isinstance(values, Tensor)
    device = values.device if isinstance(values, Tensor) else CPU
    return torch.as_tensor(np.array(values) if is_array else values, device=device)


def graph_ids(ids: GraphIds, num_graphs: int, device: torch.device = CPU) -> Tensor:
    """Turn an int, slice, index array, list or boolean mask into int64 graph ids in ``[0, num_graphs)`` on ``device``.

    Ids on the host are checked there and moved without waiting. Ids that are on the GPU already are trusted, since a
    check would wait for it; a mask there has to be read.

    Raises:
        TypeError: ``ids`` is none of these. IndexError: an id is out of range, or a mask has another length.
    """
    if isinstance(ids, tuple) and len(ids) == 2 and ids[1] is ...:  # how scikit-learn selects
        ids = ids[0]
    if isinstance(ids, slice):
        rising = (ids.step or 1) > 0
        every = torch.arange(num_graphs, device=CPU)
        chosen = every[ids] if rising else every[list(range(*ids.indices(num_graphs)))]
        return without_waiting(chosen, device)
    if isinstance(ids, (int, np.integer)) and not isinstance(ids, bool):
        chosen = torch.tensor([int(ids)], device=CPU)
    else:
        try:
            chosen = as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"graph ids must be an int, slice, index array or mask, got {type(ids).__name__}"
            ) from error
    if chosen.dim() == 0 and isinstance(ids, (np.ndarray, Tensor)) and chosen.dtype != torch.bool:
        chosen = chosen.reshape(1)
    if chosen.device != device:
        chosen = chosen.cpu()
    if chosen.dtype == torch.bool:
        if chosen.shape != (num_graphs,):
            raise IndexError(f"a mask of graphs must have shape [{num_graphs}], got {list(chosen.shape)}")
        return without_waiting(chosen.nonzero().squeeze(1), device)
    if chosen.dim() != 1 or (chosen.numel() and chosen.dtype.is_floating_point):
        raise TypeError(f"graph ids must be one-dimensional integers, got {chosen.dtype} of shape {list(chosen.shape)}")
    chosen = chosen.to(torch.int64)
    if chosen.is_cpu and chosen.numel():
        low, high = map(int, chosen.aminmax())
        if low < -num_graphs or high >= num_graphs:
            bad = chosen[(chosen < -num_graphs) | (chosen >= num_graphs)][0].item()
            raise IndexError(f"graph id {bad} is out of range for {num_graphs} graphs")
        if low >= 0:
            return without_waiting(chosen.clone(), device)
    return without_waiting(torch.where(chosen < 0, chosen + num_graphs, chosen), device)


def without_waiting(values: Tensor, device: torch.device) -> Tensor:
    """Move from the host to ``device``; to a GPU from page-locked memory, so that the host need not wait for it."""
    if device.type == "cuda" and values.is_cpu:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class GraphArrays:
    """Graphs in flat arrays, the tensors among the attributes, which move from device to device together."""

    node_features: Any = None
    _stay_on_cpu: ClassVar[tuple[str, ...]] = ()

    @property
    def num_graphs(self) -> int:
        raise NotImplementedError

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """The same graphs on another device; ``non_blocking`` as in ``torch.Tensor.to``."""
        if isinstance(device, torch.dtype):  # which Tensor.to takes, too, but it would change indices
            raise TypeError(f"device must be a torch.device, or the name or number of one, got {device}")
        place = torch.device(device)
        return self._with_arrays(lambda value: value.to(place, non_blocking=non_blocking))

    def cuda(self, device: torch.device | str | int = "cuda") -> Self:
        return self.to(device)

    def cpu(self) -> Self:
        return self.to("cpu")

    def pin_memory(self) -> Self:
        """The same graphs in page-locked memory, from which ``to(device, non_blocking=True)`` does not wait."""
        return self._with_arrays(Tensor.pin_memory)

    def __len__(self) -> int:
        return self.num_graphs

    @property
    def shape(self) -> tuple[int]:
        """``(G,)``: with a shape, scikit-learn selects by arrays of ids, and not one by one."""
        return (self.num_graphs,)

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuse, since numpy would recurse into selections without end."""
        raise TypeError(f"{type(self).__name__} cannot become an array")

    def _arrays(self) -> dict[str, Any]:
        return vars(self)

    def _with_arrays(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A copy with ``function`` of every array; its contents are trusted."""
        arrays = self._arrays()
        changed = copy.copy(self)
        for name, value in arrays.items():
            if isinstance(value, Tensor) and name not in self._stay_on_cpu:
                vars(changed)[name] = function(value)
        return changed


def ragged_arange(starts: Tensor, sizes: Tensor) -> Tensor:
    """Concatenate ``arange(start, start + size)`` over all pairs: ``[2, 9], [3, 2] -> [2, 3, 4, 9, 10]``."""
    ends = sizes.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    shifts = (starts - (ends - sizes)).repeat_interleave(sizes, output_size=total)
    return torch.arange(total, device=starts.device) + shifts


def offsets(sizes: Tensor) -> Tensor:
    """Offsets ``[n + 1]`` (int64) of ``n`` consecutive ranges of the given sizes: ``[2, 3] -> [0, 2, 5]``."""
    # torch.compile of pad reads out of bounds for an empty tensor.
    return torch.cat([sizes.new_zeros(1), sizes]).cumsum(0, dtype=torch.int64)


def are_alike(one: Any, other: Any) -> bool:
    """Whether both NodeFeatures make the same of all graphs; None leaves them as they are."""
    return one is other or ([] if one is None else one.effects) == ([] if other is None else other.effects)


def prepared_by(graphs: Any) -> str:
    """What has transformed the graphs, for messages."""
    made = graphs.node_features
    return "no NodeFeatures" if are_alike(made, None) else f"NodeFeatures {made.fingerprint}"
