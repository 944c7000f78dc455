"""Tiny encoder-decoders of Hugging Face `transformers` with random weights and SentencePiece models of their own."""

import io
import json
import random
from pathlib import Path

import sentencepiece
import torch
import transformers

LENGTH = 40
_TEXT = """the old fire an answer is not in rain it house man dog bicycle red big small der die das alte Feuer Antwort
nicht im Regen Haus Mann Hund Fahrrad rot groß klein über Straße école été 你好 привет мир ゲーム"""
_LAYERS = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIZES = {**_LAYERS, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": LENGTH}


def write_pieces(file: Path, *, seed: int, size: int = 90) -> list[str]:
    """Trains a SentencePiece model on random sentences and returns its pieces, special ones included."""
    draw, words = random.Random(seed), _TEXT.split()
    lines = [" ".join(draw.choice(words) + draw.choice(["", "", "s", "en", ".", ","]) for _ in range(8))
             for _ in range(300)]  # fmt: skip
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, character_coverage=0.98,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    file.write_bytes(model.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [pieces.id_to_piece(index) for index in range(len(pieces))]


def save(model: torch.nn.Module, folder: Path, **generation) -> Path:
    """Saves a model with random weights, drawn wide enough that answers do not repeat one word."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:
                parameter.normal_(std=0.3)
        bias = getattr(model, "final_logits_bias", None)
        if bias is not None:
            bias.normal_(std=0.5)
    model.generation_config = transformers.GenerationConfig(**generation)
    model.save_pretrained(folder)
    return folder


def write_marian(folder: Path, **changes) -> Path:
    """Writes a Marian model from English to German: ids of the union of two vocabularies, `<pad>` the last."""
    folder.mkdir(parents=True)
    pieces = [*write_pieces(folder / "source.spm", seed=1), *write_pieces(folder / "target.spm", seed=2)]
    ids = {piece: index for index, piece in enumerate(dict.fromkeys(["</s>", "<unk>", *pieces]))}
    ids.pop("<s>")
    ids = {piece: index for index, piece in enumerate([*ids, "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(ids))
    names = {"source_lang": "en", "target_lang": "de", "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    pad = ids["<pad>"]
    config = transformers.MarianConfig(
        **{**SIZES, "vocab_size": len(ids), "pad_token_id": pad, "eos_token_id": 0, "decoder_start_token_id": pad,
           "scale_embedding": True, "activation_function": "swish", **changes}
    )  # fmt: skip
    return save(
        transformers.MarianMTModel(config), folder, pad_token_id=pad, eos_token_id=0, decoder_start_token_id=pad,
        bad_words_ids=[[pad]], num_beams=4, max_length=LENGTH,
    )  # fmt: skip
