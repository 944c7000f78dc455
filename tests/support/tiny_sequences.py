"""Tiny encoder-decoders of Hugging Face `transformers` with random weights and tokenizers of their own."""

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer, SentencePieceBPETokenizer, processors
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

LENGTH = 80
_TEXT = """the old fire an answer is not in rain it house man dog bicycle red big small der die das alte Feuer Antwort
nicht im Regen Haus Mann Hund Fahrrad rot groß klein über Straße école été 你好 привет мир ゲーム"""
_LAYERS = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIZES = {**_LAYERS, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": LENGTH}


def _lines(seed: int) -> list[str]:
    """Returns random sentences."""
    draw, words = random.Random(seed), _TEXT.split()
    return [" ".join(draw.choice(words) + draw.choice(["", "", "s", "en", ".", ","]) for _ in range(8))
            for _ in range(300)]  # fmt: skip


def write_pieces(file: Path, *, seed: int, size: int = 90, **options) -> list[str]:
    """Trains a SentencePiece model on random sentences and returns its pieces, special ones included."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_lines(seed)), model_writer=model, vocab_size=size, character_coverage=0.98,
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    file.write_bytes(model.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [pieces.id_to_piece(index) for index in range(len(pieces))]


def widen(model: torch.nn.Module) -> torch.nn.Module:
    """Draws a model's weights anew, wide enough that answers do not repeat one word."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:
                parameter.normal_(std=0.3)
        bias = getattr(model, "final_logits_bias", None)
        if bias is not None:
            bias.normal_(std=0.5)
    return model


def save(model: torch.nn.Module, folder: Path, **generation) -> Path:
    """Saves a model with random weights."""
    widen(model)
    model.generation_config = transformers.GenerationConfig(**generation)
    model.save_pretrained(folder)
    return folder


def write_marian(folder: Path, marks: Sequence[str] = (), **changes) -> Path:
    """Writes a Marian model from English to German: ids of the union of two vocabularies, `<pad>` the last.

    With `marks`, such as `>>de<<`, to several languages.
    """
    folder.mkdir(parents=True)
    pieces = [*write_pieces(folder / "source.spm", seed=1), *write_pieces(folder / "target.spm", seed=2)]
    ids = {piece: index for index, piece in enumerate(dict.fromkeys(["</s>", "<unk>", *marks, *pieces]))}
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


def write_m2m(folder: Path) -> Path:
    """Writes an M2M-100 model of 100 languages: a SentencePiece model and the ids of its pieces."""
    folder.mkdir(parents=True)
    pieces = write_pieces(folder / "sentencepiece.bpe.model", seed=1, model_type="bpe")
    ids = dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", *pieces])
    (folder / "vocab.json").write_text(json.dumps({piece: index for index, piece in enumerate(ids)}))
    languages = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    names = {"tokenizer_class": "M2M100Tokenizer", "src_lang": "en", "additional_special_tokens": languages}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return _save_many(folder, "M2M100", len(ids) + 100)


def write_nllb(folder: Path) -> Path:
    """Writes an NLLB model of three languages: a BPE over SentencePiece's spaces."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trained = SentencePieceBPETokenizer()
    trained.train_from_iterator(_lines(1), vocab_size=160, special_tokens=special, show_progress=False)
    model = json.loads(trained._tokenizer.to_str())["model"]
    tokenizer = transformers.NllbTokenizer(
        vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]],
        extra_special_tokens=["deu_Latn", "eng_Latn", "fra_Latn"], src_lang="eng_Latn",
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return _save_many(folder, "M2M100", len(tokenizer))


def write_mbart50(folder: Path) -> Path:
    """Writes an mBART-50 model of 52 languages, with a unigram model."""
    folder.mkdir(parents=True)
    pieces = write_pieces(folder / "pieces.model", seed=1)
    tokenizer = transformers.MBart50Tokenizer(vocab=[(piece, -float(index)) for index, piece in enumerate(pieces)])
    tokenizer.save_pretrained(folder)
    return _save_many(folder, "MBart", len(tokenizer))


def _save_many(folder: Path, kind: str, size: int) -> Path:
    """Saves a model of many languages, whose decoder starts from `</s>`."""
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, vocab_size=size, scale_embedding=True, forced_eos_token_id=None, forced_bos_token_id=None
    )
    return save(
        getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, decoder_start_token_id=2, num_beams=5,
    )  # fmt: skip


def write_bart(folder: Path, kind: str = "Bart", **changes) -> Path:
    """Writes a BART model, or one of its kin, whose outputs all begin with `<s>`; its tokenizer is a byte-level BPE."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(_lines(1), vocab_size=400, special_tokens=special)
    trained._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    _save_fast(trained._tokenizer, folder)
    settings = {**SIZES, "vocab_size": 400, "forced_bos_token_id": None, "forced_eos_token_id": None, **changes}
    config = getattr(transformers, f"{kind}Config")(**settings)
    return save(
        getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, decoder_start_token_id=2, forced_bos_token_id=0, num_beams=4, min_length=3,
        no_repeat_ngram_size=3,
    )  # fmt: skip


def write_led(folder: Path) -> Path:
    """Writes an LED model: windows of eight tokens, and sources longer than targets."""
    lengths = {"max_encoder_position_embeddings": 96, "max_decoder_position_embeddings": 48}
    return write_bart(folder, "LED", attention_window=8, **lengths)


def write_pegasus(folder: Path) -> Path:
    """Writes a Pegasus model, whose positions are sines, with a SentencePiece model."""
    size = _write_unigram(folder, "PegasusTokenizer", offset=5)
    config = transformers.PegasusConfig(**SIZES, vocab_size=size, scale_embedding=True, forced_eos_token_id=None)
    return save(
        transformers.PegasusForConditionalGeneration(config), folder, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0,
    )  # fmt: skip


def write_t5(folder: Path, **changes) -> Path:
    """Writes a T5 model, whose positions are relative, with a SentencePiece model."""
    size = _write_unigram(folder, "T5Tokenizer", extra_ids=2)
    config = transformers.T5Config(
        **{"vocab_size": size, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "n_positions": 96,
           "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, **changes}
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    return save(model, folder, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)


def _write_unigram(folder: Path, tokenizer_class: str, **settings) -> int:
    """Writes a SentencePiece model without `<s>` and returns the number of ids that its tokenizer has."""
    folder.mkdir(parents=True)
    write_pieces(folder / "spiece.model", seed=1, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class, **settings}))
    return len(getattr(transformers, tokenizer_class).from_pretrained(folder))


def _save_fast(tokenizer, folder: Path) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
