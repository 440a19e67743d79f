"""Class probabilities of Parquet files with a row per graph, by Ray Data on one machine or many.

    python examples/ray_predict.py MODEL FOLDER OUT

The paths are absolute, on storage that all machines see. Actors load the model once and take shards of the graphs in
turn, each read a few graphs at a time. Without arguments a model of digits is trained and applied to them.
"""

import sys
import tempfile

import numpy as np
import ray
import torch
from pyarrow import parquet

from spin_fast import SPIN, PowerFeatures, datasets, training

ACTORS, SHARDS = 2, 8


class Predictor:
    def __init__(self, model: str, folder: str) -> None:
        self.folder = folder
        self.model, trained = training.load_checkpoint(model)
        self.options = {"features": trained.get("node_features"), "label": None, **(trained.get("edge_options") or {})}
        self.options |= {"edge_weight": None} if trained.get("weighted") is False else {}

    def __call__(self, batch):
        for shard in batch["shard"].tolist():
            for chunk in datasets.iter_folder(self.folder, 1024, shard=(shard, SHARDS), **self.options):
                probabilities = training.predict_proba(self.model, chunk.graphs)
                yield {"name": np.array(chunk.names, dtype=object), "probabilities": probabilities.numpy()}


def predict(model: str, folder: str, out: str) -> None:
    shards = ray.data.from_items([{"shard": number} for number in range(1, SHARDS + 1)])
    made = shards.map_batches(Predictor, fn_constructor_args=(model, folder), batch_size=1, concurrency=ACTORS)
    made.write_parquet(out)


ray.init(num_cpus=ACTORS, include_dashboard=False, log_to_driver=False)  # ray.init("auto") joins a cluster
if len(sys.argv) == 4:
    predict(*sys.argv[1:])
    sys.exit()
torch.manual_seed(0)
graphs = datasets.load("digits")
features = PowerFeatures.from_graphs(graphs, num_hops=2)
spin = SPIN(features.num_features, 32, 10, num_hops=2, attention=False)
spin.calibrate(features[:1500])
training.fit(spin, features, range(1500), range(1500, 1797), epochs=20)
with tempfile.TemporaryDirectory() as place:
    model, folder, out = (f"{place}/{name}" for name in ("model.safetensors", "graphs.parquet", "out"))
    training.save_checkpoint(model, spin)
    datasets.write_parquet(graphs, folder)
    predict(model, folder, out)
    rows = sorted(parquet.read_table(out).to_pylist(), key=lambda row: int(row["name"]))
right = [int(np.argmax(row["probabilities"])) == y for row, y in zip(rows, graphs.y.tolist(), strict=True)]
print(f"accuracy of {len(rows):,} predictions: {np.mean(right):.1%}")
