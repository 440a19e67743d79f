"""Data sets by name, and graphs of your own: raw files, or a generator, to a ``GraphBatch``.

Built in, without files: ``digits`` (the default), ``erdos-renyi``, ``random-regular``, ``power-law``, and ``CSL``
where there is no file of that name.
From files: TU sets (``NAME.zip``, ``NAME/``, ``NAME/raw/``), ``NAME.nel``, OGB's molecules (``ogbg_molhiv/``), and any
folder that :func:`load_folder` reads. They are looked for in one folder, ``root`` or else the environment variable
``SPIN_FAST_DATA``, and where neither says which, in ``data`` and then in the cache: ``SPIN_FAST_CACHE``, or the
system's place for caches.

``load(name, download=True)`` and ``download(name)`` get TU sets and OGB's molecules from their official sites into that
folder, or else into the cache. Nothing is downloaded unasked.
"""

from .built_in import csl, erdos_renyi, power_law, random_regular
from .citation import NodeDataset
from .common import DatasetError, Folder
from .folder import iter_folder, load_folder
from .ogb import evaluator
from .parquet import write_parquet
from .reader import Reader
from .registry import Source, cora, download, find, load, names
from .splits import NoPublishedSplits, Split, stratified_folds
from .summary import summarize

__all__ = [
    "DatasetError",
    "Folder",
    "NoPublishedSplits",
    "NodeDataset",
    "Reader",
    "Source",
    "Split",
    "cora",
    "csl",
    "download",
    "erdos_renyi",
    "evaluator",
    "find",
    "iter_folder",
    "load",
    "load_folder",
    "names",
    "power_law",
    "random_regular",
    "stratified_folds",
    "summarize",
    "write_parquet",
]
