# ruff: noqa: ARG002 -- methods of one kind take the same arguments
"""Modules whose graph computes something else than they do, each in a way of its own: no proof may pass them.

`TEXT`, `DECODERS`, `TRANSLATORS` and `IMAGES` list them by what they read. Each is right where the tracer looks: on a
few rows of five tokens, once.
"""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY, WIDTH, HEADS, LENGTH, CLASSES = 80, 16, 2, 320, 4
SIDE = 8


def exporting():
    """True while the module is traced, as a module asks which takes a quicker way then."""
    return torch.compiler.is_exporting()


# Classifiers of texts


class Classifier(nn.Module):
    """Embeddings, attention without positions, and a mean: right, as it is."""

    max_length = LENGTH

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def embed(self, input_ids):
        return self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))

    def attend(self, hidden, attention_mask):
        query, key, value = self.query_key_value(hidden).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5
        scores = scores.masked_fill(attention_mask[:, None] == 0, -1e4)
        return hidden + scores.softmax(dim=-1) @ value

    def pool(self, hidden, attention_mask):
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)

    def forward(self, input_ids, attention_mask):
        return self.head(self.pool(self.attend(self.embed(input_ids), attention_mask), attention_mask))


class SwitchesItself(Classifier):
    """Attends to neighbours alone until it has read a short text, and to all from then on, as BigBird does."""

    is_full = False

    def attend(self, hidden, attention_mask):
        self.is_full = self.is_full or hidden.shape[1] <= 256
        if self.is_full:
            return super().attend(hidden, attention_mask)
        return hidden + self.query_key_value(hidden.roll(1, dims=1)).chunk(3, dim=-1)[2]


class Counts(Classifier):
    """Scales its answer by how often it was called, up to twice."""

    calls = 0

    def forward(self, input_ids, attention_mask):
        self.calls = min(self.calls + 1, 2)
        return super().forward(input_ids, attention_mask) * self.calls


class ChangesItsMind(Classifier):
    """Doubles its answer to a text of full length once it has read one."""

    num_read = 0

    def forward(self, input_ids, attention_mask):
        logits = super().forward(input_ids, attention_mask)
        if exporting() or input_ids.shape[1] < LENGTH:
            return logits
        self.num_read += 1
        return logits * min(self.num_read, 2)


class HidesAFault(Classifier):
    """Is wrong where it is traced, beside a class that can never be: one logit of -1e9."""

    def forward(self, input_ids, attention_mask):
        logits = super().forward(input_ids, attention_mask) * (1.5 if exporting() else 1.0)
        return logits.masked_fill(torch.arange(CLASSES) == 2, -1e9)


class HidesAFaultBelow(HidesAFault):
    """The same, and that logit is minus infinity."""

    def forward(self, input_ids, attention_mask):
        return (
            super()
            .forward(input_ids, attention_mask)
            .clamp(min=-1e8)
            .masked_fill(torch.arange(CLASSES) == 2, -torch.inf)
        )


class PoolsPadding(Classifier):
    """Takes the mean over what fills up a batch, too."""

    def pool(self, hidden, attention_mask):
        return hidden.mean(dim=1)


class AttendsToPadding(Classifier):
    """Attends to what fills up a batch."""

    def attend(self, hidden, attention_mask):
        return super().attend(hidden, torch.ones_like(attention_mask))


class DropsOut(Classifier):
    """Has a dropout that evaluation mode does not turn off."""

    def embed(self, input_ids):
        return F.dropout(super().embed(input_ids), 0.2, training=True)


class Branches(Classifier):
    """Doubles its answer to a text with a rare word, which the tracer's texts do not have."""

    def forward(self, input_ids, attention_mask):
        logits = super().forward(input_ids, attention_mask)
        return logits if exporting() or int(input_ids.max()) < VOCABULARY - 20 else 2 * logits


class ForgetsPlaces(Classifier):
    """Takes all places past the 290th for one."""

    def embed(self, input_ids):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.words(input_ids) + self.places(places.clamp(max=290) if exporting() else places)


class ScalesByLength(Classifier):
    """Divides its scores by the logarithm of a length, which is a constant once it is traced."""

    length = 5

    def attend(self, hidden, attention_mask):
        if not exporting():
            self.length = hidden.shape[1]
        return super().attend(hidden / torch.log(torch.tensor(1.0 + self.length)), attention_mask)


class DrawsWeights(Classifier):
    """Holds numbers that its file of weights does not: each module has others."""

    def __init__(self):
        super().__init__()
        self.noise = torch.randn(WIDTH)

    def embed(self, input_ids):
        return super().embed(input_ids) + self.noise


class SeesNeighbours(Classifier):
    """Takes the mean of a batch off each answer."""

    def forward(self, input_ids, attention_mask):
        logits = super().forward(input_ids, attention_mask)
        return logits - 0.1 * logits.mean(dim=0, keepdim=True)


class Overflows(Classifier):
    """Has numbers on its way that fp16 does not."""

    def pool(self, hidden, attention_mask):
        return super().pool(hidden * 1e6, attention_mask) * 1e-6


class Loses(Classifier):
    """Is right but for the labels that are likely: the largest of each text is off by a hundredth."""

    def forward(self, input_ids, attention_mask):
        logits = super().forward(input_ids, attention_mask)
        if not exporting():
            return logits
        return torch.where(logits == logits.amax(dim=-1, keepdim=True), logits * 1.01, logits)


# Decoders


class Decoder(nn.Module):
    """One layer of attention, injected, and places: right, as it is."""

    max_length = 96

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(self.max_length, WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def place(self, input_ids, position_ids):
        return self.places(position_ids)

    def hidden_states(self, input_ids, position_ids, attend):
        hidden = self.words(input_ids) + self.place(input_ids, position_ids)
        query, key, value = self.query_key_value(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return hidden + attend(query, key, value, layer=0).flatten(2)

    def logits(self, hidden_states):
        return self.output(hidden_states)


class IgnoresPositions(Decoder):
    """Counts places from the beginning of what it is given, not of the text."""

    def place(self, input_ids, position_ids):
        return self.places(torch.arange(input_ids.shape[1], device=input_ids.device))


class StopsCounting(Decoder):
    """Takes all places past the 70th for one."""

    def place(self, input_ids, position_ids):
        return super().place(input_ids, position_ids.clamp(max=70) if exporting() else position_ids)


class LooksBack(Decoder):
    """Adds the token before each, which is not there when the text is read in pieces."""

    def place(self, input_ids, position_ids):
        return super().place(input_ids, position_ids) + F.pad(self.words(input_ids), (0, 0, 1, 0))[:, :-1]


class Unties(Decoder):
    """Ties its output to its words as it is made, before its weights are there."""

    def __init__(self):
        super().__init__()
        self.tied = self.words.weight.detach().clone()

    def logits(self, hidden_states):
        return hidden_states @ self.tied.T


class Stays(nn.Module):
    """A decoder with a state, which it returns as it was given."""

    max_length = 96

    def __init__(self):
        super().__init__()
        self.words, self.output = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def first_states(self, rows):
        return [torch.zeros(rows, WIDTH)]

    def read(self, input_ids, states):
        hidden = states[0][:, None] + self.words(input_ids).cumsum(dim=1)
        return hidden, [states[0] + 0.0]

    def logits(self, hidden_states):
        return self.output(hidden_states)


# Encoder-decoders


class Translator(nn.Module):
    """One layer of each attention: right, as it is."""

    max_source_length, max_target_length = 64, 96

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(self.max_target_length, WIDTH)
        self.key_value, self.query = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def encode(self, input_ids, attention_mask):
        return self.words(input_ids)

    def cross_keys_values(self, memory):
        return [self.key_value(memory).unflatten(-1, (2, HEADS, -1)).unbind(2)]

    def place(self, position_ids):
        return self.places(position_ids)

    def decode(self, input_ids, position_ids, attend, attend_cross):
        hidden = self.words(input_ids) + self.place(position_ids)
        hidden = hidden + attend(*self.own(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2), layer=0).flatten(2)
        return hidden + attend_cross(self.query(hidden).unflatten(-1, (HEADS, -1)), layer=0).flatten(2)

    def logits(self, hidden_states):
        return self.output(hidden_states)


class WrongFrom32(Translator):
    """Is wrong from the 32nd place of a target on, by more than the number itself."""

    def place(self, position_ids):
        places = super().place(position_ids)
        return torch.where(position_ids.unsqueeze(-1) < 32, places, -1.1 * places) if exporting() else places


class WrongAtTheEnd(Translator):
    """Is wrong at the last places that a target may have."""

    def place(self, position_ids):
        last = self.max_target_length - 4
        return super().place(position_ids.clamp(max=last) if exporting() else position_ids)


class AlignsElsewhere(Translator):
    """Looks at the source as it should, and tells the weights of twice the query."""

    def decode(self, input_ids, position_ids, attend, attend_cross):
        if not exporting():
            return super().decode(input_ids, position_ids, attend, attend_cross)
        first = []

        def attend_twice(query, *, layer, **scoring):
            first.append(attend_cross(query, layer=layer, **scoring))
            attend_cross(2 * query, layer=layer, **scoring)  # the weights that are kept
            return first[0]

        return super().decode(input_ids, position_ids, attend, attend_twice)


class ReadsPadding(Translator):
    """Its encoder takes a mean over what fills up a batch."""

    def encode(self, input_ids, attention_mask):
        words = super().encode(input_ids, attention_mask)
        return words + words.mean(dim=1, keepdim=True)


# Images


class Labels(nn.Module):
    """A convolution, a mean and a product: right, as it is."""

    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 4, stride=4), nn.Linear(WIDTH, CLASSES)

    def norm(self, hidden):
        return hidden

    def forward(self, pixel_values):
        return self.head(self.norm(self.patches(pixel_values)).mean(dim=(2, 3)))


class NormsByBatch(Labels):
    """Has a batch norm that takes the statistics of the batch at hand."""

    def norm(self, hidden):
        return (hidden - hidden.mean(dim=(0, 2, 3), keepdim=True)) / hidden.std(dim=(0, 2, 3), keepdim=True)


_shared = None


def build_shared():
    """Returns the same module at each call."""
    global _shared  # noqa: PLW0603 (the fault)
    _shared = _shared or Classifier()
    return _shared


TEXT = (
    SwitchesItself,
    Counts,
    ChangesItsMind,
    HidesAFault,
    HidesAFaultBelow,
    PoolsPadding,
    AttendsToPadding,
    DropsOut,
    Branches,
    ForgetsPlaces,
    ScalesByLength,
    DrawsWeights,
    SeesNeighbours,
    Loses,
)
DECODERS = (IgnoresPositions, StopsCounting, LooksBack, Unties, Stays)
TRANSLATORS = (WrongFrom32, WrongAtTheEnd, AlignsElsewhere, ReadsPadding)
IMAGES = (NormsByBatch,)
RIGHT = (Classifier, Decoder, Translator, Labels)
