"""A recurrent encoder-decoder from outside the kit: an LSTM, whose state is two tensors, and dot-product attention."""

import torch
from torch import nn

VOCABULARY, WIDTH, STATE, LENGTH = 80, 16, 24, 32


class ForeignRecurrent(nn.Module):
    max_source_length = LENGTH
    max_target_length = LENGTH

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.query = nn.Linear(STATE, WIDTH)
        self.gates = nn.Linear(2 * WIDTH + STATE, 4 * STATE)
        self.first = nn.Linear(WIDTH, 2 * STATE)
        self.output = nn.Linear(STATE, VOCABULARY)

    def encode_source(self, input_ids, attention_mask, _recur):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        memory = self.source(input_ids) + self.positions(positions)
        kept = attention_mask[..., None].to(memory.dtype)
        mean = (memory * kept).sum(1) / kept.sum(1)
        return (memory,), tuple(self.first(mean).tanh().chunk(2, dim=-1))

    def step(self, token_ids, states, cross, source_mask):
        hidden, cell = states
        (memory,) = cross
        scores = self.query(hidden) @ memory.transpose(1, 2)
        weights = scores.masked_fill(source_mask[:, None] == 0, -1e4).softmax(-1)
        read = torch.cat((self.target(token_ids), weights @ memory, hidden), dim=-1)
        keep, write, show, proposed = self.gates(read).chunk(4, dim=-1)
        cell = keep.sigmoid() * cell + write.sigmoid() * proposed.tanh()
        hidden = show.sigmoid() * cell.tanh()
        return self.output(hidden), (hidden, cell), weights

    def decode(self, token_ids):
        """A helper, with a name that belongs to another protocol."""
        return " ".join(map(str, token_ids))


def build():
    return ForeignRecurrent()


class ForgetsAState(ForeignRecurrent):
    def step(self, token_ids, states, cross, source_mask):
        logits, (hidden, _), weights = super().step(token_ids, states, cross, source_mask)
        return logits, (hidden,), weights


def build_forgetful():
    return ForgetsAState()


class ReadsByGRU(ForeignRecurrent):
    """Its encoder is a GRU of both directions, and so is its decoder one of its own, of one direction."""

    def __init__(self, mask_of=lambda mask: mask, directions=2):
        super().__init__()
        self.mask_of = mask_of
        self.reader = nn.GRU(WIDTH, WIDTH // directions, batch_first=True, bidirectional=directions == 2)
        self.writer = nn.GRU(2 * WIDTH, STATE, batch_first=True)

    def encode_source(self, input_ids, attention_mask, recur):
        memory, last = recur(self.reader, self.source(input_ids), self.mask_of(attention_mask))
        return (memory,), self.first(torch.cat((last[0], last[1]), dim=-1)).tanh().chunk(2, dim=-1)

    def step(self, token_ids, states, cross, source_mask):
        hidden, cell = states
        (memory,) = cross
        scores = self.query(hidden) @ memory.transpose(1, 2)
        weights = scores.masked_fill(source_mask[:, None] == 0, -1e4).softmax(-1)
        read = torch.cat((self.target(token_ids), weights @ memory), dim=-1).flatten(0, 1)[:, None]
        written, _ = self.writer(read, hidden.flatten(0, 1)[None])
        hidden = written[:, 0].unflatten(0, token_ids.shape)
        return self.output(hidden), (hidden, cell), weights


def build_reading_by_gru():
    return ReadsByGRU()
