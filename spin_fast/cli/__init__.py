"""The command ``spin-fast``: one module per command."""

import os
import sys

# Each adds its command; --help lists them in this order.
# isort: off
from . import train as train
from . import predict as predict
from . import explain as explain
from . import precompute as precompute
from . import evaluate as evaluate
from . import info as info
from . import bench as bench

# isort: on
from ._app import app
from ._errors import message_of, settle_output
from ._ranks import launch


def main() -> None:
    """Entry point of the console script."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed: what is for it goes nowhere, and no file of ours gets its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        elif name != "stdin":
            stream.reconfigure(errors="replace")  # such as ± on a terminal that knows ASCII only
    try:
        with launch().one_voice():
            app()
    except OSError as error:  # of --help: commands tell their own, and let it through with --debug
        if "--debug" in sys.argv:
            raise
        settle_output()
        sys.exit(f"spin-fast: error: {message_of(error)}")
