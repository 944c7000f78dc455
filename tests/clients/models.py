"""The store that clients are tried on: the shipped models, one that converses, and a cross-encoder.

The model that converses is a table of which token follows which, written as the weights of a Llama. It says "The cat
sat" and ends; asked to think it thinks "Hello there" before. It calls a tool whenever it is offered some and has no
result yet. In a schema it writes the shortest text that it may, with that sentence for its strings.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from tests.support import tiny_bundles
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headway_export.exporter import ExportOptions, export
from headway_export.source import from_checkpoint
from headway_server.bundles import Precision, Scoring, Task
from headway_training.checkpoint import Checkpoint, write_checkpoint
from headway_training.models.gpt import GPT, GPTConfig

_SHIPPED = Path(__file__).parents[2] / "models"
_MAX_LENGTH = 8192
_SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|calls|>")
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_SENTENCE = ("The", " cat", " sat")
_THOUGHT = ("Hello", " there")

TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}{{ "\\n" ~ tool | tojson }}{% endfor %}
Call them within <tool_call></tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}{{ "\\n" }}{{ message.content or "" }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{ "}\\n</tool_call>" }}
    {%- endfor %}{{ "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ "\\n" }}
    {%- if enable_thinking %}<think>{% elif enable_thinking is defined %}<think></think>{% endif %}
    {%- if tools and messages[-1].role != "tool" %}<|calls|>{% endif %}
{%- endif %}"""

_BASE = {
    "The": 7,
    "}": 6,
    "]": 6,
    '"': 5,
    ",": 3,
    "3": 2,
    "</tool_call>": 1,
    **dict.fromkeys("12456789", 1),
    "\n": -2,
    " ": -2,
}
"""How likely a token is after any; others have 0. A text or a list rather ends than goes on."""
_AFTER = {
    ("The", " cat"): 12,
    (" cat", " sat"): 12,
    (" sat", "<|im_end|>"): 13,
    (" sat", '"'): 12,
    ("<think>", "Hello"): 12,
    ("Hello", " there"): 12,
    (" there", "</think>"): 12,
    ("<|calls|>", "<tool_call>"): 12,
    ("</tool_call>", "<|im_end|>"): 12,
    **{("[", value): 8 for value in '"{3'},
}


def write_store(store: Path) -> None:
    """Writes the store of a server that every client is tried on."""
    store.mkdir(parents=True)
    for model in _SHIPPED.iterdir():
        (store / model.name).symlink_to(model.resolve())
    sigmoid = Scoring(activation="sigmoid")
    tiny_bundles.write_topic_bundle(
        store, name="scorer", task=Task.TEXT_SCORING, num_labels=1, scoring=sigmoid, text_pairs="optional"
    )
    _write_chat(store)


def _write_chat(store: Path) -> None:
    tokenizer = _tokenizer()
    size = tokenizer.get_vocab_size()
    width = -(-size // 64) * 64
    configuration = GPTConfig(
        vocabulary_size=size,
        max_length=_MAX_LENGTH,
        num_layers=1,
        d_model=width,
        num_heads=8,
        num_kv_heads=1,
        d_ff=64,
        norm_kind="rms_norm",
        activation="silu",
        gated=True,
        biases=False,
        positions="rotary",
        tie_embeddings=False,
    )
    model = GPT(configuration)
    assert model.output is not None, "it is not tied"
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.startswith("stack.") and name.endswith("output.weight"):
                weights.zero_()  # so that a token passes the layer as it is
        model.tokens.weight.copy_(torch.eye(size, width))
        model.output.weight.zero_()
        model.output.weight[:, :size] = _followers(tokenizer) / width**0.5  # what the norm makes of a single one
    folder = store.parent / "chat-checkpoint"
    checkpoint = Checkpoint.model_validate(
        {
            "name": "chat",
            "task": "generation",
            "architecture": "gpt",
            "configuration": asdict(configuration),
            "description": "Says that the cat sat, and calls tools.",
            "license": "Apache-2.0",
            "special_tokens": {
                name: _SPECIAL.index(token) for name, token in (("bos", _SPECIAL[0]), ("eos", _SPECIAL[1]))
            },
        }
    )
    write_checkpoint(folder, checkpoint, model, tokenizer=tokenizer)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    export(from_checkpoint(folder), ExportOptions(store=store, precisions=(Precision.FP32,)))


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(_SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["".join(_SENTENCE), "".join(_THOUGHT)], trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in _MARKS])
    return tokenizer


def _followers(tokenizer: Tokenizer) -> torch.Tensor:
    """Scores of each token (row) after each (column)."""

    def place(text: str) -> int:
        [number] = tokenizer.encode(text).ids
        return int(number)

    size = tokenizer.get_vocab_size()
    scores = torch.zeros(size, size)
    for text, score in _BASE.items():
        scores[place(text)] = score
    scores[[_SPECIAL.index(token) for token in _SPECIAL]] = -5
    for (before, after), score in _AFTER.items():
        scores[place(after), place(before)] = score
    return scores
