"""PowerFeatures: the rows of all branches, each distinct row stored once, and how graphs refer to them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._common import check
from .._common.indexing import GraphArrays, GraphIds, graph_ids, offsets, prepared_by, ragged_arange
from .._common.progress import progress_bar
from .._common.rows import arrays_of, check_ragged, dense, is_sparse, take, take_dense, with_arrays
from ..graphs.batch import GraphBatch
from ..graphs.node_features import NodeFeatures
from ..ops import reference
from . import storage
from .chunks import PowerChunk, Stream, chunks_of, num_branches_of, power_chunks, powers_of
from .identical import identical_segments

WORTHWHILE = 1.1  # nodes per distinct row; below, reading rows by index costs more than sharing them saves
CHUNK_BYTES = 8 << 20  # of the powers of a chunk and of the search for its distinct rows
ROW_BYTES = 4  # per row of a node, of the search for distinct rows
GPU_CHUNK_BYTES = 1 << 30  # the same on a GPU: few chunks, each of which is searched together with all rows so far
GPU_ROW_BYTES = 80  # per row of a node, of the search there
SAMPLE_NODES = 4096  # from so many nodes on, the rows found so far tell whether deduplication is worthwhile


@dataclass(frozen=True, repr=False, eq=False)
class PowerFeatures(GraphArrays):
    """The rows ``[X, ĀX, ..., Ā^R X]`` of a set of graphs, computed once, before training.

    Several operators ``Ā`` may stand side by side: they share branch 0, ``X``, and each adds its hops 1 to ``R`` after
    those of the one before, so that there are ``1 + k R`` branches where ``R + 1`` is written below.

    Nodes with bit-equal rows in a branch share one stored row; a graph lists its distinct rows and how often each
    occurs. The attributes describe the storage; :attr:`ids` selects graphs in it. Build with :meth:`from_graphs`. All
    arrays are on one device, but for ``row_ptr``, which is always on the CPU.

    Attributes:
        rows: ``[U, d]``; branch ``r`` owns ``rows[row_ptr[r]:row_ptr[r + 1]]``. On the CPU the layout is torch's CSR
            where that takes a quarter of the memory, or less, for the first graph that has nodes, and a dense row takes
            256 bytes or more; ``rows.to_dense()`` is always dense.
        row_ptr: ``[R + 2]`` int64.
        ptr: ``[S + 1]`` int64, the entries of each segment, branch-major.
        index: ``[nnz]`` int32 or int64, the row of each entry, one of its own branch, ascending in a segment; None for
            the identity.
        count: ``[nnz]`` int32, how often the row occurs in the graph; None for ones.
        row_of_node: ``[R + 1, N]``, the row of each node in each branch; None for the identity, or if not kept.
        node_ptr: ``[G + 1]`` int64, node offsets of the graphs.
        labels: first axis ``G``, or None.
        operator: the graph operator, or several with commas between them, such as ``"sym,adj"``.
        ids: ``[selected]`` int64 graph ids, or None.
        node_features: the :class:`spin_fast.NodeFeatures` that had transformed the graphs, as these tell; None if none
            had. Files keep it, and a model that is trained on these features takes it over, and so takes graphs as they
            were before.
        joint: the joint rows of all graphs of the storage, found when they are first asked for.
    """

    rows: Tensor
    row_ptr: Tensor
    ptr: Tensor
    index: Tensor | None
    count: Tensor | None
    row_of_node: Tensor | None
    node_ptr: Tensor
    labels: Tensor | None
    operator: str
    ids: Tensor | None = None
    node_features: NodeFeatures | None = None
    _stay_on_cpu = ("row_ptr",)

    def __post_init__(self) -> None:
        """Check the contents once; models and ops then trust them. On a GPU contents are not read."""
        vars(self)["_found"] = {}
        self._check_shapes()
        if self.rows.is_cpu:
            self._check_entries()

    @classmethod
    def _made(
        cls,
        found: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
        node_ptr: Tensor,
        labels: Tensor | None,
        operator: str,
        node_features: NodeFeatures | None,
    ) -> PowerFeatures:
        """Of arrays ``found`` by operations, ``rows`` to ``row_of_node``: they are not checked."""
        made = cls.__new__(cls)
        vars(made).update(zip(("rows", "row_ptr", "ptr", "index", "count", "row_of_node"), found, strict=True))
        vars(made).update(row_ptr=made.row_ptr.cpu(), node_ptr=node_ptr, labels=labels, operator=operator, _found={})
        vars(made).update(node_features=node_features)
        return made

    def _check_shapes(self) -> None:
        """Check all but the contents of the arrays that grow with the nodes, which are not read."""
        if self.node_features is not None and not hasattr(self.node_features, "num_features_"):
            made = type(self.node_features).__name__
            raise TypeError(f"node_features must be fitted NodeFeatures or None, got {made}")
        check_ragged(self.rows)
        device, num_rows = self.rows.device, len(self.rows)
        for name in ("node_ptr", "ptr"):
            check.offsets_shape(name, getattr(self, name), device)
        check.tensor("row_ptr", self.row_ptr, ("branches + 1",), (torch.int64,))
        object.__setattr__(self, "row_ptr", self.row_ptr.cpu())
        bounds = self.row_ptr.tolist()
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_rows or sorted(bounds) != bounds:
            raise ValueError(f"row_ptr must go from 0 to the number of rows, {num_rows}, got {bounds}")
        graphs, segments = self.node_ptr.numel() - 1, self.ptr.numel() - 1
        if segments != self.num_branches * graphs:
            raise ValueError(f"ptr must have {self.num_branches} branches of {graphs} segments, got {segments}")
        if is_sparse(self.rows) and self.index is None:
            raise ValueError("rows must be dense where index is None, got sparse_csr")
        if self.index is not None:
            check.tensor("index", self.index, ("nnz",), check.INTEGERS, device)
        if self.count is not None:
            entries = num_rows if self.index is None else self.index.numel()
            check.tensor("count", self.count, (entries,), (torch.int32,), device)
        if self.row_of_node is not None:
            check.tensor("row_of_node", self.row_of_node, (self.num_branches, "N"), check.INTEGERS, device)
        if self.labels is not None and self.labels.device != device:
            raise ValueError(f"labels must be on {device}, got {self.labels.device}")
        if self.labels is not None and self.labels.shape[:1] != (graphs,):
            raise ValueError(f"labels must have a first axis of {graphs} graphs, got {list(self.labels.shape)}")
        object.__setattr__(self, "operator", check.operators(self.operator))
        if (self.num_branches - 1) % self.num_operators:
            raise ValueError(
                f"row_ptr must have 1 branch and as many for each operator of {self.operator!r}, "
                f"got {self.num_branches} branches"
            )
        if not self.rows.is_cpu:
            return
        ops.check_sparse_rows(self.rows)
        num_nodes = int(self.node_ptr[-1])
        if problem := reference.check_offsets("node_ptr", self.node_ptr, num_nodes, "nodes"):
            raise ValueError(problem)
        if self.row_of_node is not None:
            check.tensor("row_of_node", self.row_of_node, (self.num_branches, num_nodes), check.INTEGERS)
        elif self.index is None and num_rows != self.num_branches * num_nodes:
            raise ValueError(f"rows must have one row per node and branch where index is None, got {num_rows}")
        elif self.index is None:
            starts = torch.arange(self.num_branches, device="cpu")[:, None] * num_nodes + self.node_ptr[:-1]
            if self.count is not None or not torch.equal(self.ptr[:-1], starts.flatten()):
                raise ValueError("ptr must be the offsets of the nodes of each branch, and count None, without index")

    def _check_entries(self) -> None:
        num_rows = len(self.rows)
        ops.check_segments(self.ptr, self.index, self.count, num_rows, self.row_ptr)
        entries, num_nodes = int(self.ptr[-1]), int(self.node_ptr[-1])
        if (total := entries if self.count is None else int(self.count.sum())) != self.num_branches * num_nodes:
            raise ValueError(f"count must add up to {self.num_branches} branches of {num_nodes} nodes, got {total}")
        if self.row_of_node is not None:
            ptr = torch.arange(self.num_branches + 1, device="cpu") * self.row_of_node.shape[1]
            ops.check_segments(ptr, self.row_of_node.flatten(), None, num_rows, self.row_ptr)

    def __getattr__(self, name: str) -> Any:
        """Check the arrays of a mapped file when one of them is first asked for; maybe another thread just has."""
        if name in storage.ENTRIES and name in (arrays := self._arrays()):
            return arrays[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _arrays(self) -> dict[str, Any]:
        """All attributes; the arrays of a mapped file are checked before, once for all selections of one storage."""
        mapped: storage.Mapped | None = vars(self).get("_unchecked")
        if mapped is not None:
            if not mapped.checked:
                whole = copy.copy(self)
                vars(whole).update(mapped.arrays)
                with storage.naming(mapped.path):
                    whole._check_entries()
                mapped.checked = True
            vars(self).update(mapped.arrays)  # before the next line: another thread always finds one of both
            vars(self).pop("_unchecked", None)
        return vars(self)

    def _with_arrays(self, function: Callable[[Tensor], Tensor]) -> PowerFeatures:
        changed = super()._with_arrays(lambda value: with_arrays(value, function))
        vars(changed)["_found"] = {}
        return changed

    def __deepcopy__(self, memo: dict[int, Any]) -> PowerFeatures:
        """Copy all arrays, also sparse rows, for which torch has no ``__deepcopy__``."""
        if is_sparse(self.rows) and id(self.rows) not in memo:
            memo[id(self.rows)] = with_arrays(self.rows, Tensor.clone)
        copied = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @property
    def joint(self) -> ops.JointRows:
        """The joint rows of all graphs of the storage, which ``SPIN(branches="joint")`` reads.

        Raises:
            ValueError: the rows of the nodes are not known (``node_rows=False``).
        """
        found: dict[str, ops.JointRows] = vars(self)["_found"]  # of all selections of one storage
        if "joint" not in found:
            self._check_node_rows()
            with torch.inference_mode(False):  # a prediction may find them first, and a training use them later
                if self.row_of_node is None:
                    found["joint"] = ops.JointRows(self.of_storage(None)._node_rows().t().contiguous(), self.node_ptr)
                else:
                    found["joint"] = ops.joint_rows(self.row_of_node, self.node_ptr)
        return found["joint"]

    def _check_node_rows(self) -> None:
        if self.row_of_node is None and self.index is not None:
            raise ValueError("features must know the rows of their nodes: make them with node_rows=True")

    @classmethod
    def from_graphs(
        cls,
        graphs: GraphBatch,
        num_hops: int,
        operator: str | Sequence[str] = "sym",
        deduplicate: bool = True,
        *,
        node_rows: bool = True,
        progress: bool = False,
    ) -> PowerFeatures:
        """Compute the powers of ``graphs`` and find the distinct rows of each branch.

        Deduplication is exact: rows are compared bit by bit (with -0 made +0). It goes through the graphs in chunks of
        some 8 MB, at least one graph each, and the powers of all of them are never in memory at once. Where hardly any
        row repeats, less than one in ten over all branches, it is left out: the model then runs faster on one row per
        node. So it is as soon as that holds after a chunk for the graphs so far, if these have some thousand nodes,
        whatever comes after them. On a GPU, where a chunk in cache gains nothing, all graphs are one chunk.

        Args:
            graphs: the graphs.
            num_hops: ``R``, at least 0.
            operator: ``adj``, ``sym``, ``sym+adj`` (their sum) or ``rw``; or several, such as ``("sym", "adj")`` or
                ``"sym,adj"``, each of which adds its ``R`` hops as branches.
            deduplicate: store each distinct row once, where it pays; False keeps one row per node and branch.
            node_rows: keep ``row_of_node``, which dropout, joint rows, :meth:`dense_rows` and :meth:`expand` need; with
                one float32 feature it is as large as the powers themselves.
            progress: show a progress bar on the terminal.
        """
        if not isinstance(graphs, GraphBatch):
            raise TypeError(f"graphs must be a GraphBatch, got {type(graphs).__name__}")
        check.integer("num_hops", num_hops, 0)
        check.flag("deduplicate", deduplicate)
        check.flag("node_rows", node_rows)
        operator = check.operators(operator)
        told = graphs.ptr, graphs.y, operator, graphs.node_features
        if not deduplicate:
            return cls._dense(powers_of(graphs, num_hops, operator, False), *told)
        found = ops.DistinctRows(
            num_branches_of(num_hops, operator),
            graphs.x,
            num_nodes=graphs.num_nodes,
            num_graphs=len(graphs),
            node_rows=node_rows,
            operator=operator,
        )
        with progress_bar("graphs", len(graphs), progress) as advance:
            limits = chunk_limits(graphs.x, num_branches_of(num_hops, operator))
            chunks = power_chunks(graphs, num_hops, operator, *limits, float64_sums=True)
            last = _add(found, chunks, advance)
            if last is None:
                return cls._made(found.take(), *told)
            advance("", len(graphs) - found.num_graphs)
            del found
        powers = last if last.shape[1] == graphs.num_nodes else powers_of(graphs, num_hops, operator, True)
        return cls._dense(powers, *told)

    @classmethod
    def from_chunks(
        cls,
        chunks: Iterable[GraphBatch],
        num_hops: int,
        operator: str | Sequence[str] = "sym",
        deduplicate: bool = True,
        *,
        node_rows: bool = True,
    ) -> PowerFeatures:
        """Compute the features of graphs that come chunk by chunk and need never be in memory at once.

        The result is that of :meth:`from_graphs` of all graphs in one batch, wherever they are cut: bit by bit, but for
        the sign of zeros where hardly any row repeats. In memory are one chunk of at most 4 million edges, but for a
        larger graph, powers of some 8 MB (on a GPU 500 million and 1 GB, with the search for distinct rows), and what
        is found so far: the distinct rows, twice where room is made for
        more, and the segments and ``row_of_node``, which is kept to the end, since it takes until then to know whether
        rows repeat. Without deduplication it is the rows of all nodes, which then are twice in memory if only late
        chunks show that hardly any row repeats.

        Args:
            chunks: at least one batch of any number of graphs; all alike in features, dtype and device, with labels or
                without, with edge weights or without. Read once, such as from a generator that reads files.
            num_hops, operator, deduplicate, node_rows: as in :meth:`from_graphs`.

        Raises:
            TypeError, ValueError: an argument is wrong, or a chunk does not fit the first one; names it by its number,
                from 0.
        """
        check.integer("num_hops", num_hops, 0)
        check.flag("deduplicate", deduplicate)
        check.flag("node_rows", node_rows)
        operator = check.operators(operator)
        stream = Stream(chunks, operator)
        if not deduplicate:
            dense = [*map(lambda graphs: powers_of(graphs, num_hops, operator, False), stream)]  # keeps no chunk
            return cls._dense(_joined(dense), *stream.told)
        found = ops.DistinctRows(num_branches_of(num_hops, operator), stream.x, operator=operator)
        limits = chunk_limits(stream.x, num_branches_of(num_hops, operator))
        more = stream.power_chunks(num_hops, *limits)
        last = _add(found, more)
        rows, row_ptr, ptr, index, count, row_of_node = found.take()
        assert row_of_node is not None
        if last is None:
            kept = row_of_node if node_rows else None
            return cls._made((rows, row_ptr, ptr, index, count, kept), *stream.told)
        known = take_dense(rows, row_of_node)
        del rows, row_ptr, ptr, index, count, row_of_node
        dense = [known, *map(lambda chunk: chunk.powers.clone(), more)]  # keeps no chunk
        del known
        return cls._dense(_joined(dense), *stream.told)

    @classmethod
    def _dense(cls, powers: Tensor, node_ptr: Tensor, *told: Any) -> PowerFeatures:
        """One row per node and branch, from ``powers [R + 1, N, d]``."""
        num_branches, num_nodes, _ = powers.shape
        starts = torch.arange(num_branches, device=node_ptr.device)[:, None] * num_nodes + node_ptr[:-1]
        row_ptr = torch.arange(num_branches + 1, device="cpu") * num_nodes
        ptr = torch.nn.functional.pad(starts.flatten(), (0, 1), value=num_branches * num_nodes)
        return cls._made((powers.flatten(0, 1), row_ptr, ptr, None, None, None), node_ptr, *told)

    @classmethod
    def concatenate(cls, parts: Iterable[PowerFeatures]) -> PowerFeatures:
        """Join features of the same operator, hops and kind of rows: the graphs of all parts, one after the other.

        Parts without deduplication stay so if all are. Otherwise distinct rows are found anew, with the same result as
        if all graphs had been given to :meth:`from_graphs` at once, but that ``row_of_node`` is kept only if all parts
        have it.

        Args:
            parts: at least one, all on one device.

        Raises:
            TypeError, ValueError: a part is no ``PowerFeatures``, or does not fit the first one.
        """
        parts = list(parts)
        for part in parts:
            if not isinstance(part, PowerFeatures):
                raise TypeError(f"parts must hold PowerFeatures, got {type(part).__name__}")
        if not parts:
            raise ValueError("parts must hold at least one PowerFeatures, got none")
        parts = [part.take() for part in parts]
        for part in parts:
            if part._kind != parts[0]._kind:
                raise ValueError(f"parts must be alike, got {parts[0]._kind} and {part._kind}")
        if len(parts) == 1:
            return parts[0]
        counted = [part for part in parts if part.num_nodes] or parts  # a part without nodes has no say
        are_dense = [part.index is None for part in counted]  # of all, which checks those that are mapped
        sizes = torch.cat([part.node_ptr.diff() for part in parts])
        known = [part.labels for part in parts if part.labels is not None]
        node_ptr, labels = offsets(sizes), torch.cat(known) if known else None
        num_branches, rows = parts[0].num_branches, parts[0].rows
        told = node_ptr, labels, parts[0].operator, parts[0].node_features
        if all(are_dense):
            powers = torch.cat([part.dense_rows() for part in counted], dim=1)
            return cls._dense(powers, *told)
        node_rows = all(part.row_of_node is not None or part.index is None for part in parts)
        num_nodes, num_graphs = int(sizes.sum()), len(sizes)
        found = ops.DistinctRows(num_branches, rows, num_nodes=num_nodes, num_graphs=num_graphs, node_rows=node_rows)
        num_bytes, bytes_beside = chunk_limits(rows, num_branches)
        bytes_per_node = num_branches * rows.shape[1] * rows.element_size() + bytes_beside
        for part in parts:
            for begin, end in chunks_of(part.node_ptr, num_bytes // bytes_per_node):
                found.add(part._powers_between(begin, end), part.node_ptr[begin : end + 1] - part.node_ptr[begin])
        return cls._made(found.take(), *told)

    @property
    def _kind(self) -> str:
        """Properties that features must share to be joined."""
        labels = "no labels" if self.labels is None else f"labels {self.labels.dtype} {list(self.labels.shape[1:])}"
        return (
            f"{self.num_hops} hops of {self.operator!r} on {self.num_features} features in {self.rows.dtype} "
            f"with {labels} on {self.rows.device}, prepared by {prepared_by(self)}"
        )

    def save(self, path: str | Path, *, made_of: str | None = None) -> None:
        """Write to one safetensors file, from which :meth:`load` reads; a selection as its :meth:`take`.

        The file has the arrays of :class:`PowerFeatures` by their names, and the operator and the ``node_features`` in
        its metadata. It is written under a temporary name and renamed, so that a reader never sees half of it, and
        features that are mapped from a file may be saved to that file.

        Args:
            path: the file; a name such as ``NAME-00003-of-00016.safetensors`` for :func:`spin_fast.shards.join`.
            made_of: what the file is to tell about that, any text; only files that tell the same are joined.

        Raises:
            OSError: the file cannot be written; names it. ValueError: its name is that of an index.
        """
        storage.write(Path(path), self.take()._arrays(), self.operator, self.node_features, made_of)

    @classmethod
    def load(cls, path: str | Path, *, mmap: bool = True) -> PowerFeatures:
        """Read what :meth:`save` has written, on the CPU.

        With ``mmap`` the file is mapped: only offsets, some bytes per graph and branch, and the indices of sparse rows
        are read and checked here. ``index``, ``count`` and ``row_of_node`` are read once, in order, to be checked, when
        one of them is first asked for, which the model does; rows and labels are read where they are used. What a file
        says is never trusted: a damaged one gives an error, or other numbers, but no operation reads what is not there.
        The file must not be overwritten in place meanwhile; :meth:`save` does not. Without ``mmap`` all is read and
        checked at once.

        Args:
            path: the file, or one of many, each of which can be read alone; or their index, ``*.index.json``, with
                which ``spin_fast.shards`` keeps features too large for one file: its files are joined, in memory.
            mmap: map the file, do not read it.

        Raises:
            FileNotFoundError: no such file. ValueError: the file is cut short, damaged, no file of features, or of a
                newer format; names it.
        """
        path = Path(path)

        def read() -> PowerFeatures:
            if storage.is_indexed(path):
                return cls._load_shards(storage.index_of(path))
            return cls._load_file(path, mmap)

        return storage.again_if_replaced(path, read)

    @classmethod
    def _load_file(cls, path: Path, mmap: bool) -> PowerFeatures:
        features = object.__new__(cls)
        vars(features).update(storage.read(path, mmap=mmap), ids=None, _found={})
        with storage.naming(path):
            features._check_shapes()
            if not mmap:
                features._check_entries()
                return features
            num_entries = len(features.rows) if features.index is None else features.index.numel()
            ops.check_segments(features.ptr, None, None, num_entries)
        entries = {name: vars(features).pop(name) for name in storage.ENTRIES if vars(features)[name] is not None}
        vars(features)["_unchecked"] = storage.Mapped(path, entries)
        return features

    @classmethod
    def _load_shards(cls, index: Path) -> PowerFeatures:
        parts = []
        for file, num_graphs in storage.read_index(index):
            part = cls._load_file(file, mmap=True)
            if len(part) != num_graphs:
                raise ValueError(f"{file} must have {num_graphs} graphs, as {index} says, got {len(part)}")
            parts.append(part)
        with storage.naming(index):
            return cls.concatenate(parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the storage."""
        arrays = [value for value in self._arrays().values() if isinstance(value, Tensor) and not is_sparse(value)]
        if is_sparse(self.rows):
            arrays += [value for value in arrays_of(self.rows) if isinstance(value, Tensor)]
        return sum(value.nbytes for value in arrays)

    @property
    def num_branches(self) -> int:
        """``R + 1``, or ``1 + k R`` of ``k`` operators."""
        return self.row_ptr.numel() - 1

    @property
    def num_operators(self) -> int:
        """``k``."""
        return self.operator.count(",") + 1

    @property
    def num_hops(self) -> int:
        """``R``, of each operator."""
        return (self.num_branches - 1) // self.num_operators

    @property
    def num_features(self) -> int:
        """``d``."""
        return self.rows.shape[1]

    @property
    def num_graphs(self) -> int:
        """Selected graphs."""
        return self.node_ptr.numel() - 1 if self.ids is None else self.ids.numel()

    @property
    def num_nodes(self) -> int:
        """Nodes of the selected graphs; read from the device."""
        sizes = self.node_ptr.diff()
        return int((sizes if self.ids is None else sizes[self.ids]).sum())

    @property
    def y(self) -> Tensor | None:
        """Labels of the selected graphs."""
        return self.labels if self.ids is None or self.labels is None else self.labels[self.ids]

    @property
    def deduplication(self) -> list[float]:
        """Nodes per stored row of each branch, over all graphs of the storage."""
        num_nodes = int(self.node_ptr[-1])
        return [num_nodes / size if size else 1.0 for size in self.row_ptr.diff().tolist()]

    def __getitem__(self, ids: GraphIds) -> PowerFeatures:
        """Select graphs by int, slice, index array or mask; lazy: the storage is shared, nothing is copied.

        Waits for no GPU, unless ``ids`` is a mask there; ids that are there already are trusted.
        """
        return self.of_storage(self.storage_ids(ids))

    def storage_ids(self, ids: GraphIds) -> Tensor:
        """Numbers in the storage of graphs ``ids`` of the selection, int64, on the device of the features."""
        chosen = graph_ids(ids, self.num_graphs, self.node_ptr.device)
        return chosen if self.ids is None else self.ids[chosen]

    def of_storage(self, ids: Tensor | None) -> PowerFeatures:
        """Select graphs by their numbers in the storage, which are trusted; None for all of it."""
        selected = copy.copy(self)  # not a new object: its contents are checked already
        object.__setattr__(selected, "ids", ids)
        return selected

    def __repr__(self) -> str:
        ratios = ", ".join(f"{ratio:.3g}x" for ratio in self.deduplication)
        return (
            f"PowerFeatures({self.num_graphs} graphs, {self.num_branches} branches of {self.operator!r}, "
            f"{len(self.rows)} rows of {self.num_features} features, {ratios} nodes per row, {self.rows.dtype})"
        )

    def branch_rows(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None, Tensor | None]:
        """The selected graphs in the ragged form of the readouts, each distinct row once.

        Returns:
            The rows of each branch, ``R + 1`` tensors ``[U_r, d]``; then ``ptr [S + 1]``, ``index [nnz]`` and ``count
            [nnz]`` as in :func:`spin_fast.sum_readout`, the rows of all branches counted one after the other.
        """
        if self.ids is None:
            return dense(self.rows).split(self.row_ptr.diff().tolist()), self.ptr, self.index, self.count
        rows, row_ptr, ptr, index, count, _ = self._gather()
        return dense(rows).split(row_ptr.diff().tolist()), ptr, index, count

    def take(self) -> PowerFeatures:
        """Materialise a selection: its own compact rows, no reference to the graphs left out."""
        if self.ids is None:
            return self
        rows, row_ptr, ptr, index, count, distinct = self._gather()
        row_of_node = None
        if self.row_of_node is not None and distinct is not None:
            row_of_node = torch.searchsorted(distinct, self._node_rows().to(distinct.dtype)).to(self.row_of_node.dtype)
        if index is not None and self.index is not None:
            index = index.to(self.index.dtype)
        found = (rows, row_ptr, ptr, index, count, row_of_node)
        return self._made(found, self.selected_ptr, self.y, self.operator, self.node_features)

    def identical_graphs(self, *, joint: bool = False) -> Tensor:
        """Find the graphs that no SPIN of these hops can tell apart: with the same rows equally often in every branch.

        Exact: rows are compared bit by bit, as they are in deduplication.

        Args:
            joint: with the same joint rows equally often, which a ``SPIN`` with a joint branch cannot tell apart.

        Returns:
            ``[G]`` int64: for each selected graph the position, in the selection, of the first one identical to it.
        """
        check.flag("joint", joint)
        whole = self.of_storage(None)
        if self.index is None or self.count is None:
            found = ops.distinct_rows(whole.dense_rows(), self.node_ptr, check_invariants=False)
            whole = self._made(found, self.node_ptr, None, self.operator, None)
        segments: PowerFeatures | ops.JointRows = whole.joint if joint else whole
        assert segments.index is not None
        assert segments.count is not None
        num_branches = 1 if joint else self.num_branches
        first = identical_segments(segments.ptr, segments.index, segments.count, num_branches)
        return first if self.ids is None else reference.first_positions(first[self.ids])

    def expand(self) -> PowerFeatures:
        """Materialise a selection with one row per node in each branch: what per-node dropout and BatchNorm need."""
        return self._dense(self.dense_rows(), self.selected_ptr, self.y, self.operator, self.node_features)

    def nodes(self, y: Tensor | None = None) -> PowerFeatures:
        """Every node of the selected graphs as a graph of its own: what models of nodes and links work on.

        What is a graph elsewhere then is a node: ``nodes[ids]`` selects nodes, a batch is a list of them, and the
        readout, over one node, is that node's ``z``. So ``PAGNN(..., readout=None)``, and likewise ``SPIN`` with the
        sum readout, computes the node-level form of the paper, ``h_v = Theta(z_v^(0), ..., z_v^(R))``. Rows are shared
        with these features where all graphs are selected; no edge is looked at again.

        Args:
            y: labels of the nodes, first axis ``n``; None for none.

        Raises:
            ValueError: the rows of the nodes are not known (``node_rows=False``), or ``y`` does not fit.
        """
        if self.ids is not None:
            return self.take().nodes(y)
        self._check_node_rows()
        num_nodes, device = int(self.node_ptr[-1]), self.rows.device
        if y is not None and (not isinstance(y, Tensor) or y.shape[:1] != (num_nodes,)):
            got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"y must be a tensor whose first axis has {num_nodes} entries (nodes), got {got}")
        return replace(
            self,
            ptr=torch.arange(self.num_branches * num_nodes + 1, device=device),
            index=None if self.row_of_node is None else self.row_of_node.flatten(),
            count=None,
            node_ptr=torch.arange(num_nodes + 1, device=device),
            labels=y,
        )

    def dense_rows(self) -> Tensor:
        """The selected graphs' rows per node, ``[R + 1, n, d]``."""
        return take_dense(self.rows, self._node_rows())

    @property
    def selected_ptr(self) -> Tensor:
        """Node offsets of the selected graphs, ``[selected + 1]``."""
        return self.node_ptr if self.ids is None else offsets(self.node_ptr.diff()[self.ids])

    def _powers_between(self, begin: int, end: int) -> Tensor:
        """Rows per node ``[R + 1, n, d]`` of the graphs ``begin`` to ``end - 1`` of the storage.

        Where ``row_of_node`` is not kept, the nodes of a graph are in the order of their rows, in each branch.
        """
        num_graphs, nodes = self.node_ptr.numel() - 1, slice(int(self.node_ptr[begin]), int(self.node_ptr[end]))
        if self.row_of_node is not None:
            return take_dense(self.rows, self.row_of_node[:, nodes].long())
        branches = []
        for r in range(self.num_branches):
            entries = slice(int(self.ptr[r * num_graphs + begin]), int(self.ptr[r * num_graphs + end]))
            rows = self.rows[entries] if self.index is None else take_dense(self.rows, self.index[entries].long())
            branches.append(rows if self.count is None else rows.repeat_interleave(self.count[entries].long(), dim=0))
            if len(branches[-1]) != nodes.stop - nodes.start:
                raise ValueError(
                    f"count must add up to the nodes of each graph, got {len(branches[-1])} for the "
                    f"{nodes.stop - nodes.start} nodes of graphs {begin} to {end - 1}"
                )
        return torch.stack(branches)

    def _node_rows(self) -> Tensor:
        """Rows of the selected nodes in each branch, ``[R + 1, n]``."""
        self._check_node_rows()
        num_nodes = len(self.rows) // self.num_branches if self.row_of_node is None else self.row_of_node.shape[1]
        if self.ids is None:
            nodes = torch.arange(num_nodes, device=self.node_ptr.device)
        else:
            nodes = ragged_arange(self.node_ptr[self.ids], self.node_ptr.diff()[self.ids])
        if self.row_of_node is None:
            return torch.arange(self.num_branches, device=nodes.device)[:, None] * num_nodes + nodes
        return self.row_of_node[:, nodes].long()

    def _gather(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """``rows, row_ptr, ptr, index, count`` of the selected graphs, and the stored rows they come from."""
        assert self.ids is not None
        entries, ptr = reference.select_segments(self.ptr, self.ids, self.num_branches)
        if self.index is None:
            row_ptr = ptr[:: self.ids.numel()] if self.ids.numel() else ptr.new_zeros(self.num_branches + 1)
            return take(self.rows, entries), row_ptr.clone().cpu(), ptr, None, None, None  # a file keeps both
        distinct, index = torch.unique(self.index.index_select(0, entries), return_inverse=True)
        row_ptr = torch.searchsorted(distinct, self.row_ptr.to(distinct)).cpu()
        count = None if self.count is None else self.count.index_select(0, entries)
        return take(self.rows, distinct), row_ptr, ptr, index, count, distinct


def chunk_limits(x: Tensor, num_branches: int) -> tuple[int, int]:
    """Bytes of a chunk in which distinct rows are searched, and those that a node counts beside its powers."""
    size, row_bytes = (CHUNK_BYTES, ROW_BYTES) if x.is_cpu else (GPU_CHUNK_BYTES, GPU_ROW_BYTES)
    return size, num_branches * row_bytes


def _add(
    found: ops.DistinctRows,
    chunks: Iterable[PowerChunk],
    advance: Callable[[str, int], None] = lambda *_: None,
) -> Tensor | None:
    """Add graphs chunk by chunk; where hardly any row repeats, stop, and return the powers that came last."""
    num_rows = num_nodes = 0
    powers = None
    for chunk in chunks:
        if not found.add_graphs(chunk.graphs, chunk.node_ptr):
            found.add(chunk.powers, chunk.ptr)
        num_nodes += chunk.num_nodes
        num_rows += found.num_branches * chunk.num_nodes
        advance("", len(chunk))
        is_worthwhile = num_rows >= WORTHWHILE * found.num_rows
        powers = None if is_worthwhile else chunk.powers
        del chunk  # its graphs need not be in memory when the next are made
        if num_nodes >= SAMPLE_NODES and not is_worthwhile:
            break
    return powers


def _joined(powers: list[Tensor]) -> Tensor:
    """The powers of all nodes; the list is emptied, so that no two copies of all are in memory."""
    if len(powers) == 1:
        return powers.pop()
    num_branches, _, num_features = powers[0].shape
    joined = powers[0].new_empty(num_branches, sum(chunk.shape[1] for chunk in powers), num_features)
    end = joined.shape[1]
    while powers:
        chunk = powers.pop()
        joined[:, end - chunk.shape[1] : end] = chunk
        end -= chunk.shape[1]
    return joined
