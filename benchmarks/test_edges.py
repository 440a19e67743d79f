"""The experiment of the paper: 100 epochs, and what is made before them, as the edges of random graphs grow in number.

Erdos-Renyi graphs of 100 nodes with 50 random features. The paper does not say how many graphs; here they are 1,000, in
two classes that mean nothing. An epoch and the preparation are timed, and the preparation and 100 epochs are reported.
For SPIN the preparation is the precomputation, for a rival that collates its batches beforehand it is that, and for one
with a DataLoader there is none; to sort edges and to normalise the GCN's is not counted.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from spin_fast import SPIN, PowerFeatures, datasets

from .harness import epochs
from .harness.epochs import DEPTH, WIDTH
from .harness.plugin import RaceRunner
from .harness.race import Contender
from .harness.report import Session

pytest.importorskip("torch_geometric", reason="the rivals are PyG's GIN and GCN: install torch_geometric")

from torch_geometric.loader import DataLoader

from .rivals import gnn

NUM_GRAPHS = 1000
FEW_GRAPHS = 32  # with --quick
P = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
NUM_NODES = 100
NUM_FEATURES = 50
NUM_CLASSES = 2
NUM_EPOCHS = 100
BATCH_SIZE = 128


@pytest.mark.full
@pytest.mark.parametrize("p", P)
def test_edges(race: RaceRunner, session: Session, quick: bool, p: float, threads: int) -> None:
    num_graphs = FEW_GRAPHS if quick else NUM_GRAPHS
    graphs = datasets.erdos_renyi(num_graphs, NUM_NODES, (p,) * NUM_CLASSES, NUM_FEATURES)
    shape = NUM_FEATURES, WIDTH, NUM_CLASSES, DEPTH
    torch.manual_seed(0)
    precompute = partial(PowerFeatures.from_graphs, graphs, DEPTH, deduplicate=False)  # no two nodes are alike
    features = precompute()
    spins: dict[str, Contender] = {
        name: epochs.ours(SPIN(*shape, attention=attention), features, BATCH_SIZE)
        for name, attention in (("SPIN-att", True), ("SPIN-sum", False))
    }
    preparing: dict[str, Contender] = {"prepare SPIN": precompute}
    preparation = dict.fromkeys(spins, "prepare SPIN")
    message_passing: dict[str, Contender] = {}
    for family, make in gnn.MODELS.items():
        data = gnn.data_list(graphs, family)
        loaded = partial(gnn.loaded, DataLoader(data, BATCH_SIZE, shuffle=True), "edge_index")
        collate = partial(gnn.collated, data, BATCH_SIZE, "CSR")
        message_passing[f"{family} edge_index, DataLoader"] = epochs.of(make(*shape), loaded)
        message_passing[f"{family} CSR, collated"] = epochs.of(make(*shape), partial(epochs.shuffled, collate()))
        preparing[f"prepare {family} CSR"] = collate
        preparation[f"{family} CSR, collated"] = f"prepare {family} CSR"
    case = f"training epoch, {num_graphs:,} Erdos-Renyi graphs"
    contenders = spins | preparing | message_passing  # a preparation is no rival
    run = race(case, f"p = {p:g}", contenders, ours=len(spins | preparing))
    times = run.time
    title = f"{NUM_EPOCHS} epochs, preparation included, {num_graphs:,} Erdos-Renyi graphs, {run.place}"
    curves = session.along("p", title)
    for name in spins | message_passing:
        before = times(preparation[name]).median if name in preparation else 0.0
        curves.seconds.setdefault(name, {})[p] = before + NUM_EPOCHS * times(name).median
