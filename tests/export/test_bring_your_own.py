"""Modules from outside the kit, one for each task, through the command line to an answering server's runner."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from documents import called, flags_of, pages_of_today, unknown_flags
from safetensors.torch import save_model
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.errors import SourceError
from headway_export.signing import app as signing_app
from headway_export.source import limits_of
from headway_export.tracing import trace
from headway_server.bundles import Precision, Task, open_bundle

TEXT = ["--tokenizer", "{tokenizer}", "--pad-token", "t0", "--bos-token", "t1", "--eos-token", "t2"]
ARGUMENTS = {
    "decoder": ["--task", "generation", *TEXT],
    "encoder_decoder": ["--task", "translation", "--languages", "en-de", *TEXT],
    "recurrent": ["--task", "translation", "--languages", "en-de", *TEXT],
    "text_classifier": ["--task", "text_classification", "--labels", "red, green, blue", *TEXT],
    "image_classifier": ["--task", "image_classification", "--labels", "a,b,c,d", "--preprocessing", "{preprocessing}"],
    "segmenter": ["--task", "segmentation", "--preprocessing", "{preprocessing}"],
}
PREPROCESSING = {
    "height": 16,
    "width": 16,
    "resize": "shorter_side",
    "resize_size": 20,
    "interpolation": "bicubic",
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
}


@pytest.fixture
def run(tmp_path, tokenizer_file):
    def invoke(module: str, *arguments: str, build: str = "build"):
        torch.manual_seed(0)
        weights = tmp_path / "weights.safetensors"
        save_model(getattr(importlib.import_module(f"foreign.{module}"), build)(), str(weights))
        preprocessing = tmp_path / "preprocessing.json"
        preprocessing.write_text(json.dumps(PREPROCESSING))
        given = [part.format(tokenizer=tokenizer_file, preprocessing=preprocessing) for part in arguments]
        common = ["--model", f"foreign.{module}:{build}", "--weights", str(weights), "--name", "mine"]
        return CliRunner().invoke(app, [*common, "--store", str(tmp_path / "store"), *given])

    return invoke


@pytest.mark.parametrize("module", ARGUMENTS)
def test_a_module_of_ones_own_is_exported_and_proved(run, tmp_path, module):
    result = run(module, *ARGUMENTS[module])
    assert result.exit_code == 0, result.output
    bundle = open_bundle(tmp_path / "store" / "mine" / "1")
    assert set(bundle.manifest.variants) == {Precision.FP32}
    assert bundle.manifest.variants[Precision.FP32].parity.max_relative_logit_error < 1e-5
    assert bundle.manifest.architecture.parameter_count > 1000
    assert "not measured" in result.output


def test_a_segmenter_must_say_how_large_its_masks_are(run):
    result = run("segmenter", *ARGUMENTS["segmenter"], build="build_without_size")
    assert result.exit_code != 0
    assert "'mask_size'; segmentation needs it (docs/bring-your-own.md)" in " ".join(result.output.split())


def test_an_encoder_decoder_may_scale_its_scores_too(run, tmp_path):
    result = run("encoder_decoder", *ARGUMENTS["encoder_decoder"], build="build_scaled")
    assert result.exit_code == 0, result.output
    variant = open_bundle(tmp_path / "store" / "mine" / "1").manifest.variants[Precision.FP32]
    assert variant.parity.max_relative_logit_error < 1e-5


def test_a_decoder_may_have_scores_of_its_own_and_number_its_layers_in_any_order(run, tmp_path):
    evaluation = tmp_path / "texts.jsonl"
    ids = np.random.default_rng(0).integers(3, 80, 400)
    evaluation.write_text(json.dumps({"text": " ".join(f"t{index}" for index in ids)}) + "\n")
    result = run("decoder", *ARGUMENTS["decoder"], "--evaluation", str(evaluation), build="build_scored")
    assert result.exit_code == 0, result.output
    variants = open_bundle(tmp_path / "store" / "mine" / "1").manifest.variants
    assert variants[Precision.FP32].parity.max_relative_logit_error < 1e-5
    assert variants[Precision.INT8].graphs["decoder"].inputs[5].dtype == "int8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer": 0},
            r"called attend for the layers \[0, 0\]; each layer of a decoder calls it once with its own number",
        ),
        ({"bias": torch.zeros(2)}, r"attend was called with a bias of shape \(2,\); it takes \(B, H, T, S\)"),
    ],
)
def test_calls_of_attention_that_no_graph_can_follow_are_refused_before_they_are_traced(change, message):
    from foreign.decoder import ForeignDecoder

    class Changed(ForeignDecoder):
        def hidden_states(self, input_ids, position_ids, attend):
            def attend_changed(*tensors, **keywords):
                return attend(*tensors, **(keywords | change))

            return super().hidden_states(input_ids, position_ids, attend_changed)

    with pytest.raises(SourceError, match=message):
        trace(Changed().eval(), Task.GENERATION)


def test_a_translation_decoder_that_skips_attention_to_the_source_is_refused():
    from foreign.encoder_decoder import ForeignEncoderDecoder

    class Skipping(ForeignEncoderDecoder):
        def decode(self, input_ids, position_ids, attend, attend_cross):  # noqa: ARG002 (the point of the test)
            return super().decode(input_ids, position_ids, attend, lambda query, **_: query)

    with pytest.raises(SourceError, match=r"Skipping called attend_cross for the layers \[\]"):
        trace(Skipping().eval(), Task.TRANSLATION)


def test_a_module_of_ones_own_may_read_pairs_tell_several_labels_and_give_vectors(run, tmp_path):
    flags = ["--multi-label", "--text-pairs", "required"]
    evaluation = tmp_path / "pairs.jsonl"
    rows = [{"text": f"t{i} t9", "text_pair": f"t{i + 1}", "labels": [i % 3]} for i in range(20)]
    evaluation.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [*ARGUMENTS["text_classifier"], *flags, "--evaluation", str(evaluation), "--precision", "fp32"]
    result = run("pair_classifier", *arguments)
    assert result.exit_code == 0, result.output
    manifest = open_bundle(tmp_path / "store" / "mine" / "1").manifest
    assert (manifest.text_pairs, manifest.embedding.pooling) == ("required", "largest")
    assert (manifest.classification.kind, manifest.classification.temperature) == ("multi_label", 1.0)
    assert manifest.classification.thresholds == (0.5, 0.5, 0.5)
    variant = manifest.variants[Precision.FP32]
    assert [spec.name for spec in variant.graphs["model"].inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert (variant.quality.metric, variant.quality.example_count) == ("micro_f1", 20)
    assert 0 < variant.calibration.expected_calibration_error < 1


def test_a_module_that_offers_no_vector_has_none(run, tmp_path):
    run("text_classifier", *ARGUMENTS["text_classifier"])
    manifest = open_bundle(tmp_path / "store" / "mine" / "1").manifest
    assert manifest.embedding is None
    outputs = [spec.name for spec in manifest.variants[Precision.FP32].graphs["model"].outputs]
    assert outputs == ["logits"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--multi-label"], "--multi-label is for text_classification, not for image_classification"),
        (["--text-pairs", "required"], "--text-pairs is for text_classification, not for image_classification"),
        (["--languages", "en-de"], "--languages is for translation, not for image_classification"),
        (["--tokenizer", "{tokenizer}"], "--tokenizer is for generation, translation, captioning, text_classification"),
        (["--eos-token", "t2"], "--eos-token: names a token of --tokenizer; give --tokenizer too"),
    ],
)
def test_a_flag_that_the_task_does_not_take_is_refused(run, flags, message):
    result = run("image_classifier", *ARGUMENTS["image_classifier"], *flags)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


def test_state_of_two_tensors_is_two_tensors_of_the_bundle(run, tmp_path):
    assert run("recurrent", *ARGUMENTS["recurrent"]).exit_code == 0
    variant = open_bundle(tmp_path / "store" / "mine" / "1").manifest.variants[Precision.FP32]
    assert [(state.past, state.update, state.initial) for state in variant.state] == [
        ("past_state_0", "replace", "initial_state_0"),
        ("past_state_1", "replace", "initial_state_1"),
    ]


def test_a_step_that_loses_a_state_is_refused_before_it_is_traced():
    from foreign.recurrent import build_forgetful

    with pytest.raises(SourceError, match="it returns at least one, each of the shape it was given"):
        trace(build_forgetful().eval(), Task.TRANSLATION)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mask_of": lambda mask: mask.flip(1)},
            "called recur with a mask of its own; call it with the attention_mask",
        ),
        ({"directions": 1}, "recur takes a bidirectional GRU of one layer"),
    ],
)
def test_a_recurrence_that_the_operator_cannot_be_is_refused_before_it_is_traced(change, message):
    from foreign.recurrent import ReadsByGRU

    with pytest.raises(SourceError, match=message):
        trace(ReadsByGRU(**change).eval(), Task.TRANSLATION)


def test_a_recurrent_decoder_may_be_a_gru_of_its_own(run, tmp_path):
    result = run("recurrent", *ARGUMENTS["recurrent"], build="build_reading_by_gru")
    assert result.exit_code == 0, result.output
    variant = open_bundle(tmp_path / "store" / "mine" / "1").manifest.variants[Precision.FP32]
    assert variant.parity.max_relative_logit_error < 1e-5


def test_int8_of_ones_own_module_is_judged_on_ones_own_data(run, tmp_path):
    evaluation = tmp_path / "evaluation.npz"
    generator = np.random.default_rng(0)
    np.savez(evaluation, images=generator.integers(0, 256, (40, 16, 16, 3)).astype(np.uint8), labels=np.zeros(40, int))
    result = run("image_classifier", *ARGUMENTS["image_classifier"], "--evaluation", str(evaluation))
    assert result.exit_code == 0, result.output
    assert set(open_bundle(tmp_path / "store" / "mine" / "1").manifest.variants) == {"fp32", "int8", "fp16"}


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("decoder", ["--task", "generation"], "--task generation needs --tokenizer"),
        ("decoder", ["--task", "poetry"], "task poetry: cannot be exported"),
        ("text_classifier", ["--task", "text_classification", *TEXT], "needs --labels"),
        (
            "text_classifier",
            ["--task", "text_classification", "--labels", "red,green,blue,grey", *TEXT],
            "there are 4 labels, and the model has 3 classes",
        ),
        ("image_classifier", ["--task", "image_classification", "--labels", "a"], "needs --preprocessing"),
        ("encoder_decoder", ["--task", "translation", *TEXT], "needs --languages"),
        ("encoder_decoder", ["--task", "translation", "--languages", "ende", *TEXT], "--languages ende"),
        ("decoder", ["--task", "generation", *TEXT[:-1], "nope"], "--eos-token nope"),
        ("text_classifier", ["--task", "generation", *TEXT], "does not follow docs/bring-your-own.md"),
    ],
)
def test_what_is_missing_or_wrong_is_named(run, tmp_path, module, arguments, message):
    result = run(module, *arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "store" / "mine").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["--model", "nowhere:build", "--task", "text_classification", "--weights", "w.safetensors"],
            ["needs --name", "needs --tokenizer, --labels", "w.safetensors: there is no such file", "'nowhere'"],
        ),
        (
            ["--model", "model.fine:biuld", "--task", "image_embeding", "--preprocessing", "p.json"],
            ["needs --weights, --name", "mean 'image_embedding'", "p.json: there is", "mean 'build'"],
        ),
        (["--model", "model.fime:build"], ["No module named 'model.fime' (did you mean 'fine'?)"]),
        (["tensors", "--model", "model.fine:biuld"], ["model.fine has no function 'biuld' (did you mean 'build'?)"]),
        (["tensors", "--model", "model/fine.py:build"], ["give it as package.module:function"]),
    ],
)
def test_all_that_is_missing_is_named_at_once_and_no_code_is_run_for_it(tmp_path, arguments, named):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "__init__.py").write_text("raise SystemExit('was run')")
    (tmp_path / "model" / "fine.py").write_text("import torch\n\ndef build():\n    raise KeyError('was run')\n")
    program = (
        "import sys; from typer.testing import CliRunner; from headway_export.cli import app\n"
        "result = CliRunner().invoke(app, sys.argv[1:]); print(result.output)\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 10 + result.exit_code)"
    )
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        env=os.environ | paths,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode in (11, 12), run.stderr
    assert [words for words in named if words not in run.stdout] == [], run.stdout


@pytest.mark.parametrize("where", ["import", "call"])
def test_what_a_factory_raises_is_told_with_its_line_and_no_traceback(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    body = {"import": "build = {}['missing']\n", "call": "def build():\n    return {}['missing']\n"}[where]
    (tmp_path / f"fails_at_{where}.py").write_text(body)
    (tmp_path / "w.safetensors").touch()
    (tmp_path / "p.json").write_text(json.dumps(PREPROCESSING))
    arguments = ["--model", f"fails_at_{where}:build", "--weights", "w.safetensors", "--preprocessing", "p.json"]
    result = CliRunner().invoke(app, [*arguments, "--task", "image_embedding", "--name", "mine"])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert f"KeyError: 'missing' (fails_at_{where}.py, line {body.count(chr(10))})" in result.output


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ("generation", "'max_length', 'hidden_states', 'logits'; generation"),
        ("translation", "'max_source_length', 'max_target_length', 'encode_source', 'step'; translation"),
        ("segmentation", "'mask_size', 'encoder', 'decoder'; segmentation"),
    ],
)
def test_all_that_a_module_lacks_is_named_at_once(task, named):
    with pytest.raises(SourceError, match=f"^Linear has no {named} needs it"):
        limits_of(torch.nn.Linear(1, 1), Task(task))


def test_a_module_that_is_not_there_is_named(tmp_path, tokenizer_file):
    weights = tmp_path / "w.safetensors"
    arguments = ["--model", "nowhere:build", "--weights", str(weights), "--task", "generation", "--name", "mine"]
    result = CliRunner().invoke(app, [*arguments, "--tokenizer", str(tokenizer_file)])
    assert result.exit_code == 1
    assert "--model nowhere:build: No module named 'nowhere'" in result.output


def test_flags_of_a_module_of_ones_own_are_refused_with_a_checkpoint(tmp_path):
    """Before anything is read: the checkpoint need not be there."""
    flags = ["--evaluation", "data.jsonl", "--labels", "a,b", "--multi-label", "--license", "MIT"]
    result = CliRunner().invoke(app, [str(tmp_path), *flags, "--store", str(tmp_path), "--version", "2"])
    assert result.exit_code == 1
    message = " ".join(result.output.split())
    for flag in ("--evaluation", "--labels", "--multi-label", "--license"):
        assert flag in message
    assert "--store" not in message
    assert "--version" not in message
    assert "only for --model, and CHECKPOINT was given" in message


def test_a_checkpoint_of_another_task_is_refused(tiny_checkpoints, tmp_path):
    checkpoint = str(tiny_checkpoints["generation"])
    result = CliRunner().invoke(app, [checkpoint, "--store", str(tmp_path), "--task", "translation"])
    assert result.exit_code == 1
    assert "is of task generation, and --task translation was asked for" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("program", "commands", "default"), [("headway-export", app, "checkpoint"), ("headway-sign", signing_app, "")]
)
def test_commands_of_the_documents_exist_with_their_flags(program, commands, default):
    root = Path(__file__).parents[2]
    calls = list(called(root, pages_of_today(root), program))
    assert calls
    flags = flags_of(commands)
    assert {where: found for where, words in calls if (found := unknown_flags(words, flags, default))} == {}
