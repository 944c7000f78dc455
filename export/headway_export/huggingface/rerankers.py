"""Decoders that score a pair of texts: by the logits of two words, such as yes and no, after a question about the pair.

The score is the probability of the one against the other, the sigmoid of the difference of their logits. Folders of
sentence-transformers name the words in a module `LogitScore` and the question in their chat template; of Qwen3-Reranker
(arXiv 2506.05176) and mxbai-rerank-v2 (arXiv 2506.03487) both are known here.

B rows, T tokens, D model width.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headway_export.errors import SourceError
from headway_export.huggingface.attention import check_logits
from headway_export.huggingface.embedders import MODULES_FILE, last_token
from headway_export.huggingface.folder import ModelFolder, as_source_error
from headway_export.huggingface.settings import read_settings
from headway_export.source import ExportSource
from headway_server.bundles import Scoring, SpecialTokens
from headway_training.folders import check_reading, padding_of, plain_tokenizer

_QUERY, _TEXT = "{query}", "{text}"
_MODULE: Final = "LogitScore"
_RANKS: Final = re.compile(r"^(pipeline_tag:\s*|\s*-\s*)text-ranking\s*$", re.MULTILINE)
"""What the front matter of a reranker's README says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked about a pair, and the words of the answers."""

    of: str
    """The model that was trained with it."""
    template: str
    yes: str
    no: str


_NO_ROLES: Final = ("headway_first", "headway_second")
"""Roles that no template knows."""
_QUESTIONS: Final = {
    "qwen3": Question(
        of="Qwen3-Reranker",
        template=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given '
            f"a web search query, retrieve relevant passages that answer the query\n<Query>: {_QUERY}\n<Document>: "
            f"{_TEXT}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ),
        yes="yes",
        no="no",
    ),
    "qwen2": Question(
        of="mxbai-rerank-v2",
        template=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\nquery: {_QUERY}\ndocument: {_TEXT}\nYou are a search relevance expert who evaluates "
            "how well documents match search queries. For each query-document pair, carefully analyze the semantic "
            "relationship between them, then provide your binary relevance judgment (0 for not relevant, 1 for "
            "relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n"
        ),
        yes="1",
        no="0",
    ),
}
"""By the model type of the family: the words that Qwen3-Reranker and mxbai-rerank-v2 were trained with."""


class HuggingFaceReranker(nn.Module):
    """A causal language model of `transformers` as a scorer."""

    def __init__(self, model: nn.Module, *, max_length: int, yes: int, no: int | None) -> None:
        super().__init__()
        head = cast("Any", model).get_output_embeddings()
        row = head.weight[yes] - (0 if no is None else head.weight[no])
        self.model = cast("nn.Module", model.base_model)
        self.difference = nn.Parameter(row.detach().clone()[:, None], requires_grad=False)  # (D, 1)
        self.max_length = max_length

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T), (B, T) -> the difference of the logits after the last token, (B, 1)."""
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True)
        mask = attention_mask.unsqueeze(-1).to(output.last_hidden_state.dtype)
        return last_token(output.last_hidden_state, mask) @ self.difference


def is_reranker(path: Path, architectures: list[str]) -> bool:
    """Returns True if a folder says that its causal language model scores pairs."""
    if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return False
    if _module_of(path) is not None:
        return True
    try:
        text = (path / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    matter = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    return matter is not None and _RANKS.search(matter[1]) is not None


def read_reranker(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a causal language model that scores pairs.

    Raises:
        SourceError: The folder is incomplete, or what its model is asked is not known.
    """
    own = folder.own_tokenizer()
    tokenizer = plain_tokenizer(own)
    question = _QUESTIONS.get(folder.config.model_type)
    template = _template_of(own)
    asked: tuple[str, ...] = ()
    if template is None and question is not None:
        template = question.template
        asked = (
            f"asks about a pair in the words of {question.of}, since its chat template has no place for turns of the "
            "roles query and document; another model needs such a template",
        )
    if template is None:
        raise SourceError(
            f"{folder.path}: does not say what its model is asked about a pair of texts: its chat template has no "
            "place for a turn of the role query and one of the role document, and of "
            f"{folder.config.model_type} it is not known here; give it such a template"
        )
    yes, no = _words_of(folder, tokenizer, question)
    model = folder.load(AutoModelForCausalLM)
    length, notes = folder.length(model)
    module = HuggingFaceReranker(model, max_length=length, yes=yes, no=no).eval()
    with as_source_error():
        name = type(model).__name__
        check_reading(folder.path, module, name=name, config=folder.config, tokenizer=tokenizer, longest=length)
    _check(folder, model, module, yes, no)
    return (
        folder.source(
            model,
            module,
            make_reference=lambda: HuggingFaceReranker(
                folder.load(AutoModelForCausalLM), max_length=length, yes=yes, no=no
            ).eval(),
            tokenizer=tokenizer,
            special_tokens=SpecialTokens(pad=padding_of(folder.config, own)),
            scoring=Scoring(activation="sigmoid", template=template),
            text_pairs="required",
            evaluation=folder.evaluation(),
        ),
        notes + asked,
    )


def _module_of(path: Path) -> dict[str, Any] | None:
    """Returns the settings of the module that names the words; None: there is none."""
    try:
        modules = json.loads((path / MODULES_FILE).read_text(encoding="utf-8"))
        places = [str(entry["path"]) for entry in modules if str(entry["type"]).rsplit(".", 1)[-1] == _MODULE]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    folder = path / (places[0] if places else "")
    return read_settings(folder / "config.json") if places and folder.is_relative_to(path) else None


def _template_of(own: Any) -> str | None:
    """Returns what a chat template makes of a query and a document; None: it has no place for them.

    One that shows turns of whatever role has no place for these two.
    """
    text = _rendered(own, "query", "document")
    is_whole = text.count(_QUERY) == text.count(_TEXT) == 1 and text.index(_QUERY) < text.index(_TEXT)
    others = _rendered(own, *_NO_ROLES)
    return text if is_whole and not all(role in others for role in _NO_ROLES) else None


def _rendered(own: Any, first: str, second: str) -> str:
    """Returns what a chat template makes of a pair in turns of two roles; nothing if it refuses them."""
    turns = [{"role": first, "content": _QUERY}, {"role": second, "content": _TEXT}]
    try:
        return str(own.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except Exception:  # whatever a template raises
        return ""


def _words_of(folder: ModelFolder, tokenizer: Tokenizer, question: Question | None) -> tuple[int, int | None]:
    """Returns the tokens of the words that answer yes and no; None: the score is the logit of the first alone.

    Raises:
        SourceError: They are not tokens of the vocabulary.
    """
    size = int(folder.config.vocab_size)
    yes: int | None = None
    no: int | None = None
    if (settings := _module_of(folder.path)) is not None:
        yes, no = settings.get("true_token_id"), settings.get("false_token_id")
    elif question is not None and (no := tokenizer.token_to_id(question.no)) is not None:
        yes = tokenizer.token_to_id(question.yes)
    if not isinstance(yes, int) or not 0 <= yes < size or (no is not None and not 0 <= no < size):
        raise SourceError(
            f"{folder.path}: the words that its model answers with are no tokens of its vocabulary, so it is no model "
            "that scores pairs"
        )
    return yes, no


def _check(folder: ModelFolder, model: nn.Module, reranker: nn.Module, yes: int, no: int | None) -> None:
    """Holds the difference against the logits of `transformers`.

    Raises:
        SourceError: It is another one.
    """
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, int(folder.config.vocab_size), (1, 32)))
    with torch.inference_mode():
        logits = cast("Any", model)(input_ids=ids, use_cache=False).logits[0, -1].float()
    expected = logits[yes] - (0 if no is None else logits[no])

    def compute() -> NDArray[np.float32]:
        with torch.inference_mode():
            difference: NDArray[np.float32] = reranker(ids, torch.ones_like(ids)).numpy()
        return difference

    owner = f"{folder.path}: {type(model).__name__}"
    check_logits(compute(), expected.reshape(1, 1).numpy(), owner, compute)
