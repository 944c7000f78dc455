"""Files of GGUF: the numbers of their weights, what is kept of them, their tokenizer, and what is refused."""

import json
import math

import numpy as np
import pytest
import tiny_quantized
import torch
from transformers import AutoTokenizer

from headway_export.errors import SourceError
from headway_export.huggingface import FolderOptions, from_folder
from headway_server.bundles import Precision

pytest.importorskip("gguf", reason="needs the extra gguf of headway-export")
import tiny_gguf


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_quantized.write_llama(tmp_path_factory.mktemp("folders") / "Tiny-Llama", hidden_size=256)


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_with_its_tokenizer_and_template(llama, kind, tmp_path):
    expected = tiny_gguf.write_gguf(llama, tmp_path / f"Tiny-{kind}.gguf", kind)
    path = tmp_path if kind == "F16" else tmp_path / f"Tiny-{kind}.gguf"
    source, notes = from_folder(path, FolderOptions(scratch=tmp_path / "scratch"))
    found = dict(source.module.model.named_parameters())
    assert set(found) == set(expected)
    for name, parameter in found.items():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=1e-6, atol=1e-9, err_msg=name)
    assert source.name == f"tiny-{kind.lower()}"
    assert source.architecture.configuration["quantized"] == f"gguf, {kind}"
    assert len(source.kept) == (9 if kind == "Q4_0" else 0)
    assert "weights came quantized" in notes[0]
    text = "the anteater saw it"
    assert source.tokenizer.encode(text).ids == AutoTokenizer.from_pretrained(llama)(text)["input_ids"]
    assert (source.special_tokens.bos, source.special_tokens.eos) == (1, 2)
    assert "message.content" in source.chat_template


def llama_3_factors(width, theta=1e4, factor=8.0):
    """Meta's scaling of frequencies, one after another."""
    found = []
    for place in range(0, width, 2):
        wave = 2 * math.pi * theta ** (place / width)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_scaled_positions_are_those_of_llama_3_or_refused(llama, tmp_path):
    file = tmp_path / "Tiny.gguf"
    tiny_gguf.write_gguf(llama, file, "F32", rope_freqs=llama_3_factors(64))
    source, _ = from_folder(file, FolderOptions(scratch=tmp_path))
    rope = source.module.model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("llama3", 8.0)
    refused = {
        "factors that are not those of Llama 3": {"rope_freqs": np.linspace(1, 8, 32, dtype=np.float32)},
        "its rotary positions are scaled (yarn)": {"rope.scaling.type": "yarn"},
        "its rotary positions are scaled (rope_factors_long.weight)": {"rope_factors_long": np.ones(32, np.float32)},
    }
    for message, values in refused.items():
        tiny_gguf.write_gguf(llama, file, "F32", **values)
        with pytest.raises(SourceError, match="scaled") as raised:
            from_folder(file, FolderOptions(scratch=tmp_path))
        assert message in str(raised.value)


def test_other_files_are_refused(llama, tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"nothing")
    with pytest.raises(SourceError, match=r"a\.gguf: cannot be read as GGUF"):
        from_folder(tmp_path, FolderOptions())
    (tmp_path / "b.gguf").write_bytes(b"nothing")
    with pytest.raises(SourceError, match=r"has 2 files of GGUF \(a\.gguf is the first\); give one of them"):
        from_folder(tmp_path, FolderOptions())
    file = tmp_path / "c.gguf"
    monkeypatch.setattr(tiny_gguf.gguf, "GGUFWriter", lambda file, _: real(file, "plamo"))
    real = tiny_gguf.gguf.gguf_writer.GGUFWriter
    tiny_gguf.write_gguf(llama, file, "F32")
    with pytest.raises(SourceError, match="GGUF model with architecture plamo is not supported"):
        from_folder(file, FolderOptions(scratch=tmp_path))
    assert json.loads((llama / "config.json").read_text())["model_type"] == "llama"


_THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}
FAMILIES = {
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": 16}),
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": 128}),
    "gemma2": (
        "Gemma2",
        {"query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 2, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3",
        {
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 6,
            "rope_parameters": {name: {"rope_type": "default", "rope_theta": rope} for name, rope in _THETAS.items()},
        },
    ),
    "phi3": ("Phi3", {"head_dim": 16, "sliding_window": 8}),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_other_families_compute_what_they_were_made_of(architecture, tmp_path):
    prefix, values = FAMILIES[architecture]
    model = tiny_gguf.write_family(tmp_path / "in" / "Tiny.gguf", prefix, architecture, **values)
    source, _ = from_folder(tmp_path / "in", FolderOptions(scratch=tmp_path, max_length=40))
    ids = torch.randint(4, 80, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(source.make_reference().model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_transformers_would_leave_out_is_refused(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    cases = {
        "rope.dimension_count is 32 there, and transformers reads a qwen3 of GGUF with 128": ("Qwen3", "qwen3", {}),
        "has no place for 4 of its tensors (blk.0.attn_q.bias)": (
            "Llama",
            "llama",
            {"attention_bias": True, "head_dim": 16},
        ),
        "rope.freq_base is 50000 there, and transformers reads a starcoder2 of GGUF with 10000": (
            "Starcoder2",
            "starcoder2",
            {"rope_parameters": {**rope, "rope_theta": 5e4}, "head_dim": 16},
        ),
    }
    for number, (message, (prefix, architecture, values)) in enumerate(cases.items()):
        file = tmp_path / str(number) / "Tiny.gguf"
        tiny_gguf.write_family(file, prefix, architecture, **values)
        with pytest.raises(SourceError) as raised:
            from_folder(file, FolderOptions(scratch=tmp_path))
        assert message in str(raised.value)


def test_a_file_that_memory_does_not_hold_is_refused_before_its_weights_are_read(llama, tmp_path, monkeypatch):
    file = tmp_path / "Tiny.gguf"
    numbers = tiny_gguf.write_gguf(llama, file, "Q4_0")
    count = sum(array.size for array in numbers.values())
    monkeypatch.setattr("headway_export.space.available_bytes", lambda _: 4 * count - 1)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(SourceError, match=f"its {count:,} weights take .* an export needs about 1 times that"):
        from_folder(file, FolderOptions(scratch=tmp_path, precisions=(Precision.INT4,)))
