"""Tiny decoders of Hugging Face `transformers` that read images, with random weights, tokenizer and processor."""

import json
import warnings
from pathlib import Path

import numpy as np
import tiny_huggingface as tiny
import torch
import transformers
from PIL import Image

from headway_export.huggingface.vision_language import PixtralProcessor

SIDE = 16
"""Height and width of a tile, of four patches."""
LENGTH = 256
RESOLUTIONS = ((SIDE, 2 * SIDE), (2 * SIDE, SIDE), (2 * SIDE, 2 * SIDE), (3 * SIDE, SIDE))
"""Heights and widths that images of LLaVA-NeXT are put into."""
_EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
}
_MARKS = ("<image>", "<video>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<img>", "</img>")
_GRID = tuple(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3))
_WORDS = tiny.WORDS + len(_MARKS) + len(_GRID)
_TEXT = {
    **tiny.SIZES,
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": _WORDS,
    "max_position_embeddings": LENGTH,
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32, "query_pre_attn_scalar": 16}
_GEMMAS = {
    "gemma3": {**_WINDOWS, "model_type": "gemma3_text"},
    "paligemma": {"model_type": "gemma"},
    "paligemma2": {
        **_WINDOWS,
        "model_type": "gemma2",
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 30.0,
    },
}
"""Text models whose heads of 16 let a layer with a window have a cache of it."""
_GEMMA_4 = {
    **_WINDOWS,
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": _WORDS,
    "num_kv_shared_layers": 0,
    "global_head_dim": 16,
}
_PATCHES = {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 8}
_GRID_TEXT = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_CONFIGS = {
    "llava": ("Llava", {"vision_config": {**_EYES, "model_type": "clip_vision_model"}, "image_seq_length": 4}),
    "vipllava": (
        "VipLlava",
        {
            "vision_config": {**_EYES, "model_type": "clip_vision_model"},
            "image_seq_length": 4,
            "vision_feature_layers": [-2, -1],
        },
    ),
    "llava_next": (
        "LlavaNext",
        {
            "vision_config": {**_EYES, "model_type": "clip_vision_model"},
            "image_seq_length": 4,
            "image_grid_pinpoints": [list(size) for size in RESOLUTIONS],
        },
    ),
    "llava_onevision": (
        "LlavaOnevision",
        {
            "vision_config": {**_EYES, "model_type": "siglip_vision_model", "vision_use_head": False},
            "image_grid_pinpoints": [list(size) for size in RESOLUTIONS],
            "vision_aspect_ratio": "anyres_max_2",
        },
    ),
    "idefics3": ("Idefics3", {"vision_config": _EYES, "scale_factor": 2}),
    "smolvlm": ("SmolVLM", {"vision_config": _EYES, "scale_factor": 2}),
    "qwen2_vl": (
        "Qwen2VL",
        {"vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 8}},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "vision_config": {
                **_PATCHES,
                "window_size": 32,
                "fullatt_block_indexes": [1],
                "out_hidden_size": 32,
                "intermediate_size": 16,
            }
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "vision_config": {
                **_PATCHES,
                "out_hidden_size": 32,
                "intermediate_size": 16,
                "num_position_embeddings": 9,
                "deepstack_visual_indexes": [0],
            }
        },
    ),
    "pixtral": (
        "Llava",
        {
            "vision_config": {**_EYES, "head_dim": 8, "patch_size": SIDE, "model_type": "pixtral"},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "mistral3": (
        "Mistral3",
        {"vision_config": {**_EYES, "head_dim": 8, "model_type": "pixtral"}, "spatial_merge_size": 2},
    ),
    "gemma3": ("Gemma3", {"vision_config": {**_EYES, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4}),
    "gemma4": (
        "Gemma4",
        {
            "vision_config": {
                **_EYES,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "pooling_kernel_size": 2,
                "position_embedding_size": 512,
                "standardize": True,
            },
            "audio_config": None,
        },
    ),
    "paligemma": (
        "PaliGemma",
        {"vision_config": {**_EYES, "model_type": "siglip_vision_model", "projection_dim": 32}, "projection_dim": 32},
    ),
    "paligemma2": (
        "PaliGemma",
        {"vision_config": {**_EYES, "model_type": "siglip_vision_model", "projection_dim": 32}, "projection_dim": 32},
    ),
    "internvl": (
        "InternVL",
        {
            "vision_config": {**_EYES, "image_size": [SIDE, SIDE], "patch_size": [8, 8]},
            "downsample_ratio": 0.5,
        },
    ),
}
FAMILIES = tuple(_CONFIGS)
_IN_PARTS = (
    "{% for m in messages %}<s>{{ m.role }} {% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
_OF_BOTH = (
    "{% for m in messages %}<s>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}"
)


def write_seer(folder: Path, family: str) -> Path:
    """Writes a model whose prompts may have images, whose tiles have 16 x 16 pixels."""
    prefix, values = _CONFIGS[family]
    tiny.write_tokenizer(folder, frame="$A")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [*_MARKS, *_GRID]})
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>"}
    names |= {"boi_token": "<img>", "eoi_token": "</img>", "boa_token": "<img>", "eoa_token": "</img>"}
    tokenizer._set_model_specific_special_tokens({**names, "video_token": "<video>", "image_token": "<image>"})
    token = tokenizer.convert_tokens_to_ids("<image>")
    text, untied = _TEXT, {"tie_word_embeddings": False} if family in (*_GEMMAS, "gemma4") else {}
    if prefix.startswith("Qwen"):
        text = {name: value for name, value in {**_TEXT, **_GRID_TEXT}.items() if name != "model_type"}
        text |= {"head_dim": 8} if family == "qwen3_vl" else {}
    if family == "gemma4":
        text = {**text, "num_key_value_heads": 1, "head_dim": 16, **_GEMMA_4, "tie_word_embeddings": False}
    if family in _GEMMAS:
        text = {**text, "num_key_value_heads": 1, "head_dim": 16, **_GEMMAS[family], "tie_word_embeddings": False}
    config = getattr(transformers, f"{prefix}Config")(**values, text_config=text, image_token_id=token, **untied)
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    _write_processor(folder, family, tokenizer)
    return folder


def _write_processor(folder: Path, family: str, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    """Writes what a processor would: those of families that read videos, too, need torchvision."""
    settings = {}
    if family in ("llava", "vipllava", "llava_next"):
        sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
        images = transformers.CLIPImageProcessorPil(**sizes)
        if family == "llava_next":
            points = [list(size) for size in RESOLUTIONS]
            images = transformers.LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=points)
        settings = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    elif family == "llava_onevision":
        images = transformers.LlavaOnevisionImageProcessorPil(
            size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=[list(size) for size in RESOLUTIONS]
        )
        settings = {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}
        settings |= {"vision_aspect_ratio": "anyres_max_2"}
    elif family.startswith("qwen"):
        images = transformers.Qwen2VLImageProcessorPil(
            size={"shortest_edge": 4 * SIDE**2, "longest_edge": 64 * SIDE**2}, patch_size=SIDE // 2
        )
    elif family in ("pixtral", "mistral3"):
        images = transformers.PixtralImageProcessorPil(size={"longest_edge": 8 * SIDE}, patch_size=SIDE // 2)
        settings = {"patch_size": SIDE if family == "pixtral" else SIDE // 2}
        settings |= {} if family == "pixtral" else {"spatial_merge_size": 2}
        settings |= {"image_token": "<image>", "image_break_token": "<img>", "image_end_token": "</img>"}
    elif family == "gemma4":
        images = transformers.Gemma4ImageProcessorPil(patch_size=SIDE // 2, pooling_kernel_size=2, max_soft_tokens=70)
    elif family in _GEMMAS:
        kind = "Gemma3" if family == "gemma3" else "Siglip"
        images = getattr(transformers, f"{kind}ImageProcessorPil")(size={"height": SIDE, "width": SIDE})
        images.image_seq_length = settings["image_seq_length"] = 4
    elif family == "internvl":
        images = transformers.GotOcr2ImageProcessorPil(
            size={"height": SIDE, "width": SIDE}, min_patches=1, max_patches=4, crop_to_patches=True
        )
        settings = {"image_seq_length": 1}
    else:
        kind = "Idefics3" if family == "idefics3" else "SmolVLM"
        images = getattr(transformers, f"{kind}ImageProcessorPil")(
            size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE}
        )
        settings = {"image_seq_len": 1}
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(settings))
    tokenizer.chat_template = _template_of(family)
    tokenizer.save_pretrained(folder)


def _template_of(family: str) -> str | None:
    if family in ("idefics3", "smolvlm"):
        return _IN_PARTS
    if family.startswith("qwen"):  # which do not tell images apart that stand side by side
        return _OF_BOTH.replace("<image>\n", "<img><image></img>")
    if family == "gemma3":
        return _OF_BOTH.replace("<image>\n", "<img>")
    return None if family in _GEMMAS else _OF_BOTH


def draw_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Returns a smooth picture."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def open_processor(folder: Path, family: str) -> transformers.ProcessorMixin:
    """Opens the processor of a folder, without what reads videos: that needs torchvision."""
    kinds = {
        "llava": transformers.LlavaProcessor,
        "llava_next": transformers.LlavaNextProcessor,
        "llava_onevision": transformers.LlavaOnevisionProcessor,
        "internvl": transformers.InternVLProcessor,
        "pixtral": PixtralProcessor,
        "mistral3": PixtralProcessor,
        "gemma3": transformers.Gemma3Processor,
        "gemma4": transformers.Gemma4Processor,
        "paligemma": transformers.PaliGemmaProcessor,
        "paligemma2": transformers.PaliGemmaProcessor,
        "qwen2_vl": transformers.Qwen2VLProcessor,
        "qwen2_5_vl": transformers.Qwen2VLProcessor,
        "qwen3_vl": transformers.Qwen2VLProcessor,
    }
    kind = kinds.get(family, transformers.Idefics3Processor)
    loose = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    settings = json.loads((folder / "processor_config.json").read_text())
    others = dict.fromkeys(("feature_extractor", "video_processor")) if family == "gemma4" else {}
    parts = {"image_processor": images, "tokenizer": tokenizer, **others}
    return loose(**parts, chat_template=tokenizer.chat_template, **settings)


def own_answer(folder: Path, family: str, content: list[str | Image.Image], num_tokens: int) -> tuple[int, list[int]]:
    """Returns the number of tokens of a user's turn as a prompt, and the greedy answer to it, of `transformers`."""
    processor = open_processor(folder, family)
    parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content]
    asked = [{"role": "user", "content": parts}]
    pictures = [part for part in content if not isinstance(part, str)]
    if processor.chat_template is None:
        text = "<image>" * len(pictures) + "".join(part for part in content if isinstance(part, str))
    else:
        text = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PaliGemma's copies tensors as NumPy will not have it
        if family == "llava_onevision":  # which reads several images of a prompt otherwise
            pictures = [pictures]
        inputs = processor(text=text, images=pictures, add_special_tokens=False, return_tensors="pt")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    names = ("input_ids", "pixel_values", "image_grid_thw", "image_sizes", "mm_token_type_ids", "token_type_ids")
    names += ("image_position_ids", "batch_num_images")
    given = {name: inputs[name] for name in names if name in inputs}
    with torch.inference_mode():
        ids = model.generate(**given, max_new_tokens=num_tokens, do_sample=False)[0].tolist()
    length = given["input_ids"].shape[1]
    return length, [token for token in ids[length:] if token != model.generation_config.eos_token_id]
