"""The architectures by the names that checkpoints and recipes use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headway_training.models.base import AttentionKind, Model
from headway_training.models.configuration import Configuration, nearest
from headway_training.models.encoder import Encoder, EncoderConfig
from headway_training.models.gpt import GPT, GPTConfig
from headway_training.models.recurrent import RecurrentConfig, RecurrentTranslator
from headway_training.models.transformer import Transformer, TransformerConfig
from headway_training.models.vit import ViT, ViTConfig

CONFIGURATIONS: Mapping[str, type[Configuration]] = MappingProxyType(
    {
        "gpt": GPTConfig,
        "transformer": TransformerConfig,
        "recurrent": RecurrentConfig,
        "encoder": EncoderConfig,
        "vit": ViTConfig,
    }
)
"""The class of each architecture's configuration."""


def make_configuration(architecture: str, values: Mapping[str, object]) -> Configuration:
    """Makes the configuration of an architecture from fields by name.

    Raises:
        ValueError: the architecture or a field is unknown (the nearest known one is named), or a value is wrong.
    """
    if architecture not in CONFIGURATIONS:
        raise ValueError(
            f"there is no architecture {architecture!r}; did you mean {nearest(architecture, CONFIGURATIONS)!r}? "
            f"Known are {', '.join(CONFIGURATIONS)}"
        )
    return CONFIGURATIONS[architecture].from_dict(values)


def build_model(
    architecture: str, configuration: Mapping[str, object] | Configuration, *, attention: AttentionKind = "plain"
) -> Model:
    """Builds a model with fresh weights.

    Args:
        architecture: `gpt`, `transformer`, `recurrent`, `encoder` or `vit`.
        configuration: the fields of that architecture's configuration by name, or the configuration.
        attention: `plain` to export, `fused` to train; additive attention has one kind.

    Returns:
        A `GPT`, `Transformer`, `RecurrentTranslator`, `Encoder` or `ViT`, in training mode.

    Raises:
        ValueError: the architecture, a field or a value is wrong; the message names it and its limit.
    """
    if isinstance(configuration, Configuration):
        configuration = configuration.to_dict()
    return _build(make_configuration(architecture, configuration)).use_attention(attention)


def _build(configuration: Configuration) -> Model:
    match configuration:
        case GPTConfig():
            return GPT(configuration)
        case TransformerConfig():
            return Transformer(configuration)
        case RecurrentConfig():
            return RecurrentTranslator(configuration)
        case EncoderConfig():
            return Encoder(configuration)
        case ViTConfig():
            return ViT(configuration)
        case _:
            raise AssertionError(f"no model for {type(configuration).__name__}")
