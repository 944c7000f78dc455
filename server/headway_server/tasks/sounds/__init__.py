"""Sounds that a model without a decoder reads whole."""
