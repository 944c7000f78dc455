"""Tiny encoders with random weights in the folders that sentence-transformers writes, old and new."""

import json
from pathlib import Path

import tiny_huggingface as tiny
import torch
import transformers
from safetensors.torch import save_file
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
    """
    write_encoder(folder / inner, family)
    modules = [("Transformer", inner), ("Pooling", "1_Pooling")]
    if is_new:
        content = {"embedding_dimension": 32, "pooling_mode": pooling, "include_prompt": True}
    else:
        content = {"word_embedding_dimension": 32} | {
            f"pooling_mode_{switch}": name == pooling for name, switch in _SWITCHES.items()
        }
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
