"""Drills: what a server withstands, shown by running it. `python -m tests.drills NAME`; docs/reliability.md."""
