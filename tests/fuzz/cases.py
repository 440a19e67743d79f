"""One random call per function; it fails by an AssertionError, or by any error of the package that is no refusal."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import spin_fast
from spin_fast import SPIN, GraphBatch, PowerFeatures, datasets, shards, training
from spin_fast.ops import distinct_rows, training_step

from . import oracle
from .arrays import Arrays, Random, chance, damaged, fits, graphs, misused, tensor, values

FLOATS = (torch.float32, torch.float64)
STORED = (*FLOATS, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def pick(random: Random, *choices: Any) -> Any:
    return choices[random.integers(0, len(choices))]


def refused(call: Callable[[], Any], *names: str) -> None:
    """Check that a call is refused by a message that has one of the names."""
    with pytest.raises((ValueError, TypeError), match=rf"\b({'|'.join(names)})\b"):
        call()


def close(found: Tensor, expected: np.ndarray, size: np.ndarray | float, dtype: torch.dtype) -> None:
    """Check an error relative to ``size``, that of the terms that were summed, and to how it is stored."""
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    bound = 64 * torch.finfo(computed).eps * np.asarray(size) + 2 * torch.finfo(dtype).eps * np.abs(expected)
    bound = bound + torch.finfo(dtype).smallest_normal
    assert (found.dtype, tuple(found.shape)) == (dtype, expected.shape)
    largest = torch.finfo(dtype).max
    expected = np.where(np.abs(expected) > largest, np.sign(expected) * np.inf, expected)  # as it is stored
    with np.errstate(invalid="ignore"):
        error = np.where((values_of := found.detach().double().numpy()) == expected, 0, np.abs(values_of - expected))
    assert bool((error <= bound).all()), (
        f"error {error.max()} beyond {np.broadcast_to(bound, error.shape)[error > bound].min()}"
    )


def derivative_agrees(
    loss: Callable[[np.ndarray], float], at: np.ndarray, gradient: np.ndarray, random: Random
) -> None:
    """Check a gradient in one direction by differences, closer ones where a kink lies between."""
    direction = random.standard_normal(at.shape)
    found, scale = float((gradient * direction).sum()), float(np.abs(gradient * direction).sum())
    for step in (1e-5, 1e-6, 1e-7):
        expected = (loss(at + step * direction) - loss(at - step * direction)) / (2 * step)
        if abs(found - expected) <= 1e-5 * scale + 1e-12 / step + 1e-7:
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
    """Ragged segments: ``ptr``, ``index``, ``count``."""
    numbers = random.integers(0, 6, segments) * (num_rows > 0)
    ptr = np.concatenate([[0], numbers.cumsum()]).astype(np.int64)
    index = random.integers(0, max(num_rows, 1), ptr[-1]).astype(np.int64)
    return {"ptr": ptr, "index": index, "count": random.integers(1, 5, ptr[-1]).astype(np.int64)}


def readout(random: Random) -> None:
    attention, dtype, index = chance(random, 0.6), pick(random, *STORED), pick(random, *INTEGERS)
    branches, num_graphs, h = int(pick(random, 1, 1, 3)), int(random.integers(0, 6)), int(pick(random, 1, 2, 16, 33))
    dense = chance(random, 0.4)
    if dense:
        arrays = with_damage(random, {"ptr": graphs(random).ptr}, lambda name: torch.int64)
        num_rows = int(max(arrays["ptr"][-1], 0)) if chance(random, 0.9) and arrays["ptr"][-1] < 1000 else 5
        z = tensor(random, values(random, branches, num_rows, h), dtype)
    else:
        num_rows = int(random.integers(0, 40))
        types = {"ptr": torch.int64, "index": index, "count": torch.int32}
        arrays = with_damage(random, drawn_segments(random, num_rows, branches * num_graphs), lambda name: types[name])
        z = tensor(random, values(random, num_rows, h), dtype)
    index_array, count = arrays.get("index"), arrays.get("count") if chance(random, 0.7) else None
    arguments: dict[str, Any] = {
        "z": z,
        "ptr": tensor(random, arrays["ptr"], torch.int64),
        "index": None if index_array is None else tensor(random, index_array, index),
        "count": None if count is None else tensor(random, count, torch.int32),
    }
    w = values(random, branches, h)
    call: Callable[..., Tensor] = spin_fast.sum_readout
    if attention:
        arguments["w"], call = tensor(random, w, dtype), spin_fast.attention_readout
    elif not dense:
        arguments["num_branches"] = branches
    if chance(random, 0.1):
        arguments = misused(random, arguments, ("ptr", "index", "count"))
        return refused(lambda: call(**arguments), *arguments)
    if wrong := oracle.wrong_segments(arrays["ptr"], index_array, count, num_rows):
        return refused(lambda: call(**arguments), wrong)
    segments = oracle.entries_of(arrays["ptr"], index_array, count)
    exact_w = arguments["w"].double().numpy() if attention else w

    def expected(rows: np.ndarray) -> np.ndarray:
        made = []
        for branch in range(branches):
            of = segments if dense else segments[branch * num_graphs : (branch + 1) * num_graphs]
            z_of = rows[branch] if dense else rows
            made.append(
                oracle.attention_readout(z_of, exact_w[branch], of) if attention else oracle.sum_readout(z_of, of)
            )
        return np.concatenate(made, axis=1)

    rows = z.double().numpy()
    if dtype in FLOATS:  # logits of rows that are large make any rounding large
        size = (
            expected(np.abs(rows))
            if not attention
            else 1e3
            * (1 + np.abs(rows).max(initial=0) ** 2 * np.abs(exact_w).max(initial=0) * h)
            * np.abs(rows).max(initial=0)
        )
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
    arrays = with_damage(random, {"ptr": of.ptr}, lambda name: torch.int64)
    branches, d = int(pick(random, 1, 3)), int(pick(random, 0, 1, 2, 9))
    powers = tensor(random, random.integers(-1, 2, (branches, of.num_nodes, d)).astype(np.float64), dtype)
    call = partial(distinct_rows, powers, tensor(random, arrays["ptr"], torch.int64))
    if oracle.wrong_segments(arrays["ptr"], None, None, of.num_nodes):
        return refused(call, "ptr")
    rows, row_ptr, ptr, index, count, row_of_node = call()
    exact = powers.double().numpy() + 0.0
    for branch in range(branches):
        mine = rows[row_ptr[branch] : row_ptr[branch + 1]].double().numpy()
        assert len({row.tobytes() for row in mine}) == len(mine) == len({row.tobytes() for row in exact[branch]})
        for v, row in enumerate(row_of_node[branch].tolist()):
            assert rows[row].double().numpy().tobytes() == exact[branch, v].tobytes()
    entries = oracle.entries_of(ptr.numpy(), index.numpy(), count.numpy())
    bounds = list(zip(arrays["ptr"][:-1], arrays["ptr"][1:], strict=True))
    for s, of_segment in enumerate(entries):
        first, last = bounds[s % len(bounds)]
        found = sorted(row for row, times in of_segment for _ in range(times))
        assert found == sorted(row_of_node[s // len(bounds), first:last].tolist())
        assert [row for row, _ in of_segment] == sorted({row for row, _ in of_segment})


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


def step(random: Random) -> None:
    """The loss and the gradient of a SPIN on a batch, by the fused step and by autograd, against loops."""
    of = graphs(random)
    if len(of.ptr) == 1:
        return
    batch, hops = new_batch(random, of, torch.float64), int(pick(random, 0, 1, 2))
    operator, branches = pick(random, "sym", "adj"), pick(random, "hops", "joint", "both")
    features = PowerFeatures.from_graphs(batch, hops, operator, deduplicate=chance(random, 0.8), node_rows=True)
    torch.manual_seed(int(random.integers(0, 2**31)))
    model = SPIN(
        batch.num_features,
        int(pick(random, 1, 3, 8)),
        3,
        hops,
        branches=branches,
        attention=chance(random, 0.5),
        num_layers=int(pick(random, 1, 2)),
        classifier_features=pick(random, (), (4,)),
        negative_slope=float(pick(random, 0.0, 0.01)),
    ).double()
    ids = random.integers(0, len(batch), random.integers(1, 6))
    flat = model.flatten_parameters()
    x = list(oracle.powers(of.indptr, of.indices, batch.x.numpy(), hops, operator, None)[0])

    def loss(parameters: np.ndarray) -> float:
        with torch.no_grad():
            model.flatten_parameters().copy_(torch.from_numpy(parameters))
        return oracle.cross_entropy(scores_of(model, x, of.ptr, ids), batch.y.numpy()[ids])

    at = flat.detach().numpy().copy()
    found, gradient = training_step(
        features.rows,
        flat.detach(),
        batch.y,
        features.ptr,
        model=model.sizes,
        index=features.index,
        count=features.count,
        joint=features.joint if branches != "hops" else None,
        ids=torch.from_numpy(ids),
    )
    again = torch.nn.functional.cross_entropy(model(features[ids]), batch.y[ids])
    expected = loss(at)
    for value in (found, again):
        assert abs(float(value) - expected) <= 1e-9 * (1 + abs(expected)), f"a loss of {float(value)}, not {expected}"
    derivative_agrees(loss, at, gradient.numpy().copy(), random)


def scores_of(model: SPIN, powers: list[np.ndarray], ptr: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Class scores of some graphs."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    config = model.config
    readouts = []
    for group, inputs in (("hops", powers), ("joint", [np.concatenate(powers, axis=1)])):
        layers = [name for name in state if name.startswith(f"{group}.layers") and name.endswith("weight")]
        for branch in range(len(inputs) if layers else 0):
            biases = [state[name.replace("weight", "bias")][branch] for name in layers]
            z = oracle.mlp(inputs[branch], [state[name][branch] for name in layers], biases, config["negative_slope"])
            segments = oracle.entries_of(ptr, None, None)
            attention = state.get(f"{group}.attention")
            of_graph = (
                oracle.sum_readout(z, segments)
                if attention is None
                else oracle.attention_readout(z, attention[branch], segments)
            )
            readouts.append(of_graph[ids])
    rows = np.concatenate(readouts, axis=1)
    weights = [name for name in state if name.startswith("classifier") and name.endswith("weight")]
    for name in weights:
        rows = rows @ state[name].T + state[name.replace("weight", "bias")]
        rows = np.where(rows > 0, rows, config["negative_slope"] * rows) if name != weights[-1] else rows
    return rows


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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "T"
        folder.mkdir()
        rows = np.repeat(np.arange(of.num_nodes), np.diff(of.indptr)) + 1
        lines = {
            "A": [f"{v}, {u + 1}" for v, u in zip(rows, of.indices, strict=True)],
            "graph_indicator": [str(g + 1) for g in np.repeat(np.arange(len(of.ptr) - 1), np.diff(of.ptr))],
            "graph_labels": [str(g % 2) for g in range(len(of.ptr) - 1)],
            "node_labels": [str(v % 3) for v in range(of.num_nodes)],
            "node_attributes": [f"{v}.5, -1e-3" for v in range(of.num_nodes)],
        }
        for part, content in lines.items():
            (folder / f"T_{part}.txt").write_text("\n".join(content) + "\n")
        path = folder / f"T_{random.choice(list(lines))}.txt"
        path.write_bytes(bend(random, path.read_bytes()))
        found = survives(lambda: datasets.load(str(folder)))
        if found is not None:
            PowerFeatures.from_graphs(found, 1)


def own_files(random: Random) -> None:
    """Tables of a user's, and GraphML, damaged."""
    of = graphs(random, most=3)
    graph = np.repeat(np.arange(len(of.ptr) - 1), np.diff(of.ptr))
    rows = np.repeat(np.arange(of.num_nodes), np.diff(of.indptr))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chance(random, 0.5):
            tables = {
                "graphs.csv": ["graph_id,label", *(f"{g},{g % 2}" for g in range(len(of.ptr) - 1))],
                "nodes.csv": ["graph_id,node_id,a,b", *(f"{g},{v},{v % 5},{v / 7}" for v, g in enumerate(graph))],
                "edges.csv": [
                    "graph_id,source,target",
                    *(f"{graph[v]},{v},{u}" for v, u in zip(rows, of.indices, strict=True)),
                ],
            }
        else:
            nodes = "".join(f'<node id="{v}"><data key="a">{v % 5}</data></node>\n' for v in range(of.num_nodes))
            edges = "".join(f'<edge source="{v}" target="{u}"/>\n' for v, u in zip(rows, of.indices, strict=True))
            key = '<key id="a" for="node" attr.name="a" attr.type="int"/>'
            head = f'<graphml xmlns="http://graphml.graphdrawing.org/xmlns">{key}'
            tables = {"a.graphml": [head, f'<graph edgedefault="directed">{nodes}{edges}</graph></graphml>']}
        for file, content in tables.items():
            (folder / file).write_text("\n".join(content) + "\n")
        path = folder / str(random.choice(list(tables)))
        path.write_bytes(bend(random, path.read_bytes()))
        found = survives(lambda: datasets.load(str(folder)))
        if found is not None:
            PowerFeatures.from_graphs(found, 1)


CASES: dict[str, Callable[[Random], None]] = {
    case.__name__: case
    for case in (power_features, subtree_keys, readout, distinct, step, containers, kept_files, tu_files, own_files)
}


def run(name: str, number: int) -> None:
    """One case, the same at every call."""
    CASES[name](np.random.default_rng([number, list(CASES).index(name)]))
