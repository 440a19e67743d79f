"""The machinery of the races: pytest plugin, clocks, floors, inputs, report."""
