"""Batches for stateless models (docs/batching.md)."""
