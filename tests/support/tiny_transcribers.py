"""Tiny encoder-decoders of speech of `transformers` with random weights, other than Whisper, in folders."""

import json
import tempfile
from pathlib import Path

import sentencepiece
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LENGTH = 24
_TEXTS = ["the old fire", "rain in the big house", "a red bicycle and a dog", "an answer is not here", "we are glad"]
SIZES = {
    "moonshine": {
        "hidden_size": 36,
        "intermediate_size": 48,
        "encoder_num_hidden_layers": 1,
        "decoder_num_hidden_layers": 1,
        "encoder_num_attention_heads": 3,
        "decoder_num_attention_heads": 3,
        "encoder_num_key_value_heads": 3,
        "decoder_num_key_value_heads": 3,
        "pad_head_dim_to_multiple_of": 8,
        "max_position_embeddings": LENGTH,
    },
    "speech-to-text": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "conv_channels": 24,
        "input_feat_per_channel": 20,
        "max_source_positions": 400,
        "max_target_positions": LENGTH,
    },
    "speecht5": {
        "hidden_size": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "encoder_max_relative_position": 20,
        "conv_dim": (16,) * 7,
        "conv_stride": (5, 2, 2, 2, 2, 2, 2),
        "conv_kernel": (10, 3, 3, 3, 3, 2, 2),
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "max_text_positions": LENGTH,
    },
}


def write_transcriber(folder: Path, family: str, seed: int = 3) -> Path:
    """Writes a folder whose model writes varied texts."""
    folder.mkdir(parents=True, exist_ok=True)
    is_moonshine = family == "moonshine"
    vocab_size = _write_letters(folder) if is_moonshine else _write_pieces(folder, family)
    prefix = {"moonshine": "Moonshine", "speech-to-text": "Speech2Text", "speecht5": "SpeechT5"}[family]
    head = "SpeechToText" if family == "speecht5" else "ConditionalGeneration"
    start = 1 if is_moonshine else 2
    tokens = {"bos_token_id": 1 if is_moonshine else 0, "eos_token_id": 2, "pad_token_id": 2 if is_moonshine else 1}
    config = getattr(transformers, f"{prefix}Config")(
        **SIZES[family], vocab_size=vocab_size, decoder_start_token_id=start, **tokens
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}For{head}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.4 if "decoder" in name else 1.2 * parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    settings = {"decoder_start_token_id": start, "max_length": LENGTH, **tokens}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    if is_moonshine:
        extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=False)
    elif family == "speecht5":
        extractor = transformers.SpeechT5FeatureExtractor()
    else:
        extractor = transformers.Speech2TextFeatureExtractor(num_mel_bins=20, feature_size=20)
    extractor.save_pretrained(folder)
    return folder


def _write_letters(folder: Path) -> int:
    tokens = ["<unk>", "<s>", "</s>", "\u2581", *(chr(letter) for letter in range(97, 123))]
    tokens += [f"\u2581{letter}" for letter in tokens[4:]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return len(tokens)


def _write_pieces(folder: Path, family: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        prefix = f"{scratch}/pieces"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(_TEXTS * 20),
            model_prefix=prefix,
            vocab_size=40,
            model_type="char" if family == "speecht5" else "unigram",
            hard_vocab_limit=False,
            minloglevel=9,
            bos_id=0,
            pad_id=1,
            eos_id=2,
            unk_id=3,
        )
        pieces = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
        if family == "speecht5":
            tokenizer = transformers.SpeechT5Tokenizer(f"{prefix}.model")
            tokenizer.save_pretrained(folder)
            return len(tokenizer.get_vocab())
        vocabulary = {pieces.id_to_piece(index): index for index in range(pieces.get_piece_size())}
        file = folder / "vocab.json"
        file.write_text(json.dumps(vocabulary))
        transformers.Speech2TextTokenizer(str(file), f"{prefix}.model").save_pretrained(folder)
    return len(vocabulary)
