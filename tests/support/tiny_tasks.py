"""A tiny run of every task with every architecture that can be trained for it, and what is peculiar in between.

`python -m tiny_tasks` is two processes that learn them together (`start_pair`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tiny_pictures
import tiny_segments
import tiny_transcriber
import tiny_voice
import torch
from accelerate import Accelerator
from rich.console import Console
from torch import distributed as dist

from headway_training.checkpoint import Checkpoint, ImagePreprocessing, load_matching_weights, write_checkpoint
from headway_training.data.sources import OwnData, read_splits
from headway_training.durable import replacing
from headway_training.models import build_model, make_configuration
from headway_training.processes import exchange
from headway_training.recipes import find_unread, read_recipe
from headway_training.run import RunOptions
from headway_training.sizing import expected_throughput, size_up
from headway_training.tasks import TrainingBatch, make_task, segmentation
from headway_training.tasks.base import Metrics, Part
from headway_training.trainer import Trainer

SEED = 7
NUM_PROCESSES = 2
FOLDERS = ("bert", "gpt2", "llama", "dinov2", "resnet")
"""Those of `init` that are model folders: one of them has a weight that nothing uses, one has batch norms."""
_PATIENCE_S = 120
"""For a process that waits for the other: what takes seconds may take longer on a busy machine."""
_SHORT_S = 10
LONG_VALIDATION = "long validation"
"""What two processes can do in place of a task: `validate_long`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyTask:
    """A run that takes a moment."""

    recipe: str
    """What it is made of."""
    settings: tuple[str, ...] = ()
    """What makes it tiny."""
    data: str = ""
    """The user's own data in the folder of `write_data`; empty: the recipe's data set, in `data_set`."""
    data_set: str = ""
    """Folder of the recipe's data set."""
    init: str = ""
    """Folder of what it starts from; empty: nothing."""


def _fields(section: str, values: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(f"{section}.{name}={json.dumps(value)}" for name, value in values.items())


_LAYER = {"d_model": 16, "num_heads": 2, "d_ff": 32}
_ONE = _fields("model", {**_LAYER, "num_layers": 1})
_TEXT = (*_ONE, "model.max_length=40", "tokenizer.vocabulary_size=280")
_BOTH_SIDES = ("model.max_source_length=12", "model.max_target_length=12", "tokenizer.vocabulary_size=280")
_SMALL_IMAGES = ("preprocessing.height=16", "preprocessing.width=16")
_TOWER = _fields("model", {"image_num_layers": 1, "image_d_model": 16, "image_num_heads": 2, "image_d_ff": 32})
_TEXT_TOWER = _fields("model", {"text_num_layers": 1, "text_d_model": 16, "text_num_heads": 2, "text_d_ff": 32})
_CLIP = (
    *_SMALL_IMAGES,
    *_TOWER,
    *_TEXT_TOWER,
    *_fields("model", {"d_space": 8, "patch_size": 8, "max_length": 16, "image_dropout": 0.1, "stem": "patches"}),
    *("tokenizer.vocabulary_size=300", "data.held_out_style=noto", "data.valid_fraction=0.25"),
)
_AUTOENCODER = {"width": 8, "d_latent": 2}
_DENOISER = {**_AUTOENCODER, **_LAYER, "num_layers": 1, "patch_size": 2}
_TUNED = (
    *("preprocessing.mean=[0.5, 0.5, 0.5]", "preprocessing.std=[0.5, 0.5, 0.5]"),
    "preprocessing.interpolation=bilinear",
)

TASKS: Mapping[str, TinyTask] = MappingProxyType(
    {
        "generation": TinyTask(
            recipe="tiny-shakespeare",
            settings=(
                *_TEXT,
                "model.max_length=16",
                "augmentation.subword_splitting=0.1",
                "optimization.batch_tokens=",
            ),
            data="story.txt",
        ),
        "linear generation": TinyTask(
            recipe="tiny-shakespeare-linear",
            settings=(
                *_ONE,
                *(
                    "model.max_length=64",
                    "model.window=16",
                    "tokenizer.vocabulary_size=280",
                    "optimization.batch_tokens=",
                ),
            ),
            data="story.txt",
        ),
        "folder of generation": TinyTask(
            recipe="tiny-shakespeare",
            settings=(
                *("model.max_length=16", "lora.rank=2", "lora.dropout=0.1"),
                *("augmentation.subword_splitting=0", "optimization.batch_tokens="),
            ),
            data="story.txt",
            init="gpt2",
        ),
        "conversation": TinyTask(
            recipe="tiny-shakespeare",
            settings=("model.max_length=48", "augmentation.subword_splitting=", "optimization.batch_size="),
            data="chats.jsonl",
            init="llama",
        ),
        "translation": TinyTask(
            recipe="multi30k-en-de",
            settings=(
                *_fields("model", {**_LAYER, "num_encoder_layers": 1, "num_decoder_layers": 1, "dropout": 0.2}),
                *_BOTH_SIDES,
                "augmentation.subword_splitting=0.1",
            ),
            data="pairs.tsv",
        ),
        "recurrent translation": TinyTask(
            recipe="multi30k-en-de-rnn",
            settings=(*_fields("model", {"d_embedding": 12, "d_state": 16, "d_attention": 12}), *_BOTH_SIDES),
            data="pairs.tsv",
        ),
        "text classification": TinyTask(
            recipe="ag-news", settings=(*_TEXT, "augmentation.token_dropout=0.2"), data="topics.csv"
        ),
        "several labels": TinyTask(
            recipe="ag-news", settings=(*_TEXT, "classification.multi_label=true"), data="several.csv"
        ),
        "pairs of texts": TinyTask(
            recipe="ag-news",
            settings=(*_TEXT, "classification.text_pairs=required", "model.num_token_types=2"),
            data="two.csv",
        ),
        "folder of text classification": TinyTask(
            recipe="ag-news", settings=("model.max_length=40",), data="topics.csv", init="bert"
        ),
        "token classification": TinyTask(recipe="ud-ewt-pos", settings=_TEXT, data="tags.conll"),
        "folder of token classification": TinyTask(
            recipe="ud-ewt-pos",
            settings=("model.max_length=40", "augmentation.subword_splitting=0"),
            data="tags.conll",
            init="bert",
        ),
        "image classification": TinyTask(
            recipe="cifar10", settings=(*_ONE, *_SMALL_IMAGES, "model.patch_size=8"), data="pictures"
        ),
        "folder of image classification": TinyTask(recipe="cifar10", settings=_TUNED, data="pictures", init="dinov2"),
        "folder with batch norms": TinyTask(recipe="cifar10", settings=_TUNED, data="pictures", init="resnet"),
        "image embedding": TinyTask(
            recipe="cifar10-dino",
            settings=(
                *_ONE,
                *_SMALL_IMAGES,
                *("model.patch_size=4", "distillation.local_size=8", "distillation.num_local_views=2"),
                *("distillation.num_prototypes=16", "distillation.d_hidden=32", "distillation.d_bottleneck=16"),
                *("distillation.momentum=0.9", "distillation.frozen_fraction=0.3"),
            ),
            data="pictures",
        ),
        "images and texts": TinyTask(recipe="clip", settings=_CLIP, data_set="pictures-data"),
        "images and texts by sigmoid": TinyTask(
            recipe="clip", settings=(*_CLIP, 'model.loss="sigmoid"'), data_set="pictures-data"
        ),
        "segmentation": TinyTask(
            recipe="segment",
            settings=(
                *_fields("model", {**_LAYER, "d_model": 32, "num_layers": 1}),
                *_fields("model", {"patch_size": 8, "mask_stride": 2, "d_detail": 8}),
                *_TOWER,
                *("preprocessing.height=32", "preprocessing.width=32", "data.valid_fraction=0.25"),
                "segmentation.prompts_per_image=3",
            ),
            data_set="segments",
        ),
        "object detection": TinyTask(
            recipe="detect",
            settings=(
                *_fields("model", {"width": 8, "num_blocks": 1}),
                *("preprocessing.height=32", "preprocessing.width=32"),
            ),
            data_set="segments",
        ),
        "captioning": TinyTask(
            recipe="caption",
            settings=(
                *_SMALL_IMAGES,
                *_TOWER,
                *_ONE,
                *_fields("model", {"patch_size": 8, "max_target_length": 24, "stem": "patches"}),
                *("tokenizer.vocabulary_size=340", "captioning.captions_per_image=2", "captioning.text_share=0.4"),
            ),
            data_set="captions",
        ),
        "transcription": TinyTask(
            recipe="telephone-transcriber",
            settings=(*tiny_transcriber.SETTINGS, *_fields("model", _LAYER), "speech.noise_share=0.5"),
            data="tones/train.tsv",
        ),
        "autoencoding": TinyTask(
            recipe="fashion-mnist-autoencoder",
            settings=(*_SMALL_IMAGES, *_fields("model", _AUTOENCODER)),
            data="pictures",
        ),
        "drawing of labels": TinyTask(
            recipe="fashion-mnist-diffusion",
            settings=(*_SMALL_IMAGES, *_fields("model", _DENOISER)),
            data="pictures",
            init="autoencoder",
        ),
        "drawing of texts": TinyTask(
            recipe="emoji-diffusion",
            settings=(
                *_SMALL_IMAGES,
                *_fields("model", {**_DENOISER, "text_num_layers": 1, "text_dropout": 0.1}),
                *("tokenizer.vocabulary_size=300", "data.valid_fraction=0.2"),
            ),
            data_set="pictures-data",
            init="autoencoder",
        ),
        "audio coding": TinyTask(
            recipe="telephone-codec", settings=_fields("model", tiny_voice.CODEC), data="voices/recordings.tsv"
        ),
        "speech synthesis": TinyTask(
            recipe="telephone-speech",
            settings=(
                *_fields("model", {**tiny_voice.SPEAKER, **_LAYER, "num_layers": 1, "dropout": 0.1}),
                *("speech.first_book_weight=1.5", "augmentation.join_texts=2", "augmentation.other_speeds=1"),
            ),
            data="voices/recordings.tsv",
            init="codec",
        ),
    }
)
"""By name."""

BRIEF = (
    *("tracker=none", "optimization.epochs=1000", "optimization.batch_size=5", "optimization.batch_tokens=100"),
    *("optimization.precision=fp32", "optimization.warmup_fraction=0"),
)
"""What all of them have, as far as they read it: batches that no number of processes divides."""


def write_data(root: Path) -> None:
    """Writes the data of all tasks, and what some of them start from."""
    import tiny_tuning
    import tiny_vision

    tiny_tuning.write_data(root)
    tiny_tuning.write_folders(root)
    for family in ("dinov2", "resnet"):
        tiny_vision.write_vision_model(root / family, family)
        shutil.copy(root / "vit" / "preprocessor_config.json", root / family)
    generator = random.Random(1)
    numerals = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}
    sources = [generator.choices(list(numerals), k=generator.randint(1, 4)) for _ in range(30)]
    lines = [" ".join(words) + "\t" + " ".join(numerals[word] for word in words) for words in sources]
    (root / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    animals = [[animal for animal in ("cat", "dog") if generator.random() < 0.5] for _ in range(30)]
    rows = [f"{' '.join(['a', *one, 'there'])},{'|'.join(one)}" for one in animals]
    (root / "several.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    couples = [(generator.choice(["cat", "dog"]), generator.choice(["cat", "dog"])) for _ in range(30)]
    rows = [f"the {one},a {other},{'same' if one == other else 'other'}" for one, other in couples]
    (root / "two.csv").write_text("\n".join(["text,text_pair,label", *rows]) + "\n")
    tiny_pictures.write_picture_data(root / "pictures-data")
    tiny_pictures.write_caption_data(root / "captions")
    tiny_segments.write_segment_data(root / "segments")
    tiny_transcriber.write_tones(root / "tones", "train")
    tiny_voice.write_recordings(root / "voices", repeats=2)
    preprocessing = ImagePreprocessing(height=16, width=16, mean=(0.5,) * 3, std=(0.5,) * 3)
    shape = {**_AUTOENCODER, "image_size": 16}
    _write_fresh(root / "autoencoder", "autoencoding", "autoencoder", shape, image_preprocessing=preprocessing)
    _write_fresh(root / "codec", "audio_coding", "codec", tiny_voice.CODEC)


def _write_fresh(folder: Path, task: str, architecture: str, fields: Mapping[str, Any], **more: Any) -> None:
    """Writes a checkpoint of a model that has learned nothing."""
    torch.manual_seed(SEED)
    configuration = make_configuration(architecture, fields)
    metric = {"autoencoding": "psnr", "audio_coding": "mel_cepstral_distortion"}[task]
    described = Checkpoint(
        name="fresh",
        task=task,
        description="Has learned nothing.",
        license="Apache-2.0",
        architecture=architecture,
        configuration=configuration.to_dict(),
        evaluation={"file": "evaluation.npz", "dataset": "none", "metric": metric, "higher_is_better": False},
        **more,
    )
    model = build_model(architecture, configuration).eval()
    write_checkpoint(folder, described, model, arrays={"nothing": np.zeros(1)})


def run_options(name: str, root: Path, folder: Path, *settings: str) -> RunOptions:
    """Options of a task's run of two steps in a folder."""
    tiny = TASKS[name]
    data = str(root / tiny.data)
    return RunOptions(
        recipe=tiny.recipe,
        settings=(*read_by(tiny.recipe, (*BRIEF, "optimization.evaluations=1")), *tiny.settings, *settings),
        data_dir=root / tiny.data_set if tiny.data_set else None,
        own_data=OwnData(train=data, valid=data) if tiny.data else None,
        init=root / tiny.init if tiny.init else None,
        output=folder,
        max_steps=2,
    )


def read_by(recipe: str, settings: Sequence[str]) -> list[str]:
    """Those of the settings that a recipe's task reads."""
    names = {setting: setting.partition("=")[0] for setting in settings}
    unread = find_unread(read_recipe(recipe).task, names.values())
    return [setting for setting, name in names.items() if name not in unread]


def open_trainer(name: str, root: Path, folder: Path, *settings: str, measures_speed: bool = False) -> Trainer:
    """The trainer of a task's run in a folder, fresh or as its state says, as `run_training` makes it.

    With `measures_speed` that is done too, which is to change nothing.
    """
    tiny = TASKS[name]
    init = root / tiny.init if tiny.init else None
    is_folder = tiny.init in FOLDERS
    chosen = [*read_by(tiny.recipe, BRIEF), *tiny.settings, *read_by(tiny.recipe, settings)]
    if init is not None and not is_folder:
        chosen.append(f"init.checkpoint={json.dumps(str(init))}")
    recipe, source = read_recipe(tiny.recipe, chosen, model_folder=init if is_folder else None), None
    if is_folder:
        from headway_training.huggingface import open_folder

        source = open_folder(init, recipe.task, recipe.model.get("max_length"))
        fields = {"architecture": "huggingface", "num_token_types": source.num_token_types}
        recipe = recipe.model_copy(update={"model": {**fields, "max_length": source.max_length}})
    own = OwnData(train=str(root / tiny.data), valid=str(root / tiny.data)) if tiny.data else None
    task = make_task(recipe, read_splits(recipe, root / tiny.data_set, own), folder, source)
    torch.manual_seed(SEED)
    if source is not None:
        model = source.build(task.labels, multi_label=recipe.classification.multi_label, lora=recipe.lora)
    else:
        model = build_model(recipe.architecture, {**recipe.configuration, **task.model_fields()})
        if init is not None:
            load_matching_weights(model, init, task.labels)
    trainer = Trainer(
        task=task,
        model=model,
        recipe=recipe,
        folder=folder,
        seed=SEED,
        console=Console(quiet=True),
        accelerator=Accelerator(mixed_precision="no", cpu=True),
    )
    if measures_speed:
        sizing = size_up(recipe, task, SEED, torch.device("cpu"), source)
        expected_throughput(sizing, trainer.objective, bf16=False, device=torch.device("cpu"))
    return trainer


EXACT = (
    *("optimization.max_steps=3", "optimization.evaluations=1", "optimization.optimizer=adamw"),
    *("optimization.epsilon=1", "optimization.learning_rate=0.1", "optimization.average_decay=0.9"),
)
"""With so large a term AdamW's steps are nearly the gradient's, and not its sign, which rounding may turn."""


def learn(name: str, root: Path, folder: Path, *settings: str) -> dict[str, Any]:
    """What a task learns in its first steps: gradients of the first, and the losses and the weights after two.

    Beside them are the gradients of the first row alone, of which all processes but one have nothing.
    """
    trainer = open_trainer(name, root, folder, *EXACT, *settings)
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    whole = trainer._make_batch(0)
    row = TrainingBatch(tensors={key: tensor[:1] for key, tensor in whole.tensors.items()}, num_units=1)
    found = {"gradients": _gradients(trainer, whole), "gradients of one row": _gradients(trainer, row)}
    trainer.fit(until_step=2)
    state = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    return {**found, "loss": trainer.progress.loss_sum, "state": state}


def _gradients(trainer: Trainer, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    trainer.objective.train()
    trainer.model.zero_grad(set_to_none=True)
    trainer.task.before_step(trainer.model, 0, trainer.num_steps)
    with exchange():
        trainer._backward(batch)
    weights = trainer.model.named_parameters()
    return {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}


def validate_long(root: Path, folder: Path) -> dict[str, Any]:
    """Trains while the first process validates for longer than the processes wait in collectives."""
    dist.destroy_process_group()
    _meet(folder.with_name("second meeting"), _SHORT_S)
    trainer = open_trainer(
        "text classification", root, folder, "optimization.max_steps=6", "optimization.evaluations=3"
    )
    evaluate = trainer.task.evaluate

    def take_long(model: torch.nn.Module, part: Part) -> Metrics:
        time.sleep(1.5 * _SHORT_S if trainer.progress.step == 2 else 0)
        return evaluate(model, part)

    trainer.task.evaluate = take_long
    trainer.fit(until_step=5)
    return {"step": trainer.progress.step, "validations": len(trainer.progress.history)}


def _meet(file: Path, timeout_s: float) -> None:
    dist.init_process_group(
        "gloo",
        init_method=file.as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=NUM_PROCESSES,
        timeout=timedelta(seconds=timeout_s),
    )


def start_pair(root: Path, folder: Path, names: Sequence[str]) -> subprocess.Popen[str]:
    """Starts two processes that learn tasks together; what each finds is in `folder/NAME-RANK.pt`."""
    words = [sys.executable, "-m", "tiny_tasks", str(root), str(folder), *names]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _main(root: Path, folder: Path, names: Sequence[str]) -> None:
    """What both processes do. The second is a copy of the first, which has imported everything."""
    import headway_training.huggingface  # noqa: F401 (imported once)

    child = os.fork()
    rank = 0 if child else 1
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_PROCESSES)}
    # Processes meet at a file, so that nothing listens but on the loopback interface.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    _meet(folder / "meeting", _PATIENCE_S)
    segmentation._NUM_COMPOSITES = {"valid": 1, "test": 1}
    for name in names:
        own = folder / f"{name}-{rank}"
        try:
            found = validate_long(root, own) if name == LONG_VALIDATION else learn(name, root, own)
        except Exception:
            found = traceback.format_exc()
        with replacing(folder / f"{name}-{rank}.pt") as file:
            torch.save(found, file)
        if isinstance(found, str) and "RecipeError" not in found:
            os._exit(1)  # the other process must not wait
    dist.destroy_process_group()
    if child:
        os.waitpid(child, 0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
