"""Folders of transformers that are exported by their tensors: what each call computes, held against the library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from tiny_one_calls import GROUP_VIT, ONE_CALLS, write_one_call
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.tensors import BOUND, tensor_error
from headway_server.bundles import Bundle, Precision, Task, open_bundle
from headway_server.tasks.tensors.graph import resized


def run(*arguments: object) -> tuple[int, str]:
    """Runs the command; returns its exit code and what it says, in one line."""
    ended = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, " ".join(ended.output.split())


def exported(folder: Path, *options: object) -> Bundle:
    store = folder.parent / "store"
    code, said = run("hf", folder, "--task", "tensors", "--store", store, "--name", "one", *options)
    assert code == 0, said
    return open_bundle(store / "one" / "1")


def shapes(bundle: Bundle) -> dict[str, tuple[int | str, ...]]:
    graph = bundle.manifest.variants[Precision.FP32].graphs["model"]
    return {spec.name: spec.shape for spec in (*graph.inputs, *graph.outputs)}


@pytest.mark.parametrize("architecture", ONE_CALLS)
def test_a_folder_answers_by_its_tensors_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    model = write_one_call(tmp_path / "model", architecture)
    bundle = exported(tmp_path / "model")
    assert bundle.manifest.task is Task.TENSORS
    graph = bundle.manifest.variants[Precision.FP32].graphs["model"]
    with np.load(bundle.path / "examples.npz") as arrays:
        example = dict(arrays)
    assert all("batch" in spec.shape for spec in (*graph.inputs, *graph.outputs))
    longest = dict(bundle.manifest.limits.max_axis_sizes or {})
    session = onnxruntime.InferenceSession(bundle.path / graph.file)
    for sizes in ({}, {"batch": 3, **longest}):
        inputs = resized(graph.inputs, example, sizes)
        found = dict(zip([spec.name for spec in graph.outputs], session.run(None, inputs), strict=True))
        with torch.inference_mode():
            expected = model(**{name: torch.from_numpy(array) for name, array in inputs.items()})
        for name, array in found.items():
            numbered, _, number = name.rpartition("_")
            exact = expected[name] if name in expected else expected[numbered][int(number)]
            assert tensor_error(array, exact.numpy()) <= BOUND, name


def test_inputs_that_are_given_take_the_place_of_drawn_ones(tmp_path: Path) -> None:
    write_one_call(tmp_path / "model", "Swin2SRForImageSuperResolution")
    np.savez(tmp_path / "given.npz", pixel_values=np.random.default_rng(0).random((1, 3, 8, 12), np.float32))
    axes = "pixel_values=batch,3,rows,columns"
    bundle = exported(tmp_path / "model", "--examples", tmp_path / "given.npz", "--axes", axes)
    assert shapes(bundle)["pixel_values"] == ("batch", 3, "rows", "columns")
    fixed = exported(
        tmp_path / "model", "--examples", tmp_path / "given.npz", "--replace", "--axes", "pixel_values=1,3,8,12"
    )
    assert shapes(fixed) == {"pixel_values": (1, 3, 8, 12), "reconstruction": (1, 3, 16, 24)}


def test_texts_and_images_may_have_axes_of_their_own(tmp_path: Path) -> None:
    write_one_call(tmp_path / "model", "GroupViTModel", GROUP_VIT)
    axes = [flag for name in ("input_ids", "attention_mask") for flag in ("--axes", f"{name}=texts,length")]
    found = shapes(exported(tmp_path / "model", *axes))
    assert (found["input_ids"], found["pixel_values"]) == (("texts", "length"), ("batch", 3, 32, 32))
    assert (found["logits_per_image"], found["logits_per_text"]) == (("batch", "texts"), ("texts", "batch"))


@pytest.mark.parametrize(
    ("architecture", "options", "words"),
    [
        ("BertForMultipleChoice", (), "chooses among answers, which is no task of this command; --task tensors"),
        (
            "BertForMultipleChoice",
            ("--task", "tensors", "--precision", "int8"),
            "a model of tensors is exported in fp32",
        ),
        ("BertForMultipleChoice", ("--task", "tensors", "--max-length", "64"), "does not run on so many tokens"),
        ("BertForMultipleChoice", ("--task", "tensors", "--axes", "words=batch,length"), "--axes words: is no input"),
        ("BertForMultipleChoice", ("--task", "tensors", "--axes", "words"), "give it as INPUT=AXIS,AXIS"),
        ("BertForMultipleChoice", ("--task", "fill_mask", "--axes", "input_ids=batch,3"), "--axes is for tensors"),
        ("Swin2SRForImageSuperResolution", ("--task", "tensors", "--examples", "none.npz"), "none.npz"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(
    architecture: str, options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    write_one_call(tmp_path / "model", architecture)
    code, said = run("hf", tmp_path / "model", "--store", tmp_path / "store", *options)
    assert (code, words in said) == (2, True), said
    assert not list((tmp_path / "store").glob("*/*"))
