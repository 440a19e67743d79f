"""``PowerFeatures.from_graphs`` against the powers alone, and against PyTorch's search for distinct rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from spin_fast import GraphBatch, PowerFeatures, power_features
from spin_fast.features.chunks import power_chunks
from spin_fast.features.power_features import chunk_limits

from .harness import floors
from .harness.inputs import NUM_HOPS
from .harness.plugin import RaceRunner


def test_from_graphs(race: RaceRunner, dataset: str, graphs: GraphBatch, threads: int) -> None:
    """Three hops of ``sym``. What the search for distinct rows adds to the powers, and to storing them all."""
    arrays = (graphs.indptr, graphs.indices, graphs.x, NUM_HOPS)
    powers = partial(power_features, *arrays, ptr=graphs.ptr, check_invariants=False)

    def unique() -> list[Tensor]:
        """Rows and the row of each node, without the entries of the graphs. Sums in float64 let equal rows be equal."""
        return [rows.unique(dim=0, return_inverse=True)[0] for rows in powers(float64_sums=True)]

    features = PowerFeatures.from_graphs(graphs, NUM_HOPS)
    if features.index is not None:
        assert [len(rows) for rows in unique()] == features.row_ptr.diff().tolist()
    contenders = {
        "from_graphs": partial(PowerFeatures.from_graphs, graphs, NUM_HOPS),
        "from_graphs, deduplicate=False": partial(PowerFeatures.from_graphs, graphs, NUM_HOPS, deduplicate=False),
        "power_features, contents trusted": powers,
        "power_features, float64_sums": partial(powers, float64_sums=True),
        "power_features, float64_sums, torch.unique": unique,
    }
    once = list(contenders)[4:]

    def chunks() -> Iterator[tuple[Tensor, Tensor]]:
        limits = chunk_limits(graphs.x, NUM_HOPS + 1)
        for chunk in power_chunks(graphs, NUM_HOPS, "sym", *limits, float64_sums=True):
            yield chunk.powers, chunk.ptr

    for by_slots in (False, True) if threads == 1 else ():
        if told := floors.told_search(graphs, features, chunks, by_slots=by_slots):
            *rows, _, _, _, _ = told()
            assert torch.equal(torch.cat(rows).view(torch.int32), features.rows.to_dense().view(torch.int32))
            contenders["told which rows are equal" + (" and the slot of each" if by_slots else "")] = told
    race("PowerFeatures.from_graphs", dataset, contenders, ours=4, once=once)
