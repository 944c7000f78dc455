"""Files of GGUF: the numbers of their weights, what is kept of them, their tokenizer, and what is refused."""

import json
import math

import numpy as np
import pytest
import tiny_quantized
from transformers import AutoTokenizer

from headway_export.errors import SourceError
from headway_export.huggingface import FolderOptions, from_folder

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
