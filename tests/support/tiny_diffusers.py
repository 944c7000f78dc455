"""Tiny pipelines of diffusers with random weights, as folders."""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers

SIDE, HALVINGS, LATENT_CHANNELS, WIDTH, LENGTH = 8, 1, 4, 32, 77
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
SCHEDULERS = {
    "DDIMScheduler": {"clip_sample": False, "set_alpha_to_one": False},
    "EulerDiscreteScheduler": {"timestep_spacing": "leading"},
    "DPMSolverMultistepScheduler": {},
    "PNDMScheduler": {"skip_prk_steps": True},
    "EulerAncestralDiscreteScheduler": {"timestep_spacing": "trailing"},
    "LCMScheduler": {},
}


def write_stable_diffusion(folder: Path, scheduler: str = "DDIMScheduler", **settings: object) -> Path:
    """Writes a pipeline of Stable Diffusion."""
    return _write(folder, "StableDiffusionPipeline", scheduler, **settings)


def write_inpainting(folder: Path) -> Path:
    """Writes a pipeline of Stable Diffusion whose network reads a mask and what is seen, published as it is."""
    unet = {"in_channels": 2 * LATENT_CHANNELS + 1}
    return _write(folder, "StableDiffusionInpaintPipeline", "PNDMScheduler", unet)


def write_consistency(folder: Path) -> Path:
    """Writes a latent consistency model, which reads the scale of guidance."""
    return _write(folder, "LatentConsistencyModelPipeline", "LCMScheduler", {"time_cond_proj_dim": 32})


def write_xl(folder: Path) -> Path:
    """Writes a pipeline of SDXL, of the schedule of its distilled form."""
    import diffusers

    tokenizer = _tokenizer(folder)
    second = transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer", model_max_length=LENGTH, pad_token="!")
    torch.manual_seed(3)
    pipeline = diffusers.StableDiffusionXLPipeline(
        vae=_autoencoder(),
        text_encoder=_text_encoder(len(tokenizer)),
        text_encoder_2=transformers.CLIPTextModelWithProjection(_text_config(len(tokenizer), projection_dim=16)),
        tokenizer=tokenizer,
        tokenizer_2=second,
        unet=_unet(
            cross_attention_dim=2 * WIDTH,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 16,
        ),
        scheduler=_scheduler("EulerAncestralDiscreteScheduler"),
    )
    pipeline.save_pretrained(folder)
    return folder


def write_pixart(folder: Path) -> Path:
    """Writes a pipeline of PixArt-alpha."""
    import diffusers

    tokenizer = _t5_tokenizer()
    torch.manual_seed(4)
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=LATENT_CHANNELS,
        out_channels=2 * LATENT_CHANNELS,
        num_layers=2,
        sample_size=SIDE,
        cross_attention_dim=32,
        caption_channels=WIDTH,
    )
    _lively(transformer)
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2, is_gated_act=True
    )
    pipeline = diffusers.PixArtAlphaPipeline(
        tokenizer=tokenizer,
        text_encoder=transformers.T5EncoderModel(config),
        vae=_autoencoder(),
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )
    pipeline.save_pretrained(folder)
    return folder


def _write(folder: Path, kind: str, scheduler: str, unet: dict[str, object] | None = None, **settings: object) -> Path:
    """Writes a pipeline of the parts of Stable Diffusion."""
    import diffusers

    tokenizer = _tokenizer(folder)
    torch.manual_seed(0)
    pipeline = getattr(diffusers, kind)(
        vae=_autoencoder(),
        text_encoder=_text_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        unet=_unet(**(unet or {})),
        scheduler=_scheduler(scheduler, **settings),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    return folder


def _unet(**settings: object) -> object:
    import diffusers

    return diffusers.UNet2DConditionModel(
        **{
            "sample_size": SIDE,
            "in_channels": LATENT_CHANNELS,
            "out_channels": LATENT_CHANNELS,
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "attention_head_dim": 2,
            "cross_attention_dim": WIDTH,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            **settings,
        }
    )


def _scheduler(name: str, **settings: object) -> object:
    import diffusers

    return getattr(diffusers, name)(**NOISE, **SCHEDULERS[name], **settings)


def write_dit(folder: Path) -> Path:
    """Writes a pipeline that draws a thousand labels, as DiT's is bound to."""
    import diffusers

    torch.manual_seed(1)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=LATENT_CHANNELS,
        out_channels=2 * LATENT_CHANNELS,
        num_layers=2,
        sample_size=SIDE,
        num_embeds_ada_norm=1000,
    )
    _lively(transformer)
    scheduler = diffusers.DDIMScheduler(clip_sample=False)
    pipeline = diffusers.DiTPipeline(
        transformer=transformer,
        vae=_autoencoder(),
        scheduler=scheduler,
        id2label={number: f"thing {number}, number {number}" for number in range(1000)},
    )
    pipeline.save_pretrained(folder)
    change(folder / "model_index.json", id2label={str(number): f"thing {number}" for number in range(1000)})
    return folder


def _lively(module: torch.nn.Module) -> None:
    """Makes what is zero in a new model, its gates and last layers, something."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)


def change(file: Path, **values: object) -> None:
    """Changes entries of a JSON file; None takes one out."""
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def _tokenizer(folder: Path) -> transformers.CLIPTokenizer:
    """Writes CLIP's tokenizer of single letters and a few pairs of them, as the published ones are written."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("r", "e"), ("re", "d</w>"), ("c", "a"), ("ca", "t</w>")]
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, pairs)]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(vocabulary))
    merges = "\n".join(["#version: 0.2", *map(" ".join, pairs)])
    (folder / "tokenizer" / "merges.txt").write_text(merges + "\n")
    return transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer", model_max_length=LENGTH)


def _autoencoder() -> object:
    import diffusers

    autoencoder = diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=SIDE << HALVINGS,
        scaling_factor=0.18215,
    )
    with torch.no_grad():  # latents of which nothing is drawn, so that pipelines encode an image as its likeliest one
        autoencoder.quant_conv.weight[LATENT_CHANNELS:] = 0
        autoencoder.quant_conv.bias[LATENT_CHANNELS:] = -30
    return autoencoder


def _text_encoder(vocab_size: int) -> object:
    return transformers.CLIPTextModel(_text_config(vocab_size))


def _text_config(vocab_size: int, **settings: object) -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        eos_token_id=vocab_size - 1,
        bos_token_id=vocab_size - 2,
        **settings,
    )


def _t5_tokenizer() -> transformers.T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(letter, -3.0 - number / 10) for number, letter in enumerate("abcdefghijklmnopqrstuvwxyzABC!.,")]
    return transformers.T5TokenizerFast(vocab=pieces, extra_ids=0)
