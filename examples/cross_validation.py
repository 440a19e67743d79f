"""Cross-validation on a TU set: python examples/cross_validation.py IMDB-BINARY --root data

The folds are those of Errica et al. (2020) where ROOT/splits has them, else stratified ones. Every fold chooses
its epoch by its validation graphs, and its test graphs are looked at once.
"""

import argparse
import statistics
import sys

import torch

from spin_fast import SPIN, PowerFeatures, datasets, training

parser = argparse.ArgumentParser()
parser.add_argument("name", nargs="?", default="IMDB-BINARY")
parser.add_argument("--root", help="folder of the data sets; by default $SPIN_FAST_DATA, or data")
parser.add_argument("--epochs", type=int, default=30)
arguments = parser.parse_args()

try:
    graphs = datasets.load(arguments.name, arguments.root)
except datasets.DatasetError as error:
    sys.exit(f"{error}\n`spin-fast info {arguments.name} --download` gets a TU set from its official site.")
try:
    folds, kind = datasets.find(arguments.name, arguments.root).published_splits(len(graphs)), "published"
except datasets.NoPublishedSplits:
    folds, kind = datasets.stratified_folds(graphs.y), "stratified"

features = PowerFeatures.from_graphs(graphs, num_hops=3)  # once for all folds: no fold changes it
accuracies = []
for number, fold in enumerate(folds):
    torch.manual_seed(number)
    model = SPIN(graphs.num_features, 32, int(graphs.y.max()) + 1, num_hops=3, attention=False)
    model.calibrate(features[fold.train])
    training.fit(model, features, fold.train, fold.validation, epochs=arguments.epochs, seed=number)
    scores = training.predict(model, features, fold.test)
    accuracies.append(training.accuracy(scores, graphs.y[fold.test]))
    print(f"fold {number}: {accuracies[-1]:.1%}")
mean, deviation = statistics.mean(accuracies), statistics.stdev(accuracies)
print(f"{arguments.name}, {len(folds)} {kind} folds: {mean:.1%} ± {deviation:.1%}")
