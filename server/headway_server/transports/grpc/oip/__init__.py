"""The Open Inference Protocol: models called with named tensors, by clients that were not made for this server."""
