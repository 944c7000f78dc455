"""Transformer models from one kit of parts, with recipes that train them."""
