from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import cuda_kernels
import pytest
import torch
from helpers import DATA, ISAS
from hypothesis import HealthCheck, settings

from spin_fast.ops import native as native_module

health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
settings.register_profile("spin_fast", deadline=None, max_examples=30, suppress_health_check=health)
settings.register_profile("thorough", settings.get_profile("spin_fast"), max_examples=400)
settings.load_profile("spin_fast")

# Tests that start pytest give it options of their own, and those of commands the width of the terminal.
os.environ.pop("PYTEST_ADDOPTS", None)
os.environ.pop("COLUMNS", None)

# Tests are many and small: threads would wait for each other, above all where the cores are shared.
torch.set_num_threads(1)

BEST = native_module.library.isa_available()[-1] if native_module.library is not None else None
LEVELS = [pytest.param(isa, marks=() if isa == BEST else pytest.mark.slow) for isa in ISAS]


@pytest.fixture(params=[*LEVELS, "reference", "cuda"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every instruction set that this CPU has, the reference path, and the CUDA kernels, emulated without a GPU."""
    if request.param == "reference":
        monkeypatch.setattr(native_module, "library", None)
        yield "reference"
        return
    library = require_native()
    if request.param == "cuda":
        with cuda_kernels.standing_in():
            yield "cuda"
        return
    if request.param not in library.isa_available():
        pytest.skip(f"this CPU does not have {request.param}")
    before = library.isa()
    library.set_isa(request.param)
    yield request.param
    library.set_isa(before)


def require_native():
    if native_module.library is None:
        pytest.skip(f"no compiled library: {native_module.missing_reason}")
    return native_module.library


@pytest.fixture
def native():
    """The compiled module _C."""
    return require_native()


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill what kernels get as uninitialised memory, outputs and scratch, with NaN, so that reading it shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    if native_module.library is not None:
        native_module.library.poison_scratch(True)
    yield
    torch.use_deterministic_algorithms(False)
    if native_module.library is not None:
        native_module.library.poison_scratch(False)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real datasets: SPIN_FAST_DATA, or ``shared/data`` beside the checkout."""
    if not DATA.is_dir():
        pytest.skip(f"no datasets: set SPIN_FAST_DATA to a folder of TU zips (looked in {DATA})")
    return DATA
