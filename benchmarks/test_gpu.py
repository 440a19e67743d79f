"""The goals on a GPU: training against PyG's GIN and GCN, readouts and powers against the bandwidth of a copy.

Everything is on the device before the clock starts. ``--quick --device cpu`` runs all of it small, where no GPU is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from spin_fast import SPIN, GraphBatch, PowerFeatures, attention_readout, datasets, power_features, sum_readout

from .harness import epochs, gpu, inputs
from .harness.checks import assert_close
from .harness.epochs import DEPTH, WIDTH, Epoch
from .harness.inputs import NUM_HOPS, Input
from .harness.plugin import RaceRunner, Settings
from .harness.race import Contender
from .harness.report import Goal, Session
from .rivals.ops import Segments
from .test_training import SHORTEST_SAMPLE

pytest.importorskip("torch_geometric", reason="the rivals are PyG's GIN and GCN: install torch_geometric")

from .rivals import gnn, ops

TIMES_GIN = {"NCI1": 20, "REDDIT-BINARY": 20, "ogbg-molhiv": 10}
NCI1_SECONDS = 5e-3
READOUT_SHARE = 0.85
POWER_SHARE = 0.70
BYTES = 1 << 30  # of z: far beyond any cache
MOST_CAPTURED = 400  # batches, each of which is a CUDA graph
EVEN = ("short segments", "NCI1's segments")
PER_SEGMENT = ("segment", "embedding_bag")  # rivals that leave a segment to one thread or warp


@cache
def of_name(dataset: str, root: str | None, quick: bool) -> Input:
    return inputs.real_or_stand_in(dataset, root, 40 if quick else None)


def add_goal(session: Session, race: Any, what: str, wanted: float) -> None:
    """A share of the copy bandwidth."""
    session.goals.append(Goal(what, race.on, wanted, "%", race.ratio(race.floor, race.ours)))


@pytest.fixture
def train(
    gpu_race: RaceRunner, gpu_session: Session, device: str, quick: bool, settings: Settings
) -> Callable[[str, int], None]:
    """Race one epoch in random order; the rivals' batches are collated beforehand, which is their fastest setting."""

    def run(dataset: str, batch_size: int) -> None:
        on = of_name(dataset, settings.root, quick)
        graphs = on.graphs
        assert graphs.y is not None
        shape = graphs.num_features, WIDTH, int(graphs.y.max()) + 1, DEPTH
        features = PowerFeatures.from_graphs(graphs.to(device), DEPTH)
        plain = PowerFeatures.from_graphs(graphs.to(device), DEPTH, deduplicate=False)
        torch.manual_seed(0)
        models = {"SPIN-att": SPIN(*shape, attention=True), "SPIN-sum": SPIN(*shape, attention=False)}

        def ours(name: str, of: PowerFeatures = features) -> Epoch:
            return epochs.ours(copy.deepcopy(models[name]).to(device), of, batch_size)

        contenders: dict[str, Epoch] = {name: ours(name) for name in models}
        contenders["SPIN-att, TF32"] = partial(with_tf32, ours("SPIN-att"))
        contenders["SPIN-att, not deduplicated"] = ours("SPIN-att", plain)
        own = list(contenders)
        eager = message_passing(gpu_session, graphs, shape, batch_size, device, contenders)
        for name in contenders.keys() - set(eager):
            assert math.isfinite(contenders[name]()), name
        case = f"training epoch, batches of {batch_size}"
        race = gpu_race(case, on.name, contenders, ours=len(own), shortest=0.0 if quick else SHORTEST_SAMPLE)
        best = min((name for name in eager if name.startswith("GIN")), key=lambda name: race.time(name).median)
        what = f"{case}: times as fast as the best eager GIN"
        gpu_session.goals.append(Goal(what, on.name, TIMES_GIN[dataset], "x", race.ratio(best)))
        if dataset == "NCI1" and batch_size == 128:
            gpu_session.goals.append(Goal(f"{case}: time", on.name, NCI1_SECONDS, "ms", race.time(race.ours)))

    return run


@pytest.mark.parametrize("dataset_name", list(TIMES_GIN))
def test_training_epoch(train: Callable[[str, int], None], dataset_name: str) -> None:
    train(dataset_name, 128)


def with_tf32(epoch: Epoch) -> float:
    """One epoch whose matrix products round to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return epoch()
    finally:
        torch.set_float32_matmul_precision(before)


def message_passing(
    session: Session,
    graphs: GraphBatch,
    shape: tuple[int, int, int, int],
    batch_size: int,
    device: str,
    contenders: dict[str, Epoch],
) -> list[str]:
    """Add PyG's models to the contenders, as PyTorch runs them and the GIN in CUDA graphs; the names of the former."""
    eager = []
    for family, make in gnn.MODELS.items():
        data = gnn.data_list(graphs, family)
        mixed = [data[i] for i in torch.randperm(len(data)).tolist()]
        model = make(*shape).to(device)
        for form in gnn.FORMS:
            batches = [batch.to(device) for batch in gnn.collated(mixed, batch_size, form)]
            eager.append(f"{family} {form}")
            contenders[eager[-1]] = epochs.of(copy.deepcopy(model), partial(epochs.shuffled, batches))
            if family != "GIN" or device != "cuda" or len(batches) > MOST_CAPTURED:
                continue
            name = f"GIN {form}, a CUDA graph per batch"
            try:
                contenders[name] = epochs.captured(copy.deepcopy(model), batches)
            except Exception as error:  # whatever cannot be captured
                session.note(f"{name}: failed, so it does not race: {first_line(error)}")
    return eager


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def room(device: str, quick: bool) -> int:
    """Bytes of ``z``, of which a race holds some forty times as many: results, gradients, those of the rivals."""
    if device != "cuda" or quick:
        return 1 << 16
    return min(BYTES, torch.cuda.mem_get_info()[0] // 40)


@pytest.fixture
def emptied(device: str) -> Iterator[None]:
    """Free what torch has cached, after the race."""
    yield
    if device == "cuda":
        torch.cuda.empty_cache()


def repeated(dataset: str, times: int, quick: bool) -> GraphBatch:
    return GraphBatch.concatenate([inputs.stand_in(dataset, 40 if quick else None)] * times)


def dense(quick: bool) -> GraphBatch:
    return datasets.erdos_renyi(20 if quick else 4000, 75, 0.9, 64)


def one_graph(num_features: int, quick: bool) -> GraphBatch:
    return inputs.one_graph(2000 if quick else 500_000, num_features).graphs


POWERS: dict[str, Callable[[bool], GraphBatch]] = {
    "8 times ogbg-molhiv's statistics, d = 9": partial(repeated, "ogbg-molhiv", 8),
    "32 times NCI1's statistics, d = 37": partial(repeated, "NCI1", 32),
    "8 times REDDIT-BINARY's statistics, d = 1": partial(repeated, "REDDIT-BINARY", 8),
    "4,000 dense graphs of 75 nodes, d = 64": dense,
    "one graph of 500,000 nodes, d = 16": partial(one_graph, 16),
    "one graph of 500,000 nodes, d = 100": partial(one_graph, 100),
}
IN_HALF = "32 times NCI1's statistics, d = 37"


@pytest.mark.usefixtures("emptied")
@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in POWERS), (IN_HALF, torch.bfloat16)])
def test_power_features(
    gpu_race: RaceRunner, gpu_session: Session, device: str, quick: bool, name: str, dtype: torch.dtype
) -> None:
    """Three hops of ``sym``; the rival gets the matrix normalised beforehand. In half precision it does not race."""
    graphs = POWERS[name](quick).to(device)
    x, whole = graphs.x.to(dtype), name.startswith("one graph")
    ptr = None if whole else graphs.ptr
    powers = partial(power_features, graphs.indptr, graphs.indices, num_hops=NUM_HOPS, ptr=ptr)
    contenders: dict[str, Contender] = {"spin_fast": partial(powers, x)}
    with torch.inference_mode():
        expected = powers(graphs.x)
        for rival, call in ops.cusparse(graphs, NUM_HOPS).items():
            try:
                result = call()
            except RuntimeError as error:
                gpu_session.note(f"{rival}, {name}: does not race: {first_line(error)}")
                continue
            assert_close(rival, [result], [expected])
            del result
            contenders |= {rival: call} if dtype == torch.float32 else {}
        if dtype != torch.float32:
            assert_close("spin_fast", [powers(x).float()], [expected], rtol=1e-2)
        del expected
        floors = gpu.floors(gpu.power_bytes(graphs, x, NUM_HOPS, whole), device)
        on = f"{name}, {str(dtype).removeprefix('torch.')}"
        race = gpu_race("power_features, new output", on, contenders, floors)
    add_goal(gpu_session, race, "power_features: share of the copy bandwidth", POWER_SHARE)


@pytest.mark.usefixtures("emptied")
@pytest.mark.parametrize("segments", gpu.SEGMENTS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["attention", "sum"])
@pytest.mark.parametrize(("width", "dtype"), [(32, torch.float32), (32, torch.bfloat16), (64, torch.float32)])
def test_readout(
    gpu_race: RaceRunner,
    gpu_session: Session,
    device: str,
    quick: bool,
    kind: str,
    direction: str,
    segments: str,
    width: int,
    dtype: torch.dtype,
) -> None:
    """One branch of many rows. Forward keeps nothing for a gradient; backward is that pass alone."""
    backward = direction == "backward"
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    num_rows = room(device, quick) // (width * dtype.itemsize)
    z, w = draw(num_rows, width), draw(width) / width**0.5
    ptr = gpu.segments(segments, num_rows).to(device)
    of = Segments.of(ptr, 1)
    gradient = draw(of.number, width)
    readouts: dict[str, Callable[..., Tensor]] = {
        "spin_fast": partial(attention_readout if kind == "attention" else sum_readout, ptr=ptr)
    }
    if dtype == torch.float32 or segments in EVEN:  # else additions in half precision wait for each other for minutes
        readouts |= rivals_of(gpu_session, kind, of, segments, compiled=not quick and width == 32 and device == "cuda")
    arguments = (z, w) if kind == "attention" else (z,)
    expected = oracle(kind, z, w, of, gradient if backward else None)
    contenders: dict[str, Contender] = {}
    for name, readout in readouts.items():
        ours = name == "spin_fast"
        leaves = [tensor.detach() if ours else tensor.detach()[None] for tensor in arguments]
        try:
            contenders[name] = contender(readout, leaves, gradient, backward)
            results = contenders[name]()
            if ours or dtype == torch.float32:  # what others round in bfloat16 is theirs to say
                rtol = 1e-4 if ours and dtype == torch.float32 else 1e-3 if dtype == torch.float32 else 2e-2
                results = (results,) if isinstance(results, Tensor) else results
                wide = [one.view(other.shape).double() for one, other in zip(results, expected, strict=True)]
                assert_close(name, wide, expected, rtol=rtol)
        except Exception as error:  # wrong, or not to be had for this dtype
            if ours:
                raise
            contenders.pop(name, None)
            gpu_session.note(f"{name}, {direction}, {segments}, {dtype}: does not race: {first_line(error)}")
    del expected
    on = f"{segments}, h = {width}, {str(dtype).removeprefix('torch.')}"
    nbytes = gpu.readout_bytes(kind, z, ptr, backward)
    race = gpu_race(f"{kind} readout, {direction}", on, contenders, gpu.floors(nbytes, device))
    add_goal(gpu_session, race, f"{kind} readout, {direction}: share of the copy bandwidth", READOUT_SHARE)


def rivals_of(
    session: Session, kind: str, of: Segments, segments: str, compiled: bool
) -> dict[str, Callable[..., Tensor]]:
    """The rivals that can handle such segments."""
    found = ops.attention_readouts(of) if kind == "attention" else ops.sum_readouts(of)
    if segments not in EVEN:
        session.note(f"{segments}: without the rivals that leave a segment to one thread or warp")
        return {name: call for name, call in found.items() if not any(part in name for part in PER_SEGMENT)}
    if compiled and kind == "attention" and segments == EVEN[1]:
        if reason := ops.cannot_compile("cuda"):
            session.note(f"torch.compile does not work here, so it does not race: {reason}")
        else:
            found |= ops.compiled_attention(of)
    return found


def contender(readout: Callable[..., Tensor], leaves: list[Tensor], gradient: Tensor, backward: bool) -> Contender:
    """The forward pass, or the backward pass alone."""
    if not backward:

        def forward() -> Tensor:
            with torch.inference_mode():
                return readout(*leaves)

        return forward
    leaves = [leaf.requires_grad_() for leaf in leaves]
    return partial(torch.autograd.grad, readout(*leaves), leaves, gradient, retain_graph=True)


def oracle(kind: str, z: Tensor, w: Tensor, of: Segments, gradient: Tensor | None) -> list[Tensor]:
    """Readouts, or the gradients of ``z`` and ``w``, in float64 from running sums, which add nothing at random."""

    def sums(values: Tensor) -> Tensor:
        running = torch.nn.functional.pad(values.T.contiguous().cumsum(1), (1, 0))
        return running[:, of.offsets].diff(dim=1).T

    z, w = z.double(), w.double()
    if kind == "sum":
        return [sums(z)] if gradient is None else [gradient.double()[of.of_row]]
    beta = (z @ w).relu()
    mass = beta.exp()[:, None]
    total = sums(mass)
    readout = sums(mass * z) / total.clamp(min=1e-300)
    if gradient is None:
        return [readout]
    ds, alpha = gradient.double()[of.of_row], mass / total[of.of_row]
    along = (ds * (z - readout[of.of_row])).sum(1, keepdim=True)
    dbeta = alpha * along * (beta > 0)[:, None]
    return [alpha * ds + dbeta * w, (dbeta * z).sum(0)]


@pytest.mark.parametrize("dataset_name", list(TIMES_GIN))
def test_precomputation(gpu_race: RaceRunner, device: str, quick: bool, settings: Settings, dataset_name: str) -> None:
    """From graphs to features, which is done once."""
    on = of_name(dataset_name, settings.root, quick)
    there = on.graphs.to(device)
    make = partial(PowerFeatures.from_graphs, num_hops=DEPTH)
    arrays = (there.indptr, there.indices, there.x, DEPTH)
    contenders: dict[str, Contender] = {
        "features": partial(make, there),
        "features, not deduplicated": partial(make, there, deduplicate=False),
        "powers alone": partial(power_features, *arrays, ptr=there.ptr),
        "features, on the CPU with 1 thread": partial(make, on.graphs),
    }
    floors = gpu.floors(gpu.power_bytes(there, there.x, DEPTH), device)
    gpu_race("precomputation", on.name, contenders, floors)


@pytest.mark.parametrize("dataset_name", list(TIMES_GIN))
def test_training_epoch_of_small_batches(train: Callable[[str, int], None], dataset_name: str) -> None:
    train(dataset_name, 32)
