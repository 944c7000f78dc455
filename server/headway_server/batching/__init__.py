"""Batches of stateless graphs, whatever their inputs and outputs (docs/batching.md)."""

from headway_server.batching.batcher import BatchedResults, Batcher, BatchError
from headway_server.batching.graph import BatchGraph, Postprocess, RunCosts, Tensors, measure_costs

__all__ = [
    "BatchError",
    "BatchGraph",
    "BatchedResults",
    "Batcher",
    "Postprocess",
    "RunCosts",
    "Tensors",
    "measure_costs",
]
