"""Drills: what a server withstands, shown by running it. `python -m benchmarks.drills NAME`; docs/reliability.md."""
