"""Tiny models of Hugging Face `transformers` of two towers, with random weights, tokenizer and preprocessing."""

import string
from pathlib import Path

import tiny_huggingface as tiny
import tiny_sequences
import torch
import transformers
from tiny_vision import write_preprocessing
from tokenizers import processors

_SIDE = 32
_LAYER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
_VISION = {**_LAYER, "image_size": _SIDE, "patch_size": 8}
_TEXT = {**_LAYER, "vocab_size": tiny.WORDS, "bos_token_id": 1, "pad_token_id": 0}
_SQUARE = {"height": _SIDE, "width": _SIDE}
_CLIP_IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": _SIDE},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": _SQUARE,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}
_SIGLIP_IMAGES = {
    "image_processor_type": "SiglipImageProcessor",
    "size": _SQUARE,
    "resample": 3,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_PATCH_IMAGES = {"image_processor_type": "Siglip2ImageProcessor", "patch_size": 8, "max_num_patches": 20}
_LETTERS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\u2581", *string.ascii_lowercase)
LENGTH = 24
_END = tiny.WORDS - 1
"""Token that ends a text of CLIP's; the largest there is."""

FAMILIES = (
    "clip",
    "clip-old",
    "siglip",
    "siglip-fast",
    "siglip-left",
    "siglip2",
    "chinese_clip",
    "altclip",
    "metaclip_2",
)
"""`clip-old` finds the end of a text as the first checkpoints do, `siglip` has a SentencePiece model, the next two a
`tokenizer.json` as fixed SigLIP 2 does, of which one pads in front and masks the padding.
`siglip2` keeps the proportions of images."""


def write_towers(folder: Path, family: str) -> Path:
    """Writes a folder."""
    model_type = family.partition("-")[0]
    end = _END if family == "clip" else 2
    text = {**_TEXT, "max_position_embeddings": LENGTH, "eos_token_id": end}
    joint = {"projection_dim": 16, "logit_scale_init_value": 2.5}
    if model_type == "siglip":
        text |= {"projection_size": 32, "vocab_size": 300 if family == "siglip" else tiny.WORDS}
        joint = {}
    elif model_type == "altclip":
        text |= {"project_dim": 32, "max_position_embeddings": LENGTH + 1}
    vision = _VISION
    if model_type == "siglip2":
        text |= {"projection_size": 32, "vocab_size": len(_LETTERS), "pad_token_id": 0, "eos_token_id": 1}
        vision, joint = {**_LAYER, "patch_size": 8, "num_patches": 9}, {}
    config = transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **joint)
    torch.manual_seed(7)
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
        if model_type.startswith("siglip"):
            model.logit_scale.fill_(1.5)
            model.logit_bias.fill_(-2.0)
    model.save_pretrained(folder)
    write_tokenizer(folder, family)
    images = {"siglip": _SIGLIP_IMAGES, "siglip2": _PATCH_IMAGES}.get(model_type, _CLIP_IMAGES)
    write_preprocessing(folder, **images)
    return folder


def write_tokenizer(folder: Path, family: str) -> None:
    if family == "siglip":
        tiny_sequences.write_pieces(folder / "spiece.model", seed=3)
        read = transformers.SiglipTokenizer(
            str(folder / "spiece.model"), model_max_length=LENGTH, model_input_names=["input_ids"]
        )
        read.save_pretrained(folder)
        return
    if family == "siglip2":
        read = transformers.Siglip2Tokenizer(vocab={letter: place for place, letter in enumerate(_LETTERS)})
        read.model_max_length = LENGTH
        read.save_pretrained(folder)
        return
    tiny.write_tokenizer(folder, frame="$A </s>" if family.startswith("siglip") else "<s> $A </s>")
    read = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    read.model_max_length = LENGTH
    if family.startswith("clip"):
        marks = [("<s>", 1), (f"<{_END}>", _END)]
        read.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"<s> $A <{_END}>", special_tokens=marks
        )
    if family.startswith("siglip"):
        read.padding_side = "left" if family == "siglip-left" else "right"
        read.model_input_names = ["input_ids", "attention_mask"] if family == "siglip-left" else ["input_ids"]
    read.save_pretrained(folder)
