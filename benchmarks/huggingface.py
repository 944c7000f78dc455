"""Folders of Hugging Face transformers with random weights in real sizes, imported by `headway-export hf`.

This module is also the worker that writes the folders, so that PyTorch stays out of the driver. A tokenizer is one of
`inputs.make_tokenizer`, so that random words are one token each and everybody does the same work. Speed does not depend
on what weights are, if no answer ends by itself and none repeats one token.
"""

import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.environments import SCRATCH
from benchmarks.inputs import AG_NEWS, MULTI30K, make_tokenizer, random_texts
from benchmarks.worker import ROOT, ContestantError, Worker, serve, tree_environment

_LLAMA = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
_QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
_MINILM = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
_MAX_LENGTH = 1024
SIZES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2-small": ("generation", "gpt2", {}),
    "smollm2-135m": ("generation", "llama", _LLAMA | {"num_key_value_heads": 3, "vocab_size": 49152,
                     "max_position_embeddings": _MAX_LENGTH, "tie_word_embeddings": True}),
    "qwen2.5-0.5b": ("generation", "qwen2", _QWEN | {"num_key_value_heads": 2, "vocab_size": 151936,
                     "max_position_embeddings": _MAX_LENGTH, "tie_word_embeddings": True}),
    "minilm-l6": ("text_embedding", "bert", _MINILM),
    "bge-small": ("text_embedding", "bert", _MINILM | {"num_hidden_layers": 12}),
    "bert-base-hf": ("text_classification", "bert", {}),
    "vit-b16-hf": ("image_classification", "vit", {}),
}  # fmt: skip
"""By name: the task, the family of transformers, and the sizes that are not the family's own."""
_PRECISIONS = ("fp32", "int8", "int8-static")
_END = "<|endoftext|>"
_ENLARGED = ("c_proj.weight", "o_proj.weight", "down_proj.weight")
"""Weights of decoders that are ten times as large, so that a greedy answer does not repeat one token."""
_NUM_EVALUATED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedModel:
    """Where the files of a model are."""

    name: str
    task: str
    folder: Path
    """What `save_pretrained` wrote, and what others convert for themselves."""
    store: Path

    @property
    def bundle(self) -> Path:
        """The bundle's folder."""
        return self.store / self.name / "1"

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a model that reads texts."""
        return Tokenizer.from_file(str(self.bundle / "tokenizer.json"))


def import_model(name: str) -> ImportedModel:
    """Finds a model's folder and its bundle, and makes what is missing.

    Raises:
        ContestantError: It cannot be made or imported.
    """
    task = SIZES[name][0]
    made_by = hashlib.sha256(f"{SIZES[name]}{inspect.getsource(_write)}".encode()).hexdigest()[:12]
    folder = SCRATCH / "huggingface" / f"{name}-{made_by}"
    model = ImportedModel(name=name, task=task, folder=folder / "model", store=folder / "store")
    if not (model.folder / "evaluation").exists():
        with Worker("huggingface", environment=tree_environment(ROOT)) as worker:
            worker.ask(name=name, folder=str(model.folder))
    if not model.bundle.is_dir():
        command = [
            sys.executable,
            "-c",
            "from headway_export.cli import app; app()",
            "hf",
            str(model.folder),
            "--store",
            str(model.store),
        ]
        command += ["--name", name, "--max-length", "512" if task != "generation" else str(_MAX_LENGTH)]
        evaluation = next(model.folder.glob("evaluation.*"), None)
        command += ["--evaluation", str(evaluation)] if evaluation else []
        command += [part for precision in _PRECISIONS for part in ("--precision", precision)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=tree_environment(ROOT))
        if ended.returncode:
            raise ContestantError(f"{name} cannot be imported: {' | '.join(ended.stderr.strip().splitlines()[-3:])}")
    return model


def _write(name: str, folder: Path) -> None:
    import torch  # noqa: PLC0415 (as the rest: only this process needs it)
    import transformers  # noqa: PLC0415

    task, family, sizes = SIZES[name]
    ends = {"bos_token_id": None, "eos_token_id": None} if task == "generation" else {}
    config = transformers.AutoConfig.for_model(family, **sizes, **ends)
    if task.endswith("classification"):
        config.num_labels = 1000 if family == "vit" else 4
    kinds: dict[str, Callable[..., Any]] = {
        "generation": transformers.AutoModelForCausalLM.from_config,
        "text_embedding": transformers.AutoModel.from_config,
        "text_classification": transformers.AutoModelForSequenceClassification.from_config,
        "image_classification": transformers.AutoModelForImageClassification.from_config,
    }
    torch.manual_seed(1)
    model = kinds[task](config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if task == "generation" and parameter_name.endswith(_ENLARGED):
                parameter.mul_(10)
            elif parameter_name == "classifier.bias":
                parameter[0] = 100  # every answer is the first class
    encoder = folder
    model.save_pretrained(encoder)
    if family == "vit":
        size = {"height": 224, "width": 224}
        settings: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": size}
        settings |= {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
        settings |= {"do_rescale": True, "rescale_factor": 1 / 255}
        _write_json(folder / "preprocessor_config.json", settings)
    else:
        tokenizer = make_tokenizer(config.vocab_size)
        names = dict.fromkeys(("pad_token", "bos_token", "eos_token", "unk_token"), _END)
        length = config.max_position_embeddings
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **names)
        fast.save_pretrained(folder)
        texts, _ = random_texts(tokenizer, MULTI30K if task == "generation" else AG_NEWS, _NUM_EVALUATED)
    if task == "text_embedding":
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        entries = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (kind, path) in enumerate(modules)
        ]
        _write_json(folder / "modules.json", entries)
        pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True}
        _write_json(folder / "1_Pooling" / "config.json", pooling)
        _write_json(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    elif task == "generation":
        _write_lines(folder / "evaluation.jsonl", [{"text": "".join(texts)}])
    elif task == "text_classification":
        _write_lines(folder / "evaluation.jsonl", [{"text": text, "label": 0} for text in texts])
    else:
        import numpy as np  # noqa: PLC0415

        images = np.random.default_rng(1).integers(0, 256, (_NUM_EVALUATED, 224, 224, 3), np.uint8)
        np.savez(folder / "evaluation.npz", images=images, labels=np.zeros(_NUM_EVALUATED, np.int64))
    (folder / "evaluation").touch()  # the last thing that is written


def _write_json(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")


def _write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _answer(request: dict[str, str]) -> dict[str, str]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    _write(request["name"], Path(request["folder"]))
    return {}


if __name__ == "__main__":
    serve(_answer, ["torch", "transformers"])
