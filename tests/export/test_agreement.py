"""int8 is judged by how near its answers are to fp32's, on inputs that its scales were not taken from."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from documents import rows
from foreign import fragile
from safetensors.torch import save_model

from headway_export import agreement, inputs
from headway_export.agreement import (
    LIMITS,
    LIMITS_BESIDE_A_METRIC,
    LIMITS_OF_INT4,
    LIMITS_OF_KINDS,
    interval_of_mean,
    interval_of_share,
)
from headway_export.errors import ParityError
from headway_export.exporter import ExportOptions, export
from headway_export.source import EvaluationData, ExportSource, from_checkpoint, from_factory
from headway_export.tasks.stateless import Stateless
from headway_export.tasks.table import task_of, tasks_where
from headway_server.bundles import ImagePreprocessing, Languages, Precision, SpecialTokens, Task

BOTH = (Precision.FP32, Precision.INT8)
OF_TOKENS = {"mean_kl_divergence", "worst_kl_divergence", "top_agreement", "correlation"}
IMAGES = ImagePreprocessing(
    height=16, width=16, resize="stretch", interpolation="bilinear", mean=(0.5,) * 3, std=(0.3,) * 3
)
WRITERS = ("generation", "translation")


@pytest.fixture
def own(tokenizer_file, tmp_path, monkeypatch):
    """Makes a source of a module of `foreign.fragile`, drawn by a seed."""

    def source_of(task: Task, build, num_labels: int = 0, **parts) -> ExportSource:
        monkeypatch.setattr(fragile, "build", build, raising=False)
        torch.manual_seed(0)
        save_model(build(), str(tmp_path / "weights.safetensors"))
        if task is Task.SEGMENTATION:
            parts["image_preprocessing"] = IMAGES
        else:
            parts["tokenizer_file"] = tokenizer_file
            parts["special_tokens"] = SpecialTokens(pad=0, bos=1, eos=2)
        labels = [f"label {number}" for number in range(num_labels)]
        weights = tmp_path / "weights.safetensors"
        return from_factory("foreign.fragile:build", weights, task=task, name="own", labels=labels, **parts)

    return source_of


def judged(source: ExportSource, folder, precision: Precision = Precision.INT8):
    bundle = export(source, ExportOptions(store=folder, precisions=(Precision.FP32, precision)))
    return bundle.manifest.variants[precision].agreement


# What is measured


@pytest.mark.parametrize(
    "task", ["generation", "translation", "text_classification", "token_classification", "image_classification"]
)
def test_the_manifest_and_the_card_say_how_near_int8_is_to_fp32(tiny_checkpoints, tmp_path, task):
    source = dataclasses.replace(from_checkpoint(tiny_checkpoints[task]), evaluation=None)
    bundle = export(source, ExportOptions(store=tmp_path, precisions=BOTH))
    assert bundle.manifest.variants[Precision.FP32].agreement is None
    agreed = bundle.manifest.variants[Precision.INT8].agreement
    expected = OF_TOKENS if task in WRITERS else OF_TOKENS | {"least_correlation"}
    assert (agreed.dataset, set(agreed.figures)) == ("generated", expected)
    assert agreed.limits == {name: LIMITS[name] for name in expected}
    low, high = agreed.intervals["mean_kl_divergence"]
    assert low <= agreed.figures["mean_kl_divergence"] <= high < LIMITS["mean_kl_divergence"]
    assert agreed.intervals["top_agreement"] == interval_of_share(
        round(agreed.figures["top_agreement"] * agreed.prediction_count), agreed.prediction_count
    )
    card = bundle.file("README.md").read_text()
    assert "Its answers were held against those of fp32." in card
    assert " to ".join(f"{end:.4f}" for end in agreed.intervals["top_agreement"]) in card
    if task in WRITERS:
        graph = bundle.manifest.variants[Precision.INT8].graphs["decoder"]
        assert "int8" in {tensor.dtype for tensor in graph.inputs}


@pytest.mark.parametrize("task", ["generation", "translation", "text_classification"])
def test_texts_that_are_given_are_what_is_answered(tiny_checkpoints, tmp_path, task):
    whole = from_checkpoint(tiny_checkpoints[task])
    texts = tuple(text[:200] for text in whole.evaluation.texts[:80])
    source = dataclasses.replace(whole, evaluation=None, texts=texts, texts_name="own.txt")
    agreed = judged(source, tmp_path)
    assert agreed.dataset == "own.txt"
    assert agreed.example_count == {"generation": 2, "translation": 64, "text_classification": 60}[task]
    assert agreed.figures["top_agreement"] >= LIMITS["top_agreement"]


def test_too_few_inputs_prove_nothing(tiny_checkpoints, tmp_path):
    whole = from_checkpoint(tiny_checkpoints["text_classification"])
    source = dataclasses.replace(whole, evaluation=None, texts=whole.evaluation.texts[:5], texts_name="own.txt")
    with pytest.raises(
        ParityError, match=r"top_agreement with fp32 on 5 inputs \(own.txt\) is 1.0000, and may be 0.64"
    ):
        judged(source, tmp_path)


ANSWERING_ONCE = [
    task
    for task in tasks_where(lambda task: isinstance(task, Stateless) and task.own_kind is None)
    if task is not Task.CTC_TRANSCRIPTION  # which answers frame by frame
]


@pytest.mark.parametrize("task", ANSWERING_ONCE)
def test_as_many_inputs_are_drawn_as_can_tell_that_a_variant_agrees(task):
    """Else no variant could be exported without data of one's own, however near it is."""
    least, _ = task_of(task).num_items
    assert interval_of_share(least, least)[0] >= LIMITS["top_agreement"]


def test_a_variant_that_answers_otherwise_is_refused_and_nothing_is_written(tiny_checkpoints, tmp_path, monkeypatch):
    """Rounding the weights to nothing, as a quantizer with a bug would."""
    source = dataclasses.replace(from_checkpoint(tiny_checkpoints["text_classification"]), evaluation=None)
    monkeypatch.setattr(
        "headway_export.rewriting.quantize_matrix",
        lambda matrix, *, axis: (np.zeros(matrix.shape, np.int8), np.ones(matrix.shape[1 - axis], np.float32)),
    )
    with pytest.raises(
        ParityError, match=r"int8: \w+ with fp32 on 2048 inputs .*own, --texts FILE or --evaluation FILE, or export"
    ):
        judged(source, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_page_of_exports_has_these_limits():
    rows_of = {
        "mean_kl_divergence": 0,
        "worst_kl_divergence": 1,
        "top_agreement": 2,
        "correlation": 3,
        "least_correlation": 4,
        "mean_mask_iou": 7,
        "iou_correlation": 8,
        "mean_label_iou": 9,
        "mean_relative_error": 10,
        "mean_box_iou": 12,
    }
    table = rows(Path(__file__).parents[2] / "docs" / "export.md", "outputs | figure")
    numbers = [
        [float(number) for number in re.findall(r"\d\.?\d*(?=[; ]|$)", row[2].replace("int4", ""))] for row in table
    ]
    for name, place in rows_of.items():
        others = [LIMITS_OF_INT4[name]] if name in LIMITS_OF_INT4 else []
        others += [LIMITS_OF_KINDS["score"][name]] if name in LIMITS_OF_KINDS["score"] else []
        assert numbers[place] == [LIMITS[name], *others], name
    assert numbers[5] == [LIMITS["mean_cosine"], LIMITS["least_cosine"]]
    assert numbers[6] == [LIMITS_OF_KINDS["choices"]["mean_cosine"]]


# Variants that are broken


def test_labels_that_become_constants_are_refused_though_no_decision_changes(own, tmp_path):
    """80 labels, none of which ever applies: -12 and a little, which becomes -12 for every label of every text."""
    good = own(Task.TEXT_CLASSIFICATION, lambda: fragile.Classifier(80, outlier=1.0, bias=-12.0), 80, multi_label=True)
    agreed = judged(good, tmp_path)
    assert agreed.figures["top_agreement"] == 1
    assert min(agreed.figures[name] for name in ("least_correlation", "mean_cosine", "correlation")) > 0.99
    broken = own(Task.TEXT_CLASSIFICATION, lambda: fragile.Classifier(80, bias=-12.0), 80, multi_label=True)
    with pytest.raises(ParityError, match=r"int8: (\w*correlation|mean_cosine) with fp32"):
        judged(broken, tmp_path / "broken")


def test_a_single_label_that_becomes_a_constant_is_refused(own, tmp_path, monkeypatch):
    """As a column of weights would that was lost."""
    from headway_export.rewriting import quantize_matrix

    def without_last(matrix, *, axis):
        quantized, scales = quantize_matrix(matrix, axis=axis)
        if 80 in matrix.shape:
            np.moveaxis(quantized, matrix.shape.index(80), 0)[-1] = 0
        return quantized, scales

    monkeypatch.setattr("headway_export.rewriting.quantize_matrix", without_last)
    source = own(
        Task.TEXT_CLASSIFICATION, lambda: fragile.Classifier(80, outlier=1.0, bias=-12.0), 80, multi_label=True
    )
    with pytest.raises(ParityError, match="int8: least_correlation with fp32"):
        judged(source, tmp_path)


def test_masks_that_are_empty_on_both_sides_show_nothing(own, tmp_path):
    good = own(Task.SEGMENTATION, lambda: fragile.Segmenter(outlier=1.0, bias=-60.0))
    agreed = judged(good, tmp_path)
    assert set(agreed.figures) == {"correlation", "iou_correlation"}
    seen = judged(own(Task.SEGMENTATION, lambda: fragile.Segmenter(outlier=1.0)), tmp_path / "seen")
    assert seen.figures["mean_mask_iou"] > LIMITS["mean_mask_iou"]
    broken = own(Task.SEGMENTATION, lambda: fragile.Segmenter(bias=-60.0))
    with pytest.raises(ParityError, match=r"int8: correlation with fp32 on 64 inputs .*own, --images FOLDER or"):
        judged(broken, tmp_path / "broken")


@pytest.mark.parametrize("kind", ["generation", "translation", "text_classification"])
def test_positions_up_to_the_limit_are_judged(own, tmp_path, kind):
    """int8 that is right up to position 100 of 160, or for texts of at most 64 tokens."""
    source = {
        "generation": lambda: own(Task.GENERATION, fragile.Decoder),
        "translation": lambda: own(
            Task.TRANSLATION, fragile.EncoderDecoder, languages=Languages(source="en", target="de")
        ),
        "text_classification": lambda: own(
            Task.TEXT_CLASSIFICATION, lambda: fragile.Classifier(40, only_long=True, scale=2), 40
        ),
    }[kind]()
    with pytest.raises(ParityError, match=r"int8: (mean|worst)_kl_divergence with fp32"):
        judged(source, tmp_path)


def test_a_large_vocabulary_leaves_the_sample_as_it_is(own, tmp_path):
    agreed = judged(own(Task.GENERATION, lambda: fragile.Decoder(10_000, first=fragile.LENGTH)), tmp_path)
    assert agreed.prediction_count >= 1_800


# Variants that are not broken


def test_a_flipped_choice_of_which_fp32_is_unsure_is_no_fault(own, tmp_path):
    """1,000 labels, nearly alike: rounding changes many choices, and no distribution."""
    agreed = judged(
        own(Task.TEXT_CLASSIFICATION, lambda: fragile.Classifier(1_000, outlier=60.0, scale=0.02), 1_000), tmp_path
    )
    assert agreed.figures["top_agreement"] == 1
    assert agreed.figures["correlation"] < 1
    broken = own(Task.TEXT_CLASSIFICATION, lambda: fragile.Classifier(1_000, scale=0.02), 1_000)
    with pytest.raises(ParityError, match="int8: correlation with fp32"):
        judged(broken, tmp_path / "broken")


# Beside a metric


def test_agreement_is_recorded_beside_a_metric(tiny_checkpoints, tmp_path):
    source = from_checkpoint(tiny_checkpoints["text_classification"])
    bundle = export(source, ExportOptions(store=tmp_path, precisions=BOTH))
    variant = bundle.manifest.variants[Precision.INT8]
    assert (variant.quality.metric, variant.agreement.dataset) == ("accuracy", "weather")
    assert set(variant.agreement.figures) == OF_TOKENS | {"least_correlation"}
    assert variant.agreement.limits == LIMITS_BESIDE_A_METRIC
    card = bundle.file("README.md").read_text()
    assert "Measured at export" in card
    assert "Its answers were held against those of fp32." in card


def test_a_constant_is_refused_though_the_metric_does_not_see_it(own, tmp_path):
    """No label ever applies, so that F1 is 0 in fp32 too."""
    texts = [f"t{3 + number % 70} t{4 + number % 60}" for number in range(60)]
    truth = np.eye(80, dtype=np.int64)[np.arange(60)]
    data = EvaluationData(dataset="own", metric="micro_f1", higher_is_better=True, texts=texts, labels=truth)
    source = own(Task.TEXT_CLASSIFICATION, lambda: fragile.Classifier(80, bias=-12.0), 80, multi_label=True)
    source = dataclasses.replace(source, evaluation=data)
    with pytest.raises(ParityError, match=r"int8: correlation with fp32 on 60 inputs \(own\) is 0.0000; limit 0.5$"):
        judged(source, tmp_path)


# Scales are taken from other inputs


@pytest.fixture
def read(monkeypatch):
    """What scales were taken from, and what judged, in that order."""
    seen = []
    for name in ("cache_ranges", "row_maxima"):
        original = getattr(__import__("headway_export.exporter", fromlist=[name]), name)

        def noted(*arguments, original=original):
            seen.append(arguments[-1])
            return original(*arguments)

        monkeypatch.setattr(f"headway_export.exporter.{name}", noted)
    original_judge = agreement.Judge.of

    def noted_judge(candidate, drawn):
        seen.append(drawn.judged)
        return original_judge(candidate, drawn)

    monkeypatch.setattr(agreement.Judge, "of", noted_judge)
    return seen


def contents(given: inputs.Inputs) -> set[bytes]:
    """Everything that the encoder or the decoder reads, as bytes."""
    read = [text.token_ids if text.source is None else text.source for text in given.texts]
    read += [item.get("input_ids", item.get("pixel_values")) for item in given.items]
    return {array.tobytes() for array in read}


@pytest.mark.parametrize("is_given", [False, True], ids=["drawn", "given"])
@pytest.mark.parametrize(
    "task", ["generation", "translation", "text_classification", "token_classification", "image_classification"]
)
def test_scales_are_taken_from_inputs_that_do_not_judge(tiny_checkpoints, tmp_path, read, task, is_given):
    whole = from_checkpoint(tiny_checkpoints[task])
    data, parts = whole.evaluation, {}
    if is_given:
        texts = [*dict.fromkeys(data.texts)][:90]
        if task == "generation":
            texts = [texts[0][start : start + 90] for start in range(0, 240, 20)]
        parts = {"texts": tuple(texts), "images": data.images if len(data.images) else None, "texts_name": "own"}
    source = dataclasses.replace(whole, evaluation=None, **parts)
    agreed = judged(source, tmp_path, Precision.INT8_STATIC)
    assert agreed.calibrated_on == "other inputs"
    judging, *calibrating = map(contents, read)
    assert calibrating
    assert all(found and not found & judging for found in calibrating)


def test_evaluation_data_that_is_enough_is_parted(tiny_checkpoints, tmp_path, read):
    source = from_checkpoint(tiny_checkpoints["token_classification"])
    bundle = export(source, ExportOptions(store=tmp_path, precisions=(*BOTH, Precision.INT8_STATIC)))
    for variant in bundle.manifest.variants.values():
        assert variant.quality.example_count == len(source.evaluation) - inputs.NUM_CALIBRATED == 568
    assert bundle.manifest.variants[Precision.INT8_STATIC].agreement.calibrated_on == "other inputs"
    assert bundle.manifest.variants[Precision.INT8].agreement.calibrated_on is None  # it has no such scales
    assert len(read[1].items) == inputs.NUM_CALIBRATED


def test_evaluation_data_that_is_not_enough_is_read_for_both_and_the_bundle_says_so(tiny_checkpoints, tmp_path):
    source = from_checkpoint(tiny_checkpoints["translation"])
    bundle = export(source, ExportOptions(store=tmp_path, precisions=BOTH))
    variant = bundle.manifest.variants[Precision.INT8]
    assert (variant.quality.example_count, variant.agreement.calibrated_on) == (100, "these inputs")
    assert "The scales of int8 were taken from these inputs too" in bundle.file("README.md").read_text()


def test_the_end_of_a_long_text_is_held_out(tiny_checkpoints):
    source = from_checkpoint(tiny_checkpoints["generation"])
    text = " ".join(source.evaluation.texts) * 200
    long = dataclasses.replace(source, evaluation=dataclasses.replace(source.evaluation, texts=[text]))
    kept, taken = inputs.hold_out(long)
    assert kept.evaluation.texts[0] + taken.texts[0] == text
    assert len(taken.texts[0]) == inputs.NUM_CALIBRATED * 160


def test_examples_are_taken_whole():
    rng = np.random.default_rng(0)
    data = EvaluationData(
        dataset="own",
        metric="micro_f1",
        higher_is_better=True,
        texts=["a", "b", "c"],
        text_pairs=["d", "e", "f"],
        images=rng.integers(0, 255, (3, 2, 2, 3), np.uint8),
        labels=np.eye(3, dtype=np.int64),
        captions={"en": [["g"], ["h"], ["i"]]},
    )
    taken = data.take(np.array([0, 2]))
    assert (taken.texts, taken.text_pairs, taken.captions) == (["a", "c"], ["d", "f"], {"en": [["g"], ["i"]]})
    np.testing.assert_array_equal(taken.images, data.images[[0, 2]])
    np.testing.assert_array_equal(taken.labels, data.labels[[0, 2]])
    assert len(taken) == 2


# Intervals


def test_a_share_has_wilsons_interval():
    """Against values of Brown, Cai and DasGupta's formula, by hand for 90 %: z = 1.645."""
    low, high = interval_of_share(63, 64)
    assert (low, high) == (pytest.approx(0.9330, abs=1e-3), pytest.approx(0.9964, abs=1e-3))
    assert interval_of_share(64, 64)[0] == pytest.approx(64 / (64 + 1.6449**2), abs=1e-4)


def test_a_mean_has_the_interval_of_its_units():
    rng = np.random.default_rng(1)
    values, units = rng.normal(size=40), np.repeat(np.arange(8), 5)
    low, high = interval_of_mean(values, units)
    means = values.reshape(8, 5).mean(axis=1)
    half = 1.8946 * means.std(ddof=1) / 8**0.5  # Student's t with 7 degrees of freedom, 95 %
    assert (low, high) == (pytest.approx(values.mean() - half, abs=1e-4), pytest.approx(values.mean() + half, abs=1e-4))
    assert interval_of_mean(values[:5], units[:5]) == (-np.inf, np.inf)


def test_the_interval_holds_the_mean_nearly_as_often_as_it_says():
    rng = np.random.default_rng(2)
    units = np.repeat(np.arange(20), 10)
    hits = 0
    for _ in range(400):
        values = np.repeat(rng.exponential(size=20), 10) + rng.normal(size=200)
        low, high = interval_of_mean(values, units)
        hits += low <= 1 <= high
    assert 0.84 < hits / 400 < 0.95
