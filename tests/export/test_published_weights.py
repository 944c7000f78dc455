"""Folders whose weights are quantized, adapters, and pickles: what is read of them, kept of them, or refused."""

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import peft
import pytest
import tiny_huggingface as tiny
import tiny_quantized
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from headway_export import agreement, exporter, spool
from headway_export.cli import app
from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.huggingface import FolderOptions, from_folder, kinds, plain
from headway_export.huggingface.adapters import Adapter, widened
from headway_export.huggingface.published import plain_weights, stored_tensors
from headway_export.space import bytes_text
from headway_server.bundles import Precision, open_bundle
from headway_training import folders
from headway_training.errors import CheckpointError


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_quantized.write_llama(tmp_path_factory.mktemp("folders") / "Tiny-Llama")


@pytest.fixture
def folder(llama, tmp_path):
    """A copy of a small model, whose weights are floats."""
    copy = tmp_path / llama.name
    copy.mkdir()
    for file in llama.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def refusal(folder, *flags):
    result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(folder.parent / "store"), *flags])
    assert result.exit_code == 2, result.output
    assert len(result.output.strip().splitlines()) == 1, result.output
    return result.output.strip()


@pytest.mark.parametrize("layout", tiny_quantized.LAYOUTS)
def test_weights_are_the_numbers_that_a_layout_stands_for(folder, layout):
    expected = tiny_quantized.quantize(folder, layout)
    found = plain_weights(stored_tensors([folder / "model.safetensors"]), tiny_quantized.LAYOUTS[layout][2])
    assert set(found) == set(expected)
    for name, read in found.items():
        np.testing.assert_allclose(widened(read()).numpy(), expected[name], rtol=1e-6, atol=0, err_msg=name)


def test_experts_of_mxfp4_are_the_numbers_that_their_codes_stand_for():
    rng = np.random.default_rng(2)
    codes, powers = rng.integers(0, 16, (3, 4, 2, 32)), rng.integers(120, 130, (3, 4, 2))
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = np.vectorize(lambda code: values[code % 8] * (-1) ** (code // 8))(codes) * 2.0 ** (
        powers[..., None] - 127
    )
    pairs = codes[..., ::2] + 16 * codes[..., 1::2]
    stored = {
        "experts.down_proj_blocks": torch.from_numpy(pairs.astype(np.uint8)),
        "experts.down_proj_scales": torch.from_numpy(powers.astype(np.uint8)),
        "experts.down_proj_bias": torch.ones(3, 4),
    }
    read = {name: lambda tensor=tensor: tensor for name, tensor in stored.items()}
    found = plain_weights(read, {"quant_method": "mxfp4"})
    assert set(found) == {"experts.down_proj", "experts.down_proj_bias"}
    np.testing.assert_array_equal(found["experts.down_proj"](), numbers.reshape(3, 4, 64).swapaxes(1, 2))


def test_weights_that_came_in_4_bits_are_kept_and_proved(folder):
    expected = tiny_quantized.quantize(folder, "gptq, act-order")
    store = folder.parent / "store"
    result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store)])
    assert result.exit_code == 0, result.output
    assert "note: weights came quantized (gptq, 4 bits, groups of 32): int4 keeps 7 of them" in result.output
    assert [path.name for path in store.iterdir()] == ["tiny-llama"], "nothing else is left"
    manifest = open_bundle(store / "tiny-llama" / "1").manifest
    assert list(manifest.variants) == ["int4"]
    assert manifest.architecture.configuration["quantized"] == "gptq, 4 bits, groups of 32"
    assert "quantized gptq, 4 bits" in (store / "tiny-llama" / "1" / "README.md").read_text()
    model = ir.load(store / "tiny-llama" / "1" / "int4" / "decoder.onnx")
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    weights = [numbers_of(node) for node in products]
    for name, numbers in expected.items():
        if name.endswith("_proj.weight"):
            assert any(np.array_equal(numbers, weight) for weight in weights), name
    assert len(products) == 7


def numbers_of(node):
    """Reads a `MatMulNBits` and the order of its activation: (N, K)."""
    codes, scales, zeros = (value.const_value.numpy() for value in node.inputs[1:4])
    codes, zeros = (np.stack([part & 15, part >> 4], axis=-1).reshape(*part.shape[:-1], -1) for part in (codes, zeros))
    numbers = (codes.astype(np.float32) - zeros[:, : scales.shape[1], None]) * scales[..., None]
    gather = node.inputs[0].producer()
    order = gather.inputs[1].const_value.numpy()
    weight = np.zeros((len(codes), len(order)), np.float32)
    weight[:, order] = numbers.reshape(len(codes), -1)
    return weight


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "aqlm"}, "quantized by aqlm, and those of gptq, awq, compressed-tensors, fp8, mxfp4, bitsan"),
        ({"quant_method": "gptq", "bits": 3}, "quantized by gptq with 3 bits; 4 and 8 are read"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "with the layout gemv; gemm is read"),
        (tiny_quantized.compressed("nvfp4-pack-quantized"), "with the format nvfp4-pack-quantized"),
        (tiny_quantized.compressed("pack-quantized", 2), "with 2 bits; 4 and 8 are read"),
        (
            {**tiny_quantized.compressed("pack-quantized"), "transform_config": {"config_groups": {"R3": {}}}},
            "rotations",
        ),
        ({"quant_method": "fp8", "fmt": "e8m0"}, "floats of the kind e8m0"),
    ],
)
def test_what_is_not_read_is_refused_before_anything_is_loaded(folder, values, message, monkeypatch):
    tiny_quantized.change(folder, quantization_config=values)
    monkeypatch.setattr(kinds, "check_weights", lambda *_, **__: pytest.fail("weights were looked at"))
    assert message in refusal(folder)


@pytest.mark.parametrize(
    ("layout", "end", "stored"),
    [
        ("fp8", ".weight_scale_inv", "float8_e4m3fn"),
        ("int-quantized", ".weight_scale", "int8"),
        ("bitsandbytes, 8 bits", ".SCB", "int8"),
    ],
)
def test_a_weight_that_has_lost_its_scale_is_refused(folder, layout, end, stored):
    tiny_quantized.quantize(folder, layout)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.0.self_attn.q_proj{end}"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"model.layers.0.self_attn.q_proj.weight is stored as {stored}, and has no scale there" in refusal(folder)


@pytest.mark.parametrize("end", [".scales", ".qzeros"])
@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_a_weight_that_has_lost_a_part_is_refused_by_its_name(folder, layout, end):
    tiny_quantized.quantize(folder, layout)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.0.self_attn.q_proj{end}"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"lack model.layers.0.self_attn.q_proj{end}, a part of a quantized weight" in refusal(folder)


def test_bytes_of_4_bits_may_be_stored_as_other_numbers(folder):
    """`bnb_4bit_quant_storage`, which training across machines needs."""
    expected = tiny_quantized.quantize(folder, "nf4")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    stored[name] = stored[name].reshape(-1).view(torch.bfloat16)[:, None]
    read = {key: lambda tensor=tensor: tensor for key, tensor in stored.items()}
    found = plain_weights(read, {"quant_method": "bitsandbytes"})
    np.testing.assert_allclose(widened(found[name]()), expected[name], rtol=1e-6)


def test_a_full_disk_is_told_of_as_such(folder, monkeypatch):
    tiny_quantized.quantize(folder, "gptq")

    def fail(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(spool, "save_file", fail)
    message = refusal(folder)
    assert "weights in fp32 cannot be written there for the time of the export" in message
    assert "No space left on device" in message
    assert not any((folder.parent / "store").glob(".*"))


def test_training_refuses_quantized_weights_in_a_sentence(folder):
    tiny_quantized.quantize(folder, "gptq")
    config = folders.parse_configuration(folder, folders.read_configuration(folder))
    with pytest.raises(CheckpointError, match=r"its weights are quantized \(gptq\), and only headway-export reads"):
        folders.load_model(folder, config, transformers.AutoModelForCausalLM, "generation")


ADAPTERS = {
    "lora": ("llama", {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 24}),
    "patterns": (
        "llama",
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"layers.0.mlp.up_proj": 3},
        },
    ),
    "dora": ("llama", {"target_modules": ["k_proj", "up_proj"], "use_dora": True}),
    "modules": ("llama", {"target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "dora, embedding": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "fan in, fan out": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "bias": "lora_only"}),
    "dora, fan in, fan out": ("gpt2", {"target_modules": ["c_proj"], "fan_in_fan_out": True, "use_dora": True}),
}


def write_adapter(base, folder, **settings):
    """Writes an adapter of random weights, and returns the model that peft merges it into."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, **settings))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    tuned.save_pretrained(folder, save_embedding_layers="embed_tokens" in settings["target_modules"])
    return tuned.merge_and_unload()


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(a+)+", "repeats up to 2 parts"),
        (".*a.*b.*c", "repeats up to 2 parts"),
        ("x" * 501, "up to 500 characters"),
        ("(a", "which is no regular expression"),
        (r"layers\.[0-9]+\.(?:up|down)_proj", "no adapter_model.safetensors"),
    ],
)
def test_a_pattern_that_may_take_long_is_refused(tmp_path, pattern, words):
    settings = {"peft_type": "LORA", "alpha_pattern": {pattern: 3}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(SourceError, match=words):
        Adapter.read(tmp_path)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # within peft
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_is_merged_as_peft_merges_it(kind, tmp_path):
    family, settings = ADAPTERS[kind]
    base = tiny.write_model(tmp_path / "base", family)
    expected = write_adapter(base, tmp_path / "adapter", **settings).state_dict()
    before = load_file(base / "model.safetensors")
    adapter = Adapter.read(tmp_path / "adapter")
    found, changed = adapter.merged(stored_tensors([base / "model.safetensors"]))
    assert set(before) <= set(found)
    names = {name: name if name in expected else f"transformer.{name}" for name in found}
    for name, read in found.items():
        np.testing.assert_allclose(widened(read()), expected[names[name]], rtol=1e-4, atol=1e-6, err_msg=name)
    assert any(not np.array_equal(read(), before[name]) for name, read in found.items())
    assert changed == ({"vocab_size": tiny.WORDS} if kind in ("modules", "dora, embedding") else {})


TIED = {
    "embedding": {"target_modules": ["embed_tokens"]},
    "embedding, tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "whole embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "whole embedding, tied": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "projection": {"target_modules": ["lm_head"]},
    "whole projection": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("kind", TIED)
def test_an_adapter_of_one_of_two_tied_matrices_computes_what_was_trained(kind, tmp_path):
    """As peft runs it: what it merges is another model, since the other matrix changes along."""
    base = tiny_quantized.write_llama(tmp_path / "base", tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, **TIED[kind])).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    tuned.save_pretrained(tmp_path / "adapter")
    source, _ = from_folder(tmp_path / "adapter", FolderOptions(scratch=tmp_path / "scratch", max_length=32))
    ids = torch.randint(4, 80, (1, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = tuned(input_ids=ids).logits, source.make_reference().model(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_folder_of_an_adapter_is_exported_with_its_base(folder, tmp_path):
    tiny_quantized.quantize(folder, "gptq")
    named = tiny_quantized.write_llama(tmp_path / "plain")
    write_adapter(named, tmp_path / "Own-Adapter", target_modules=["q_proj"])
    source, notes = from_folder(tmp_path / "Own-Adapter", FolderOptions(base=str(folder), scratch=tmp_path))
    assert source.name == "own-adapter"
    stated = source.architecture.configuration
    assert (stated["adapter"], stated["base"]) == ("Own-Adapter", str(folder))
    assert stated["quantized"] == "gptq, 4 bits, groups of 128"
    assert f"the adapter Own-Adapter is merged into {folder}" in notes
    assert len(source.kept) == 6, "the merged weight is no longer one of 4 bits"
    source, _ = from_folder(tmp_path / "Own-Adapter", FolderOptions(scratch=tmp_path))
    assert source.architecture.configuration["base"] == str(named), "which the adapter names"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_without_its_base_or_of_another_kind_is_refused(folder, tmp_path):
    write_adapter(folder, tmp_path / "adapter", target_modules=["q_proj"])
    file = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(file.read_text())
    refused = {
        "does not say what it is an adapter of; name that with --base": {"base_model_name_or_path": None},
        "its base /nowhere is no folder here": {"base_model_name_or_path": "/nowhere"},
        "of the kind LOHA, and LORA is merged": {"peft_type": "LOHA"},
        "its adapter has lora_bias, which is not merged": {"lora_bias": True},
        "its adapter has init_lora_weights pissa_niter_4": {"init_lora_weights": "pissa_niter_4"},
    }
    for message, values in refused.items():
        file.write_text(json.dumps(settings | values))
        assert message in refusal(tmp_path / "adapter")
    file.write_text(json.dumps(settings))
    (other := tmp_path / "other").mkdir()
    tiny.write_model(other, "gpt2")
    assert "has a weight for model.layers.0.self_attn.q_proj.weight, which the base does not have" in refusal(
        tmp_path / "adapter", "--base", str(other)
    )
    assert "--base x: is for an adapter" in refusal(folder, "--base", "x")
    file.write_text(json.dumps(settings | {"base_model_name_or_path": str(tmp_path / "adapter")}))
    assert "is an adapter itself" in refusal(tmp_path / "adapter")
    file.write_text("[" * 100_000)
    assert "adapter_config.json: cannot be read" in refusal(tmp_path / "adapter")
    file.write_text(json.dumps(settings))
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    (name,) = (name for name in tensors if "lora_B" in name)
    save_file({**tensors, name: tensors[name][:1]}, weights)
    assert "changes model.layers.0.self_attn.q_proj as a matrix of (1, 128), and the base has one of (128" in refusal(
        tmp_path / "adapter"
    )
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    assert "has adapter_config.json and no adapter_model.safetensors" in refusal(tmp_path / "adapter")


@pytest.fixture
def narrow(folder, monkeypatch) -> dict[str, torch.Tensor]:
    """The weights of the folder in 16 bits, which count as large."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(plain, "_LARGE_BYTES", 1)
    return tensors


def ranges_mapped_from(part: str) -> list[tuple[int, ...]]:
    """Returns where files whose paths have a part lie in memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines if part in line]


def test_weights_of_16_bits_are_widened_on_disk_and_mapped(folder, narrow, tmp_path, monkeypatch):
    tensors = narrow
    num_bytes = 4 * sum(tensor.numel() for tensor in tensors.values())
    monkeypatch.setattr("headway_export.space.available_bytes", lambda _: num_bytes)
    monkeypatch.setattr(kinds, "working_bytes_of", lambda *_: 0)
    with pytest.raises(SourceError, match="leave fp32 out by --precision int8 or int4, with disk for twice that"):
        from_folder(folder, FolderOptions(scratch=tmp_path / "scratch"))
    source, notes = from_folder(folder, FolderOptions(scratch=tmp_path / "scratch", precisions=(Precision.INT4,)))
    found = dict(source.module.model.named_parameters())
    assert all(torch.equal(parameter, tensors[name].float()) for name, parameter in found.items())
    mapped = ranges_mapped_from(".plain-")
    for parameter in found.values():
        assert any(start <= parameter.data_ptr() < end for start, end in mapped)
    assert notes == ()
    assert "quantized" not in source.architecture.configuration


def test_an_fp32_that_only_judges_is_neither_held_nor_written(folder, narrow, tmp_path, monkeypatch):
    """Its module, its graphs and its session read the weights from the files that they were widened to."""
    source, _ = from_folder(folder, FolderOptions(scratch=tmp_path / "scratch", precisions=(Precision.INT4,)))
    held: list[str] = []
    quantize = exporter._Prover._quantize

    def look(prover, traced, *given):
        mapped = ranges_mapped_from(".plain-")
        values = [value for graph in traced.graphs for value in graph.model.graph.initializers.values()]
        arrays = {str(value.name): value.const_value.numpy() for value in values}
        addresses = {name: array.ctypes.data for name, array in arrays.items() if array.nbytes > 1024}
        addresses |= {name: one.data_ptr() for name, one in source.module.named_parameters()}
        held.extend(
            name for name, address in addresses.items() if not any(start <= address < end for start, end in mapped)
        )
        files = list((prover._folder / "fp32").iterdir())
        assert sum(file.is_symlink() for file in files) == 1
        assert sum(file.stat().st_size for file in files if file.suffix == ".data" and not file.is_symlink()) < 5_000
        return quantize(prover, traced, *given)

    monkeypatch.setattr(exporter._Prover, "_quantize", look)
    monkeypatch.setattr(agreement.Judge, "_check", lambda *_: None)  # random weights
    options = ExportOptions(store=tmp_path / "store", precisions=(Precision.INT4,), external_data_threshold_bytes=1)
    bundle = export(source, options)
    assert held == []
    assert set(bundle.manifest.variants) == {Precision.INT4}
    assert not (bundle.path / "fp32").exists()


def test_an_export_for_which_there_is_no_disk_is_refused_before_weights_are_read(folder, narrow, monkeypatch):
    count = sum(tensor.numel() for tensor in narrow.values())
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("was read"))
    monkeypatch.setattr("headway_export.huggingface.kinds.make_plain", lambda *_, **__: pytest.fail("was widened"))
    monkeypatch.setattr("headway_export.space.free_on_disk", lambda _: 1)
    for precision, bytes_of_weight in {"int4": 0.8, "int8": 1.1, "fp16": 2.0}.items():
        told = refusal(folder, "--precision", precision)
        assert f"needs about {bytes_text(int(count * (4 + bytes_of_weight)))} of disk while it is exported" in told
