"""The engine: scheduling of sequences to slots, and the steps (docs/engine.md)."""
