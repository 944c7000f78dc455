"""Adapters of low rank (LoRA, Hu et al. 2021, arXiv 2106.09685), merged into the weights of their base.

    W' = W + s B A,  s = alpha / r, or alpha / sqrt(r) with `use_rslora` (Kalajdzievski 2023, arXiv 2312.03732)
    W' = m (W + s B A) / |W + s B A|  with `use_dora`, norms by row, of an embedding (V, D) by column
                                                          (Liu et al. 2024, arXiv 2402.09353)

A folder of PEFT holds A, (r, K), B, (N, r), m, (N,), and whole weights of the modules that were trained themselves.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from headway_export.errors import SourceError
from headway_export.huggingface.published import Codes, Plain, Weight, stored_tensors

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = re.compile(r"(embed_tokens|embed_in|wte)\.weight$")
_PARTS: Final = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
_UNREAD: Final = (
    "alora_invocation_tokens", "arrow_config", "corda_config", "eva_config", "kasa_config", "layer_replication",
    "lora_bias", "lora_ga_config", "megatron_config", "monteclora_config", "target_parameters",
    "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
"""Settings of an adapter with which the merged weights, or what is computed with them, would be others."""
_MOST_REPEATED: Final = 2
_LONGEST_PATTERN: Final = 500
_CHANGE_THE_BASE: Final = ("pissa", "olora", "corda", "loftq", "eva", "lora_ga")
"""Begins of `init_lora_weights` with which the base that was trained on is another than the one that is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A folder of PEFT whose settings have been read."""

    path: Path
    settings: Mapping[str, Any]
    title: str
    """What the adapter is called."""

    @classmethod
    def read(cls, path: Path, title: str | None = None) -> Adapter | None:
        """Reads the settings of a folder; None: it holds no adapter.

        Args:
            path: The folder.
            title: What the adapter is called; None: by its folder.

        Raises:
            SourceError: The adapter is of a kind that is not merged.
        """
        try:
            settings = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise SourceError(f"{path / CONFIG_FILE}: cannot be read ({error})") from error
        if not isinstance(settings, dict):
            raise SourceError(f"{path / CONFIG_FILE}: is not a JSON object")
        if (kind := settings.get("peft_type")) != "LORA":
            raise SourceError(f"{path}: is an adapter of the kind {kind}, and LORA is merged; merge it with peft first")
        start = settings.get("init_lora_weights")
        unread = [name for name in _UNREAD if settings.get(name)]
        unread += [f"init_lora_weights {start}"] if str(start).lower().startswith(_CHANGE_THE_BASE) else []
        if unread:
            raise SourceError(
                f"{path}: its adapter has {', '.join(unread)}, which is not merged; merge it with peft first"
            )
        for pattern in settings.get("alpha_pattern") or {}:
            _check_pattern(path, str(pattern))
        if not (path / WEIGHTS_FILE).is_file():
            raise SourceError(f"{path}: has {CONFIG_FILE} and no {WEIGHTS_FILE}; fetch the folder again")
        return cls(path=path, settings=settings, title=title or path.resolve().name)

    @property
    def base(self) -> str | None:
        """The folder or id that the adapter was trained on, as it says itself."""
        stated = self.settings.get("base_model_name_or_path")
        return str(stated) if stated else None

    def merged(self, plain: Plain) -> tuple[Plain, Mapping[str, Any]]:
        """Returns the weights of the base with the adapter merged into them, and what it changes in `config.json`.

        Raises:
            SourceError: The adapter has weights for modules that the base does not have.
        """
        stored = stored_tensors([self.path / WEIGHTS_FILE])
        parts: defaultdict[str, dict[str, Callable[[], Tensor]]] = defaultdict(dict)
        found: dict[str, Callable[[], Weight]] = dict(plain)
        changed: dict[str, Any] = {}
        whole: dict[str, Callable[[], Tensor]] = {}
        for name, read in stored.items():
            module, part = self._split(name)
            if part is None:
                whole[module] = read
            else:
                parts[module][part] = read
        if _HEAD not in plain:  # the base has the embedding's there
            head = whole.get(_HEAD) or self._tied(plain, whole, parts)
            if head is not None:
                found[_HEAD], changed["tie_word_embeddings"] = head, False
        for name, read in whole.items():  # modules that were trained whole, or their biases
            self._check(name, found)
            found[name] = read
            if _EMBEDDING.search(name) or (name == _HEAD and name in plain):
                changed["vocab_size"] = len(read())
        for module, some in parts.items():
            weight = f"{module}.weight"
            self._check(weight, found)
            found[weight] = self._merging(module, found[weight], some)
        return found, changed

    def _tied(
        self, plain: Plain, whole: Mapping[str, Callable[[], Tensor]], parts: Collection[str]
    ) -> Callable[[], Weight] | None:
        """Returns an output projection that the base has as its embedding alone; None: they are the same still.

        An adapter of one of the two leaves the other as it was, unless it says that it ties them.
        """
        embeddings = [name for name in plain if _EMBEDDING.search(name)]
        if len(embeddings) != 1:
            return None
        (name,) = embeddings
        ties = bool(self.settings.get("ensure_weight_tying"))
        if _HEAD.removesuffix(".weight") in parts or (name.removesuffix(".weight") in parts and not ties):
            return whole.get(name, plain[name])
        is_trained = name in whole and not ties and whole[name]().shape == widened(plain[name]()).shape
        return plain[name] if is_trained else None

    def _split(self, name: str) -> tuple[str, str | None]:
        """Returns the module and the part of it that a tensor of the adapter is; or a weight's name and None."""
        name = name.removeprefix(_PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        for part in _PARTS:
            module, mark, rest = name.partition(f".{part}")
            if mark and rest in ("", ".weight", ".default", ".default.weight"):
                return module, part
        return name, None

    def _check(self, name: str, plain: Plain) -> None:
        if name not in plain:
            raise SourceError(
                f"{self.path}: its adapter has a weight for {name}, which the base does not have; name the base that "
                "it was trained on with --base"
            )

    def _merging(
        self, module: str, read: Callable[[], Weight], parts: Mapping[str, Callable[[], Tensor]]
    ) -> Callable[[], Tensor]:
        def merge() -> Tensor:
            weight = widened(read())
            if "lora_embedding_A" in parts:
                down, up = (parts[f"lora_embedding_{part}"]().float() for part in "AB")  # (r, V), (D, r)
                whole = weight + self._scale(module, len(down)) * (up @ down).T
                if (length := parts.get("lora_magnitude_vector")) is not None:
                    whole *= length().float() / torch.linalg.norm(whole, dim=0)  # (D,)
                return whole
            down, up = (parts[f"lora_{part}"]().float() for part in "AB")
            change = self._scale(module, len(down)) * (up @ down)  # (N, K)
            is_transposed = bool(self.settings.get("fan_in_fan_out"))
            whole = weight.T if is_transposed else weight
            if change.shape != whole.shape:
                raise SourceError(
                    f"{self.path}: its adapter changes {module} as a matrix of {tuple(change.shape)}, and the base has "
                    f"one of {tuple(whole.shape)}; name the base that it was trained on with --base"
                )
            whole = whole + change
            if (length := parts.get("lora_magnitude_vector")) is not None:
                whole *= (length().float() / torch.linalg.norm(whole, dim=1))[:, None]
            return whole.T.contiguous() if is_transposed else whole

        return merge

    def _scale(self, module: str, rank: int) -> float:
        patterns = self.settings.get("alpha_pattern") or {}
        of_module = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
        alpha = float(next(of_module, self.settings.get("lora_alpha", 8)))
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)


def _check_pattern(path: Path, pattern: str) -> None:
    """Checks that a pattern of modules' names is quickly compared with a name: others may take years.

    Raises:
        SourceError: It repeats groups, or more than two parts.
    """
    plain = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern)
    repeated = len(re.findall(r"[*+{]", plain))
    if repeated > _MOST_REPEATED or len(pattern) > _LONGEST_PATTERN or re.search(r"\)[*+{]", plain):
        raise SourceError(
            f"{path}: its adapter has the alpha_pattern {pattern[:80]!r}, and a pattern repeats up to {_MOST_REPEATED} "
            f"parts, no groups, and has up to {_LONGEST_PATTERN} characters; write the names of the modules"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise SourceError(
            f"{path}: its adapter has the alpha_pattern {pattern[:80]!r}, which is no regular expression ({error})"
        ) from error


def widened(weight: Weight) -> Tensor:
    """Returns a weight in fp32."""
    return torch.from_numpy(weight.widened()) if isinstance(weight, Codes) else weight.float()
