"""Texts that are made of texts: translation, and what else encoder-decoders write."""
