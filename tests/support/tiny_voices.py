"""Tiny VITS, SpeechT5 and MusicGen of `transformers`, and Kokoro, with random weights, in folders as published."""

import json
import tempfile
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headway_export.huggingface.style_speakers import StyleSpeaker

LETTERS = "k abcdefghijlmnopqrstuvwxyz'-"
"""The first is the blank, which is the padding too, as in MMS-TTS."""
SIZES = {
    "vocab_size": len(LETTERS),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "window_size": 3,
    "ffn_dim": 24,
    "flow_size": 8,
    "spectrogram_bins": 9,
    "upsample_initial_channel": 16,
    "upsample_rates": [4, 2],
    "upsample_kernel_sizes": [8, 4],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3], [1, 2]],
    "duration_predictor_num_flows": 2,
    "duration_predictor_filter_channels": 12,
    "prior_encoder_num_flows": 2,
    "prior_encoder_num_wavenet_layers": 2,
    "posterior_encoder_num_wavenet_layers": 1,
    "wavenet_dilation_rate": 2,
    "depth_separable_num_layers": 2,
}
SPEECHT5_SIZES = {
    "hidden_size": 24,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_max_relative_position": 9,
    "num_mel_bins": 6,
    "speech_decoder_prenet_units": 10,
    "speaker_embedding_dim": 5,
    "speech_decoder_postnet_layers": 2,
    "speech_decoder_postnet_units": 8,
    "max_text_positions": 40,
    "max_speech_positions": 320,
    "conv_dim": (8,),
    "conv_stride": (5,),
    "conv_kernel": (10,),
}
HIFIGAN_SIZES = {
    "model_in_dim": 6,
    "sampling_rate": 16_000,
    "upsample_initial_channel": 16,
    "upsample_rates": [4, 2],
    "upsample_kernel_sizes": [8, 4],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3], [1, 2]],
}
XVECTORS = {
    name: np.random.default_rng(seed).normal(size=SPEECHT5_SIZES["speaker_embedding_dim"]).astype(np.float32)
    for seed, name in enumerate(("ada", "bo"))
}


def write_speecht5(folder: Path, seed: int = 4, **changes) -> Path:
    """Writes a folder with its vocoder and two voices, whose texts end after some steps, or not."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the old cook's book, like a thick black brick!"] * 20),
            model_prefix=f"{scratch}/pieces",
            vocab_size=40,
            model_type="char",
            hard_vocab_limit=False,
            minloglevel=9,
            bos_id=0,
            pad_id=1,
            eos_id=2,
            unk_id=3,
        )
        tokenizer = transformers.SpeechT5Tokenizer(f"{scratch}/pieces.model")
        tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.SpeechT5Config(**{**SPEECHT5_SIZES, "vocab_size": len(tokenizer), **changes})
    model = transformers.SpeechT5ForTextToSpeech(config).eval()
    vocoder = transformers.SpeechT5HifiGan(transformers.SpeechT5HifiGanConfig(**HIFIGAN_SIZES)).eval()
    with torch.no_grad():
        for part in (model, vocoder):
            for name, parameter in part.named_parameters():
                if parameter.ndim > 1:
                    is_louder = "prob_out" in name or "decoder.prenet" in name
                    parameter.normal_(std=(2 if is_louder else 1) * parameter[0].numel() ** -0.5)
                if name.endswith("prob_out.bias"):
                    parameter.fill_(-6.2)
        vocoder.mean.normal_()
        vocoder.scale.uniform_(0.5, 1.5)
        vocoder.conv_post.weight.mul_(0.3)
    model.save_pretrained(folder)
    vocoder.save_pretrained(folder / "vocoder")
    (folder / "speaker_embeddings").mkdir(exist_ok=True)
    for name, vector in XVECTORS.items():
        np.save(folder / "speaker_embeddings" / f"{name}.npy", vector)
    return folder


def write_vits(folder: Path, seed: int = 5, pad: str = "k", **changes) -> Path:
    """Writes a folder whose tokens last some frames each."""
    torch.manual_seed(seed)
    model = transformers.VitsModel(transformers.VitsConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "flows" in name or "duration" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith("duration_predictor.flows.0.translate"):
                parameter.fill_(2.0)  # durations of a few frames
            if "decoder.conv_post" in name:
                parameter.mul_(0.03)  # samples that are not clipped
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({letter: index for index, letter in enumerate(LETTERS)}))
    options = {"phonemize": False, "pad_token": pad, "unk_token": "<unk>", "language": "eng"}
    transformers.VitsTokenizer(str(folder / "vocab.json"), **options).save_pretrained(folder)
    return folder


def write_musicgen(folder: Path, seed: int = 6, **changes) -> Path:
    """Writes a folder whose model writes varied codes of two codebooks."""
    torch.manual_seed(seed)
    words = ("<pad>", "</s>", "<unk>", "a", "quiet", "loud", "drum", "flute", "and")
    sizes = {"d_model": 12, "d_kv": 6, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    text = transformers.T5Config(vocab_size=len(words), **sizes)
    codec = transformers.EncodecConfig(
        sampling_rate=16_000,
        upsampling_ratios=[4, 2],
        num_filters=4,
        hidden_size=8,
        codebook_size=16,
        codebook_dim=8,
        target_bandwidths=[16.0],
        use_causal_conv=False,
    )
    decoder = transformers.MusicgenDecoderConfig(
        vocab_size=16,
        num_hidden_layers=2,
        ffn_dim=24,
        num_attention_heads=2,
        hidden_size=20,
        num_codebooks=2,
        pad_token_id=16,
        bos_token_id=16,
        max_position_embeddings=32,
        **changes,
    )
    config = transformers.MusicgenConfig(text_encoder=text, audio_encoder=codec, decoder=decoder)
    model = transformers.MusicgenForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not name.startswith("audio_encoder"):
                parameter.normal_(std=(3.0 if "encoder_attn" in name else 1.5) * parameter[0].numel() ** -0.5)
        for layer in model.audio_encoder.quantizer.layers:
            layer.codebook.embed.copy_(torch.randn_like(layer.codebook.embed))
        model.audio_encoder.decoder.layers[-1].conv.parametrizations.weight.original0.mul_(0.5)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, guidance_scale=3.0, max_length=200, decoder_start_token_id=16, pad_token_id=16, bos_token_id=16
    )
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


PHONEMES = "abdefhijklmnoprstuvwxyz\u02c8\u02cc\u02d0\u0259\u026a\u028a ,.!"
KOKORO = {
    "n_token": 40,
    "hidden_dim": 16,
    "style_dim": 6,
    "n_layer": 2,
    "max_dur": 12,
    "dropout": 0.2,
    "n_mels": 80,
    "text_encoder_kernel_size": 5,
    "vocab": {letter: number for number, letter in enumerate(PHONEMES, 3)},
    "plbert": {
        "hidden_size": 12,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 32,
        "num_hidden_layers": 2,
        "embedding_size": 8,
    },
    "istftnet": {
        "upsample_rates": [4, 2],
        "upsample_kernel_sizes": [8, 4],
        "upsample_initial_channel": 12,
        "resblock_kernel_sizes": [3, 5],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
        "gen_istft_n_fft": 20,
        "gen_istft_hop_size": 5,
    },
}
KOKORO_VOICES = ("ada", "bo")


def write_kokoro(folder: Path, config=None, seed: int = 9, width: int = 14, narrow: int = 5) -> Path:
    """Writes a folder as Kokoro's is, whose phonemes last some frames each and have a pitch.

    The last two are widths of the decoder that no configuration states.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = config or KOKORO
    voices = torch.randn(len(KOKORO_VOICES), 30, 1, 2 * config["style_dim"])
    widths = {"decoder.encode.conv1.weight": torch.empty(width), "decoder.asr_res.0.weight": torch.empty(narrow)}
    model = StyleSpeaker(config, widths, voices[:, :, 0], max_length=None)
    parts = {name: {} for name in ("bert", "bert_encoder", "predictor", "decoder", "text_encoder")}
    for name, initial in model.state_dict().items():
        part, _, inner = name.partition(".")
        if part not in parts or inner.endswith(("transform", "squares")) or ".norm." in inner:
            continue
        weight = initial.clone()
        if weight.ndim > 1 and "alpha" not in inner:
            weight.normal_(std=(40 if inner == "F0_proj.weight" else 1) * weight[0].numel() ** -0.5)
        for end, value in (("F0_proj.bias", 150.0), ("duration_proj.linear_layer.bias", -1.0)):
            if inner.endswith(end):
                weight.fill_(value)
        stem, _, kind = f"module.{inner}".rpartition(".")
        if kind == "weight" and weight.ndim == 3 and not any(plain in stem for plain in ("noise_convs", "_proj")):
            size = 0.05 if "conv_post" in inner else 1.0
            parts[part] |= {f"{stem}.weight_g": torch.full((len(weight), 1, 1), size), f"{stem}.weight_v": weight}
        else:
            parts[part][f"{stem}.{kind}"] = weight
    torch.save(parts, folder / "kokoro-v1_0.pth")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "voices").mkdir(exist_ok=True)
    for name, voice in zip(KOKORO_VOICES, voices, strict=True):
        torch.save(voice.clone(), folder / "voices" / f"{name}.pt")
    return folder
