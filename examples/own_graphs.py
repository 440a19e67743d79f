"""Graphs of one's own, from lists of edges to a saved model that classifies new ones.

The graphs are trees that grew in two ways: each new node hangs on a node drawn at random, or on a node of one of the
edges so far, so that nodes with many neighbours get more.
"""

import random
import tempfile
from pathlib import Path

import torch

from spin_fast import SPIN, GraphBatch, NodeFeatures, PowerFeatures, training


def tree(kind: int, num_nodes: int) -> list[tuple[int, int]]:
    edges = [(0, 1)]
    for node in range(2, num_nodes):
        parent = random.randrange(node) if kind == 0 else random.choice(random.choice(edges))
        edges.append((parent, node))
    return edges


def batch_of(kinds: list[int]) -> GraphBatch:
    """All trees side by side: the nodes of each come after those of the one before."""
    sizes = [random.randint(30, 60) for _ in kinds]
    edges, first = [], 0
    for kind, size in zip(kinds, sizes, strict=True):
        edges += [(first + source, first + target) for source, target in tree(kind, size)]
        first += size
    return GraphBatch.from_edge_index(
        torch.tensor(edges).t(),
        x=torch.ones(first, 1),  # nodes have no features of their own
        batch=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        y=torch.tensor(kinds),
        undirected=True,  # each edge is listed once
    )


random.seed(0)
torch.manual_seed(0)
graphs = batch_of([number % 2 for number in range(600)])
train, validation = range(500), range(500, 600)
node_features = NodeFeatures(degree="log").fit(graphs, train)
features = PowerFeatures.from_graphs(node_features.transform(graphs), num_hops=2)  # once
model = SPIN(features.num_features, 32, 2, num_hops=2, attention=False)
model.calibrate(features[train])
training.fit(model, features, train, validation, epochs=20)  # it knows node_features then, for what it predicts

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    training.save_checkpoint(path, model)
    model, _ = training.load_checkpoint(path)
new = batch_of([number % 2 for number in range(200)])
print(f"accuracy on new graphs: {training.accuracy(training.predict_proba(model, new), new.y):.1%}")
