"""Continuous batching of decoders (docs/engine.md)."""
