"""Batches of stateless graphs, whatever their inputs and outputs (docs/batching.md)."""

from headway_server.batching.batcher import BatchedResults, Batcher, BatchError
from headway_server.batching.graph import BatchGraph, Postprocess, Tensors, measure_padding, measure_run

__all__ = [
    "BatchError",
    "BatchGraph",
    "BatchedResults",
    "Batcher",
    "Postprocess",
    "Tensors",
    "measure_padding",
    "measure_run",
]
