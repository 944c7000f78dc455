"""Tiny models of sounds of Hugging Face `transformers` with random weights, in folders as they are published."""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
_BLOCKS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
_WAVES = {
    **_BLOCKS,
    "conv_dim": (16,) * 7,
    "conv_stride": (5, 2, 2, 2, 2, 2, 2),
    "conv_kernel": (10, 3, 3, 3, 3, 2, 2),
    "num_feat_extract_layers": 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_STABLE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
_SUBSAMPLING = {**_BLOCKS, "subsampling_conv_channels": 8, "conv_kernel_size": 5}
FAMILIES = {
    "wav2vec2": ("Wav2Vec2", _WAVES, "Wav2Vec2FeatureExtractor"),
    "wav2vec2-layer": ("Wav2Vec2", _WAVES | _STABLE, "Wav2Vec2FeatureExtractor"),
    "hubert": ("Hubert", _WAVES, "Wav2Vec2FeatureExtractor"),
    "wavlm": ("WavLM", {**_WAVES, "num_buckets": 32, "max_bucket_distance": 80}, "Wav2Vec2FeatureExtractor"),
    "data2vec-audio": ("Data2VecAudio", {**_WAVES, "conv_pos_kernel_size": 5}, "Wav2Vec2FeatureExtractor"),
    "wav2vec2-conformer": (
        "Wav2Vec2Conformer",
        {**_WAVES, "position_embeddings_type": "relative", "conv_depthwise_kernel_size": 7},
        "Wav2Vec2FeatureExtractor",
    ),
    "sew": ("SEW", {**_WAVES, "squeeze_factor": 2}, "Wav2Vec2FeatureExtractor"),
    "sew-d": (
        "SEWD",
        {**_WAVES, "squeeze_factor": 2, "position_buckets": 16, "max_position_embeddings": 64},
        "Wav2Vec2FeatureExtractor",
    ),
    "unispeech": ("UniSpeech", _WAVES, "Wav2Vec2FeatureExtractor"),
    "unispeech-sat": ("UniSpeechSat", _WAVES, "Wav2Vec2FeatureExtractor"),
    "wav2vec2-bert": (
        "Wav2Vec2Bert",
        {**_BLOCKS, "feature_projection_input_dim": 160, "conv_depthwise_kernel_size": 7},
        "SeamlessM4TFeatureExtractor",
    ),
    "parakeet": ("Parakeet", {**_SUBSAMPLING, "num_mel_bins": 80}, "ParakeetFeatureExtractor"),
    "lasr": ("Lasr", {**_SUBSAMPLING, "num_key_value_heads": 4, "num_mel_bins": 128}, "LasrFeatureExtractor"),
}
"""Prefix of the classes, configuration, and feature extractor of each family."""
PIECES = ("\u2581the", "\u2581a", "\u2581cat", "s", "ing", "\u2581on", "ed", "\u2581", "er", "t")
_OF_PIECES = ("Parakeet", "Lasr")


def write_ctc(folder: Path, family: str) -> Path:
    """Writes a transcriber whose likeliest tokens change from frame to frame."""
    prefix, values, extractor = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size, pad = _write_pieces(folder, prefix) if prefix in _OF_PIECES else _write_letters(folder)
    if prefix in _OF_PIECES:
        configuration = getattr(transformers, f"{prefix}CTCConfig")
        config = configuration(vocab_size=vocab_size, pad_token_id=pad, encoder_config=values)
    else:
        config = getattr(transformers, f"{prefix}Config")(**values, vocab_size=vocab_size, pad_token_id=pad)
    _write_model(folder, getattr(transformers, f"{prefix}ForCTC"), config)
    getattr(transformers, extractor)().save_pretrained(folder)
    return folder


CLASSIFIERS = {
    "ast": (
        "AST",
        {**_BLOCKS, "patch_size": 16, "frequency_stride": 10, "time_stride": 10, "max_length": 64, "num_mel_bins": 32},
        {"max_length": 64, "num_mel_bins": 32},
    ),
    "wav2vec2": ("Wav2Vec2", {**_WAVES, "classifier_proj_size": 16}, {}),
    "hubert": ("Hubert", {**_WAVES, "classifier_proj_size": 16, "use_weighted_layer_sum": True}, {}),
    "wavlm": ("WavLM", {**_WAVES, "classifier_proj_size": 16, "num_buckets": 32, "max_bucket_distance": 80}, {}),
}
"""Prefix of the classes, configuration, and settings of the feature extractor of each classifier."""


def write_classifier(folder: Path, family: str, **changes) -> Path:
    """Writes a classifier of five labels."""
    prefix, values, settings = CLASSIFIERS[family]
    config = getattr(transformers, f"{prefix}Config")(**values, num_labels=5, **changes)
    head = "Audio" if prefix == "AST" else "Sequence"
    _write_model(folder, getattr(transformers, f"{prefix}For{head}Classification"), config)
    extractor = transformers.ASTFeatureExtractor if prefix == "AST" else transformers.Wav2Vec2FeatureExtractor
    extractor(**settings).save_pretrained(folder)
    return folder


def _write_model(folder: Path, model_class, config) -> None:
    torch.manual_seed(7)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5 * 1.5)
    model.save_pretrained(folder)


def _write_letters(folder: Path) -> tuple[int, int]:
    """Writes the tokenizer of Wav2Vec2; returns the size of its vocabulary and the blank."""
    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", *LETTERS.upper()]
    file = folder / "vocab.json"
    file.write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    transformers.Wav2Vec2CTCTokenizer(str(file)).save_pretrained(folder)
    return len(tokens), 0


def _write_pieces(folder: Path, prefix: str) -> tuple[int, int]:
    """Writes a tokenizer of SentencePiece's form; returns the size of its vocabulary and the blank."""
    if prefix == "Lasr":
        tokens = ["<pad>", "</s>", "<unk>", *PIECES]
        transformers.LasrTokenizer(vocab=[(token, 0.0) for token in tokens], extra_ids=0).save_pretrained(folder)
        return len(tokens), 0
    tokens = ["<unk>", *PIECES, "<blank>"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    transformers.ParakeetTokenizer(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<blank>", clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
    return len(tokens), tokens.index("<blank>")
