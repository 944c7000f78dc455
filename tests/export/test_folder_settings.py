"""Settings of a model folder: each is read, or named in a note; its chat template writes transformers' prompts."""

import json
import shutil
import sys

import pytest
import tiny_embedders
import tiny_families
import tiny_huggingface as tiny
import transformers
from tiny_chat import DEFAULT_SYSTEM, MARKERS
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.errors import SourceError, reason_of
from headway_export.huggingface import FolderOptions, from_folder, in_a_sentence
from headway_export.huggingface.conversations import read_chat_template
from headway_export.huggingface.embedders import SETTINGS as SENTENCE_SETTINGS
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.settings import (
    _ENDS,
    _HOW_IT_RUNS,
    _OF_TOKENIZERS,
    folder_notes,
    generation_notes,
    truncation_side,
)
from headway_server.bundles import SpecialTokens, Task
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import TextTokenizer

SETTINGS = transformers.GenerationConfig().to_dict()
CALLS = """\
{%- for message in messages %}{{ '<s>' + message.role + ': ' + message.content }}
    {%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}
{%- endfor %}{{ tools | length if tools else '' }}"""
"""Calls without their arguments."""


# Generation


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - _HOW_IT_RUNS - set(_ENDS)))
def test_a_setting_of_generation_that_nothing_applies_is_named(name):
    settings = transformers.GenerationConfig()
    settings.do_sample, settings.num_beams = True, 2
    setattr(settings, name, 7)
    [note] = generation_notes(settings, applied=(), asked={})
    assert name in note.removeprefix("generation_config: ").partition(":")[0].split(", ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forced_bos_token_id", 0),
        ("forced_bos_token_id", 1),
        ("forced_eos_token_id", 0),
        ("max_time", 1),
        ("min_length", 1),
        ("min_new_tokens", 1),
        ("no_repeat_ngram_size", 1),
        ("penalty_alpha", 1),
        ("own", 0),
        ("own", 1),
    ],
)
def test_a_small_number_changes_answers_unless_it_is_known_not_to(name, value):
    [note] = generation_notes(transformers.GenerationConfig(**{name: value}), applied=(), asked={})
    assert note == f"generation_config: {name}: not applied by the server"


def test_a_setting_that_the_library_does_not_know_is_named():
    settings = transformers.GenerationConfig(length_of_breath=3)
    assert generation_notes(settings, applied=(), asked={}) == (
        "generation_config: length_of_breath: not applied by the server",
    )


def test_settings_that_change_no_answer_are_those_of_the_library_and_not_named():
    assert SETTINGS.keys() >= _HOW_IT_RUNS
    settings = transformers.GenerationConfig(use_cache=True, num_beams=1, length_penalty=2.0, top_k=5, do_sample=False)
    assert generation_notes(settings, applied=(), asked={}) == ()
    neutral = transformers.GenerationConfig(**transformers.GenerationConfig._get_default_generation_params())
    neutral.max_length = None
    assert generation_notes(neutral, applied=(), asked={}) == ()


def test_what_a_call_may_give_is_named_as_calls_name_it():
    settings = transformers.GenerationConfig(max_length=50, min_new_tokens=3, num_beams=4, early_stopping=True)
    asked = {"max_length": "max_new_tokens", "min_new_tokens": "min_new_tokens"}
    assert generation_notes(settings, applied=(), asked=asked) == (
        "generation_config: early_stopping, num_beams: not applied by the server",
        "generation_config: max_new_tokens 50, min_new_tokens 3: give these with a call, whose defaults are others",
    )
    settings.max_new_tokens = 20
    assert "max_new_tokens 50" not in generation_notes(settings, applied=("max_new_tokens",), asked=asked)[1]


# Tokenizers and pipelines


def notes_of(folder, task=Task.TEXT_CLASSIFICATION, *, config=None, **settings):
    tiny.write_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder_notes(folder, config or {}, task)


def test_what_the_library_writes_is_all_known(tmp_path):
    assert notes_of(tmp_path) == ()
    settings = dict.fromkeys(sorted(_OF_TOKENIZERS - {"tokenizer_class", "split_special_tokens"}), "right")
    assert folder_notes(tmp_path, {}, Task.TEXT_CLASSIFICATION) == ()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert folder_notes(tmp_path, {}, Task.TEXT_CLASSIFICATION) == ()


@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_text_is_cut_where_the_library_cuts_it(tmp_path, side):
    assert notes_of(tmp_path, truncation_side=side) == ()
    assert truncation_side(tmp_path) == side
    own = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert own.truncation_side == side
    served = TextTokenizer.load(tmp_path / "tokenizer.json", truncation_side=side)
    text, other = "the rain in spain falls", "on the plain"
    for pair in (None, other):
        for length in range(4, len(own(text, pair).input_ids)):
            expected = own(text, pair, truncation=True, max_length=length, return_offsets_mapping=True)
            [encoded] = await served.encode_limited(
                [text],
                fields=["text"],
                max_tokens=length,
                truncate=True,
                with_offsets=True,
                text_pairs=None if pair is None else [pair],
            )
            assert encoded.input_ids.tolist() == expected.input_ids
            assert list(encoded.offsets) == list(map(tuple, expected.offset_mapping))


def test_the_side_that_a_folder_cuts_is_the_bundles(tmp_path):
    folder = tiny.write_model(tmp_path, "bert", "ForSequenceClassification")
    for side in ("right", "left"):
        notes_of(folder, truncation_side=side)
        source, notes = from_folder(folder, FolderOptions())
        assert (source.truncation_side, [note for note in notes if "truncation" in note]) == (side, [])


def test_a_length_that_the_tokenizer_alone_states_is_named(tmp_path):
    folder = tiny.write_model(tmp_path, "bert", "ForSequenceClassification")
    for stated, noted in ((16, True), (tiny.LENGTH, False), (int(1e30), False), (1e30, False), (None, False)):
        notes_of(folder, model_max_length=stated)
        source, notes = from_folder(folder, FolderOptions())
        assert source.limits.max_input_tokens == tiny.LENGTH
        assert [note for note in notes if "model_max_length" in note] == [
            "tokenizer_config.json: model_max_length 16: transformers cuts texts there, and the bundle takes 48 "
            "tokens; --max-length N changes it"
        ] * noted
    assert from_folder(folder, FolderOptions(max_length=16))[0].limits.max_input_tokens == 16


def test_what_is_not_known_of_a_tokenizer_is_named(tmp_path):
    [note] = notes_of(tmp_path, reads_backwards=True)
    assert note == "tokenizer_config.json: reads_backwards: not applied by the server"
    [note] = notes_of(tmp_path, split_special_tokens=True)
    assert "split_special_tokens: special tokens in a text are read as such" in note


def test_spaces_that_the_library_takes_out_are_named_of_models_that_write(tmp_path, monkeypatch):
    assert notes_of(tmp_path, clean_up_tokenization_spaces=True) == ()
    monkeypatch.setattr("headway_export.huggingface.settings._cleans", lambda _: True)
    [note] = notes_of(tmp_path, Task.GENERATION, clean_up_tokenization_spaces=True)
    assert "transformers takes out spaces before punctuation" in note


def test_what_pipelines_apply_is_named(tmp_path):
    [note] = notes_of(tmp_path, config={"task_specific_params": {"summarization": {"num_beams": 4}}})
    assert note.startswith("config.json: task_specific_params (summarization): pipelines of transformers apply them")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_settings_that_are_no_object_are_refused(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(SourceError, match=r"tokenizer_config\.json: "):
        folder_notes(tmp_path, {}, Task.GENERATION)


# Chat templates


def read(path, template, special_tokens=None, **settings):
    tiny.write_tokenizer(path)
    file = path / "tokenizer_config.json"
    content = {name: value for name, value in (json.loads(file.read_text()) | settings).items() if value is not None}
    file.write_text(json.dumps(content))
    (path / "chat_template.jinja").write_text(template)
    own = transformers.AutoTokenizer.from_pretrained(path)
    folder = ModelFolder(path=path, task=Task.GENERATION, config=None, options=FolderOptions())
    special_tokens = special_tokens or SpecialTokens(bos=1, eos=2)
    return read_chat_template(folder, own, own.backend_tokenizer, special_tokens)


@pytest.mark.parametrize("template", [MARKERS, DEFAULT_SYSTEM])
def test_a_template_whose_prompts_are_those_of_the_library_is_taken_as_it_is(tmp_path, template):
    assert read(tmp_path, template) == (template, ())


def test_special_tokens_that_a_template_names_and_a_server_does_not_give_go_with_it(tmp_path):
    named = "\n{{ pad_token }}{{ cls_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    template, notes = read(tmp_path, named, cls_token="<unk>")
    assert (template.removesuffix(named), notes) == (
        '{% set cls_token = "<unk>" +%}{% set pad_token = "<pad>" +%}',
        (),
    )


def test_prompts_of_plain_conversations_that_differ_are_refused(tmp_path):
    template = "{{ bos_token is defined }}{{ messages[-1].content }}"
    with pytest.raises(SourceError, match=r"with one turn is not that of transformers .*'TrueHello"):
        read(tmp_path, template, SpecialTokens(eos=2), bos_token=None)


def test_prompts_of_further_conversations_that_differ_are_named(tmp_path):
    _, [note] = read(tmp_path, "<s>{% for message in messages %}{{ message.content | e }}{% endfor %}")
    assert note.startswith("chat template: prompts of conversations with characters that special tokens have (from")
    _, [note] = read(tmp_path, CALLS)
    assert note.startswith("chat template: prompts of conversations with calls of tools (refused: ")


@pytest.mark.parametrize("in_files", [False, True])
def test_templates_beside_the_default_one_are_named(tmp_path, in_files):
    tiny.write_tokenizer(tmp_path)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path)
    own.chat_template = {"default": MARKERS, "tool_use": CALLS, "rag": MARKERS}
    own.save_pretrained(tmp_path, save_jinja_files=in_files)
    assert (tmp_path / "additional_chat_templates").exists() == in_files
    own = transformers.AutoTokenizer.from_pretrained(tmp_path)
    folder = ModelFolder(path=tmp_path, task=Task.GENERATION, config=None, options=FolderOptions())
    template, notes = read_chat_template(folder, own, own.backend_tokenizer, SpecialTokens(bos=1, eos=2))
    assert template == MARKERS
    assert notes == ("chat template: the one named default is served, and not rag, tool_use",)


# Whatever a folder holds


def test_whatever_goes_wrong_is_a_sentence():
    said = r"^model: cannot be exported, and is not supported \(KeyError: 'x'\)$"
    with pytest.raises(SourceError, match=said), in_a_sentence("model"):
        raise KeyError("x")
    for known in (SourceError("a"), InvalidInputError("a", "b")):
        with pytest.raises(type(known)), in_a_sentence("model"):
            raise known


def test_a_model_that_cannot_be_traced_is_refused_in_a_sentence(tmp_path, monkeypatch):
    def fail(*_, **__):
        sys.stderr.write("a graph\n" * 1000)
        raise RuntimeError("a graph\n" * 1000)

    monkeypatch.setattr("torch.onnx.export", fail)
    folder = tiny_families.write_family(tmp_path / "model", "bert")
    arguments = ["hf", str(folder), "--store", str(tmp_path / "store"), "--task", "text_classification"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, len(result.output.splitlines())) == (2, 1), result.output
    assert "PyTorch cannot trace" in result.output
    assert len(result.output) < 500


def test_a_folder_whose_code_fails_is_refused_in_a_sentence():
    with (
        pytest.raises(SourceError, match=r"model: cannot be exported, and is not supported \(TypeError: int"),
        in_a_sentence("model"),
    ):
        int([])  # whatever its code raises


def test_sizes_of_two_numbers_are_read(tmp_path):
    sizes = {"patch_size": [7, 7], "patch_stride": [4, 4], "patch_padding": [3, 3], "masked_unit_size": [4, 4]}
    config = transformers.HieraConfig(
        image_size=[32, 32], embed_dim=16, depths=[1, 1], num_heads=[1, 2], num_query_pool=1, num_labels=3, **sizes
    )
    transformers.HieraForImageClassification(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    source, _ = from_folder(tmp_path, FolderOptions(name="hiera"))
    assert source.task is Task.IMAGE_CLASSIFICATION


def test_what_a_tracer_says_is_cut():
    assert len(reason_of(ValueError("a graph\n" * 10_000))) < 310
    assert reason_of(ValueError()) == "ValueError"


# Folders of sentence-transformers


READ, REFUSED = "is read", "is refused"
FILES = {
    "module": "modules.json",
    "transformer": "sentence_bert_config.json",
    "sentence transformer": "config_sentence_transformers.json",
    "pooling": "1_Pooling/config.json",
    "dense": "2_Dense/config.json",
}
OF_SENTENCES = {
    "module": {"idx": (9, READ), "name": ("x", READ), "path": ("1_Pooling", READ), "type": ("x.Pooling", READ),
               "kwargs": (["task"], "takes task, which calls of the server do not have")},
    "transformer": {
        "max_seq_length": (20, READ), "do_lower_case": (True, READ), "unpad_inputs": (True, READ),
        "model_type": ("bert", READ), "transformer_task": ("fill-mask", REFUSED),
        "module_output_name": ("sentence_embedding", REFUSED),
        "modality_config": ({"text": {"method": "get_text_features", "method_output_name": None}}, REFUSED),
    } | dict.fromkeys(("model_args", "tokenizer_args", "config_args", "processor_args", "processing_kwargs"),
                      ({"a": 1}, "not applied by the server")),
    "sentence transformer": {
        "__version__": ({"sentence_transformers": "5.0"}, READ), "prompts": ({"query": "q: "}, READ),
        "default_prompt_name": ("missing", REFUSED), "similarity_fn_name": ("manhattan", "ranks by the cosine"),
        "model_type": ("SparseEncoder", REFUSED), "truncate_dim": (8, "not applied by the server"),
    },
    "pooling": {
        "word_embedding_dimension": (32, READ), "embedding_dimension": (32, READ), "include_prompt": (False, READ),
        "pooling_mode": ("max", READ),
    } | {f"pooling_mode_{name}": (True, READ) for name in (
        "cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")},
    "dense": {
        "in_features": (32, READ), "out_features": (8, READ), "bias": (True, READ),
        "activation_function": ("torch.nn.modules.activation.Softplus", REFUSED), "use_residual": (True, REFUSED),
        "module_input_name": ("token_embeddings", REFUSED), "module_output_name": ("token_embeddings", REFUSED),
    },
}  # fmt: skip
"""A value of every setting of each file, and what becomes of it: the words of a note, if it is named."""


@pytest.fixture(scope="module")
def sentence_folder(tmp_path_factory):
    return tiny_embedders.write_sentence_transformer(
        tmp_path_factory.mktemp("sentences") / "model", "bert", width=8, normalizes=False
    )


def changed(folder, target, kind, **settings):
    """A copy of a folder, with settings of one file."""
    shutil.copytree(folder, target)
    file = target / FILES[kind]
    content = json.loads(file.read_text()) if file.exists() else {}
    if kind == "module":
        content[1] |= settings
    elif kind == "pooling":
        content |= {"pooling_mode_mean_tokens": False, **settings}
    else:
        content |= settings
    file.write_text(json.dumps(content))
    return target


def test_every_setting_of_sentence_transformers_is_listed():
    assert {kind: set(settings) for kind, settings in OF_SENTENCES.items()} == SENTENCE_SETTINGS


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, settings in OF_SENTENCES.items() for name in (*settings, "own")]
)
def test_a_setting_of_sentence_transformers_is_read_or_refused_or_named(sentence_folder, tmp_path, kind, name):
    value, outcome = OF_SENTENCES[kind].get(name, (3, "own: not applied by the server"))
    folder = changed(sentence_folder, tmp_path / "model", kind, **{name: value})
    if outcome == REFUSED:
        with pytest.raises(SourceError, match=f"{FILES[kind]}: "):
            from_folder(folder, FolderOptions())
        return
    before = from_folder(sentence_folder, FolderOptions())[1]
    notes = [note for note in from_folder(folder, FolderOptions())[1] if note not in before]
    assert notes == [] if outcome == READ else outcome in notes[0], notes
    assert len(notes) <= 1


def test_files_of_sentence_transformers_are_named_of_a_model_that_makes_no_vectors(tmp_path):
    folder = tiny.write_model(tmp_path, "bert", "ForSequenceClassification")
    tiny.write_tokenizer(folder)
    (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "x.Transformer"}]))
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    notes = from_folder(folder, FolderOptions())[1]
    assert "modules.json, sentence_bert_config.json: read of embedders alone, so nothing in them is applied" in notes


def test_what_a_setting_of_sentence_transformers_says_is_what_is_done(sentence_folder, tmp_path):
    folder = changed(sentence_folder, tmp_path / "dot", "sentence transformer", similarity_fn_name="dot")
    assert any("similarity_fn_name dot" in note for note in from_folder(folder, FolderOptions())[1])
    folder = changed(sentence_folder, tmp_path / "own", "pooling", pooling_mode_own=True)
    with pytest.raises(SourceError, match="pooling_mode_own is none of"):
        from_folder(folder, FolderOptions())
    folder = changed(sentence_folder, tmp_path / "older", "transformer", max_seq_length=20)
    (folder / FILES["transformer"]).rename(folder / "sentence_roberta_config.json")
    assert from_folder(folder, FolderOptions())[0].limits.max_input_tokens == 20
