"""Loads the plugin, under the name of whatever package this folder is: ``benchmarks`` or ``spin_fast.benchmarks``."""

import sys

# An editable installation is met under both names; the options must not be registered twice.
pytest_plugins = [] if "spin_fast.benchmarks.harness.plugin" in sys.modules else [f"{__package__}.harness.plugin"]
