"""Token classifiers that do not fit their bundles are told when they are loaded."""

import pytest
import tiny_tagger
from loading import loading
from pydantic import ValidationError

from headway_server.bundles import Manifest, Tagging, describe_files, open_bundle, write_manifest
from headway_server.errors import BundleError
from headway_server.tasks.tokens.classifier import TokenClassifier


def test_outputs_that_the_tags_do_not_name_are_a_bad_bundle(tmp_path, runtime):
    bundle = tiny_tagger.write_tagger_bundle(tmp_path, tags=("O", "B-person"))
    with pytest.raises(BundleError, match=r"logits is \(16, 4\) of one input, by the manifest it is \(16, 2\)"):
        TokenClassifier.load(bundle, runtime, loading())


def test_labels_that_are_no_tags_are_a_bad_manifest(tmp_path):
    with pytest.raises(ValidationError, match=r"labels: 'person' is no tag; tags are O, and B-x and I-x"):
        tiny_tagger.write_tagger_bundle(tmp_path, tags=("O", "person"))


def test_a_graph_that_is_not_onnx_is_a_bad_bundle(tmp_path, runtime):
    bundle = tiny_tagger.write_tagger_bundle(tmp_path)
    bundle.file("model.onnx").write_bytes(b"not a graph")
    write_manifest(bundle.path, bundle.manifest.model_copy(update={"files": describe_files(bundle.path)}))
    with pytest.raises(BundleError, match=r"model\.onnx: ONNX Runtime .* cannot load it"):
        TokenClassifier.load(open_bundle(bundle.path), runtime, loading())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"word_boxes": None}, "word_boxes: is for graphs of token_classification with an input bbox in its unit"),
        ({"word_boxes": tiny_tagger.BOXES.model_copy(update={"unit": "fractions"})}, "variants.fp32 is int64"),
        ({"tagging": Tagging(aggregation="simple")}, "simple labels parts of words, and word_boxes are of whole ones"),
        ({"task": "text_classification"}, "word_boxes: is for graphs of token_classification"),
    ],
)
def test_boxes_that_the_graph_does_not_read_are_a_bad_manifest(tmp_path, changes, says):
    bundle = tiny_tagger.write_tagger_bundle(tmp_path, word_boxes=tiny_tagger.BOXES)
    with pytest.raises(ValidationError, match=says):
        Manifest.model_validate({**dict(bundle.manifest), **changes})
