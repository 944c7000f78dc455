"""Models of `transformers` that write about images: logits, alignment and what stands before the patches."""

import numpy as np
import pytest
import tiny_captioners as tiny
import torch
import transformers
from PIL import Image

from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.huggingface import FolderOptions, from_folder, images
from headway_export.reference import translation_logits
from headway_server.bundles import ImagePreprocessing, Precision
from headway_server.preprocessing import ImagePreprocessor

LEADING = {"trocr-small": 2}


@pytest.mark.parametrize("family", [*tiny.FAMILIES, tiny.BLIP, tiny.DONUT])
def test_a_captioner_is_read(tmp_path, family):
    folder = tiny.write_captioner(tmp_path / family, family)
    source, _ = from_folder(folder, FolderOptions())
    model = tiny.load(folder)
    rng = np.random.default_rng(3)
    size, grid, num_leading = (tiny.SIDE, tiny.SIDE), (4, 4), LEADING.get(family, 1)
    if family == tiny.DONUT:
        size, grid, num_leading = tiny.PAGE, (8, 6), 0
    pixels = rng.normal(size=(3, *size)).astype(np.float32)
    target = rng.integers(3, 60, 12)
    name = "input_ids" if family == tiny.BLIP else "decoder_input_ids"
    with torch.inference_mode():
        given = {"pixel_values": torch.from_numpy(pixels)[None], name: torch.from_numpy(target)[None]}
        expected = model(**given).logits[0].numpy()
    found = translation_logits(source.module, pixels, target)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert source.module.grid == grid
    assert source.module.num_leading_tokens == num_leading
    reference = source.make_reference()
    logits, weights = reference.target_logits(
        torch.from_numpy(pixels)[None], torch.from_numpy(target)[None], torch.tensor([0, 5, 11])
    )
    np.testing.assert_allclose(logits[0].detach().numpy(), expected[[0, 5, 11]], rtol=1e-4, atol=1e-4)
    read = torch.from_numpy(pixels)[None]
    again, _ = reference.target_logits(
        read, torch.from_numpy(target)[None], torch.tensor([0, 5, 11]), reference.encode_source(read)
    )
    torch.testing.assert_close(again, logits, rtol=0, atol=0)
    assert weights.shape[-2:] == (12, num_leading + grid[0] * grid[1])


def test_a_captioner_is_exported_and_states_its_tokens(tmp_path):
    """That of the narrowest encoder; others are exported where they are served."""
    folder = tiny.write_captioner(tmp_path / "trocr-small", "trocr-small")
    source, _ = from_folder(folder, FolderOptions())
    bundle = export(source, ExportOptions(store=tmp_path / "store", precisions=(Precision.FP32,)))
    patches = bundle.manifest.patches
    assert (patches.rows, patches.columns, patches.has_class_token, patches.num_registers) == (4, 4, True, 1)
    assert bundle.manifest.limits.max_input_tokens == patches.num_tokens == 18


def test_a_length_past_the_positions_is_refused(tmp_path):
    folder = tiny.write_captioner(tmp_path / "model", "beit-roberta")
    with pytest.raises(SourceError, match=f"--max-length 25: the model writes {tiny.LENGTH} tokens"):
        from_folder(folder, FolderOptions(max_length=25))


def test_the_task_of_a_model_of_donut_is_the_token_that_nothing_closes(tmp_path):
    folder = tiny.write_captioner(tmp_path / "donut", tiny.DONUT)
    source, _ = from_folder(folder, FolderOptions())
    assert source.tokenizer.id_to_token(source.special_tokens.bos) == "<s_ask>"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s_other>"]}, replace_extra_special_tokens=False)
    model = tiny.load(folder)
    model.decoder.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(SourceError, match="does not say which task it was trained for"):
        from_folder(folder, FolderOptions())


@pytest.mark.parametrize("size", [(64, 48), (1, 9), (33, 150), (250, 40), (48, 64), (47, 63), (61, 59)])
def test_a_page_is_centred_as_the_processor_of_donut_does(size):
    processor = transformers.DonutImageProcessorPil(size={"height": tiny.PAGE[0], "width": tiny.PAGE[1]})
    settings = ImagePreprocessing(
        height=tiny.PAGE[0], width=tiny.PAGE[1], resize="inside", **images.normalization(processor)
    )
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    expected = processor(Image.fromarray(pixels), return_tensors="np")["pixel_values"][0]
    prepared = ImagePreprocessor(settings, images.LIMITS).prepare_decoded(Image.fromarray(pixels), "image")
    np.testing.assert_allclose(prepared.pixel_values, expected, rtol=0, atol=1e-5)
