"""Training, prediction and memory: SPIN against PyG's GIN and GCN, and against itself without our kernels.

All have the same depth, width, batch size and classifier, and all forms of one model are checked to be that model.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spin_fast import SPIN, GraphBatch, PowerFeatures, training
from spin_fast._common.rows import arrays_of, values_of

from .harness import epochs, floors, peak
from .harness.checks import assert_close
from .harness.epochs import DEPTH, WIDTH, Epoch
from .harness.plugin import Floors, RaceRunner, Settings
from .harness.race import num_threads
from .harness.report import Session

pytest.importorskip("torch_geometric", reason="the rivals are PyG's GIN and GCN: install torch_geometric")

from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from .rivals import gnn, ops, plain_spin

BATCH_SIZE = 128
COMPILED_ON = ("NCI1", "PROTEINS", "IMDB-BINARY", "COLLAB")
CHECKED = 128  # graphs
SINGLE_GRAPHS = 64
SHORTEST_SAMPLE = 0.1  # seconds: epoch follows epoch, and none has its rivals' caches
TOP_OPERATORS = 15

Shape = tuple[int, int, int, int]


@pytest.fixture
def shape(dataset: str, graphs: GraphBatch) -> Shape:
    """Features, width, classes and depth of the models."""
    if graphs.y is None or graphs.y.is_floating_point() or graphs.y.dim() != 1:
        pytest.skip(f"{dataset} has not one class per graph")
    return graphs.num_features, WIDTH, int(graphs.y.max()) + 1, DEPTH


@pytest.fixture
def spins(shape: Shape) -> dict[str, SPIN]:
    """SPIN-att, which the ratios refer to, and SPIN-sum."""
    torch.manual_seed(0)
    return {"SPIN-att": SPIN(*shape, attention=True), "SPIN-sum": SPIN(*shape, attention=False)}


@pytest.mark.parametrize("batch_size", [BATCH_SIZE, pytest.param(32, marks=pytest.mark.full)])
def test_training_epoch(
    race: RaceRunner,
    session: Session,
    dataset: str,
    graphs: GraphBatch,
    shape: Shape,
    spins: dict[str, SPIN],
    batch_size: int,
    threads: int,
) -> None:
    """One epoch in random order; features, and the batches of the rivals' second setting, are made beforehand."""
    features = PowerFeatures.from_graphs(graphs, DEPTH)
    # The rivals train copies, and so start from the same weights.
    contenders = vectorised_epochs(spins, graphs, features, batch_size)
    # The loops are slow, and hardly depend on threads and batches: one setting suffices.
    loops = loop_epochs(spins, graphs, batch_size) if batch_size == BATCH_SIZE and threads == 1 else {}
    contenders |= loops
    for family, make in gnn.MODELS.items():
        data = gnn.data_list(graphs, family)
        model = make(*shape)
        check_forms(family, model, data[:CHECKED])
        contenders |= message_passing_epochs(family, model, data, batch_size)
        if family == "GIN" and batch_size == BATCH_SIZE:
            contenders |= compiled_epoch(session, dataset, model, data, threads)
    joint = {"SPIN-sum, joint rows": SPIN(*shape, attention=False, branches="joint")}
    spin_epochs = {name: epochs.ours(model, features, batch_size) for name, model in (spins | joint).items()}
    batches = torch.randperm(len(features)).split(batch_size)
    least = arithmetic_floor(spins["SPIN-att"], features, batches, training=True)
    case = f"training epoch, batches of {batch_size}"
    race(case, dataset, spin_epochs | contenders, least, ours=len(spin_epochs), once=loops, shortest=SHORTEST_SAMPLE)


def arithmetic_floor(spin: SPIN, features: PowerFeatures, batches: Iterable[Tensor], *, training: bool) -> Floors:
    """The products of the MLPs on the distinct rows of each batch, in the first layer on what is not 0 in them.

    Rows of one feature need fewer.
    """
    if features.num_features == 1:
        return {}
    first, other = (2, 3) if training else (1, 1)  # products of a layer: no gradient goes below the first
    layers, multiplications = spin.config["num_layers"] - 1, 0
    for ids in batches:
        rows = features[ids].take().rows
        multiplications += WIDTH * (first * int(values_of(rows).count_nonzero()) + other * len(rows) * layers * WIDTH)
    classifier = sum(layer.weight.numel() for layer in spin.classifier if isinstance(layer, nn.Linear))
    return floors.arithmetic(2 * (multiplications + other * len(features) * classifier))


def message_passing_epochs(family: str, model: gnn.Classifier, data: list[Data], batch_size: int) -> dict[str, Epoch]:
    """With batches that PyG's DataLoader collates in every epoch, and with batches collated beforehand."""
    loader = DataLoader(data, batch_size, shuffle=True)
    mixed = [data[i] for i in torch.randperm(len(data)).tolist()]
    contenders = {}
    for form in gnn.FORMS:
        batches = gnn.collated(mixed, batch_size, form)
        loaded = partial(gnn.loaded, loader, form)
        contenders[f"{family} {form}, DataLoader"] = epochs.of(copy.deepcopy(model), loaded)
        contenders[f"{family} {form}, collated"] = epochs.of(copy.deepcopy(model), partial(epochs.shuffled, batches))
    return contenders


def compiled_epoch(
    session: Session, dataset: str, model: gnn.Classifier, data: list[Data], threads: int
) -> dict[str, Epoch]:
    """Batches collated beforehand, ``torch.compile`` where it works; what it takes to compile is not in the race."""
    session.note(f"torch.compile of the GIN races on {', '.join(COMPILED_ON)} only, in batches of {BATCH_SIZE}")
    session.note("torch.compile takes no sparse tensors: the GIN's CSR form is not compiled")
    if dataset not in COMPILED_ON:
        return {}
    if reason := ops.cannot_compile():
        session.note(f"torch.compile does not work here, so it does not race: {reason}")
        return {}
    name, batches = "GIN edge_index, collated, compiled", gnn.collated(data, BATCH_SIZE, "edge_index")
    compiled = gnn.compiled(copy.deepcopy(model), threads)
    epoch = epochs.of(compiled, partial(epochs.shuffled, batches))
    start = time.perf_counter()
    try:
        logits = compiled(batches[0])
        epoch()
    except Exception as error:  # whatever the compiler stumbles over
        session.note(f"{name}, on {dataset}: failed, so it does not race: {str(error).strip().splitlines()[0]}")
        return {}
    seconds = time.perf_counter() - start
    session.note(f"{name}, on {dataset}: {seconds:.0f} s before the race, less where torch's cache has it compiled")
    assert_close(name, [logits], [model(batches[0])], rtol=1e-3)
    return {name: epoch}


def vectorised_epochs(
    spins: Mapping[str, SPIN], graphs: GraphBatch, features: PowerFeatures, batch_size: int
) -> dict[str, Epoch]:
    """Plain PyTorch, batches assembled in every epoch as ours are."""
    stored = {"": PowerFeatures.from_graphs(graphs, DEPTH, deduplicate=False), ", deduplicated": features}
    contenders = {}
    for name, spin in spins.items():
        for kind, rows in stored.items():
            model = plain_spin.Vectorised(spin)
            check_spin(f"{name}, vectorised{kind}", model, spin, rows, plain_spin.row_batches)
            batches = partial(in_random_order, plain_spin.row_batches, rows, batch_size)
            contenders[f"{name}, vectorised PyTorch{kind}"] = epochs.of(model, batches)
    return contenders


def loop_epochs(spins: Mapping[str, SPIN], graphs: GraphBatch, batch_size: int) -> dict[str, Epoch]:
    """The loop over graphs and branches, with Adam as its authors have it."""
    features = PowerFeatures.from_graphs(graphs, DEPTH, deduplicate=False)
    contenders = {}
    for name, spin in spins.items():
        model = plain_spin.Loop(spin)
        check_spin(f"{name}, loop", model, spin, features, plain_spin.separate_batches)
        batches = partial(in_random_order, plain_spin.separate_batches, features, batch_size)
        optimizer = torch.optim.Adam(model.parameters(), epochs.LEARNING_RATE)
        contenders[f"{name}, loop over graphs"] = epochs.of(model, batches, optimizer)
    return contenders


def in_random_order(batches: Callable[..., Any], features: PowerFeatures, batch_size: int) -> Any:
    """One epoch's iterator over all graphs."""
    return batches(features, torch.randperm(len(features)), batch_size)


def check_spin(name: str, rival: nn.Module, spin: SPIN, features: PowerFeatures, batches: Callable[..., Any]) -> None:
    """A rival with SPIN's weights must give its class scores."""
    ids = torch.arange(min(CHECKED, len(features)))
    with torch.no_grad():
        assert_close(name, [rival(next(batches(features, ids, CHECKED)))], [spin(features[ids])], rtol=1e-3)


def check_forms(family: str, model: gnn.Classifier, data: list[Data]) -> None:
    """All forms of a batch must give the same class scores and the same gradients."""
    results = {}
    for form in gnn.FORMS:
        (inputs,) = gnn.collated(data, len(data), form)
        logits = model(inputs)
        gradients = torch.autograd.grad(F.cross_entropy(logits, inputs.y), list(model.parameters()))
        results[form] = logits.detach(), *gradients
    expected = next(iter(results.values()))
    for form, result in results.items():
        assert_close(f"{family} {form}", result, expected, rtol=1e-3)


def predict_from_features(model: SPIN, features: PowerFeatures) -> Tensor:
    """Class probabilities ``[G, C]`` where the precomputation is over."""
    return training.predict(model, features).softmax(1)


def test_prediction(race: RaceRunner, dataset: str, graphs: GraphBatch, shape: Shape, spins: dict[str, SPIN]) -> None:
    """Class probabilities of all graphs from what is in memory: a GraphBatch for ours, PyG's graphs for its models.

    The name of a contender says what is made beforehand (features, batches).
    """
    features = PowerFeatures.from_graphs(graphs, DEPTH)
    contenders: dict[str, Callable[[], Tensor]] = {
        name: partial(training.predict_proba, spin, graphs, "sym") for name, spin in spins.items()
    }
    for name, spin in spins.items():
        made = f"{name}, features made"
        contenders[made] = partial(predict_from_features, spin, features)
        check_agreement({key: contenders[key] for key in (name, made)})
    num_ours = len(contenders)
    for family, make in gnn.MODELS.items():
        model = make(*shape)
        data = gnn.data_list(graphs, family)
        loader = DataLoader(data, BATCH_SIZE)
        passes: dict[str, Callable[[], Tensor]] = {}
        for form in gnn.FORMS:
            batches = gnn.collated(data, BATCH_SIZE, form)
            loaded = partial(gnn.loaded, loader, form)
            passes |= {
                f"{family} {form}, DataLoader": partial(predict_rival, model, loaded),
                f"{family} {form}, collated": partial(predict_rival, model, partial(iter, batches)),
            }
        check_agreement(passes)
        contenders |= passes
    case = "prediction, precomputation included"
    least = arithmetic_floor(spins["SPIN-att"], features, [torch.arange(len(features))], training=False)
    race(case, dataset, contenders, least, ours=num_ours, shortest=SHORTEST_SAMPLE)


@pytest.mark.full
def test_single_graphs(
    race: RaceRunner, dataset: str, graphs: GraphBatch, shape: Shape, spins: dict[str, SPIN], threads: int
) -> None:
    """Class probabilities of graphs in memory, one a call, as a server computes them that waits for no other request.

    A time is that of all calls, on graphs from the whole data set. Batches are made beforehand but where it says how.
    """
    chosen = graphs[torch.linspace(0, len(graphs) - 1, SINGLE_GRAPHS).long()]
    singles = [chosen[i : i + 1] for i in range(SINGLE_GRAPHS)]
    data = gnn.data_list(chosen, "GIN")
    spin = spins["SPIN-att"]
    predictor = training.Predictor(spin, "sym")
    ours = {
        "SPIN-att, Predictor, from edge_index": partial(
            one_by_one, lambda graph: predictor(GraphBatch.from_edge_index(graph.edge_index, graph.x)), data
        ),
        "SPIN-att, Predictor": partial(one_by_one, predictor, singles),
        "SPIN-att, predict_proba": partial(
            one_by_one, lambda graph: training.predict_proba(spin, graph, "sym"), singles
        ),
    }
    gin = gnn.gin(*shape).eval()
    forms: dict[str, nn.Module] = {"GIN edge_index": gin}
    if dataset in COMPILED_ON:
        forms["GIN edge_index, torch.compile"] = gnn.compiled(gin, threads)
    inputs = gnn.collated(data, 1, "edge_index")
    rivals = {
        f"{name}, collated": partial(one_by_one, lambda of, model=model: model(of).softmax(1), inputs)
        for name, model in forms.items()
    }
    rivals["GIN edge_index, collated in the call"] = partial(
        one_by_one, lambda graph: gin(gnn.edge_inputs(Batch.from_data_list([graph]))).softmax(1), data
    )
    for passes in (ours, rivals):
        check_agreement(passes)
    race(f"prediction, {SINGLE_GRAPHS} graphs one by one", dataset, ours | rivals, ours=len(ours))


@torch.inference_mode()
def one_by_one(predict: Callable[[Any], Tensor], graphs: Iterable[Any]) -> Tensor:
    """Class probabilities ``[G, C]``, a call for each graph."""
    return torch.cat([predict(graph) for graph in graphs])


def check_agreement(passes: Mapping[str, Callable[[], Tensor]]) -> None:
    """All must predict the same."""
    expected, *others = (predict() for predict in passes.values())
    for name, result in zip(list(passes)[1:], others, strict=True):
        assert_close(name, [result], [expected], rtol=1e-3)


def predict_rival(model: gnn.Classifier, batches: Callable[[], Any]) -> Tensor:
    """Class probabilities by a rival; ``batches`` starts the pass's iterator."""
    return gnn.predict(model, batches()).softmax(1)


@pytest.mark.full
@pytest.mark.prefer("NCI1")
def test_profile(session: Session, dataset: str, graphs: GraphBatch, shape: Shape) -> None:
    """A profile of the best GIN, to show that it is not slow by accident."""
    batches = gnn.collated(gnn.data_list(graphs, "GIN"), BATCH_SIZE, "CSR")
    with num_threads(1):
        epoch = epochs.of(gnn.gin(*shape), partial(epochs.shuffled, batches))
        epoch()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            epoch()
    operators = sorted(profile.key_averages(), key=lambda operator: -operator.self_cpu_time_total)
    total = sum(operator.self_cpu_time_total for operator in operators)
    rows = [
        (
            operator.key,
            f"{operator.count:,}",
            f"{operator.self_cpu_time_total / 1e3:.2f}",
            f"{operator.self_cpu_time_total / total:.1%}",
            f"{operator.cpu_time_total / total:.1%}",
        )
        for operator in operators[:TOP_OPERATORS]
    ]
    title = f"profile of a training epoch: GIN CSR, collated, {dataset}, batches of {BATCH_SIZE}, 1 thread"
    session.count(title, ("operator", "calls", "self CPU time, ms", "share", "with what it calls"), rows)


def test_resident_memory(session: Session, dataset: str, graphs: GraphBatch) -> None:
    """What the features of a whole data set take, against its hops as one dense array."""
    features = PowerFeatures.from_graphs(graphs, DEPTH, node_rows=False)
    rows = sum(array.nbytes for array in arrays_of(features.rows) if isinstance(array, Tensor))
    dense = (DEPTH + 1) * graphs.x.nbytes
    numbers = (f"{number / 1e6:,.1f}" for number in (dense, features.nbytes, rows))
    title, headers = "memory of a data set", ("input", "(R + 1) X, MB", "PowerFeatures, MB", "its rows, MB", "ratio")
    session.count(title, headers, [(dataset, *numbers, f"{features.nbytes / dense:.2f}")])


@pytest.mark.skipif(not peak.available(), reason="this system does not tell the peak memory of a process")
@pytest.mark.prefer("NCI1", "REDDIT-BINARY", "COLLAB", "ogbg-molhiv", "DD")
def test_peak_memory(session: Session, settings: Settings, dataset: str, graphs: GraphBatch, shape: Shape) -> None:
    """What a training run takes, with the graphs in the form that it keeps them in."""
    contenders = peak.TRAINED if settings.full else ["SPIN-att", "GIN, DataLoader"]
    peaks = peak.measure("training", graphs, contenders)
    first = next(iter(peaks.values()))
    rows = [
        (dataset if not number else "", name, f"{size / 1e6:,.0f}", f"{size / first:.2f}" if number else "")
        for number, (name, size) in enumerate(peaks.items())
    ]
    title = f"peak memory of a training run, graphs included, batches of {BATCH_SIZE}, 1 thread"
    session.count(title, ("input", "contender", "peak, MB", "/ ours"), rows, left=2)
