"""A decoder of the kit whose attention is bounded in every way there is, traced."""

from functools import partial

import torch
from shared_traces import trace
from tiny_models import LLAMA_PARTS
from torch import nn

from headway_export.tracing import TracedModel
from headway_server.bundles import Task
from headway_training.models import build_model

VOCAB_SIZE, MAX_LENGTH, NUM_LAYERS, WINDOW = 90, 48, 2, 9


class Bounded(nn.Module):
    """A decoder whose attention has a window, a cap, sinks and a bias of keys."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder, self.max_length = decoder, decoder.max_length
        self.sinks = nn.Parameter(torch.randn(4))
        self.bias = nn.Parameter(torch.randn(1, 4, 1, MAX_LENGTH))

    def hidden_states(self, input_ids, position_ids, attend):
        bounded = partial(attend, window=WINDOW, softcap=4.0, sinks=self.sinks, bias=self.bias)
        return self.decoder.hidden_states(input_ids, position_ids, bounded)

    def logits(self, hidden_states):
        return self.decoder.logits(hidden_states)


def traced_decoder(*, is_bounded: bool = True, is_llama: bool = False) -> TracedModel:
    torch.manual_seed(3)
    sizes = {"num_layers": NUM_LAYERS, "d_model": 64, "num_heads": 4, "d_ff": 128}
    parts = LLAMA_PARTS if is_llama else {}
    model = build_model("gpt", {"vocabulary_size": VOCAB_SIZE, "max_length": MAX_LENGTH, **sizes, **parts})
    for parameter in model.parameters():
        parameter.data *= 3  # so that attention looks at something
    return trace((Bounded(model) if is_bounded else model).eval(), Task.GENERATION)
