"""Static embeddings, of sentence-transformers or model2vec: the vector of a text is the mean of its tokens'.

B rows, T tokens, V tokens of the vocabulary, D width of an embedding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PretrainedConfig

from headway_export.errors import SourceError
from headway_export.huggingface.embedders import MODULES_FILE, Normalize, read_prompts
from headway_export.huggingface.folder import FolderOptions, ModelFolder
from headway_export.source import ExportSource, open_tokenizer
from headway_server.bundles import Origin, SpecialTokens, Task
from headway_training.folders import MAX_LENGTH, first_line

_KINDS: Final = (["StaticEmbedding"], ["StaticEmbedding", "Normalize"])
_WEIGHTS: Final = "model.safetensors"
_VECTORS: Final = ("embedding.weight", "embeddings")
"""Names of the vectors: of sentence-transformers, and of model2vec."""


class _Config(PretrainedConfig):  # type: ignore[misc]  # the library has no types here
    model_type = "static_embedding"


class StaticEmbedder(nn.Module):
    """Mean vector of a text's tokens."""

    pooling = "mean"

    def __init__(self, vectors: Tensor, *, head: nn.Module, max_length: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(vectors, requires_grad=False)  # (V, D)
        self.head = head
        self.max_length = max_length

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """(B, T), (B, T) -> `embedding` (B, D)."""
        mask = attention_mask.unsqueeze(-1).to(self.vectors.dtype)  # (B, T, 1)
        means = (self.vectors[input_ids] * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return {"embedding": self.head(means)}


def static_part(path: Path) -> Path | None:
    """Returns the folder of the vectors, if a folder has static embeddings."""
    try:
        entries = json.loads((path / MODULES_FILE).read_text(encoding="utf-8"))
        kinds = [str(entry["type"]).rsplit(".", 1)[-1] for entry in entries]
        part = path / str(entries[0]["path"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None  # `read_layout` says what is wrong
    return part if kinds in _KINDS and part.resolve().is_relative_to(path.resolve()) else None


def read_static(
    path: Path, part: Path, options: FolderOptions, origin: Origin | None = None
) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a folder of static embeddings.

    Raises:
        SourceError: The folder is incomplete, or another task is asked for.
    """
    if options.task not in (None, Task.TEXT_EMBEDDING):
        raise SourceError(f"{path}: has static embeddings, which are for {Task.TEXT_EMBEDDING}, not for {options.task}")
    tokenizer = open_tokenizer(part / "tokenizer.json")
    tokenizer.post_processor = None  # no special token is in the mean
    vectors = _read_vectors(part / _WEIGHTS, tokenizer)
    is_normal = len(json.loads((path / MODULES_FILE).read_text(encoding="utf-8"))) > 1
    length = options.max_length or MAX_LENGTH
    notes = () if options.max_length else (f"texts of at most {length} tokens; --max-length N changes it",)
    config = _Config(vocab_size=len(vectors))
    folder = ModelFolder(path=path, task=Task.TEXT_EMBEDDING, config=config, options=options, origin=origin)

    def make() -> StaticEmbedder:
        head = Normalize() if is_normal else nn.Identity()
        return StaticEmbedder(_read_vectors(part / _WEIGHTS, tokenizer), head=head, max_length=length).eval()

    module = make()
    prompts, default, prompt_notes = read_prompts(folder, is_normal=is_normal)
    source = folder.source(
        module,
        module,
        make_reference=make,
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(pad=0),
        prompts=prompts,
        default_prompt=default,
        evaluation=folder.evaluation(),
    )
    return source, (*notes, *prompt_notes)


def _read_vectors(file: Path, tokenizer: Tokenizer) -> Tensor:
    """Returns the vectors of tokens, (V, D).

    model2vec shares vectors between tokens (`mapping`, (V,)) and weighs them (`weights`, (V,)).

    Raises:
        SourceError: They cannot be read, or are fewer than the tokens.
    """
    try:
        stored = load_file(file)
        vectors = next(stored[name] for name in _VECTORS if name in stored).float()
        if "mapping" in stored:
            vectors = vectors[stored["mapping"].long()]
        if "weights" in stored:
            vectors = vectors * stored["weights"].float()[:, None]
    except (OSError, SafetensorError, StopIteration, IndexError, RuntimeError) as error:
        raise SourceError(f"{file}: its vectors cannot be read ({first_line(error)})") from error
    if (needed := max(tokenizer.get_vocab().values(), default=0) + 1) > len(vectors):
        raise SourceError(
            f"{file}: has {len(vectors)} vectors, and the tokenizer {needed} tokens; fetch the folder again"
        )
    if not torch.isfinite(vectors).all():
        raise SourceError(f"{file}: has vectors that are not finite; fetch the folder again")
    return vectors
