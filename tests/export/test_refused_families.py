"""The table of families: the documents show it, and each that is refused is tried with a tiny configuration."""

import json
import re
from pathlib import Path

import pytest
import tiny_huggingface as tiny
import transformers
from thorough import IS_THOROUGH
from transformers.models.auto import modeling_auto
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.errors import SourceError
from headway_export.huggingface import FolderOptions, families, from_folder

DOCUMENTS = Path(__file__).parents[2] / "docs"
SIZES = {"vocab_size": tiny.WORDS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
_ROTARY = {"n_layer": 1, "n_head": 4, "n_embd": 32, "rotary_dim": 4}
_WRITES = "ForConditionalGeneration"
_CLASSIFIES = "ForSequenceClassification"
_TAGS = "ForTokenClassification"
FAMILIES = {
    "DBRX": ("Dbrx", {}),
    "Llama 4": ("Llama4Text", {}),
    "MiniMax": ("MiniMax", {"num_hidden_layers": 2}),
    "Switch": ("SwitchTransformers", {}, _WRITES),
    "NLLB-MoE": ("NllbMoe", {}, _WRITES),
    "DeepSeek V3.2": ("DeepseekV32", {}),
    "GLM-5": ("GlmMoeDsa", {}),
    "RWKV": ("Rwkv", {}),
    "xLSTM": ("xLSTM", {}),
    "RecurrentGemma": ("RecurrentGemma", {}),
    "GPT": ("OpenAIGPT", {"n_layer": 1, "n_head": 4, "n_embd": 32}, "LMHeadModel"),
    "XLNet": ("XLNet", None, "LMHeadModel"),
    "XLM": ("XLM", {}, "WithLMHeadModel"),
    "CPM-Ant": ("CpmAnt", {}),
    "BLIP-2": ("Blip2", None, _WRITES),
    "InstructBLIP": ("InstructBlip", None, _WRITES),
    "Llama 3.2 Vision": ("Mllama", None, _WRITES),
    "MusicGen Melody": ("MusicgenMelody", None, _WRITES),
    "ProphetNet": ("ProphetNet", None, _WRITES),
    "FSMT": ("FSMT", None, _WRITES),
    "Pegasus-X": ("PegasusX", {}, _WRITES),
    "SAM-HQ": ("SamHQ", None, "Model"),
    "SAM 3": ("Sam3", None, "Model"),
    "EdgeTAM": ("EdgeTam", None, "Model"),
    "LayoutLMv2": ("LayoutLMv2", None, _TAGS),
    "LayoutXLM": ("LayoutXLM", None, _TAGS),
    "LayoutLMv3": ("LayoutLMv3", None, _TAGS),
    "UDOP": ("Udop", None, _WRITES),
    "Funnel": ("Funnel", None, _CLASSIFIES),
    "Reformer": ("Reformer", None, _CLASSIFIES),
    "CANINE": ("Canine", None, _CLASSIFIES),
    "MRA": ("Mra", None, _CLASSIFIES),
    "YOSO of hashes": ("Yoso", {"use_expectation": False}, _CLASSIFIES),
    "Nyströmformer of fewer landmarks than tokens": ("Nystromformer", {"segment_means_seq_len": 512}, _CLASSIFIES),
    "X-MOD without a default language": ("Xmod", {}, _CLASSIFIES),
    "BERT as a decoder": ("Bert", {}, "LMHeadModel"),
}
"""Prefix of the classes, what its configuration has beside `SIZES` (None: only its own), and the head's name."""
ROWS = [(family, row.says) for row in families.REFUSALS for family in row.names]


def write_family(folder, prefix, values, head="ForCausalLM"):
    sizes = {} if values is None else {**SIZES, "intermediate_size": 48, **values}
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    config.architectures = [prefix + head]
    config.save_pretrained(folder)


@pytest.mark.parametrize(
    ("document", "table"),
    [
        ("huggingface.md", families.models_table),
        ("huggingface-families.md", families.refusals_table),
        ("huggingface-families.md", families.behind_table),
    ],
)
def test_a_document_has_the_table_of_families(document, table):
    assert f"\n\n{table()}" in (DOCUMENTS / document).read_text(), f"write this into docs/{document}:\n{table()}"


def test_every_family_that_is_refused_is_tried():
    assert {family for family, _ in ROWS} == FAMILIES.keys()


def test_what_optimum_exports_besides_is_of_its_list():
    behind = [name for names in families.BEHIND.values() for name in names]
    assert set(behind) <= set(families.OPTIMUM)
    assert len(set(behind)) == len(behind)
    text = (DOCUMENTS / "huggingface-families.md").read_text()
    assert families.OPTIMUM_SOURCE.rsplit(" ", 1)[1] in text
    assert f"Of the {len(families.OPTIMUM)} architectures" in text
    assert re.search(rf"these\s{len(behind)} are not read here", text)


@pytest.mark.parametrize(("family", "words"), ROWS, ids=[family for family, _ in ROWS])
def test_a_family_of_the_table_is_refused_with_its_sentence(tmp_path, family, words):
    write_family(tmp_path / "model", *FAMILIES[family])
    result = CliRunner().invoke(app, ["hf", str(tmp_path / "model"), "--store", str(tmp_path / "store")])
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1, result.output
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("head", families.OTHER_HEADS)
def test_what_no_task_does_is_said(tmp_path, head):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": [f"Own{head}"], "model_type": "bert"}))
    with pytest.raises(SourceError, match=f"Own{head} {families.OTHER_HEADS[head]}, which is no task of this command"):
        from_folder(tmp_path / "model", FolderOptions())


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model_index.json": "{}"}, "is a pipeline None, which is not exported; those that are: Stable"),
        ({"params.json": "{}"}, "but weights as their makers keep them"),
        ({"config.json": '{"architecture": "resnet18"}'}, "states no model_type, so it is of another library"),
        (
            {"config.json": '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}', "tf_model.h5": ""},
            "those of TensorFlow (tf_model.h5) are not read",
        ),
        (
            {
                "config.json": json.dumps(
                    {
                        "model_type": "speech-encoder-decoder",
                        "architectures": ["SpeechEncoderDecoderModel"],
                        "is_encoder_decoder": True,
                        "encoder": {},
                        "decoder": {},
                    }
                ),
                "preprocessor_config.json": "{}",
            },
            "SpeechEncoderDecoderModel writes texts by an encoder and a decoder of two families",
        ),
    ],
    ids=["diffusers", "makers", "another library", "tensorflow", "two families"],
)
def test_a_folder_of_another_kind_is_called_what_it_is(tmp_path, files, words):
    (tmp_path / "model").mkdir()
    for name, text in files.items():
        (tmp_path / "model" / name).write_text(text)
    result = CliRunner().invoke(app, ["hf", str(tmp_path / "model")])
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1, result.output


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    folder = tiny.write_model(tmp_path / "model", "llama")
    tiny.write_tokenizer(folder)

    def needs_package(*_, **__):
        raise ModuleNotFoundError("No module named 'timm'", name="timm.models")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", needs_package)
    with pytest.raises(SourceError, match="it needs a package that is not installed: pip install timm"):
        from_folder(folder, FolderOptions())


# Every configuration of the library, without weights

SWEPT = sorted(transformers.CONFIG_MAPPING) if IS_THOROUGH else ["hiera", "minicpm3", "musicgen", "t5", "xlnet"]
"""All take minutes, since each loads the code of a family."""
SWEPT_HEADS = ("CAUSAL_LM", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION")


@pytest.mark.parametrize("model_type", SWEPT)
def test_any_configuration_is_refused_in_a_sentence_or_asks_for_weights(tmp_path, model_type):
    try:
        config = transformers.CONFIG_MAPPING[model_type]()
    except Exception as error:  # it has no default
        pytest.skip(f"has no configuration of its own: {type(error).__name__}")
    found = (getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").get(model_type) for head in SWEPT_HEADS)
    names = {name for name in found if isinstance(name, str)}
    for name in names or {f"{type(config).__name__.removesuffix('Config')}Model"}:
        config.architectures = [name]
        config.save_pretrained(tmp_path / "model")
        result = CliRunner().invoke(app, ["hf", str(tmp_path / "model"), "--store", str(tmp_path / "store")])
        assert result.exit_code == 2, result.output
        assert len(result.output.strip().splitlines()) == 1, result.output
        assert "cannot be exported, and is not supported" not in result.output


# Files that are damaged


@pytest.fixture
def llama(tmp_path):
    """A folder that can be exported."""
    folder = tiny.write_model(tmp_path / "Tiny-Llama", "llama")
    tiny.write_tokenizer(folder, frame="<s> $A")
    return folder


def shards(folder):
    """Writes the weights of a folder in shards, and returns the names of these."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    return sorted(path.name for path in folder.glob("model-*.safetensors"))


def cut_off(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_off_shard(folder):
    file = folder / shards(folder)[-1]
    file.write_bytes(file.read_bytes()[:-1])


def empty_weights(folder):
    (folder / "model.safetensors").write_bytes(b"")


def header_of_no_end(folder):
    (folder / "model.safetensors").write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}")


def forged_header(folder):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def shard_of_another_model(folder):
    names = shards(folder)
    other = tiny.write_model(folder.parent / "other", "llama", intermediate_size=24)
    (folder / names[0]).write_bytes((other / "model.safetensors").read_bytes())


def index_of_nothing(folder):
    shards(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')


def index_that_leads_out(folder):
    names = shards(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], f"../Tiny-Llama/{names[0]}")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def configuration_that_is_no_json(folder):
    (folder / "config.json").write_text('{"model_type": "llama",')


def configuration_of_another_kind(folder):
    (folder / "config.json").write_text("[]")


def configuration_of_wrong_types(folder):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "num_hidden_layers": "two"}))


def tokenizer_that_is_no_json(folder):
    (folder / "tokenizer.json").write_text("{")


def adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")


DAMAGED = {
    cut_off: "model.safetensors: cannot be read as safetensors (it has ",
    cut_off_shard: ".safetensors: cannot be read as safetensors (it has ",
    empty_weights: "model.safetensors: cannot be read as safetensors",
    header_of_no_end: "model.safetensors: cannot be read as safetensors",
    forged_header: "is too large for this machine",
    shard_of_another_model: "weights of LlamaForCausalLM are ",
    index_of_nothing: "has no weights",
    index_that_leads_out: "which is not there",
    configuration_that_is_no_json: "config.json: cannot be read",
    configuration_of_another_kind: "config.json: is not a JSON object",
    configuration_of_wrong_types: "config.json: cannot be read",
    tokenizer_that_is_no_json: "has no tokenizer that can be read",
    adapter: "is an adapter of the kind None, and LORA is merged",
}


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda damage: damage.__name__)
def test_a_damaged_folder_is_refused_with_what_was_found(llama, damage):
    damage(llama)
    store = llama.parent / "store"
    result = CliRunner().invoke(app, ["hf", str(llama), "--store", str(store)])
    assert result.exit_code == 2, result.output
    assert DAMAGED[damage] in result.output
    assert len(result.output.strip().splitlines()) == 1, result.output
    assert not store.exists()
