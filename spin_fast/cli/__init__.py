"""The command ``spin-fast``: one module per command."""

# Each adds its command; --help lists them in this order.
# isort: off
from . import train as train
from . import predict as predict
from . import precompute as precompute
from . import evaluate as evaluate
from . import info as info
from . import bench as bench

# isort: on
from ._app import app


def main() -> None:
    """Entry point of the console script."""
    app()
