"""Text-to-text tasks of encoder-decoders, including translation."""
