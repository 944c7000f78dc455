"""Tiny models of Hugging Face `transformers` with random weights, as the folders that its `save_pretrained` writes.

Tracing takes seconds a layer, so there are two layers only where layers differ, and in the Llama.
"""

import json
import string
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

WORDS = 80
LENGTH = 48
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TWO_LAYERS = {"num_hidden_layers": 2}
_GROUPED = {**SIZES, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 1, "n_head": 4}
_OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}
_ENCODER = {**SIZES, "num_labels": 3}
_DISTIL = {"dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48}

_WINDOW = {"sliding_window": 8}
_WINDOWS = {**_WINDOW, **_TWO_LAYERS, "layer_types": ["sliding_attention", "full_attention"]}

_SHORT = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_ROTARY = {**_GPT2, **_SHORT, "n_layer": 2, "rotary_dim": 4}
_FALCON = {**SIZES, **_TWO_LAYERS}
_EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
"""Of a tower that reads images."""

DECODERS = {
    "gpt2": ("GPT2", {**_GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "llama": ("Llama", {**_GROUPED, **_TWO_LAYERS}),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 16}),
    "gpt_neox": ("GPTNeoX", SIZES),
    "opt": ("OPT", {**SIZES, **_OPT}),
    "phi3": ("Phi3", _GROUPED),
    "olmo2": ("Olmo2", _GROUPED),
    "smollm3": ("SmolLM3", {**_GROUPED, **_TWO_LAYERS, "no_rope_layer_interval": 2}),
    "gemma2": ("Gemma2", {**_GROUPED, **_WINDOWS, "head_dim": 8, "attn_logit_softcapping": 5.0}),
    "mpt": ("Mpt", {**_SHORT, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": LENGTH}),
    "gemma3": (
        "Gemma3",
        {
            "text_config": {**_GROUPED, **_WINDOWS, "head_dim": 8},
            "vision_config": _EYES,
            "image_token_id": SPECIAL.index("<unk>"),
        },
    ),
}
"""Prefix of the classes of a family and its configuration, by model type."""
_SCALED = {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}
_ATTENTION_ALONE = {
    "num_hidden_layers": 2,
    "layer_types": ["attention", "attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 4,
}
"""Of a family that has other layers, too."""
_LOCAL = {"attention_types": [[["global", "local"], 1]], "window_size": 8, "max_position_embeddings": LENGTH}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_GEMMA_4 = {**_GROUPED, **_WINDOWS, "head_dim": 8, "vocab_size_per_layer_input": WORDS}
_SEES = {**_EYES, "model_type": "clip_vision_model"}
_PIXTRAL = {**_EYES, "model_type": "pixtral", "head_dim": 8}
_QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_MIXED = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}
_MIXED_LOCALLY = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
FURTHER_DECODERS = {
    "granite": ("Granite", {**_GROUPED, **_SCALED}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**_GROUPED, **_SCALED, **_ATTENTION_ALONE}),
    "stablelm": ("StableLm", _GROUPED),
    "starcoder2": ("Starcoder2", {**_GROUPED, **_WINDOW}),
    "mistral": ("Mistral", {**_GROUPED, **_WINDOW}),
    "qwen2, windows": ("Qwen2", {**_GROUPED, **_WINDOW, "use_sliding_window": True, "max_window_layers": 0}),
    "phi3, windows": ("Phi3", {**_GROUPED, **_WINDOW}),
    "gemma3_text": ("Gemma3", {**_GROUPED, **_WINDOWS, "head_dim": 8}),
    "gemma4_text": ("Gemma4", _GEMMA_4),
    "vaultgemma": ("VaultGemma", {**_GROUPED, **_WINDOWS, "head_dim": 8, "attn_logit_softcapping": 5.0}),
    "cohere2": ("Cohere2", {**_GROUPED, **_WINDOWS}),
    "olmo3": ("Olmo3", {**_GROUPED, **_WINDOWS}),
    "exaone4": ("Exaone4", {**_GROUPED, **_WINDOWS}),
    "gemma": ("Gemma", {**_GROUPED, "head_dim": 8}),
    "cohere": ("Cohere", _GROUPED),
    "phi": ("Phi", _GROUPED),
    "nanochat": ("NanoChat", _GROUPED),
    "phimoe, windows": ("Phimoe", {**_MIXED_LOCALLY, **_WINDOW}),
    "qwen2_moe, windows": (
        "Qwen2Moe",
        {
            **_MIXED,
            **_WINDOW,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "gptj": ("GPTJ", _ROTARY),
    "codegen": ("CodeGen", _ROTARY),
    "gpt_neo": ("GPTNeo", {**_SHORT, **_LOCAL, "hidden_size": 32, "num_layers": 2, "num_heads": 4}),
    "falcon": ("Falcon", _FALCON),
    "falcon, grouped heads": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, alibi": ("Falcon", {**_FALCON, "alibi": True, "multi_query": False}),
    "bloom": ("Bloom", {**_SHORT, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "xglm": ("XGLM", {**SIZES, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
    "biogpt": ("BioGpt", SIZES),
    "minicpm3": ("MiniCPM3", {**SIZES, **_LATENT, "num_key_value_heads": 4}),
    "diffllama": ("DiffLlama", {**_GROUPED, **_TWO_LAYERS}),
    "gpt2, narrow heads": ("GPT2", {**_GPT2, "n_embd": 40}),
    "gemma4, images": ("Gemma4", {"text_config": _GEMMA_4, "vision_config": _EYES}),
    "llava": ("Llava", {"text_config": {**_GROUPED, "model_type": "llama"}, "vision_config": _SEES}),
    "mistral3": ("Mistral3", {"text_config": {**_GROUPED, "model_type": "mistral"}, "vision_config": _PIXTRAL}),
    "idefics3": ("Idefics3", {"text_config": {**_GROUPED, "model_type": "llama"}, "vision_config": _EYES}),
    "smolvlm": ("SmolVLM", {"text_config": {**_GROUPED, "model_type": "llama"}, "vision_config": _EYES}),
    "qwen2_5_vl": ("Qwen2_5_VL", {"text_config": {**_GROUPED, "rope_parameters": _MROPE}, "vision_config": _QWEN_EYES}),
    "qwen3_vl": (
        "Qwen3VL",
        {"text_config": {**_GROUPED, "head_dim": 8, "rope_parameters": _MROPE}, "vision_config": _QWEN_EYES},
    ),
}
"""Decoders that are held against `transformers` and not exported in the tests."""
_WITH_IMAGES = ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")
"""Families whose configuration of a decoder alone has a name of its own."""
MIXTURES = {
    "mixtral": ("Mixtral", {**_MIXED_LOCALLY, "intermediate_size": 32}),
    "qwen2_moe": ("Qwen2Moe", {**_MIXED, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3Moe", {**_MIXED, "moe_intermediate_size": 24, "head_dim": 8}),
    "olmoe": ("Olmoe", _MIXED),
    "gpt_oss": (
        "GptOss",
        {
            **_MIXED_LOCALLY,
            **_WINDOWS,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "granitemoe": ("GraniteMoe", _MIXED_LOCALLY),
    "phimoe": ("Phimoe", _MIXED_LOCALLY),
    "flex_olmo": ("FlexOlmo", _MIXED),
}
"""Decoders with experts."""
_STATES = {**_GROUPED, **_TWO_LAYERS}
_CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}
_DELTA_MIXED = {**_DELTA, **_MIXED, **_TWO_LAYERS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
_SCAN = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_MAMBA = {**SIZES, "state_size": 8}
_MAMBA2 = {**SIZES, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16}
_GRANITE = {**_STATES, **_SCALED, **_SCAN, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48}
STATEFUL = {
    "lfm2": ("Lfm2", {**_STATES, **_CONVOLUTION, "block_multiple_of": 16}),
    "lfm2_moe": (
        "Lfm2Moe",
        {**_STATES, **_CONVOLUTION, **_MIXED, **_TWO_LAYERS, "moe_intermediate_size": 24, "num_dense_layers": 1},
    ),
    "lfm3": ("Lfm3", _STATES),
    "qwen3_5_text": ("Qwen3_5", {**_STATES, **_DELTA}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", _DELTA_MIXED),
    "qwen3_next": ("Qwen3Next", _DELTA_MIXED),
    "olmo_hybrid": ("OlmoHybrid", {**_STATES, **_DELTA}),
    "granitemoehybrid, states": ("GraniteMoeHybrid", {**_GRANITE, "num_local_experts": 0}),
    "granitemoehybrid, experts": ("GraniteMoeHybrid", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "falcon_h1": ("FalconH1", {**_GROUPED, **_SCAN, "mamba_d_ssm": 64, "head_dim": 8, "lm_head_multiplier": 0.5}),
    "bamba": ("Bamba", {**_STATES, **_SCAN, "attn_layer_indices": [1]}),
    "nemotron_h": (
        "NemotronH",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "hybrid_override_pattern": "M*-",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "head_dim": 8,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **_STATES,
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "chunk_size": 16,
            "num_mem_blocks": 1,
        },
    ),
    "jamba": (
        "Jamba",
        {
            **_STATES,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "mamba2": ("Mamba2", _MAMBA2),
    "mamba": ("Mamba", _MAMBA),
    "falcon_mamba": ("FalconMamba", _MAMBA),
}
"""Decoders with states beside keys and values, or in their place."""
_BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2, "num_labels": 3}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
ENCODER_DECODERS = {
    "bart": ("Bart", {"vocab_size": WORDS, "max_position_embeddings": LENGTH, **_BART}),
    "t5": ("T5", {"vocab_size": WORDS, **_T5, "num_labels": 3}),
    "umt5": ("UMT5", {"vocab_size": WORDS, **_T5, "num_labels": 3}),
}
"""Classifiers with a decoder."""
ENCODERS = {
    "bert": ("Bert", _ENCODER),
    "roberta": ("Roberta", {**_ENCODER, "max_position_embeddings": LENGTH + 1, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", {**_ENCODER, **_DISTIL}),
    "modernbert": ("ModernBert", {**_ENCODER, **_TWO_LAYERS, "local_attention": 8, "global_attn_every_n_layers": 2}),
    "electra": ("Electra", {**_ENCODER, "embedding_size": 16}),
    "big_bird": ("BigBird", {**_ENCODER, "max_position_embeddings": 256, "block_size": 16, "num_random_blocks": 1}),
}

_RELATIVE = {"relative_attention": True, "max_relative_positions": LENGTH}
FURTHER_ENCODERS = {
    "albert": ("Albert", {**_ENCODER, "embedding_size": 16}),
    "deberta": ("Deberta", {**_ENCODER, **_RELATIVE, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}),
    "deberta-v2": (
        "DebertaV2",
        {
            **_ENCODER,
            **_RELATIVE,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
            "type_vocab_size": 0,
            "legacy": False,
        },
    ),
    "mpnet": ("MPNet", {**_ENCODER, "max_position_embeddings": LENGTH + 2}),
    "xlm-roberta": ("XLMRoberta", {**_ENCODER, "max_position_embeddings": LENGTH + 1, "type_vocab_size": 1}),
}
"""Encoders that are read, and not served in the tests."""


def write_tokenizer(
    folder: Path,
    *,
    frame: str = "<s> $A </s>",
    extra_words: int = 0,
    has_types: bool = False,
    chat_template: str | None = None,
    mask: str = "",
) -> None:
    """Writes a tokenizer of bytes and a few merges, all of ASCII; 0 pads, 1 begins and 2 ends a text.

    Args:
        folder: Where to.
        frame: What it puts around a text: a Llama's puts nothing behind it.
        extra_words: How many words it has past `WORDS`.
        has_types: True if it tells the model which text of a pair each token belongs to, as BERT's does.
        chat_template: Jinja.
        mask: Its mask token, the last of its words; empty: none. One called <mask> takes the space before it, as
            RoBERTa's does.
    """
    letters = [*string.ascii_lowercase, "Ġ"]
    merges = [("Ġ", letter) for letter in string.ascii_lowercase]
    merges += [(first, second) for first in "aeiou" for second in "nrst"]
    pieces = [*SPECIAL, *letters, *("".join(pair) for pair in merges)]
    pieces += [f"<{number}>" for number in range(len(pieces), WORDS + extra_words)]
    pieces[-1] = mask or pieces[-1]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [("<s>", 1), ("</s>", 2)]
    pair = "<s> $A </s> $B:1 </s>:1"
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, pair=pair, special_tokens=marks)
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    if mask:
        names["mask_token"] = transformers.AddedToken(mask, lstrip=mask == "<mask>", special=True)
    inputs = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def write_model(folder: Path, family: str, head: str = "", **changes) -> Path:
    """Writes a model with random weights, drawn wide enough that greedy answers do not repeat one word."""
    families = {
        **DECODERS,
        **FURTHER_DECODERS,
        **MIXTURES,
        **STATEFUL,
        **ENCODERS,
        **FURTHER_ENCODERS,
        **ENCODER_DECODERS,
    }
    prefix, values = families[family]
    text = "Text" if prefix in _WITH_IMAGES and "text_config" not in values else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**{**values, **changes})
    name = head or ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM")
    if "text_config" in values:
        name = "ForConditionalGeneration"
    torch.manual_seed(7)
    model = getattr(transformers, prefix + name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def write_generation_config(folder: Path, **values):
    """Writes `generation_config.json`."""
    (folder / "generation_config.json").write_text(json.dumps(values))
