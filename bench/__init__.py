"""Benchmarks: `python -m bench.run` from the repository's root."""
