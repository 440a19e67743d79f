"""``python -m spin_fast.cli``."""

from . import main

main()
