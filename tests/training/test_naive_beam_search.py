"""The reference of beam search, against searching everything there is, and against greedy decoding."""

import itertools
import random

import pytest
import torch
from naive_beam_search import BeamSearchConfig, beam_search, translate_with_beams

from headway_training.evaluation import translate_greedily
from headway_training.models import build_model

EOS, VOCABULARY_SIZE, MAX_LENGTH = 0, 4, 5
EVERYTHING = VOCABULARY_SIZE**MAX_LENGTH


def random_table(seed: int):
    """How likely each token is after each text, drawn when it is first asked for."""
    table: dict[tuple[int, ...], torch.Tensor] = {}

    def log_probabilities(beams):
        for beam in beams:
            if beam not in table:
                generator = torch.Generator().manual_seed(hash((seed, *beam)) % 2**31)
                logits = torch.randn(VOCABULARY_SIZE, generator=generator, dtype=torch.float64) * 2
                table[beam] = logits.log_softmax(dim=-1)
        return torch.stack([table[beam] for beam in beams])

    return log_probabilities


def everything(log_probabilities, *, length_penalty: float):
    """Scores every text that ends or is as long as it may be."""
    scores = {}
    for length in range(MAX_LENGTH + 1):
        for text in itertools.product(range(1, VOCABULARY_SIZE), repeat=length):
            tokens = (*text, EOS) if length < MAX_LENGTH else text
            total = sum(float(log_probabilities([tokens[:place]])[0, token]) for place, token in enumerate(tokens))
            scores[text] = total / len(tokens) ** length_penalty
    return scores


def contains(text: tuple[int, ...], phrase: tuple[int, ...]) -> bool:
    return any(text[start : start + len(phrase)] == phrase for start in range(len(text) - len(phrase) + 1))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 1.7])
@pytest.mark.parametrize("seed", range(3))
def test_with_beams_enough_for_everything_the_best_of_everything_is_found(seed, length_penalty):
    table = random_table(seed)
    search = BeamSearchConfig(
        beam_size=EVERYTHING, num_hypotheses=8, length_penalty=length_penalty, early_stopping="never"
    )
    found = beam_search(table, eos=EOS, search=search, max_length=MAX_LENGTH)
    best = sorted(everything(table, length_penalty=length_penalty).items(), key=lambda item: -item[1])[:8]
    assert [hypothesis.tokens for hypothesis in found] == [text for text, _ in best]
    assert [hypothesis.score for hypothesis in found] == pytest.approx([score for _, score in best])


@pytest.mark.parametrize("seed", range(6))
def test_the_best_that_keeps_every_rule_is_found(seed):
    rng = random.Random(seed)
    table = random_table(seed)
    required, forbidden = ((rng.randint(1, 3), rng.randint(1, 3)),), ((rng.randint(1, 3),) * 2, (1, 2, 3))
    if required[0] in forbidden:
        required = ((rng.randint(1, 3),),)
    search = BeamSearchConfig(
        beam_size=EVERYTHING, required=required, forbidden=forbidden, no_repeat_ngram_size=2, early_stopping="never"
    )
    found = beam_search(table, eos=EOS, search=search, max_length=MAX_LENGTH)
    allowed = {
        text: score
        for text, score in everything(table, length_penalty=1.0).items()
        if contains(text, required[0])
        and not any(contains(text, phrase) for phrase in forbidden)
        and len(set(itertools.pairwise(text))) == max(len(text) - 1, 0)
    }
    assert found[0].tokens == max(allowed, key=allowed.__getitem__)


def test_one_beam_is_greedy_decoding():
    torch.manual_seed(5)
    configuration = {
        "vocabulary_size": 30,
        "max_source_length": 12,
        "max_target_length": 12,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "d_model": 16,
        "num_heads": 2,
        "d_ff": 32,
    }
    model = build_model("transformer", configuration).eval()
    for parameter in model.parameters():
        parameter.data *= 3  # else a random model repeats one token
    for _ in range(5):
        source = torch.randint(3, 30, (6,))
        (greedy,) = translate_greedily(model, source[None], torch.ones(1, 6, dtype=torch.int64), bos=1, eos=2)
        (found,) = translate_with_beams(model, source, bos=1, eos=2, search=BeamSearchConfig(beam_size=1))
        assert list(found.tokens) == greedy
