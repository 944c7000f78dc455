"""Models that make texts of texts by an encoder and a decoder of two families, against `transformers`."""

import numpy as np
import pytest
import tiny_huggingface as tiny
import torch
import transformers

from headway_export.errors import SourceError
from headway_export.huggingface import FolderOptions, from_folder
from headway_export.reference import translation_logits

LENGTH = 24
_SIZES = {**tiny.SIZES, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
_WRITERS = {
    "bert": ("Bert", _SIZES),
    "roberta": ("Roberta", {**_SIZES, "max_position_embeddings": LENGTH + 1}),
    "gpt2": ("GPT2", {"vocab_size": tiny.WORDS, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}),
}


def write_pair(folder, reader, writer):
    """Writes a model whose encoder and decoder are of these families; those of another width have a bridge."""
    configs = []
    for family in (reader, writer):
        prefix, sizes = _WRITERS[family]
        configs.append(getattr(transformers, f"{prefix}Config")(**sizes))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*configs)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 1, 0, 2
    torch.manual_seed(7)
    model = transformers.EncoderDecoderModel(config=config).eval()
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=1, pad_token_id=0, eos_token_id=2, bos_token_id=1
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    return folder


@pytest.mark.parametrize(("reader", "writer"), [("bert", "bert"), ("roberta", "roberta"), ("bert", "gpt2")])
def test_a_pair_is_read(tmp_path, reader, writer):
    folder = write_pair(tmp_path / "pair", reader, writer)
    source, _ = from_folder(folder, FolderOptions())
    assert (source.limits.max_input_tokens, source.limits.max_total_tokens) == (LENGTH, LENGTH)
    model = transformers.EncoderDecoderModel.from_pretrained(folder).eval()
    ids, target = np.random.default_rng(3).integers(3, 60, (2, 12))
    read, written = torch.from_numpy(ids)[None], torch.from_numpy(target)[None]
    with torch.inference_mode():
        expected = model(input_ids=read, decoder_input_ids=written).logits[0].numpy()
    found = translation_logits(source.module, ids, target)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    reference = source.make_reference()
    with torch.inference_mode():
        logits, weights = reference.target_logits(read, written, torch.tensor([0, 5, 11]))
        again, _ = reference.target_logits(read, written, torch.tensor([0, 5, 11]), reference.encode_source(read))
    np.testing.assert_allclose(logits[0].numpy(), expected[[0, 5, 11]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, logits, rtol=0, atol=0)
    assert weights.shape[-2:] == (12, 12)


def test_a_length_past_the_positions_is_refused(tmp_path):
    folder = write_pair(tmp_path / "pair", "bert", "bert")
    with pytest.raises(SourceError, match=f"--max-length 25: a source has {LENGTH} tokens at most"):
        from_folder(folder, FolderOptions(max_length=25))
