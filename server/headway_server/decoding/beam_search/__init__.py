"""Beam search over many sequences at once (docs/beams.md)."""
