"""Models of `transformers` that write about images, exported by one command and served, against `generate`."""

import base64
import io

import httpx2
import numpy as np
import pytest
import tiny_captioners as tiny
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

from headway_client import Client, InvalidArgumentError
from headway_export.cli import app

from .conftest import serve_saying

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
    written = {family: tiny.write_captioner(root / family, family) for family in (*FAMILIES, tiny.DONUT)}
    return {**written, tiny.FLORENCE: tiny.write_florence(root / tiny.FLORENCE)}


@pytest.fixture(scope="module")
def addresses(folders, tmp_path_factory):
    """Of gRPC and of HTTP."""
    store = tmp_path_factory.mktemp("store")
    for folder in folders.values():
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store), "--precision", "fp32"])
        assert result.exit_code == 0, result.output
    flags = ("--precision", "fp32", "--http-port", "0")
    for line in serve_saying(store, tmp_path_factory.mktemp("log") / "server.log", *flags):
        yield line.split()[0], line.split("http=")[1].strip()


@pytest.fixture(scope="module")
def client(addresses):
    with Client(addresses[0]) as connected:
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


QUESTIONS = (
    "",
    "<OD>",
    "<OPEN_VOCABULARY_DETECTION> a green car",
    "<REGION_TO_OCR><loc_1><loc_2><loc_7><loc_7>",
    "so it is",
)


@pytest.fixture(scope="module")
def asked(folders):
    """Texts of `transformers` about the first picture, by question, greedy and with three beams."""
    model = tiny.load(folders[tiny.FLORENCE])
    processor = tiny.open_florence(folders[tiny.FLORENCE])

    def answer(data, question, num_beams):
        inputs = processor(text=question or "<CAPTION>", images=Image.open(io.BytesIO(data)), return_tensors="pt")
        given = {name: inputs[name] for name in ("input_ids", "pixel_values")}
        with torch.inference_mode():
            [ids] = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=num_beams)
        text = processor.tokenizer.decode(ids)
        for token in ("<s>", "</s>", "<pad>", "<image>"):
            text = text.replace(token, "")
        return text

    return {
        num_beams: [[answer(data, question, num_beams) for question in QUESTIONS] for data in PICTURES]
        for num_beams in (1, 3)
    }


@pytest.mark.parametrize("num_beams", [1, 3])
def test_an_image_is_written_about_as_asked(client, asked, num_beams):
    """All questions are read in one batch, whatever their lengths."""
    for data, expected in zip(PICTURES, asked[num_beams], strict=True):
        given = {"beam_size": num_beams, "max_new_tokens": NEW_TOKENS - 1}  # theirs counts the token that is forced
        written = client.caption_image([data] * len(QUESTIONS), model=tiny.FLORENCE, questions=list(QUESTIONS), **given)
        assert [one.text for one in written] == expected
    texts = {text for one in asked[num_beams] for text in one}
    assert len(texts) > len(QUESTIONS)  # image and question are read


def test_a_question_is_asked_at_every_door(client, addresses, asked):
    expected = asked[1][0][1]
    asking = {"model": tiny.FLORENCE, "max_new_tokens": NEW_TOKENS - 1}
    with client.stream_caption_image(PICTURES[0], question="<OD>", **asking) as stream:
        assert "".join(delta.text for delta in stream) == expected
    [prepared] = client.prepare_image(PICTURES[0])
    [by_id] = client.caption_image(image_ids=[prepared.image_id], questions="<OD>", **asking)
    assert by_id.text == expected
    data = base64.b64encode(PICTURES[0]).decode()
    body = {
        "model": tiny.FLORENCE,
        "images": [data],
        "questions": ["<OD>"],
        "parameters": {"maxNewTokens": NEW_TOKENS - 1},
    }
    answer = httpx2.post(f"http://{addresses[1]}/headway.v1.CaptionService/CaptionImage", json=body).json()
    assert answer["results"][0]["text"] == expected
    tensors = [
        {"name": "image", "datatype": "BYTES", "shape": [1], "data": [data], "parameters": {"content_type": "base64"}},
        {"name": "question", "datatype": "BYTES", "shape": [1], "data": ["<OD>"]},
    ]
    body = {"inputs": tensors, "parameters": {"max_new_tokens": NEW_TOKENS - 1}}
    answer = httpx2.post(f"http://{addresses[1]}/v2/models/{tiny.FLORENCE}/infer", json=body).json()
    assert next(one for one in answer["outputs"] if one["name"] == "caption")["data"] == [expected]


def test_tokens_of_places_are_text(client):
    [caption] = client.caption_image(PICTURES[0], model=tiny.FLORENCE, questions="<OD>", prefixes="at<loc_3>")
    assert caption.text.startswith("at<loc_3>")


def test_what_is_no_question_is_refused_by_name(client):
    def ask(question, model=tiny.FLORENCE):
        client.caption_image(PICTURES[0], model=model, questions=question, max_new_tokens=2)

    with pytest.raises(InvalidArgumentError, match=r"questions\[0\]: is set, and vit-gpt2 reads no text with an image"):
        ask("<OD>", "vit-gpt2")
    with pytest.raises(InvalidArgumentError, match="has more than the name of a task that takes nothing"):
        ask("<OD> cats")
    for token in ("</s>", "<image>"):
        with pytest.raises(InvalidArgumentError, match=f"has '{token}', a special token of florence2"):
            ask(f"so {token}")
    with pytest.raises(InvalidArgumentError, match=r"questions\[0\]: has \d+ tokens"):
        ask("the rain in spain " * 30)
    with pytest.raises(InvalidArgumentError, match="questions: has 2 elements"):
        ask(["<OD>", "<OD>"])


def test_attention_is_to_the_image_alone(client):
    [caption] = client.caption_image(
        PICTURES[0], model=tiny.FLORENCE, questions="<OD>", max_new_tokens=4, include_attention=True
    )
    assert (caption.patch_row_count, caption.patch_column_count) == (4, 4)
    for token in caption.tokens:
        assert len(token.patch_attention) == 16
        assert 0 < sum(token.patch_attention) < 1
