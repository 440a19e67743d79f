"""What the races are made of: the pytest plugin, clocks, floors, inputs, and the report."""
