"""The table of refused families in docs/huggingface.md: each is tried with a tiny configuration."""

import json
import re
from pathlib import Path

import pytest
import tiny_huggingface as tiny
import transformers
from typer.testing import CliRunner

from headway_export.cli import app

DOCUMENT = Path(__file__).parents[2] / "docs" / "huggingface.md"
SIZES = {"vocab_size": tiny.WORDS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
_ROTARY = {"n_layer": 1, "n_head": 4, "n_embd": 32, "rotary_dim": 4}
_WRITES = "ForConditionalGeneration"
FAMILIES = {
    "DeepSeek-V3": ("DeepseekV3", {}),
    "DBRX": ("Dbrx", {}),
    "Llama 4": ("Llama4Text", {}),
    "MiniMax": ("MiniMax", {"num_hidden_layers": 2}),
    "Qwen3-Next": ("Qwen3Next", {}),
    "Switch": ("SwitchTransformers", {}, _WRITES),
    "NLLB-MoE": ("NllbMoe", {}, _WRITES),
    "Mamba": ("Mamba", {}),
    "Mamba 2": ("Mamba2", {"num_heads": 4, "head_dim": 16}),
    "Falcon-Mamba": ("FalconMamba", {}),
    "Jamba": ("Jamba", {"num_experts": 1}),
    "RWKV": ("Rwkv", {}),
    "xLSTM": ("xLSTM", {}),
    "RecurrentGemma": ("RecurrentGemma", {}),
    "Falcon-H1": ("FalconH1", {}),
    "Qwen3.5": ("Qwen3_5Text", {}),
    "Llama with dynamic scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "Phi-3 with longrope": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 24,
            }
        },
    ),
    "LLaVA": ("Llava", None, _WRITES),
    "Gemma 3 with images": ("Gemma3", None, _WRITES),
    "Qwen2.5-VL": ("Qwen2_5_VL", None, _WRITES),
    "PaliGemma": ("PaliGemma", None, _WRITES),
    "GPT-J": ("GPTJ", _ROTARY),
    "GPT-Neo": ("GPTNeo", {"attention_types": [[["global"], 1]], "num_layers": 1, "num_heads": 4}),
    "Falcon": ("Falcon", {}),
    "BLOOM": ("Bloom", {"n_layer": 1, "n_head": 4}),
    "CodeGen": ("CodeGen", _ROTARY),
    "MPT": ("Mpt", {"n_layers": 1, "n_heads": 4, "d_model": 32}),
    "XGLM": ("XGLM", {"num_layers": 1, "attention_heads": 4, "d_model": 32, "ffn_dim": 48}),
    "GPT": ("OpenAIGPT", {"n_layer": 1, "n_head": 4, "n_embd": 32}, "LMHeadModel"),
    "LFM2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_key_value_heads": 2},
    ),
}
"""Prefix of the classes, what its configuration has beside `SIZES` (None: only its own), and the head's name."""
_NEED_WEIGHTS = ("does not attend through the interface", "layers attend through the interface")


def rows():
    """Returns the family and the words of each refusal that the document promises."""
    section = DOCUMENT.read_text().partition("### Families that are refused")[2]
    found = re.findall(r"^\| ([^|]+) \| `([^`]+)` \|", section, re.MULTILINE)
    return [(family.strip(), words) for families, words in found for family in families.split(",")]


def write_family(folder, words, prefix, values, head="ForCausalLM"):
    sizes = {} if values is None else {**SIZES, "intermediate_size": 48, **values}
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    config.architectures = [prefix + head]
    config.save_pretrained(folder)
    if words in _NEED_WEIGHTS:
        getattr(transformers, prefix + head)(config).save_pretrained(folder)
        tiny.write_tokenizer(folder)


def test_the_document_and_the_tests_have_the_same_families():
    assert {family for family, _ in rows()} == FAMILIES.keys()


@pytest.mark.parametrize(("family", "words"), rows(), ids=[family for family, _ in rows()])
def test_a_family_of_the_table_is_refused_with_its_sentence(tmp_path, family, words):
    write_family(tmp_path / "model", words, *FAMILIES[family])
    result = CliRunner().invoke(app, ["hf", str(tmp_path / "model"), "--store", str(tmp_path / "store")])
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1, result.output
    assert not (tmp_path / "store").exists()


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
