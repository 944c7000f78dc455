"""Tiny encoders with random weights in the folders that sentence-transformers writes, old and new."""

import json
from pathlib import Path

import tiny_huggingface as tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers

_CLASSES = "sentence_transformers.models."
_SWITCHES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}

ENCODERS = {
    "bert": {},
    "roberta": {"max_position_embeddings": tiny.LENGTH + 1, "type_vocab_size": 1},
    "xlm-roberta": {"max_position_embeddings": tiny.LENGTH + 1, "type_vocab_size": 1},
    "distilbert": {"dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48},
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "mpnet": {"max_position_embeddings": tiny.LENGTH + 1},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "share_att_key": True,
    },
    "modernbert": {"num_hidden_layers": 2, "local_attention": 8, "global_attn_every_n_layers": 2},
    "nomic_bert": {},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "use_bidirectional_attention": True,
    },
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
}
"""Sizes of each family beside the common ones, by model type."""


def write_encoder(folder: Path, family: str, **changes) -> Path:
    """Writes an encoder without a head, with a tokenizer."""
    config = transformers.AutoConfig.for_model(family, **{**tiny.SIZES, **ENCODERS[family], **changes})
    torch.manual_seed(7)
    is_t5 = family == "t5"
    model = transformers.T5EncoderModel(config) if is_t5 else transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    return folder


def write_sentence_transformer(
    folder: Path,
    family: str,
    *,
    pooling: str = "mean",
    normalizes: bool = True,
    width: int | None = None,
    inner: str = "",
    is_new: bool = False,
    max_seq_length: int | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
    pools_prompt: bool | None = True,
) -> Path:
    """Writes a folder of sentence-transformers.

    Args:
        folder: Where to.
        family: A key of `ENCODERS`.
        pooling: Name in sentence-transformers.
        normalizes: True for a last module that scales vectors to length 1.
        width: Of a dense layer with tanh; None: none.
        inner: Folder of the encoder in it.
        is_new: True to name the pooling as version 6 does.
        max_seq_length: Most tokens of a text.
        prompts: By name.
        default_prompt: Name of the default one.
        pools_prompt: False to leave the prompt's tokens out of the pooling; None: nothing is said of them.
    """
    write_encoder(folder / inner, family)
    modules = [("Transformer", inner), ("Pooling", "1_Pooling")]
    if is_new:
        content = {"embedding_dimension": 32, "pooling_mode": pooling, "include_prompt": True}
    else:
        content = {f"pooling_mode_{switch}": name == pooling for name, switch in _SWITCHES.items()}
        content |= {"word_embedding_dimension": 32}
        content |= {} if pools_prompt is None else {"include_prompt": pools_prompt}
    _write(folder / "1_Pooling" / "config.json", content)
    if width is not None:
        modules.append(("Dense", "2_Dense"))
        layer = torch.nn.Linear(32, width)
        content = {"in_features": 32, "out_features": width, "bias": True}
        _write(
            folder / "2_Dense" / "config.json", content | {"activation_function": "torch.nn.modules.activation.Tanh"}
        )
        save_file(
            {f"linear.{key}": value for key, value in layer.state_dict().items()},
            folder / "2_Dense" / "model.safetensors",
        )
    if normalizes:
        modules.append(("Normalize", f"{len(modules)}_Normalize"))
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": _CLASSES + kind}
        for index, (kind, path) in enumerate(modules)
    ]
    _write(folder / "modules.json", entries)
    if max_seq_length is not None:
        _write(folder / inner / "sentence_bert_config.json", {"max_seq_length": max_seq_length, "do_lower_case": False})
    if prompts is not None:
        _write(
            folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": default_prompt}
        )
    return folder


def write_sparse_encoder(folder: Path, *, pooling: str = "max", activation: str = "relu") -> Path:
    """Writes a folder of sentence-transformers with a BERT whose logits are weights of tokens."""
    torch.manual_seed(7)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**tiny.SIZES, initializer_range=0.5))
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    parts = {"MLMTransformer.MLMTransformer": "", "SpladePooling.SpladePooling": "1_SpladePooling"}
    kinds = "sentence_transformers.sparse_encoder.models."
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": kinds + kind}
        for index, (kind, path) in enumerate(parts.items())
    ]
    _write(folder / "modules.json", entries)
    _write(folder / "1_SpladePooling" / "config.json", {"pooling_strategy": pooling, "activation_function": activation})
    _write(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder", "similarity_fn_name": "dot"})
    return folder


def _write(file: Path, content) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


JUDGE_WORDS = (40, 41)
"""Tokens of the words that a reranker answers with: yes and no."""
_ASKED = (
    "{% for m in messages %}{{ '<s>the ' if m.role == 'query' else ' is in ' }}{{ m.content }}{% endfor %} is it</s>"
)


def write_reranker(folder: Path) -> Path:
    """Writes a decoder that scores pairs, as sentence-transformers does, with random weights.

    One character, é, has four tokens, as rare ones have.
    """
    tiny.write_model(folder, "qwen3")
    tiny.write_tokenizer(folder, frame="$A", chat_template=_ASKED)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Replace("é", "xyzq")
    tokenizer.save(str(folder / "tokenizer.json"))
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.LogitScore", "path": "1_LogitScore"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    words = dict(zip(("true_token_id", "false_token_id"), JUDGE_WORDS, strict=True))
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(words))
    return folder


COLBERT_TOKENS = {"mask": "<77>", "query": "<78>", "text": "<79>"}
COLBERT_QUERY_LENGTH = 20
COLBERT_SKIPPED = ("e", "s", "an")


def write_colbert(folder: Path, *, is_of_authors: bool = False, **stated) -> Path:
    """Writes a BERT with a vector of 8 numbers a token, as PyLate does, or as ColBERT's authors do."""
    write_encoder(folder, "bert")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mask_token": COLBERT_TOKENS["mask"]}))
    weight = torch.randn(8, 32)
    if is_of_authors:
        config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
        _write(folder / "config.json", config)
        weights = load_file(folder / "model.safetensors")
        save_file(
            {f"bert.{name}": value for name, value in weights.items()} | {"linear.weight": weight},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        names = {"query_token_id": COLBERT_TOKENS["query"], "doc_token_id": COLBERT_TOKENS["text"]}
        _write(folder / "artifact.metadata", names | {"query_maxlen": COLBERT_QUERY_LENGTH, "doc_maxlen": 30} | stated)
        return folder
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    _write(folder / "modules.json", [*modules, {"type": "pylate.models.Dense.Dense", "path": "1_Dense"}])
    sizes = {"in_features": 32, "out_features": 8, "bias": False}
    _write(folder / "1_Dense" / "config.json", sizes | {"activation_function": "torch.nn.modules.linear.Identity"})
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    settings = {"query_prefix": COLBERT_TOKENS["query"], "document_prefix": COLBERT_TOKENS["text"]}
    settings |= {"query_length": COLBERT_QUERY_LENGTH, "document_length": 40, "skiplist_words": COLBERT_SKIPPED}
    _write(folder / "config_sentence_transformers.json", settings | stated)
    return folder


def colbert_score(folder: Path, query: str, text: str, *, attends_to_filler: bool = False) -> float:
    """What PyLate computes of a pair, written anew."""
    (_, asked), (_, found) = (
        colbert_vectors(folder, one, is_query=one is query, attends_to_filler=attends_to_filler)
        for one in (query, text)
    )
    return float((asked @ found.T).max(dim=1).values.sum())


def colbert_vectors(
    folder: Path, text: str, *, is_query: bool, attends_to_filler: bool = False
) -> tuple[list[int], torch.Tensor]:
    """The tokens that PyLate gives a vector in a query or a document, and these vectors, (T, 8)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    weight = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]
    mask, *markers = tokenizer.convert_tokens_to_ids(list(COLBERT_TOKENS.values()))

    def vectors(text: str, marker: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, *rest = tokenizer(text).input_ids
        ids = [first, marker, *rest]
        seen = torch.tensor([[int(place < len(ids) or attends_to_filler) for place in range(max(length, len(ids)))]])
        ids = torch.tensor([[*ids, *[mask] * (length - len(ids))]])
        with torch.inference_mode():
            states = model(input_ids=ids, attention_mask=seen).last_hidden_state[0]
        return ids[0], torch.nn.functional.normalize(states @ weight.T, dim=-1)

    ids, found = vectors(text, *((markers[0], COLBERT_QUERY_LENGTH) if is_query else (markers[1], 0)))
    skipped = () if is_query else tokenizer.convert_tokens_to_ids(list(COLBERT_SKIPPED))
    counts = [token not in skipped for token in ids.tolist()]
    return ids[counts].tolist(), found[counts]
