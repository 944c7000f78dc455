"""Decoders and encoders on ONNX Runtime, and the memory of their state."""
