"""Beam search over many sentences at once."""
