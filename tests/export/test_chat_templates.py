"""Chat templates on their way from a checkpoint, or from a file, into a bundle."""

import dataclasses
import json

import pytest
from tiny_chat import DEFAULT_SYSTEM, MARKERS, NAMESPACE
from tiny_chat_model import chat_checkpoint, write_chat_bundle
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.source import find_chat_template, from_checkpoint
from headway_server.bundles import CHAT_TEMPLATE_FILE, Precision, open_bundle
from headway_server.errors import BundleError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return chat_checkpoint(tmp_path_factory.mktemp("chat") / "checkpoint", template=None)


@pytest.fixture
def folder(checkpoint, tmp_path):
    """The checkpoint, without a template, to be changed."""
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def write_configuration(folder, template):
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))


def test_a_template_is_taken_from_its_own_file_first(folder):
    write_configuration(folder, MARKERS)
    assert find_chat_template(folder) == MARKERS
    (folder / CHAT_TEMPLATE_FILE).write_text(NAMESPACE)
    assert find_chat_template(folder) == NAMESPACE
    assert from_checkpoint(folder).chat_template == NAMESPACE


def test_of_several_templates_the_default_is_taken(folder):
    write_configuration(folder, [{"name": "tools", "template": NAMESPACE}, {"name": "default", "template": MARKERS}])
    assert find_chat_template(folder) == MARKERS


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ([], "no template named default"),
        ([{"name": "tools", "template": MARKERS}], "no template named default"),
        ({"default": 3}, "neither a text nor a list of named templates"),
        (7, "neither a text nor a list of named templates"),
        ([1], "neither a text nor a list of named templates"),
        ([{}], "neither a text nor a list of named templates"),
    ],
)
def test_templates_without_a_default_are_refused(folder, template, reason):
    write_configuration(folder, template)
    with pytest.raises(SourceError, match=reason):
        from_checkpoint(folder)


@pytest.mark.parametrize("content", ["{}", "[]", '{"chat_template": null}'])
def test_a_configuration_without_a_template_is_none(folder, content):
    (folder / "tokenizer_config.json").write_text(content)
    assert from_checkpoint(folder).chat_template is None


def test_a_configuration_that_is_no_json_is_refused(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(SourceError, match=r"tokenizer_config\.json: cannot be read"):
        from_checkpoint(folder)


def test_the_bundle_holds_the_template_letter_for_letter_hashed_and_told_of(folder, tmp_path):
    template = NAMESPACE.replace("\n", "\r\n") + "{# é #}"
    (folder / CHAT_TEMPLATE_FILE).write_bytes(template.encode())
    arguments = [str(folder), "--store", str(tmp_path / "store"), "--precision", "fp32"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "a conversation instead of a prompt" in result.output
    bundle = open_bundle(tmp_path / "store" / "tiny-chat" / "1")
    assert bundle.file(CHAT_TEMPLATE_FILE).read_bytes() == (folder / CHAT_TEMPLATE_FILE).read_bytes()
    assert "Conversations" in bundle.file("README.md").read_text()
    bundle.file(CHAT_TEMPLATE_FILE).write_text(template + " ")
    with pytest.raises(BundleError, match=r"chat_template\.jinja has"):
        open_bundle(bundle.path)


def test_without_a_template_nothing_is_said_of_conversations(folder, tmp_path):
    bundle = write_chat_bundle(tmp_path / "store", folder)
    assert CHAT_TEMPLATE_FILE not in bundle.manifest.files
    assert "Conversations" not in bundle.file("README.md").read_text()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for message in messages %}", "is not a template"),
        ("{{ messages | unheard_of }}", "is not a template"),
        ("{{ messages.pop() }}", "fails .access to attribute .pop. .* is unsafe"),
        ("{{ raise_exception('never') }}", "for no conversation"),
        (DEFAULT_SYSTEM + " " * 2**16, "has 6.,... bytes, a chat template at most 65,536"),
    ],
)
def test_a_template_that_a_server_would_refuse_is_refused_and_nothing_is_written(folder, tmp_path, template, message):
    source = dataclasses.replace(from_checkpoint(folder), chat_template=template)
    with pytest.raises(SourceError, match=rf"^chat_template\.jinja: .*{message}"):
        export(source, ExportOptions(store=tmp_path / "store", precisions=(Precision.FP32,)))
    assert not list((tmp_path / "store").glob("*"))


def test_a_template_of_another_task_is_refused(tmp_path):
    (tmp_path / "template.jinja").write_text(MARKERS)
    (tmp_path / "weights").touch()
    arguments = ["--model", "foreign.image_classifier:build", "--task", "image_classification", "--name", "mine"]
    arguments += ["--weights", str(tmp_path / "weights"), "--chat-template", str(tmp_path / "template.jinja")]
    (tmp_path / "preprocessing.json").write_text(
        json.dumps(
            {"height": 8, "width": 8, "resize": "stretch", "interpolation": "bilinear", "mean": [0] * 3, "std": [1] * 3}
        )
    )
    arguments += ["--labels", "a,b", "--preprocessing", str(tmp_path / "preprocessing.json")]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, "--chat-template is for generation" in result.output) == (1, True), result.output
