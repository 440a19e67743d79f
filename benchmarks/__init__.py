"""The benchmark suite: ``pytest benchmarks/`` in a checkout, ``spin-fast bench`` where the package is installed."""
