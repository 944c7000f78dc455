"""Measures headway beside other libraries and servers: `python -m benchmarks --help`."""
