"""One random call per function; it fails by an AssertionError, or by any error of the package that is no refusal."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import spin_fast
from spin_fast import SPIN, GraphBatch, PowerFeatures, datasets, shards, training
from spin_fast.ops import (
    BRANCHES,
    MOST_LAYERS,
    JointRows,
    ModelSizes,
    distinct_rows,
    joint_rows,
    parameter_shapes,
    training_step,
)

from . import oracle
from .arrays import BAD_VECTOR, Arrays, Random, chance, damaged, fits, graphs, misused, tensor, values

FLOATS = (torch.float32, torch.float64)
STORED = (*FLOATS, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def pick(random: Random, *choices: Any) -> Any:
    return choices[random.integers(0, len(choices))]


def refused(
    call: Callable[[], Any], *names: str, errors: tuple[type[Exception], ...] = (ValueError, TypeError)
) -> None:
    """Check that a call is refused by a message that has one of the names."""
    with pytest.raises(errors, match=rf"\b({'|'.join(names)})\b"):
        call()


def close(found: Tensor, expected: np.ndarray, size: np.ndarray | float, dtype: torch.dtype) -> None:
    """Check an error relative to ``size``, that of the terms that were summed, and to how it is stored."""
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    bound = 64 * torch.finfo(computed).eps * np.asarray(size) + 2 * torch.finfo(dtype).eps * np.abs(expected)
    bound = bound + torch.finfo(dtype).smallest_normal
    assert (found.dtype, tuple(found.shape)) == (dtype, expected.shape)
    info, values_of = torch.finfo(dtype), found.detach().double().numpy()
    largest, sign, nearly = info.max, np.sign(expected), info.max * (1 + 2 * info.eps)
    stored = np.where(np.abs(expected) > largest, np.copysign(np.inf, expected), expected)
    right = (values_of == stored) | ((np.abs(expected) <= nearly) & (values_of == sign * largest))
    with np.errstate(invalid="ignore"):
        error = np.where(right, 0, np.abs(values_of - stored))
    assert bool((error <= bound).all()), (
        f"error {error.max()} beyond {np.broadcast_to(bound, error.shape)[error > bound].min()}"
    )


def derivative_agrees(
    loss: Callable[[np.ndarray], float], at: np.ndarray, gradient: np.ndarray, random: Random
) -> None:
    """Check a gradient in one direction by differences: closer ones and of one side, where a kink is near."""
    direction = random.standard_normal(at.shape)
    found, scale = float((gradient * direction).sum()), float(np.abs(gradient * direction).sum())
    for step in (1e-5, 1e-6, 1e-7):
        below, here, above = (loss(at + sign * step * direction) for sign in (-1, 0, 1))
        expected = (above - below) / (2 * step)
        for slope in (expected, (above - here) / step, (here - below) / step):
            if abs(found - slope) <= 1e-5 * scale + 1e-12 / step + 1e-7:
                return
    raise AssertionError(f"a derivative of {found}, by differences {expected}")


def with_damage(
    random: Random, arrays: dict[str, np.ndarray], dtype_of: Callable[[str], torch.dtype]
) -> dict[str, np.ndarray]:
    """Sometimes one of the arrays damaged, if its dtype can hold that."""
    if chance(random, 0.6):
        return arrays
    name = str(random.choice(list(arrays)))
    made = damaged(random, arrays[name])
    return arrays | {name: made} if fits(made, dtype_of(name)) else arrays


def drawn(
    random: Random, arrays: dict[str, np.ndarray], types: dict[str, torch.dtype] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Tensor]]:
    """The arrays, sometimes one of them damaged, and the tensors of these."""
    types = {name: torch.int64 for name in arrays} | (types or {})
    types |= {name: torch.int32 for name in arrays if name.endswith("count")}
    types |= {name: pick(random, *INTEGERS) for name in arrays if name.endswith(("index", "parts"))}
    arrays = with_damage(random, arrays, types.__getitem__)
    return arrays, {name: tensor(random, array, types[name]) for name, array in arrays.items()}


def drawn_adjacency(random: Random) -> tuple[dict[str, np.ndarray], torch.dtype, int]:
    of, dtype = graphs(random), pick(random, *INTEGERS)
    arrays = {"ptr": of.ptr, "indptr": of.indptr, "indices": of.indices}
    return with_damage(random, arrays, lambda name: torch.int64 if name == "ptr" else dtype), dtype, of.num_nodes


def power_features(random: Random) -> None:
    arrays, index, num_nodes = drawn_adjacency(random)
    dtype, operator = pick(random, *STORED), pick(random, "sym", "adj", "sym+adj", "rw")
    ptr: np.ndarray | None = arrays.pop("ptr")
    ptr = ptr if chance(random, 0.7) else None
    x = tensor(random, values(random, num_nodes, int(pick(random, 0, 1, 1, 3, 8, 37))), dtype)
    width = torch.float64 if dtype == torch.float64 else torch.float32
    arguments: dict[str, Any] = {name: tensor(random, array, index) for name, array in arrays.items()} | {
        "x": x,
        "num_hops": int(pick(random, 0, 1, 2, 4)),
        "operator": operator,
        "ptr": None if ptr is None else tensor(random, ptr, torch.int64),
        "edge_weight": tensor(random, random.integers(0, 4, len(arrays["indices"])) / 2, width)
        if chance(random, 0.3)
        else None,
        "float64_sums": chance(random, 0.3),
    }
    if chance(random, 0.2):
        arguments["out"] = torch.full((arguments["num_hops"] + 1, *x.shape), float("nan"), dtype=dtype)
    if chance(random, 0.15):
        arguments = misused(random, arguments, ("indptr", "indices", "x"))
        return refused(lambda: spin_fast.power_features(**arguments), *arguments)
    wrong = oracle.wrong_array(ptr, arrays["indptr"], arrays["indices"], num_nodes)
    if wrong is not None:
        return refused(lambda: spin_fast.power_features(**arguments), wrong)
    weight = arguments["edge_weight"]
    exact, size = oracle.powers(
        arrays["indptr"],
        arrays["indices"],
        x.double().numpy(),
        arguments["num_hops"],
        operator,
        None if weight is None else weight.double().numpy(),
    )
    close(spin_fast.power_features(**arguments), exact, size, dtype)


def subtree_keys(random: Random) -> None:
    arrays, index, num_nodes = drawn_adjacency(random)
    x = tensor(random, random.integers(0, 3, (num_nodes, 2)).astype(np.float64), pick(random, *FLOATS))
    hops, seed = int(pick(random, 0, 1, 3)), int(random.integers(0, 2**63))
    call = partial(
        spin_fast.subtree_keys,
        tensor(random, arrays["indptr"], index),
        tensor(random, arrays["indices"], index),
        x,
        hops,
        seed=seed,
    )
    if wrong := oracle.wrong_array(None, arrays["indptr"], arrays["indices"], num_nodes):
        return refused(call, wrong)
    keys = call()
    labels = [row.tobytes() for row in x.double().numpy()]
    for found, colours in zip(keys, oracle.colours(arrays["indptr"], arrays["indices"], labels, hops), strict=True):
        pairs = set(zip(found.tolist(), colours, strict=True))
        assert len(pairs) == len(set(found.tolist())) == len(set(colours)), "keys and colours have other partitions"


def drawn_segments(random: Random, num_rows: int, segments: int) -> dict[str, np.ndarray]:
    """Ragged segments: ``ptr``, ``count`` or not, and ``index``, or not where the entries are the rows in order."""
    if segments and chance(random, 0.2):
        bounds = np.sort(random.integers(0, num_rows + 1, segments - 1))
        arrays = {"ptr": np.concatenate([[0], bounds, [num_rows]]).astype(np.int64)}
    else:
        numbers = random.integers(0, pick(random, 6, 6, 60), segments) * (num_rows > 0)
        arrays = {"ptr": np.concatenate([[0], numbers.cumsum()]).astype(np.int64)}
        arrays["index"] = random.integers(0, max(num_rows, 1), arrays["ptr"][-1])
    return arrays | ({"count": random.integers(1, 5, arrays["ptr"][-1])} if chance(random, 0.7) else {})


def drawn_joint(random: Random, num_rows: int, width: int, num_graphs: int) -> dict[str, np.ndarray]:
    """Segments of joint rows, and their ``parts``."""
    parts = random.integers(0, max(num_rows, 1), (random.integers(0, 20) * (num_rows > 0), width))
    return {"parts": parts} | drawn_segments(random, len(parts), num_graphs)


def drawn_rows(random: Random, branches: int, dense: bool) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    """The shape of rows but for their width, and their segments."""
    if dense:
        ptr = graphs(random).ptr
        return (branches, int(ptr[-1])), {"ptr": ptr}
    num_rows = int(random.integers(0, 40))
    return (num_rows,), drawn_segments(random, num_rows, branches * int(random.integers(0, 6)))


def drawn_ids(random: Random, number: int) -> np.ndarray:
    return random.integers(0, max(number, 1), random.integers(0, 6) * (number > 0))


def by_branch(
    rows: np.ndarray, arrays: dict[str, np.ndarray], branches: int
) -> tuple[list[np.ndarray], list[list[oracle.Segment]]]:
    """What each branch reads, of any form: rows, and the segments of them."""
    if rows.ndim == 3:
        return list(rows), oracle.entries_of(arrays) * branches
    if "parts" in arrays:
        number, width = arrays["parts"].shape
        rows = rows[arrays["parts"]].reshape(number, width * rows.shape[1])
    return [rows] * branches, oracle.entries_of(arrays, branches)


def named(flat: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The parameters of which a vector consists."""
    ends = np.cumsum([0, *map(math.prod, shapes.values())]).tolist()
    return {name: flat[a:b].reshape(of) for (name, of), (a, b) in zip(shapes.items(), pairwise(ends), strict=True)}


def drawn_widths(random: Random) -> list[int]:
    return [int(pick(random, 1, 2, 5, 17)) for _ in range(pick(random, 1, 1, 2, 8))]


def readout(random: Random) -> None:
    attention, dtype, dense = chance(random, 0.6), pick(random, *STORED), chance(random, 0.4)
    branches, h = int(pick(random, 1, 1, 3)), int(pick(random, 1, 2, 16, 33))
    shape, arrays = drawn_rows(random, branches, dense)
    arrays, tensors = drawn(random, arrays)
    z, w = (tensor(random, values(random, *of, h), dtype) for of in (shape, (branches,)))
    arguments: dict[str, Any] = {"z": z} | tensors
    call: Callable[..., Tensor] = spin_fast.sum_readout
    if attention:
        arguments["w"], call = w, spin_fast.attention_readout
    elif not dense:
        arguments["num_branches"] = branches
    if chance(random, 0.1):
        arguments = misused(random, arguments, tensors)
        return refused(lambda: call(**arguments), *arguments)
    if wrong := oracle.wrong_segments(arrays, shape[-1], 1 if dense else branches):
        return refused(lambda: call(**arguments), wrong)

    def expected(rows: np.ndarray) -> np.ndarray:
        of = zip(*by_branch(rows, arrays, branches), w.double().numpy(), strict=True)
        return np.concatenate([oracle.readout(z, w if attention else None, segments) for z, segments, w in of], axis=1)

    rows = z.double().numpy()
    if dtype in FLOATS:  # logits of rows that are large make any rounding large
        largest, of_w = np.abs(rows).max(initial=0), float(w.double().abs().max())
        size = 1e3 * (1 + largest**2 * of_w * h) * largest if attention else expected(np.abs(rows))
        close(call(**arguments), expected(rows), size, dtype)
    else:
        call(**arguments)
    if dtype == torch.float64 and z.numel():
        leaf = torch.from_numpy(
            random.standard_normal(z.shape)
        ).requires_grad_()  # no logit is 0, where ReLU has a kink
        out = call(**arguments | {"z": leaf})
        by = random.standard_normal(out.shape)
        (gradient,) = torch.autograd.grad((out * torch.from_numpy(by)).sum(), leaf)
        derivative_agrees(lambda at: float((expected(at) * by).sum()), leaf.detach().numpy(), gradient.numpy(), random)


def distinct(random: Random) -> None:
    of, dtype = graphs(random), pick(random, *STORED)
    arrays, tensors = drawn(random, {"ptr": of.ptr})
    branches, d = int(pick(random, 1, 3)), int(pick(random, 0, 1, 2, 9))
    powers = tensor(random, random.integers(-1, 2, (branches, of.num_nodes, d)).astype(np.float64), dtype)
    call = partial(distinct_rows, powers, tensors["ptr"])
    if oracle.wrong_segments(arrays, of.num_nodes):
        return refused(call, "ptr")
    rows, row_ptr, ptr, index, count, row_of_node = call()
    exact = powers.double().numpy() + 0.0
    segments = oracle.entries_of({"ptr": ptr.numpy(), "index": index.numpy(), "count": count.numpy()}, branches)
    for branch in range(branches):
        mine = rows[row_ptr[branch] : row_ptr[branch + 1]].double().numpy()
        assert len({row.tobytes() for row in mine}) == len(mine) == len({row.tobytes() for row in exact[branch]})
        for v, row in enumerate(row_of_node[branch].tolist()):
            assert rows[row].double().numpy().tobytes() == exact[branch, v].tobytes()
        has_the_rows_of_its_nodes(segments[branch], row_of_node[branch].numpy(), arrays["ptr"])


def has_the_rows_of_its_nodes(segments: list[oracle.Segment], row_of_node: np.ndarray, ptr: np.ndarray) -> None:
    """Check that each graph has each row of its nodes once, ascending, and counts them."""
    for (index, count), (first, last) in zip(segments, pairwise(ptr), strict=True):
        rows, times = np.unique(row_of_node[first:last], return_counts=True)
        assert (index.tolist(), count.tolist()) == (rows.tolist(), times.tolist())


def joint(random: Random) -> None:
    """Joint rows, against a dictionary of tuples."""
    ptr, branches = graphs(random).ptr, int(pick(random, 1, 2, 4))
    numbers = random.integers(0, pick(random, 1, 3, 2**31), (branches, int(ptr[-1])))
    arrays, tensors = drawn(random, {"row_of_node": numbers, "ptr": ptr}, {"row_of_node": pick(random, *INTEGERS)})
    if chance(random, 0.1):
        tensors = misused(random, tensors, tensors)
        return refused(lambda: joint_rows(**tensors), *tensors)
    numbers = arrays["row_of_node"]
    if oracle.wrong_segments({"ptr": arrays["ptr"]}, numbers.shape[1]):
        return refused(lambda: joint_rows(**tensors), "ptr")
    found = joint_rows(**tensors)
    if numbers.min(initial=0) < 0:
        return  # these number no rows: no more is asked than to go on
    tuples = [tuple(row) for row in numbers.T.tolist()]
    places = {row: place for place, row in enumerate(dict.fromkeys(tuples))}  # by first appearance
    assert found.parts.dtype == tensors["row_of_node"].dtype
    assert [tuple(row) for row in found.parts.tolist()] == list(places)
    (segments,) = oracle.entries_of({name: getattr(found, name).numpy() for name in ("ptr", "index", "count")})
    has_the_rows_of_its_nodes(segments, np.array([places[row] for row in tuples]), arrays["ptr"])


def new_batch(random: Random, of: Arrays, dtype: torch.dtype, classes: int = 3) -> GraphBatch:
    x = random.integers(-1, 3, (of.num_nodes, int(pick(random, 1, 4)))).astype(np.float64)
    y = torch.from_numpy(random.integers(0, classes, len(of.ptr) - 1))
    index = pick(random, *INTEGERS)
    return GraphBatch(
        torch.from_numpy(of.ptr),
        tensor(random, of.indptr, index),
        tensor(random, of.indices, index),
        tensor(random, x, dtype),
        y,
    )


JOINT = {"parts": "parts", "joint_ptr": "ptr", "joint_index": "index", "joint_count": "count"}
WRONG_SIZES: tuple[Callable[[ModelSizes], ModelSizes], ...] = (
    *(lambda model, by=by: model._replace(num_branches=model.num_branches + by) for by in (-1, 1, -(2**40), 2**40)),
    *(
        lambda model, name=name, change=change: model._replace(**{name: change([*getattr(model, name)])})
        for name in ("widths", "classifier_widths")
        for change in (
            lambda widths: [],
            lambda widths: [0, *widths],
            lambda widths: [*widths, -1],
            lambda widths: [*widths, widths[-1]],
            lambda widths: [*widths[:-1], 2**62],
            lambda widths: widths + [1] * MOST_LAYERS,
            lambda widths: [*widths[:-1], 1.5],
        )
    ),
    *(lambda model, slope=slope: model._replace(negative_slope=slope) for slope in (-0.1, math.inf, math.nan, "x")),
    lambda model: model._replace(attention=not model.attention),
    lambda model: model._replace(branches="all"),
)


def step(random: Random) -> None:
    """The loss of a SPIN on a batch, and its gradient in all parameters, by the fused step."""
    branches, classes, dtype = int(pick(random, 1, 2, 4)), int(pick(random, 1, 2, 3)), pick(random, *FLOATS)
    widths, hidden = drawn_widths(random), pick(random, (), (4,))
    slope, form = float(pick(random, 0.0, 0.01)), str(pick(random, *BRANCHES))
    model = ModelSizes(branches, widths, [*hidden, classes], chance(random, 0.5), slope, form)
    num_rows, num_graphs = int(random.integers(0, 30)), int(random.integers(0, 6))
    arrays = {"labels": random.integers(0, classes, num_graphs)}
    if form != "joint":
        arrays |= drawn_segments(random, num_rows, branches * num_graphs)
    if form != "hops":
        of_joint = drawn_joint(random, num_rows, branches, num_graphs)
        arrays |= {name: of_joint[of] for name, of in JOINT.items() if of in of_joint}
    if chance(random, 0.6):
        arrays["ids"] = drawn_ids(random, num_graphs)
    arrays, tensors = drawn(random, arrays)
    rows = random.standard_normal((num_rows, int(pick(random, 0, 1, 3))))
    shapes = parameter_shapes(rows.shape[1], model)
    flat = random.standard_normal(sum(map(math.prod, shapes.values()))) / 2
    weight = random.integers(0, 3, classes) / 2 if chance(random, 0.5) else np.ones(classes)
    tensors |= {"rows": torch.from_numpy(rows).to(dtype), "parameters": torch.from_numpy(flat).to(dtype)}
    if chance(random, 0.5) or (weight != 1).any():
        tensors["class_weight"] = torch.from_numpy(weight).to(dtype)

    def call(sizes: ModelSizes = model, **changed: Any) -> tuple[Tensor, Tensor]:
        given = {"ptr": None} | tensors | changed
        of = JointRows(*(given.pop(name, None) for name in JOINT)) if form != "hops" else None
        return training_step(**given, model=sizes, joint=of)

    errors, names = (ValueError, TypeError, RuntimeError), ("model", *tensors, *ModelSizes._fields)
    if chance(random, 0.1) and not all(value.is_contiguous() for value in tensors.values()):
        return refused(call, *names, errors=errors)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    if chance(random, 0.1):
        wrong_kind = misused(random, tensors, tensors)
        return refused(lambda: call(**wrong_kind), *names, errors=errors)
    if chance(random, 0.1):
        wrong_size = misused(random, tensors, sorted({"parameters", "class_weight"} & {*tensors}), BAD_VECTOR)
        return refused(lambda: call(**wrong_size), *names, errors=errors)
    if chance(random, 0.1):
        sizes = WRONG_SIZES[random.integers(0, len(WRONG_SIZES))](model)
        return refused(lambda: call(sizes), *names, errors=errors)
    if wrong := wrong_step(arrays, form, branches, num_rows, classes):
        return refused(call, *wrong, errors=errors)

    groups = groups_of(arrays, form)
    ids = arrays.get("ids", np.arange(len(arrays["labels"])))
    labels = arrays["labels"][ids]

    def loss(parameters: np.ndarray) -> float:
        state = named(parameters, shapes)
        readouts = [
            oracle.branch_readout(state, name, *by_branch(rows, of, branches if name == "hops" else 1), slope)[ids]
            for name, of in groups.items()
        ]
        scores = oracle.classifier(state, np.concatenate(readouts, axis=1), slope)
        return oracle.cross_entropy(scores, labels, weight[labels])

    found, gradient = call()
    expected, tolerance = loss(flat), 1e-9 if dtype == torch.float64 else 1e-3
    assert abs(float(found) - expected) <= tolerance * (1 + abs(expected)), f"a loss of {float(found)}, not {expected}"
    if dtype == torch.float64:
        derivative_agrees(loss, flat, gradient.numpy(), random)


def groups_of(arrays: dict[str, np.ndarray], form: str) -> dict[str, dict[str, np.ndarray]]:
    """The segments of each group of branches, and the graphs chosen of them."""
    ids = {name: array for name, array in arrays.items() if name == "ids"}
    names = {"hops": {name: name for name in ("ptr", "index", "count")}, "joint": JOINT}
    return {
        group: {of: arrays[name] for name, of in renamed.items() if name in arrays} | ids
        for group, renamed in names.items()
        if form in (group, "both")
    }


def wrong_step(
    arrays: dict[str, np.ndarray], form: str, branches: int, num_rows: int, classes: int
) -> tuple[str, ...] | None:
    """The names of the array that is wrong, if any is, of a training step."""
    groups = groups_of(arrays, form)
    num_graphs = {(len(of["ptr"]) - 1) // (branches if group == "hops" else 1) for group, of in groups.items()}
    if len(num_graphs) > 1:
        return "ptr", "joint_ptr"
    for group, of in groups.items():
        if wrong := oracle.wrong_segments(of, num_rows, branches if group == "hops" else 1):
            return wrong, f"joint_{wrong}"
    labels = arrays["labels"]
    if {len(labels)} != num_graphs:
        return ("labels",)
    return ("labels",) if oracle.outside(labels[arrays.get("ids", slice(None))], 0, classes) else None


def branch(random: Random) -> None:
    """The MLPs and the readout of branches in one operation, and its gradient in rows and parameters."""
    form, dtype = pick(random, "ragged", "dense", "joint"), pick(random, *FLOATS)
    branches = 1 if form == "joint" else int(pick(random, 1, 1, 3))
    shape, arrays = drawn_rows(random, branches, form == "dense")
    if form == "joint":
        arrays = drawn_joint(random, shape[0], int(pick(random, 1, 2, 4)), int(random.integers(0, 6)))
    of_ptr = 1 if form == "dense" else branches
    if chance(random, 0.5):
        arrays["ids"] = drawn_ids(random, (len(arrays["ptr"]) - 1) // of_ptr)
    attention, slope, d = chance(random, 0.5), float(pick(random, 0.0, 0.01, 1.5)), int(pick(random, 0, 1, 1, 3, 8))
    width = d * arrays["parts"].shape[1] if form == "joint" else d
    shapes = parameter_shapes(width, ModelSizes(branches, drawn_widths(random), (), attention, slope))
    arrays, tensors = drawn(random, arrays)
    rows = values(random, *shape, d)
    flat = random.standard_normal(sum(map(math.prod, shapes.values()))) / 2

    def call(rows: Tensor, state: dict[str, Tensor], change: Callable[..., Any] = dict) -> Tensor:
        layers = {of: [state[name] for name in state if name.endswith(of)] for of in ("weight", "bias")}
        w = state.get("hops.attention")
        given = {"rows": rows, "weights": layers["weight"], "biases": layers["bias"], "w": w, "negative_slope": slope}
        return spin_fast.branch_readout(**change(given | tensors))

    def expected(rows: np.ndarray, state: dict[str, np.ndarray], slope: float = slope) -> np.ndarray:
        return oracle.branch_readout(state, "hops", *by_branch(rows, arrays, branches), slope)[chosen]

    state = {name: tensor(random, array, dtype) for name, array in named(flat, shapes).items()}
    rows_given = tensor(random, rows, dtype)
    if chance(random, 0.1):
        names = {"weights", "biases", "w", *tensors} | ({"rows"} if "index" in arrays else set())  # else another form
        change = partial(misused, random, names=sorted(names))
        return refused(lambda: call(rows_given, state, change), "rows", *names)
    if wrong := oracle.wrong_segments(arrays, shape[-1], of_ptr):
        return refused(lambda: call(rows_given, state), wrong)
    chosen = arrays.get("ids", slice(None))
    rows = rows_given.double().numpy()
    exact = {name: value.double().numpy() for name, value in state.items()}
    size = magnitude(expected, rows, exact)
    close(call(rows_given, state), expected(rows, exact), size, dtype)
    if dtype == torch.float64:
        at = np.concatenate([random.standard_normal(rows.size), flat])
        split = lambda at: (at[: rows.size].reshape(rows.shape), named(at[rows.size :], shapes))  # noqa: E731
        leaf = torch.from_numpy(at).requires_grad_()
        out = call(*split(leaf))
        by = random.standard_normal(out.shape)
        (gradient,) = torch.autograd.grad((out * torch.from_numpy(by)).sum(), leaf)
        derivative_agrees(lambda at: float((expected(*split(at)) * by).sum()), at, gradient.numpy(), random)


def magnitude(call: Callable[..., np.ndarray], rows: Any, state: dict[str, np.ndarray]) -> float:
    """What the errors of readouts and scores are relative to: all terms in absolute value; of attention the logits."""
    positive = {
        name: -np.abs(value) if name.endswith("mean") else np.abs(value)
        for name, value in state.items()
        if not name.endswith("attention")
    }
    size = float(call(np.abs(rows), positive, 1.5).max(initial=0))
    return size if len(positive) == len(state) else size * (1 + size)


def prediction(random: Random) -> None:
    """The scores and probabilities of a SPIN, new or trained, from features and from graphs; and kept in a file."""
    of, dtype = graphs(random, most=3), pick(random, *FLOATS)
    batch, hops = new_batch(random, of, dtype), int(pick(random, 0, 1, 2))
    operator, attention = pick(random, "sym", "adj", "rw", "sym,rw"), chance(random, 0.5)
    torch.manual_seed(int(random.integers(0, 2**31)))
    model = SPIN(
        batch.num_features,
        int(pick(random, 1, 3, 8)),
        3,
        hops,
        num_operators=operator.count(",") + 1,
        branches=pick(random, *BRANCHES),
        attention=attention,
        size_aware=attention and chance(random, 0.5),
        num_layers=int(pick(random, 1, 2)),
        batch_norm=chance(random, 0.3),
        dropout=float(pick(random, 0.0, 0.0, 0.2)),
        classifier_features=pick(random, (), (4,)),
        negative_slope=float(pick(random, 0.0, 0.01)),
    ).to(dtype)
    features = PowerFeatures.from_graphs(batch, hops, operator, deduplicate=chance(random, 0.8))
    order, half = random.permutation(len(batch)), len(batch) // 2
    if half and chance(random, 0.2):
        training.fit(
            model,
            features,
            order[:half],
            order[half:],
            epochs=int(pick(random, 1, 2)),
            batch_size=int(pick(random, 1, 32)),
            class_weight=pick(random, None, "balanced"),
            schedule=pick(random, *training.SCHEDULES),
        )
    model.operator = operator
    state = {name: value.double().numpy() for name, value in model.state_dict().items()}
    powers = [batch.x.double().numpy()]
    for name in operator.split(","):
        powers += list(oracle.powers(of.indptr, of.indices, powers[0], hops, name, None)[0])[1:]

    def scores(powers: np.ndarray, state: dict[str, np.ndarray], slope: float) -> np.ndarray:
        by_node = {"hops": powers, "joint": np.concatenate(powers, axis=1)[None]}
        readouts = [
            oracle.branch_readout(state, group, *by_branch(rows, {"ptr": of.ptr}, len(rows)), slope)
            for group, rows in by_node.items()
            if model.config["branches"] in (group, "both")
        ]
        sizes = np.diff(of.ptr)[:, None] if model.config["size_aware"] else 1
        return oracle.classifier(state, np.concatenate(readouts, axis=1) * sizes, slope)

    exact = scores(np.stack(powers), state, model.config["negative_slope"])
    size = magnitude(scores, np.stack(powers), state)
    if chance(random, 0.5):
        ids, batch_size = drawn_ids(random, len(batch)), int(pick(random, 1, 99))
        return close(training.predict(model, features, torch.from_numpy(ids), batch_size), exact[ids], size, dtype)
    probabilities = training.predict_proba(model, batch)
    close(probabilities, np.exp(oracle.log_softmax(exact)), size, dtype)
    if chance(random, 0.8):
        return
    with tempfile.TemporaryDirectory() as name:
        training.save_checkpoint(Path(name) / "a", model)
        loaded, _ = training.load_checkpoint(Path(name) / "a")
    assert torch.equal(training.predict_proba(loaded, batch), probabilities), "a kept model predicts something else"


def containers(random: Random) -> None:
    """Selections of graphs and of features, by all kinds of ids, some out of range."""
    of = graphs(random)
    batch = new_batch(random, of, torch.float32)
    number = len(batch)
    features = PowerFeatures.from_graphs(
        batch, int(pick(random, 0, 2)), deduplicate=chance(random, 0.8), node_rows=True
    )
    ids = (
        random.integers(-number - chance(random, 0.1), number + chance(random, 0.1), random.integers(0, 5))
        if number
        else np.zeros(0, np.int64)
    )
    kind = random.integers(0, 4)
    chosen: Any = ids
    if kind == 0:
        chosen = torch.from_numpy(ids)
    elif kind == 1:
        chosen = random.random(number + int(chance(random, 0.1))) < 0.5
        ids = chosen.nonzero()[0]
    elif kind == 2:
        chosen = slice(*(int(random.integers(-9, 9)) for _ in range(2)), int(pick(random, 1, 2, -1)))
        ids = np.arange(number)[chosen]
    ok = bool(((ids >= -number) & (ids < number)).all()) and not (kind == 1 and len(chosen) != number)
    try:
        found, rows = batch[chosen], features[chosen]
    except IndexError:
        assert not ok
        return
    assert ok, f"{chosen} of {number} graphs was not refused"
    by_branch = (features.num_hops + 1, -1, batch.num_features)
    nodes = [node for g in ids % max(number, 1) for node in range(of.ptr[g], of.ptr[g + 1])]
    assert torch.equal(found.x, batch.x[nodes])
    taken, everything = (of_all.expand().rows.view(by_branch) for of_all in (rows.take(), features))
    assert torch.equal(taken, everything[:, nodes])
    assert found.num_edges == np.diff(of.indptr)[nodes].sum()


def bend(random: Random, content: bytes) -> bytes:
    """A file's content cut short, or with some bytes changed, doubled or left out."""
    for _ in range(int(pick(random, 1, 1, 3))):
        if not content:
            return content
        at, kind = int(random.integers(0, len(content))), random.integers(0, 5)
        if kind == 0:
            content = content[:at]
        elif kind == 1:
            content = content[:at] + bytes([int(random.integers(0, 256))]) + content[at + 1 :]
        elif kind == 2:
            content = (
                content[:at]
                + pick(random, b"-1", b"9" * 20, b",", b"\n", b"nan", b"1e400", b"x", b"\xff", b"0")
                + content[at:]
            )
        elif kind == 3:
            content = content[:at] + content[at + int(random.integers(1, 9)) :]
        else:
            content = content[:at] + content[max(at - 7, 0) :]
    return content


def survives(read: Callable[[], Any]) -> Any:
    """What is read, or None where the file is refused in one line."""
    try:
        return read()
    except (ValueError, TypeError, OSError):
        return None


def kept_files(random: Random) -> None:
    """Features, shards and checkpoints whose files are damaged: refused, or used without harm."""
    of = graphs(random)
    batch = new_batch(random, of, torch.float32)
    features = PowerFeatures.from_graphs(batch, 1, node_rows=chance(random, 0.5))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind = random.integers(0, 3)
        model = SPIN(batch.num_features, 4, 3, 1)
        if kind == 0:
            features.save(folder / "a")
        elif kind == 1:
            half = len(features) // 2
            shards.save([features[:half].take(), features[half:].take()], folder / "a")
        else:
            training.save_checkpoint(folder / "a", model)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        path = files[random.integers(0, len(files))]
        path.write_bytes(bend(random, path.read_bytes()))
        if kind == 2:
            loaded = survives(lambda: training.load_checkpoint(folder / "a"))
            if loaded is None or loaded[0].config != model.config:
                return
            model = loaded[0]
        else:
            loaded = survives(lambda: PowerFeatures.load(folder / "a", mmap=chance(random, 0.5)))
            if loaded is None:
                return
            features = loaded
        survives(lambda: model(features))


def tu_files(random: Random) -> None:
    """A data set as text files, one of them damaged."""
    of = graphs(random)
    rows = np.repeat(np.arange(of.num_nodes), np.diff(of.indptr)) + 1
    lines = {
        "A": [f"{v}, {u + 1}" for v, u in zip(rows, of.indices, strict=True)],
        "graph_indicator": [str(g + 1) for g in np.repeat(np.arange(len(of.ptr) - 1), np.diff(of.ptr))],
        "graph_labels": [str(g % 2) for g in range(len(of.ptr) - 1)],
        "node_labels": [str(v % 3) for v in range(of.num_nodes)],
        "node_attributes": [f"{v}.5, -1e-3" for v in range(of.num_nodes)],
    }
    own_files(random, {f"T_{part}.txt": content for part, content in lines.items()})


def own_tables(random: Random) -> None:
    """Tables of a user's, one of them damaged."""
    of = graphs(random, most=3)
    graph = np.repeat(np.arange(len(of.ptr) - 1), np.diff(of.ptr))
    rows = np.repeat(np.arange(of.num_nodes), np.diff(of.indptr))
    tables = {
        "graphs.csv": ["graph,label", *(f"{g},{g % 2}" for g in range(len(of.ptr) - 1))],
        "nodes.csv": ["graph,node,a,b", *(f"{g},{v},{v % 5},{v / 7}" for v, g in enumerate(graph))],
        "edges.csv": ["graph,source,target", *(f"{graph[v]},{v},{u}" for v, u in zip(rows, of.indices, strict=True))],
    }
    own_files(random, tables)


def own_graphml(random: Random) -> None:
    """A GraphML file of a user's, damaged."""
    of = graphs(random, most=3)
    rows = np.repeat(np.arange(of.num_nodes), np.diff(of.indptr))
    nodes = "".join(f'<node id="{v}"><data key="a">{v % 5}</data></node>\n' for v in range(of.num_nodes))
    edges = "".join(f'<edge source="{v}" target="{u}"/>\n' for v, u in zip(rows, of.indices, strict=True))
    key = '<key id="a" for="node" attr.name="a" attr.type="int"/>'
    head = f'<graphml xmlns="http://graphml.graphdrawing.org/xmlns">{key}'
    own_files(random, {"a.graphml": [head, f'<graph edgedefault="directed">{nodes}{edges}</graph></graphml>']})


def own_files(random: Random, contents: dict[str, list[str]]) -> None:
    """A folder of a user's, one of whose files is damaged."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in contents.items():
            (folder / file).write_text("\n".join(content) + "\n")
        path = folder / str(random.choice(list(contents)))
        path.write_bytes(bend(random, path.read_bytes()))
        found = survives(lambda: datasets.load(str(folder)))
        if found is not None:
            PowerFeatures.from_graphs(found, 1)
            chunks = datasets.iter_folder(folder, int(pick(random, 1, 2, 100)))
            assert_equal(GraphBatch.concatenate(chunk.graphs for chunk in chunks), found)


def assert_equal(one: GraphBatch, other: GraphBatch) -> None:
    for field in ("ptr", "indptr", "indices", "x", "y"):
        values, wanted = getattr(one, field), getattr(other, field)
        assert values is wanted is None or torch.equal(values, wanted), field


ODD = (None, -1, 2**40, 0.5, math.nan, "x", True, [], [None], [[1.0], [2.0]])


def own_parquet(random: Random) -> None:
    """A Parquet file of a user's with a row per graph, maybe damaged; as a whole, and by shards, chunk by chunk."""
    import pyarrow
    from pyarrow.parquet import write_table

    of = graphs(random)
    rows = np.repeat(np.arange(of.num_nodes), np.diff(of.indptr))
    nodes = list(pairwise(of.ptr))
    edges = [slice(of.indptr[begin], of.indptr[end]) for begin, end in nodes]
    columns: dict[str, list[Any]] = {
        "num_nodes": [int(end - begin) for begin, end in nodes],
        "source": [(of.indices[some] - begin).tolist() for some, (begin, _) in zip(edges, nodes, strict=True)],
        "target": [(rows[some] - begin).tolist() for some, (begin, _) in zip(edges, nodes, strict=True)],
        "x": [[[v % 5, v / 7] for v in range(begin, end)] for begin, end in nodes],
        "label": [g % 2 for g in range(len(nodes))],
    }
    is_right = bool(nodes)
    if nodes and chance(random, 0.5):
        values = columns[str(random.choice(list(columns)))]
        row, odd, is_right = int(random.integers(0, len(values))), pick(random, *ODD), False
        if isinstance(values[row], list) and values[row] and chance(random, 0.5):
            values[row][int(random.integers(0, len(values[row])))] = odd
        else:
            values[row] = odd
    try:
        table = pyarrow.table(columns)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):  # what is odd has no place in such a column
        return
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.parquet"
        write_table(table, path, row_group_size=int(pick(random, 1, 2, 100)))
        if chance(random, 0.3):
            content, is_right = bend(random, path.read_bytes()), False
            path.write_bytes(content)
        found = survives(lambda: datasets.load(str(path)))
        if found is None:
            assert not is_right, "what is right is refused"
            return
        if is_right:
            assert (found.ptr.tolist(), found.indptr.tolist()) == (of.ptr.tolist(), of.indptr.tolist())
            assert sorted(zip(*found.edge_index.tolist(), strict=True)) == sorted(zip(of.indices, rows, strict=True))
            assert found.x.tolist() == torch.tensor([[v % 5, v / 7] for v in range(of.num_nodes)]).view(-1, 2).tolist()
        size, number = int(pick(random, 1, 2, 100)), int(pick(random, 1, 2, 5))
        chunks = [
            part.graphs for i in range(number) for part in datasets.iter_folder(path, size, shard=(i + 1, number))
        ]
        assert_equal(GraphBatch.concatenate(chunks), found)
        streamed = PowerFeatures.from_chunks(chunks, 1)
        assert torch.equal(streamed.dense_rows(), PowerFeatures.from_graphs(found, 1).dense_rows())


CASES: dict[str, Callable[[Random], None]] = {
    case.__name__: case
    for case in (
        power_features,
        subtree_keys,
        readout,
        distinct,
        step,
        containers,
        kept_files,
        tu_files,
        own_tables,
        branch,
        joint,
        prediction,
        own_graphml,
        own_parquet,
    )
}


def run(name: str, number: int) -> None:
    """One case, the same at every call."""
    CASES[name](np.random.default_rng([number, list(CASES).index(name)]))
