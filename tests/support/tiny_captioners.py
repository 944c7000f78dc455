"""Tiny models of Hugging Face `transformers` that write about images, with random weights and a tokenizer."""

from pathlib import Path

import tiny_huggingface as tiny
import torch
import transformers
from tiny_vision import write_preprocessing

SIDE, PATCH, LENGTH = 32, 8, 24
_SEES = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": SIDE,
    "patch_size": PATCH,
}
_WRITES = {"vocab_size": tiny.WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BERT = {
    **_WRITES,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": LENGTH,
}
_TROCR = {
    **_WRITES,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": LENGTH,
    "cross_attention_hidden_size": 24,
}
_GPT2 = {**_WRITES, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
FAMILIES = {
    "trocr": ("ViT", "TrOCR", _TROCR),
    "trocr-small": ("DeiT", "TrOCR", {**_TROCR, "use_learned_position_embeddings": False, "scale_embedding": True}),
    "vit-gpt2": ("ViT", "GPT2", _GPT2),
    "beit-roberta": ("Beit", "Roberta", {**_BERT, "max_position_embeddings": LENGTH + 1}),
    "vit-bert": ("ViT", "Bert", _BERT),
}
"""Encoder, decoder and its sizes."""
BLIP, DONUT, FLORENCE = "blip", "donut", "florence2"
PAGE = (64, 48)
"""Height and width of what Donut reads."""
_FIELDS = ("<s_iitcdip>", "<s_ask>", "<s_question>", "</s_question>", "<s_answer>", "</s_answer>")
_MBART = {
    **_WRITES,
    "vocab_size": tiny.WORDS + len(_FIELDS),
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": LENGTH,
    "scale_embedding": True,
    "add_final_layer_norm": True,
}
_SWIN = {"image_size": PAGE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}


_DAVIT = {
    "depths": (1, 1),
    "patch_size": (7, 3),
    "patch_stride": (4, 2),
    "patch_padding": (3, 1),
    "patch_prenorm": (False, True),
    "embed_dim": (16, 24),
    "num_heads": (2, 2),
    "num_groups": (2, 2),
    "window_size": 3,
    "projection_dim": 32,
}
_PLACES = ("<image>", "<od>", "</od>", *(f"<loc_{place}>" for place in range(8)))
_BART = {
    "model_type": "bart",
    "vocab_size": tiny.WORDS + len(_PLACES),
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 2,
}


def write_florence(folder: Path) -> Path:
    """Writes a model of Florence-2, which reads a text with an image of 32 x 32 pixels."""
    torch.manual_seed(7)
    tiny.write_tokenizer(folder, frame="<s> $A </s>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_PLACES)})
    tokenizer._set_model_specific_special_tokens({"image_token": "<image>"})
    token = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.Florence2Config(
        vision_config=_DAVIT, text_config=_BART, image_token_id=token, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model = transformers.Florence2ForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=2, forced_bos_token_id=1, pad_token_id=0, eos_token_id=2, bos_token_id=1
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_preprocessing(
        folder,
        image_processor_type="CLIPImageProcessor",
        size={"height": SIDE, "width": SIDE},
        do_center_crop=False,
        resample=3,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
        image_seq_length=1 + (SIDE // 8) ** 2,
    )
    return folder


def open_florence(folder: Path) -> transformers.ProcessorMixin:
    """Opens the processor of a folder with an image processor that needs no torchvision."""
    kind = transformers.Florence2Processor
    loose = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return loose(images, transformers.AutoTokenizer.from_pretrained(folder))


def write_captioner(folder: Path, family: str) -> Path:
    """Writes a model that writes about images of 32 x 32 pixels, with its tokenizer."""
    torch.manual_seed(7)
    if family == BLIP:
        texts = {**_BERT, "encoder_hidden_size": _SEES["hidden_size"], "sep_token_id": 2}
        config = transformers.BlipConfig(text_config=texts, vision_config=_SEES)
        model = transformers.BlipForConditionalGeneration(config)
    else:
        encoder, decoder, sizes = ("DonutSwin", "MBart", _MBART) if family == DONUT else FAMILIES[family]
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            getattr(transformers, f"{encoder}Config")(**(_SWIN if family == DONUT else _SEES)),
            getattr(transformers, f"{decoder}Config")(**sizes),
        )
        config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 1, 0, 2
        model = transformers.VisionEncoderDecoderModel(config=config)
        model.generation_config = transformers.GenerationConfig(
            decoder_start_token_id=1, pad_token_id=0, eos_token_id=2, bos_token_id=1
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    if family == DONUT:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": list(_FIELDS)})
        tokenizer.save_pretrained(folder)
        images = transformers.DonutImageProcessorPil(size={"height": PAGE[0], "width": PAGE[1]})
        images.save_pretrained(folder)
        return folder
    write_preprocessing(
        folder,
        image_processor_type="ViTImageProcessor",
        size={"height": SIDE, "width": SIDE},
        resample=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return folder


def load(folder: Path) -> torch.nn.Module:
    """Reads a folder as `transformers` does; computed positions, which 5.23 leaves without numbers, anew."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    for part in model.modules():
        if getattr(part, "weights", torch.zeros(0)).is_meta:
            part.weights = None
    return model
