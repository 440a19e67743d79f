"""The command ``spin-fast``: one module per command."""

# isort: off  (each adds its command, and --help lists them in this order)
from . import (
    bench,  # noqa: F401
    info,  # noqa: F401
    precompute,  # noqa: F401
    predict,  # noqa: F401
    train,  # noqa: F401
)

# isort: on
from ._common import app


def main() -> None:
    """Entry point of the console script."""
    app()
