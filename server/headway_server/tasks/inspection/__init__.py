"""Attention maps (docs/attention.md)."""
