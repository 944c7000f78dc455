"""Masks that reach the attention of int8 graphs: padding on the right, and everything else that a module may hide."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch import nn

from headway_export.tracing import trace
from headway_server.bundles import Task
from headway_training.models.parts.attention import scaled_dot_product_attention

WIDTH, HEADS, LENGTH = 32, 4, 16


class Attending(nn.Module):
    """A module that shows its attention: an output for each of several calls of its kernel, (B, WIDTH)."""

    max_length = LENGTH

    def __init__(self, masks=None):
        super().__init__()
        self.kernel = scaled_dot_product_attention
        self.masks = masks or {}
        self.tokens = nn.Embedding(50, WIDTH)
        self.product = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, states):
        return self.product(states).unflatten(-1, (3, HEADS, -1)).unbind(2)

    def forward(self, input_ids, attention_mask):
        heads = self.heads(self.tokens(input_ids))
        masks = {name: of(attention_mask, input_ids) for name, of in self.masks.items()}
        return {name: self.kernel(*heads, mask).flatten(2).sum(dim=1) for name, mask in masks.items()}


def of_keys(mask):
    return mask.bool()[:, None, None]


def places(mask):
    return torch.arange(mask.shape[1])


HIDING = {
    "a_hole": lambda mask, _: of_keys(mask * (places(mask) % 3 != 1)),
    "the_first_token": lambda mask, _: of_keys(mask) & (places(mask) > 0),
    "tokens_of_an_id": lambda mask, ids: of_keys(mask) & (ids != 7)[:, None, None],
    "padding_on_the_left": lambda mask, _: of_keys(mask.flip(1)),
    "what_the_mask_shows": lambda mask, _: of_keys(1 - mask),
    "what_the_first_row_hides": lambda mask, _: of_keys(mask)[:1],
    "a_key_each_query": lambda mask, _: of_keys(mask) & (places(mask)[:, None] != places(mask)),
    "a_key_each_head": lambda mask, _: of_keys(mask) & (torch.arange(HEADS) > 1)[:, None, None],
}
GIVEN = {
    "nothing": lambda *_: None,
    "indexed": lambda mask, _: of_keys(mask),
    "cast_last": lambda mask, _: mask[:, None, None, :].to(torch.bool),
    "viewed": lambda mask, _: mask.view(mask.shape[0], 1, 1, mask.shape[1]).float().bool(),
}


def operators_of_an_equal_graph(module, task, feeds, folder, **options):
    """Holds the graph for the CPU against PyTorch, and returns its operators."""
    graph = trace(module.eval(), task, for_cpu=True, **options).graphs[0]
    ir.save(graph.model, folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    with torch.inference_mode():
        outputs = module(*map(torch.from_numpy, feeds.values()))
    for name, expected in outputs.items():
        (found,) = session.run([name], feeds)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    return [node.op_type for node in graph.model.graph]


def text_feeds():
    lengths = np.array([9, 3, LENGTH, 1])
    ids = np.random.default_rng(0).integers(5, 10, (4, LENGTH))
    return {"input_ids": ids, "attention_mask": (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)}


def test_a_mask_of_the_modules_own_hides_in_int8_what_it_hides_in_fp32(tmp_path):
    torch.manual_seed(0)
    module = Attending(HIDING)
    operators = operators_of_an_equal_graph(module, Task.TEXT_CLASSIFICATION, text_feeds(), tmp_path)
    assert "GroupQueryAttention" not in operators


def test_the_mask_that_a_graph_is_given_becomes_lengths_of_one_operator(tmp_path):
    torch.manual_seed(0)
    module = Attending(GIVEN)
    operators = operators_of_an_equal_graph(module, Task.TEXT_CLASSIFICATION, text_feeds(), tmp_path)
    assert operators.count("GroupQueryAttention") == 2  # one for nothing, and one: the others are the same
    assert "Softmax" not in operators


class PatchesApart(Attending):
    """Its patches do not see the first one, and the first one sees all: fewer queries than keys."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)

    def forward(self, pixel_values):
        states = self.patches(pixel_values).flatten(2).transpose(1, 2)
        query, key, value = self.heads(states)
        mask = (torch.arange(states.shape[1]) > 0).expand(states.shape[0], 1, 1, -1)
        return {
            "others": self.kernel(query, key, value, mask).flatten(2).sum(dim=1),
            "first": self.kernel(query[:, :1], key, value).flatten(2).sum(dim=1),
        }


def test_patches_see_in_int8_what_they_see_in_fp32(tmp_path):
    torch.manual_seed(0)
    feeds = {"pixel_values": np.random.default_rng(0).normal(size=(3, 3, 16, 16)).astype(np.float32)}
    operators_of_an_equal_graph(PatchesApart(), Task.IMAGE_CLASSIFICATION, feeds, tmp_path, image_size=(16, 16))
