"""The engine: which sequence runs, in which slot, and what a step computes (docs/engine.md)."""
