"""Decoders and encoders on ONNX Runtime, and the memory that holds their state."""
