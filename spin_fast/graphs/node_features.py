"""Node features before any hop: degrees, codes of categories, columns standardised on the training graphs."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .._common import check, files
from .._common.indexing import GraphIds, are_alike, as_tensor, graph_ids, prepared_by, ragged_arange
from .batch import GraphBatch

Degree = Literal["raw", "log", "one-hot", "profile"]
DEGREES = ("raw", "log", "one-hot", "profile")
MOST_CATEGORIES = 4096  # of a column; more are no categories
BLOCK = 1 << 16  # nodes in float64 at a time
FORMAT = "spin_fast node-features 1"


class ColumnsError(check.NamingError, ValueError):
    """``one_hot`` does not fit the columns of ``x``."""


@dataclass(eq=False)
class NodeFeatures:
    """Transforms node features: fitted on the training graphs, then applied to all graphs.

    Used as a transformer of scikit-learn is::

        node_features = NodeFeatures(degree="log").fit(graphs, train)
        features = PowerFeatures.from_graphs(node_features.transform(graphs), num_hops=3)

    It belongs before the powers: ``Ā`` of a standardised column is not the standardised column of ``ĀX``, unless the
    rows of ``Ā`` sum to 1. Equal rows stay equal bit by bit, but with a ``"profile"``, so that they are stored once as
    before.

    Args:
        degree: features to make of the number of edges per row of a node (a self-loop counts 1, weights do not count):
            ``"raw"``; ``"log"`` (``log(1 + degree)``); ``"one-hot"``, with a column for each degree from 0 to the
            largest in the training graphs, which stands for larger ones as well; or ``"profile"``, the logarithms of
            the degree and of the minimum, maximum, mean and standard deviation of the neighbours' degrees (Cai & Wang
            2018), 0 without neighbours. None for none.
        max_degree: with ``"one-hot"`` the largest degree that may have a column; None for no such bound.
        one_hot: encode categories, such as OGB's atom features: True for all columns of ``x``, or the numbers of some.
            They must hold whole numbers; each value that occurs in the training graphs becomes a column, in the place
            of the one encoded, and other values have none.
        keep_x: True for ``x`` first and then what is made of the degree, False for that alone; ``"auto"`` leaves ``x``
            out if it is the degree itself.
        standardize: shift and scale columns to mean 0 and standard deviation 1 over the nodes of the training graphs;
            ``"auto"`` does if ``x`` has anything but whole numbers, so that attributes are, but neither one-hot labels
            nor OGB's categories nor degrees alone, or if ``columns`` are named.
        columns: which columns of the result to standardise; None for those of anything but 0 and 1. A column that is
            constant over the training graphs is left alone.

    Attributes:
        num_features_: columns of the ``x`` it was fitted on.
        previous_: what had transformed the graphs that it was fitted on; None if nothing had.
        ids_sha256_: a hash of the numbers of the training graphs; None if these are not known.
        keeps_x_: whether the result has them.
        max_degree_: the largest degree that has a column; None but for ``"one-hot"``.
        categories_: the values of each column of ``x`` that has them, ascending; None for columns left as they are.
        columns_: the columns of the result that are standardised, ascending.
        mean_, scale_: of each of ``columns_``, computed in float64.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """

    degree: Degree | None = None
    _: KW_ONLY
    max_degree: int | None = None
    one_hot: bool | Sequence[int] = False
    keep_x: bool | Literal["auto"] = "auto"
    standardize: bool | Literal["auto"] = "auto"
    columns: Sequence[int] | None = None
    previous_: NodeFeatures | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.degree is not None and self.degree not in DEGREES:
            raise ValueError(f"degree must be one of {', '.join(DEGREES)} or None, got {self.degree!r}")
        if self.max_degree is not None:
            self.max_degree = check.integer("max_degree", self.max_degree, 0)
            if self.degree != "one-hot":
                raise ValueError(f"max_degree must be None where degree is {self.degree!r}: it is of one-hot degrees")
        if isinstance(self.one_hot, bool | np.bool_):
            self.one_hot = bool(self.one_hot)
        elif isinstance(self.one_hot, Iterable):
            self.one_hot = check.integers("one_hot", self.one_hot, 0)
        else:
            raise TypeError(f"one_hot must be a bool or numbers of columns, got {type(self.one_hot).__name__}")
        if self.one_hot and self.keep_x is False:
            raise ValueError("one_hot must be left out where keep_x is False: it encodes columns of x")
        for name, value in (("keep_x", self.keep_x), ("standardize", self.standardize)):
            if value is not True and value is not False and value != "auto":
                raise ValueError(f"{name} must be True, False or 'auto', got {value!r}")
        if self.degree is None and self.keep_x is False:
            raise ValueError("keep_x must not be False without degree: no features would be left")
        if self.columns is not None:
            self.columns = check.integers("columns", self.columns, 0)
            if self.standardize is False:
                raise ValueError("columns must be None where standardize is False")

    @torch.no_grad()
    def fit(self, graphs: GraphBatch | Iterable[GraphBatch], ids: GraphIds | None = None) -> NodeFeatures:
        """Learn from the training graphs. Returns itself.

        Args:
            graphs: the graphs; or chunks of them, such as a generator reads from files, with the same result bit by
                bit, wherever they are cut. Chunks are read once.
            ids: the training graphs among all of these; of chunks their numbers, from 0. None for all.

        Raises:
            TypeError, ValueError: no nodes, chunks of several kinds, ``columns`` out of range, or values to standardise
                that are not finite. IndexError: ``ids`` that there are not.
        """
        if not isinstance(graphs, Iterable):
            raise TypeError(f"graphs must be a GraphBatch or chunks, got {type(graphs).__name__}")
        chosen, seen = _chosen(graphs, ids), _Seen(self)
        for block in _blocks(seen.rows([graphs] if isinstance(graphs, GraphBatch) else graphs, chosen)):
            seen.add(block)
        chosen = torch.arange(seen.num_graphs) if chosen is None else chosen
        if len(chosen) and int(chosen[-1]) >= seen.num_graphs:
            raise IndexError(f"ids must be from 0 to {seen.num_graphs - 1}, numbers of graphs, got {chosen[-1]}")
        if seen.num_nodes == 0:
            raise ValueError("graphs must have nodes in the training part, got none")
        vars(self).pop("num_features_", None)
        self.ids_sha256_ = ids_sha256(chosen)
        wanted = not seen.is_degree or bool(self.one_hot)
        self.keeps_x_ = self.keep_x is True or self.degree is None or (self.keep_x == "auto" and wanted)
        self.max_degree_ = None
        if self.degree == "one-hot":
            largest = len(seen.degrees) - 1
            self.max_degree_ = largest if self.max_degree is None else min(largest, self.max_degree)
        self.categories_ = [None if values is None else sorted(values) for values in seen.values]
        self.columns_: list[int] = []
        self.mean_: list[float] = []
        self.scale_: list[float] = []
        automatic = self.columns is not None or not seen.is_whole
        if self.standardize is True or (self.standardize == "auto" and automatic):
            self._fit_columns(seen)
        self.previous_ = seen.previous
        self.num_features_ = len(seen.values)  # last, since by this it counts as fitted
        return self

    def _fit_columns(self, seen: _Seen) -> None:
        moments, d = seen.moments, len(seen.values)
        made = []
        if self.keeps_x_:
            for column, counts in enumerate(seen.values):
                known = [] if counts is None else [counts[value] for value in sorted(counts)]
                made.append(moments[:, [column]] if counts is None else seen.moments_of(torch.tensor(known)))
        if self.max_degree_ is None:
            made.append(moments[:, d:])
        else:
            clamped = torch.arange(len(seen.degrees)).clamp(max=self.max_degree_)
            made.append(seen.moments_of(clamped.bincount(seen.degrees)))
        mean, variance, varies, is_measured = torch.cat(made, dim=1).tolist()
        if self.columns is None:
            chosen = [column for column, measured in enumerate(is_measured) if measured]
        elif (widest := max(self.columns, default=-1)) >= len(mean):
            raise ValueError(f"columns must be less than {len(mean)}, the number of columns, got {widest}")
        else:
            chosen = sorted(set(self.columns))
        for column in chosen:
            spread = math.sqrt(variance[column])
            if not math.isfinite(spread):
                raise ValueError(f"x must be finite in the training graphs to be standardised; column {column} is not")
            if varies[column] and spread > 0:
                self.columns_.append(column)
                self.mean_.append(mean[column])
                self.scale_.append(spread)

    @torch.no_grad()
    def transform(self, graphs: GraphBatch) -> GraphBatch:
        """The same graphs with the features that were fitted, in the dtype and on the device of ``graphs.x``.

        They tell what has transformed them, ``node_features``; those that tell of an equal one are returned as they
        are. If it was fitted on graphs that others had transformed, these do so first where they have not yet.

        Raises:
            TypeError, ValueError: not fitted yet, graphs with another number of features, or that something else has
                transformed.
        """
        check_graphs(graphs)
        self._check_fitted()
        if graphs.node_features is not None and are_alike(self, graphs.node_features):
            return graphs
        if not are_alike(self.previous_, graphs.node_features):
            if self.previous_ is None:
                raise ValueError(
                    f"graphs must be as those that NodeFeatures {self.fingerprint} were fitted on, which nothing had "
                    f"transformed, got graphs prepared by {prepared_by(graphs)}"
                )
            graphs = self.previous_.transform(graphs)
        if graphs.num_features != self.num_features_:
            raise ValueError(f"graphs must have {self.num_features_} features as fitted, got {graphs.num_features}")
        x = self._columns_of(graphs)
        if self.columns_:
            mean, scale = (x.new_tensor(values, dtype=torch.float64) for values in (self.mean_, self.scale_))
            x = x.clone() if x is graphs.x else x
            for block in x.split(BLOCK):  # views
                block[:, self.columns_] = ((block[:, self.columns_].double() - mean) / scale).to(x.dtype)
        made = copy.copy(graphs)  # not a new object: its contents are checked already
        vars(made).update(x=x, node_features=copy.copy(self))
        return made

    def _check_fitted(self) -> None:
        if not hasattr(self, "num_features_"):
            raise ValueError("NodeFeatures must be fitted before they transform: call fit")

    def _columns_of(self, graphs: GraphBatch) -> Tensor:
        """The columns before they are standardised, ``[N, columns]``; ``x`` itself if these are all."""
        x = graphs.x
        if self.degree is None and not any(self.categories_):
            return x
        made = [x] if self.keeps_x_ else []
        if self.keeps_x_ and any(self.categories_):
            made = []
            for number, (column, values) in enumerate(zip(x.split(1, dim=1), self.categories_, strict=True)):
                if values is not None and not bool(column.isfinite().all()):
                    raise ValueError(f"x must be finite in columns to be encoded; column {number} is not")
                made.append(column if values is None else (column == x.new_tensor(values)).to(x.dtype))
        if self.max_degree_ is not None:
            made.append(F.one_hot(graphs.degree.long().clamp(max=self.max_degree_), self.max_degree_ + 1).to(x.dtype))
        else:
            made.append(self._degree_columns(graphs))
        return torch.cat(made, dim=1)

    def _degree_columns(self, graphs: GraphBatch) -> Tensor:
        """Features of the degree that are not one-hot, ``[N, columns]``; there may be none."""
        if self.degree in (None, "one-hot"):
            return graphs.x[:, :0]
        if self.degree == "profile":
            return _degree_profile(graphs).log1p().to(graphs.x.dtype)
        return (graphs.degree.double().log1p() if self.degree == "log" else graphs.degree).to(graphs.x.dtype)[:, None]

    def to_dict(self) -> dict[str, Any]:
        """All arguments and what was fitted, as JSON values, from which :meth:`from_dict` makes the same again."""
        state = {name: list(value) if isinstance(value, list) else value for name, value in vars(self).items()}
        previous: Any = state.pop("previous_", None)
        return state if previous is None else state | {"previous_": previous.to_dict()}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> NodeFeatures:
        """Restore what :meth:`to_dict` has returned, exactly.

        Raises:
            ValueError: ``state`` is nothing that it returns.
        """
        try:
            made = cls(**{of.name: state[of.name] for of in fields(cls) if of.init})
            if state.keys() - vars(made).keys():
                state = {"ids_sha256_": None} | state
                made.num_features_ = check.integer("num_features_", state["num_features_"], 0)
                previous = state.get("previous_")
                made.previous_ = None if previous is None else cls.from_dict(previous)
                if made.previous_ is not None and made.previous_.num_columns != made.num_features_:
                    raise ValueError(f"num_features_ must be {made.previous_.num_columns}, as previous_ makes")
                made.ids_sha256_ = state["ids_sha256_"]
                if not isinstance(made.ids_sha256_, str | None):
                    raise TypeError("ids_sha256_ must be text")
                made.keeps_x_ = check.flag("keeps_x_", state["keeps_x_"])
                made.max_degree_ = None
                if made.degree == "one-hot":
                    made.max_degree_ = check.integer("max_degree_", state["max_degree_"], 0)
                made.categories_ = [
                    None if values is None else [int(value) for value in values] for values in state["categories_"]
                ]
                if len(made.categories_) != made.num_features_:
                    raise ValueError(f"categories_ must be of {made.num_features_} columns")
                made.columns_ = [check.integer("columns_", column, 0) for column in state["columns_"]]
                made.mean_, made.scale_ = ([float(value) for value in state[name]] for name in ("mean_", "scale_"))
                if not len(made.columns_) == len(made.mean_) == len(made.scale_):
                    raise ValueError("columns_, mean_ and scale_ must be of one length")
                if max(made.columns_, default=-1) >= made.num_columns:
                    raise ValueError(f"columns_ must be below {made.num_columns}, the number of columns")
                if not all(map(math.isfinite, made.mean_)) or not all(0 < scale < math.inf for scale in made.scale_):
                    raise ValueError("mean_ and scale_ must be finite, and scale_ above 0")
                if made.to_dict() != state:
                    raise ValueError(f"it would be {made.to_dict()}")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            told = f"got {check.shown(state)}: {error!r:.200}"
            raise ValueError(f"state must be what NodeFeatures.to_dict has told, {told}") from error
        return made

    @property
    def num_inputs(self) -> int:
        """Columns of ``x`` of the graphs that nothing has transformed, once it is fitted."""
        return self.num_features_ if self.previous_ is None else self.previous_.num_inputs

    @property
    def num_columns(self) -> int:
        """Columns of the result, once it is fitted."""
        of_x = sum(1 if values is None else len(values) for values in self.categories_) if self.keeps_x_ else 0
        if self.max_degree_ is not None:
            return of_x + self.max_degree_ + 1
        return of_x + {None: 0, "profile": 5}.get(self.degree, 1)

    @property
    def learns(self) -> bool:
        """Whether anything was fitted, so that other training graphs may lead to other features."""
        return bool(self.columns_) or any(self.categories_) or self.max_degree_ is not None

    @property
    def effects(self) -> list[list[Any]]:
        """All that the result depends on, step by step; none where graphs stay as they are.

        Raises:
            ValueError: not fitted yet.
        """
        self._check_fitted()
        before: list[list[Any]] = [] if self.previous_ is None else self.previous_.effects
        if self.degree is None and not self.learns:
            return before
        fitted = [self.keeps_x_, self.max_degree_, self.categories_, self.columns_, self.mean_, self.scale_]
        return [*before, [self.degree, self.num_features_, *fitted]]

    @property
    def fingerprint(self) -> str:
        """A hash of what it does: that of another one differs if it transforms otherwise."""
        return hashlib.sha256(json.dumps(self.effects).encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write to a JSON file, from which :meth:`load` reads.

        Raises:
            OSError: the file cannot be written; names it.
        """
        files.write_json(Path(path), FORMAT, {"node_features": self.to_dict()})

    @classmethod
    def load(cls, path: str | Path) -> NodeFeatures:
        """Read what :meth:`save` has written, exactly.

        Raises:
            FileNotFoundError: no such file. ValueError: the file is damaged, something else, or of a newer format;
                names it.
        """
        content = files.read_json(Path(path), FORMAT)
        try:
            return cls.from_dict(content.get("node_features"))  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error


def _degree_profile(graphs: GraphBatch) -> Tensor:
    """Degree, and minimum, maximum, mean and deviation of the neighbours' degrees, ``[N, 5]`` float64.

    Sums of whole numbers are exact, so that the order of the neighbours changes no bit.
    """
    degree = graphs.degree.double()
    number = degree.clamp(min=1)
    of_neighbours = degree[graphs.indices.long()]
    node = graphs.edge_index[1].long()
    zeros = torch.zeros_like(degree)
    least, most = (zeros.scatter_reduce(0, node, of_neighbours, how, include_self=False) for how in ("amin", "amax"))
    mean = zeros.index_add(0, node, of_neighbours) / number
    variance = zeros.index_add(0, node, of_neighbours.square()) / number - mean.square()
    return torch.stack([degree, least, most, mean, variance.clamp(min=0).sqrt()], dim=1)


def check_graphs(graphs: Any) -> None:
    if not isinstance(graphs, GraphBatch):
        raise TypeError(f"graphs must be a GraphBatch, got {type(graphs).__name__}")


def ids_sha256(ids: Tensor) -> str:
    """A hash of the numbers of graphs, in any order."""
    return hashlib.sha256(ids.cpu().sort().values.numpy().astype("<i8").tobytes()).hexdigest()


def _chosen(graphs: GraphBatch | Iterable[GraphBatch], ids: GraphIds | None) -> Tensor | None:
    """The numbers of the training graphs, ascending; those of chunks are compared with the number of graphs later."""
    if ids is None:
        return None
    if isinstance(graphs, GraphBatch):
        return graph_ids(ids, len(graphs), graphs.ptr.device).cpu().sort().values
    if isinstance(ids, slice) or as_tensor(ids).dtype == torch.bool:
        raise TypeError("ids must be numbers of graphs where these come in chunks, got a slice or a mask")
    return graph_ids(ids, sys.maxsize).sort().values


def _blocks(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """All rows in float64, in blocks of as many, but for the last: so sums are those of all rows in one piece."""
    held: list[Tensor] = []
    room = BLOCK
    for piece in pieces:
        for rows in (piece[:room], *piece[room:].split(BLOCK)):
            held.append(rows.to(torch.float64, copy=True))
            room -= len(rows)
            if room == 0:
                yield torch.cat(held)
                held, room = [], BLOCK
        del piece, rows  # which need not be in memory when the next are made
    if room < BLOCK:
        yield torch.cat(held)


class _Seen:
    """What fitting has to know of the training nodes, which come chunk by chunk.

    Attributes:
        num_graphs: those of all chunks.
        previous: what has transformed them.
        num_nodes: rows that have been added; like everything that follows of the training graphs alone.
        is_degree: whether ``x`` is the degree and nothing else.
        is_whole: whether ``x`` has only whole numbers.
        values: for each column of ``x`` that is encoded how many nodes have each value; None for the others.
        degrees: how many nodes have each degree, up to the largest; counted where degrees are encoded.
    """

    def __init__(self, made: NodeFeatures) -> None:
        self._made = made
        self.num_graphs = self.num_nodes = 0
        self.previous: NodeFeatures | None = None
        self.is_degree = self.is_whole = True
        self.values: list[Counter[int] | None] = []
        self.degrees = torch.zeros(1, dtype=torch.int64)
        self._kind = ""

    def rows(self, chunks: Iterable[GraphBatch], ids: Tensor | None) -> Iterator[Tensor]:
        """Yield ``x`` of the training nodes of each chunk, beside it features of the degree that are not one-hot."""
        for graphs in chunks:
            check_graphs(graphs)
            kind = f"{graphs.num_features} features in {check.shown(graphs.x.dtype)} on {graphs.x.device}"
            kind += f" prepared by {prepared_by(graphs)}"
            self._kind, self.previous = self._kind or kind, graphs.node_features
            if kind != self._kind:
                raise ValueError(f"graphs must be alike in all chunks, got {self._kind} and {kind}")
            x, degree = graphs.x.detach(), graphs.degree
            of_degree = self._made._degree_columns(graphs)
            if ids is not None:
                first, last = torch.searchsorted(ids, torch.tensor([self.num_graphs, self.num_graphs + len(graphs)]))
                chosen = (ids[first:last] - self.num_graphs).to(x.device)
                nodes = ragged_arange(graphs.ptr[chosen], graphs.num_nodes_per_graph[chosen])
                x, degree, of_degree = x[nodes], degree[nodes], of_degree[nodes]
            self.num_graphs += len(graphs)
            self.is_degree = self.is_degree and x.shape[1] == 1 and torch.equal(x[:, 0], degree.to(x.dtype))
            self._count(x, degree)
            yield torch.cat([x, of_degree], dim=1) if of_degree.shape[1] else x
            del graphs, x, degree, of_degree  # which need not be in memory when the next are made

    def _count(self, x: Tensor, degree: Tensor) -> None:
        if not self.values:
            encoded = range(x.shape[1]) if self._made.one_hot is True else self._made.one_hot or ()
            if (widest := max(encoded, default=-1)) >= x.shape[1]:
                raise ColumnsError(
                    check.Argument("one_hot"), f" must be less than {x.shape[1]}, the number of columns, got {widest}"
                )
            self.values = [Counter() if column in encoded else None for column in range(x.shape[1])]
        for column, known in enumerate(self.values):
            if known is None:
                continue
            values, counts = x[:, column].unique(return_counts=True)
            if not bool(((values == values.round()) & (values.abs() < 2**53)).all()):  # nor NaN, nor infinity
                raise ColumnsError(
                    check.Argument("one_hot"), f" must name columns of whole numbers; column {column} has others"
                )
            known.update(dict(zip(values.long().tolist(), counts.tolist(), strict=True)))
            if len(known) > MOST_CATEGORIES:
                raise ColumnsError(
                    check.Argument("one_hot"),
                    f" must name columns of at most {MOST_CATEGORIES} values; column {column} has {len(known)}",
                )
        if self._made.degree == "one-hot":
            counts = degree.bincount(minlength=len(self.degrees)).cpu()
            counts[: len(self.degrees)] += self.degrees
            self.degrees = counts

    def add(self, block: Tensor) -> None:
        """Take a block of rows into the sums of columns, and those of squared deviations from their means."""
        number, sums = len(block), block.sum(0)
        squares = (block - sums / number).square().sum(0)
        if self.num_nodes == 0:
            self._first, self._sums, self._squares = block[0], torch.zeros_like(sums), torch.zeros_like(sums)
            self._varies = self._is_measured = torch.zeros_like(sums, dtype=torch.bool)
        else:  # the means of block and those before differ (Chan, Golub & LeVeque 1983)
            shift = sums / number - self._sums / self.num_nodes
            squares += shift.square() * (self.num_nodes * number / (self.num_nodes + number))
        self.num_nodes += number
        self._sums, self._squares = self._sums + sums, self._squares + squares
        self._varies = self._varies | (block != self._first).any(0)  # a sum of equal numbers, divided, may be another
        self._is_measured = self._is_measured | ((block != 0) & (block != 1)).any(0)
        x = block[:, : len(self.values)]
        self.is_whole = self.is_whole and torch.equal(x, x.round())

    @property
    def moments(self) -> Tensor:
        """``[4, columns]`` of the rows: mean, variance, whether a column varies, whether it has more than 0 and 1."""
        made = (self._sums / self.num_nodes, self._squares / self.num_nodes, self._varies, self._is_measured)
        return torch.stack([of.double() for of in made]).cpu()

    def moments_of(self, counts: Tensor) -> Tensor:
        """The same of columns of 0 and 1 that so many nodes have, ``[columns]``."""
        share = counts.double() / self.num_nodes
        return torch.stack([share, share * (1 - share), ((share > 0) & (share < 1)).double(), torch.zeros_like(share)])
