"""The window of tokens that is read before the first layer."""

import numpy as np
import pytest
import torch

from headway_training.models import build_model
from headway_training.models.encoder import TokenWindow

FIELDS = {
    "vocabulary_size": 50,
    "max_length": 40,
    "num_layers": 1,
    "d_model": 16,
    "num_heads": 2,
    "d_ff": 32,
    "head": "token",
    "num_classes": 5,
}


@torch.inference_mode()
def test_a_token_is_read_with_its_neighbours_alone():
    torch.manual_seed(0)
    window = TokenWindow(16, 2, 0.0).eval()
    states = torch.randn(1, 9, 16)
    mask = torch.ones(1, 9, dtype=torch.long)
    changed = states.clone()
    changed[0, 4, 0] += 1
    differs = (window(states, mask) - window(changed, mask)).abs().amax(-1)[0] > 1e-6
    assert differs.tolist() == [2 <= place <= 6 for place in range(9)]


@torch.inference_mode()
def test_it_is_the_layer_over_the_tokens_side_by_side():
    torch.manual_seed(0)
    window = TokenWindow(4, 1, 0.0).eval()
    states = torch.randn(1, 3, 4)
    own = torch.nn.functional.layer_norm(states[0], (4,))
    zeros = torch.zeros(4)
    rows = [torch.cat([own[i - 1] if i else zeros, own[i], own[i + 1] if i < 2 else zeros]) for i in range(3)]
    expected = states[0] + torch.nn.functional.gelu(window.project(torch.stack(rows)))
    torch.testing.assert_close(window(states, torch.ones(1, 3, dtype=torch.long))[0], expected)


@torch.inference_mode()
def test_a_padded_row_answers_as_alone_whatever_stands_in_the_padding():
    torch.manual_seed(0)
    model = build_model("encoder", {**FIELDS, "window": 2}).double().eval()
    torch.nn.init.normal_(model.tokens.weight, std=1.0)
    ids = torch.from_numpy(np.random.default_rng(1).integers(1, 50, (2, 12)))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    alone = model(ids[:1, :7], mask[:1, :7])
    together = model(ids, mask)
    torch.testing.assert_close(together[:1, :7], alone)
    ids[0, 7:] = 49
    assert torch.equal(model(ids, mask)[0, :7], together[0, :7])


def test_a_model_without_it_has_no_weights_for_it():
    names = set(build_model("encoder", FIELDS).state_dict())
    assert set(build_model("encoder", {**FIELDS, "window": 1}).state_dict()) > names
    with pytest.raises(ValueError, match="window must be an integer of at least 0"):
        build_model("encoder", {**FIELDS, "window": -1})


@torch.inference_mode()
def test_it_can_be_traced_with_batches_and_lengths_of_any_size():
    torch.manual_seed(0)
    model = build_model("encoder", {**FIELDS, "window": 2}).eval()
    dynamic = torch.export.Dim.DYNAMIC
    example = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    shapes = ({0: dynamic, 1: dynamic}, {0: dynamic, 1: dynamic})
    program = torch.export.export(model, example, dynamic_shapes=shapes).module()
    for size in ((1, 1), (3, 2), (2, 17)):
        ids = torch.randint(1, 50, size)
        torch.testing.assert_close(program(ids, torch.ones_like(ids)), model(ids, torch.ones_like(ids)))
