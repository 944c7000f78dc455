"""Models of `transformers` that write about images, exported by one command and served, against `generate`."""

import io

import numpy as np
import pytest
import tiny_captioners as tiny
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

from headway_client import Client
from headway_export.cli import app

from .conftest import serve

FAMILIES = ("vit-gpt2", tiny.BLIP)
NEW_TOKENS = 12


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (40 + seed, 60, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


PICTURES = [picture(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("captioners")
    return {family: tiny.write_captioner(root / family, family) for family in (*FAMILIES, tiny.DONUT)}


@pytest.fixture(scope="module")
def client(folders, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    for folder in folders.values():
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store)])
        assert result.exit_code == 0, result.output
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


@pytest.mark.parametrize("family", FAMILIES)
def test_captions_are_those_of_generate(folders, client, family):
    model = tiny.load(folders[family])
    processor = transformers.AutoImageProcessor.from_pretrained(folders[family], backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[family])
    captions = client.caption_image(PICTURES, model=family, max_new_tokens=NEW_TOKENS)
    written = []
    for data, caption in zip(PICTURES, captions, strict=True):
        pixels = processor(Image.open(io.BytesIO(data)), return_tensors="pt").pixel_values
        with torch.inference_mode():
            [ids] = model.generate(pixel_values=pixels, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1)
        assert caption.text == tokenizer.decode(ids, skip_special_tokens=True)
        written.append(caption.text)
    assert len(set(written)) > 1  # the images are read


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_token_is_no_patch(client, family):
    [caption] = client.caption_image(PICTURES[0], model=family, max_new_tokens=NEW_TOKENS, include_attention=True)
    assert (caption.patch_row_count, caption.patch_column_count) == (4, 4)
    for token in caption.tokens:
        assert len(token.patch_attention) == 16
        assert 0 < sum(token.patch_attention) < 1


def test_a_page_is_read_by_the_prompt_of_its_task(folders, client):
    """That of Donut's documentation: the task's token, and the question between tokens that answers have too."""
    model = tiny.load(folders[tiny.DONUT])
    processor = transformers.AutoImageProcessor.from_pretrained(folders[tiny.DONUT], backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[tiny.DONUT])
    asked = "<s_question>who?</s_question><s_answer>"
    start = tokenizer(f"<s_ask>{asked}", add_special_tokens=False, return_tensors="pt").input_ids
    prompts = (asked, f"<s_ask>{asked}")
    expected = []
    for data in PICTURES:
        pixels = processor(Image.open(io.BytesIO(data)), return_tensors="pt").pixel_values
        with torch.inference_mode():
            [ids] = model.generate(
                pixel_values=pixels, decoder_input_ids=start, max_new_tokens=5, do_sample=False, num_beams=1
            )
        expected.append(tokenizer.decode(ids[1:]).removesuffix("</s>"))
    for prompt in prompts:
        length = start.shape[1] - 1 + 5
        written = client.caption_image(PICTURES, model=tiny.DONUT, prefixes=prompt, max_new_tokens=length)
        assert [one.text for one in written] == expected
    assert all(text.startswith("<s_question>") for text in expected)
    assert len(set(expected)) > 1  # the images are read
    [caption] = client.caption_image(PICTURES[0], model=tiny.DONUT, max_new_tokens=8, include_attention=True)
    assert (caption.patch_row_count, caption.patch_column_count) == (8, 6)
