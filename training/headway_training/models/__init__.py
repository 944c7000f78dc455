"""Transformers and a recurrent model in plain PyTorch, made of one kit of parts (protocol: docs/bring-your-own.md)."""

from headway_training.models.architectures import (
    ARCHITECTURES,
    architecture,
    architectures_of,
    build_model,
    find_architecture,
    make_configuration,
)
from headway_training.models.autoencoder import Autoencoder, AutoencoderConfig
from headway_training.models.base import AttentionKind, Model, count_parameters
from headway_training.models.captioning import Captioner, CaptionerConfig
from headway_training.models.clip import CLIP, CLIPConfig
from headway_training.models.codec import Codec, CodecConfig
from headway_training.models.configuration import Configuration, LayerConfig
from headway_training.models.detection import Detector, DetectorConfig
from headway_training.models.diffusion import LatentDiffusion, LatentDiffusionConfig
from headway_training.models.dino import DINO, DINOConfig
from headway_training.models.encoder import Encoder, EncoderConfig
from headway_training.models.gpt import GPT, GPTConfig
from headway_training.models.linear import LinearConfig, LinearDecoder
from headway_training.models.recurrent import RecurrentConfig, RecurrentTranslator
from headway_training.models.segmentation import MaskDecoder, SegmentationConfig, Segmenter
from headway_training.models.sizes import NAMED_CONFIGURATIONS, NamedConfiguration, named_configuration
from headway_training.models.synthesis import SpeechSynthesizer, SpeechSynthesizerConfig
from headway_training.models.transcription import Transcriber, TranscriberConfig
from headway_training.models.transformer import Transformer, TransformerConfig
from headway_training.models.vit import ImageEmbedder, ImageEncoderConfig, ViT, ViTConfig

__all__ = [
    "ARCHITECTURES",
    "CLIP",
    "DINO",
    "GPT",
    "NAMED_CONFIGURATIONS",
    "AttentionKind",
    "Autoencoder",
    "AutoencoderConfig",
    "CLIPConfig",
    "Captioner",
    "CaptionerConfig",
    "Codec",
    "CodecConfig",
    "Configuration",
    "DINOConfig",
    "Detector",
    "DetectorConfig",
    "Encoder",
    "EncoderConfig",
    "GPTConfig",
    "ImageEmbedder",
    "ImageEncoderConfig",
    "LatentDiffusion",
    "LatentDiffusionConfig",
    "LayerConfig",
    "LinearConfig",
    "LinearDecoder",
    "MaskDecoder",
    "Model",
    "NamedConfiguration",
    "RecurrentConfig",
    "RecurrentTranslator",
    "SegmentationConfig",
    "Segmenter",
    "SpeechSynthesizer",
    "SpeechSynthesizerConfig",
    "Transcriber",
    "TranscriberConfig",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTConfig",
    "architecture",
    "architectures_of",
    "build_model",
    "count_parameters",
    "find_architecture",
    "make_configuration",
    "named_configuration",
]
