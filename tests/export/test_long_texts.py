"""Models of long texts, whose graphs attend in chunks of queries, held against PyTorch."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_embedders
import torch

from headway_export.huggingface import FolderOptions, from_folder
from headway_export.rewriting import ChunkAttention, chunk_length
from headway_export.tracing import trace
from headway_server.bundles import Task

MOST_SCORES = 256
"""A text of 16 tokens is one chunk."""


def test_a_chunk_has_about_the_same_scores_at_any_length():
    assert [chunk_length(length) for length in (0, 512, 1024, 1025, 8192, 32768)] == [0, 512, 1024, 513, 128, 32]


@pytest.mark.parametrize("family", ["modernbert", "mpnet", "qwen3"])
def test_chunks_of_queries_give_what_all_at_once_give(tmp_path, monkeypatch, family):
    """Of a mask with a window, of one with a bias of positions, and of a causal one."""
    source, _ = from_folder(tiny_embedders.write_sentence_transformer(tmp_path / "model", family), FolderOptions())
    monkeypatch.setattr(ChunkAttention, "MOST_SCORES", MOST_SCORES)
    [graph] = trace(source.module, Task.TEXT_EMBEDDING).graphs
    whole = {node.op_type for node in graph.model.graph}
    assert ("Loop" in whole, "Softmax" in whole) == (True, False)
    session = onnxruntime.InferenceSession(ir.to_proto(graph.model).SerializeToString())
    for lengths in ([1], [16], [17], [47], [33, 2, 17]):
        mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
        ids = np.random.default_rng(0).integers(5, 70, mask.shape) * mask
        [found] = session.run(None, {"input_ids": ids, "attention_mask": mask})
        with torch.no_grad():
            expected = source.module(torch.from_numpy(ids), torch.from_numpy(mask))["embedding"]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


def test_the_memory_of_a_run_is_counted_and_does_not_grow_with_the_square_of_a_long_text(tmp_path, monkeypatch):
    source, _ = from_folder(tiny_embedders.write_sentence_transformer(tmp_path / "model", "bert"), FolderOptions())
    source.module.max_length, taken = 480, []
    for most_scores in (MOST_SCORES, 480 * 479):
        monkeypatch.setattr(ChunkAttention, "MOST_SCORES", most_scores)
        taken.append(trace(source.module, Task.TEXT_EMBEDDING).graphs[0].run_bytes)
    in_small_chunks, in_two_halves = taken
    assert 480 * 32 * 4 < in_small_chunks < in_two_halves / 4
