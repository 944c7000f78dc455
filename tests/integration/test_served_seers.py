"""Folders of decoders that read images, exported by one command and served, against `transformers` itself."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import tiny_huggingface as tiny
import tiny_seers
from tiny_seers import draw_picture
from typer.testing import CliRunner

from headway_client import ChatMessage, Client, InvalidArgumentError, Picture, Role
from headway_export.cli import app

from .conftest import serve_saying

SERVED = ("llava", "llava_onevision", "smolvlm", "internvl", "qwen2_5_vl", "gemma3", "gemma4", "paligemma2")
NUM_TOKENS = 16
TEXT = "the rain"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("seers")
    return {family: tiny_seers.write_seer(root / family, family) for family in SERVED}


@pytest.fixture(scope="module")
def addresses(folders, tmp_path_factory):
    """Of gRPC and of HTTP."""
    store = tmp_path_factory.mktemp("store")
    blind = tiny.write_model(tmp_path_factory.mktemp("blind") / "blind", "gpt2")
    tiny.write_tokenizer(blind, frame="$A", chat_template="{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}")
    for folder in (*folders.values(), blind):
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store), "--precision", "fp32"])
        assert result.exit_code == 0, f"{folder.name}: {result.output}"
    flags = ("--precision", "fp32", "--http-port", "0")
    for line in serve_saying(store, tmp_path_factory.mktemp("log") / "server.log", *flags):
        yield line.split()[0], line.split("http=")[1].strip()


@pytest.fixture(scope="module")
def client(addresses):
    with Client(addresses[0]) as connected:
        yield connected


def encode(picture, kind="PNG", **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def ask(client, model, content, **options):
    parts = [part if isinstance(part, str | Picture) else Picture(encode(part)) for part in content]
    turn = ChatMessage(Role.USER, parts)
    [answer] = client.chat([turn], model=model, max_new_tokens=NUM_TOKENS, log_probabilities=0, **options)
    return answer


def tokens_of(answer):
    return [token.token_id for token in answer.tokens]


CONTENTS = (
    [draw_picture(64, 48), TEXT],
    ["so ", draw_picture(33, 150, 1), " and", draw_picture(90, 80, 2), "then"],
    [draw_picture(16, 16, 3)],
    [draw_picture(120, 40, 4), draw_picture(120, 40, 4), "a"],
)


@pytest.mark.parametrize("family", SERVED)
def test_answers_are_those_of_transformers(folders, client, family):
    for content in CONTENTS:
        length, expected = tiny_seers.own_answer(folders[family], family, content, NUM_TOKENS)
        answer = ask(client, family, content)
        assert (answer.prompt_token_count, tokens_of(answer)) == (length, expected)


LONG = tuple(
    ["abcdefgh " * 13 + "a " * number, draw_picture(20, 30, number), "the rain in spain " * 3] for number in (2, 4, 6)
)
"""With an image before, across and behind the end of a chunk."""


@pytest.mark.parametrize(("family", "num_cached"), [("gemma3", 128), ("paligemma2", 0)])
def test_tokens_that_attend_to_later_ones_are_exact_beside_other_calls_and_from_the_cache(
    folders, client, family, num_cached
):
    """The cache has what comes before an image, or before all of a prompt that is read in one piece."""
    contents = [*CONTENTS[1:3], *LONG]
    expected = [tiny_seers.own_answer(folders[family], family, content, NUM_TOKENS)[1] for content in contents]
    with ThreadPoolExecutor(2 * len(contents)) as pool:
        together = list(pool.map(lambda content: ask(client, family, content), contents * 2))
    assert [tokens_of(answer) for answer in together] == expected * 2
    again = [ask(client, family, content) for content in LONG]
    assert [tokens_of(answer) for answer in again] == expected[2:]
    assert max(answer.cached_prompt_token_count for answer in again) == num_cached


def test_what_a_prompt_of_one_piece_is_not_read_with_is_refused_by_name(client):
    picture = draw_picture(20, 30)
    turns = [ChatMessage(Role.USER, [Picture(encode(picture))]), ChatMessage(Role.ASSISTANT, ["so"])]
    with pytest.raises(InvalidArgumentError, match="reads one turn of a user, and no conversation"):
        client.chat([*turns, turns[0]], model="paligemma2")
    with pytest.raises(InvalidArgumentError, match="has no log-probabilities: each token of a prompt"):
        ask(client, "paligemma2", [picture, "a"], prompt_log_probabilities=True)


def test_an_upright_jpeg_on_its_side_is_one_image(client):
    """Its header announces another grid of tiles than its pixels have once they are upright."""
    picture = draw_picture(150, 40)
    exif = picture.getexif()
    exif[0x0112] = 6
    turned = ask(client, "smolvlm", [Picture(encode(picture.rotate(90, expand=True), "PNG", exif=exif)), TEXT])
    assert tokens_of(turned) == tokens_of(ask(client, "smolvlm", [picture, TEXT]))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_beginning_is_cached_with_its_image(folders, client, family):
    text = "the rain in spain " * 10
    first = ask(client, family, [draw_picture(64, 48), text])
    again = ask(client, family, [draw_picture(64, 48), text])
    other = ask(client, family, [draw_picture(64, 48, 5), text])
    blind = [ask(client, family, [text, "a"]) for _ in range(2)]  # in a slot that has had an image
    assert blind[1].cached_prompt_token_count == 128
    assert tokens_of(blind[0]) == tokens_of(blind[1])
    _, expected = tiny_seers.own_answer(folders[family], family, [draw_picture(64, 48), text], NUM_TOKENS)
    assert tokens_of(first) == expected
    assert first.prompt_token_count > 128
    assert [one.cached_prompt_token_count for one in (first, again, other)] == [0, 128, 0]
    assert tokens_of(again) == tokens_of(first) != tokens_of(other)


def test_samples_share_a_prompt_with_an_image(client):
    turn = ChatMessage(Role.USER, [Picture(encode(draw_picture(64, 48))), TEXT])
    answers = client.chat([turn], model="llava", max_new_tokens=NUM_TOKENS, sample_count=3, temperature=1.0, seed=7)
    alone = [
        client.chat([turn], model="llava", max_new_tokens=NUM_TOKENS, temperature=1.0, seed=7)[0].text for _ in range(2)
    ]
    assert len({one.text for one in answers}) > 1
    assert alone == [answers[0].text] * 2


def test_a_prepared_image_is_named(client):
    picture = encode(draw_picture(200, 60))
    [prepared] = client.prepare_image(picture, model="internvl")
    by_id = ask(client, "internvl", [Picture(image_id=prepared.image_id), "so"])
    assert tokens_of(by_id) == tokens_of(ask(client, "internvl", [Picture(picture), "so"]))


def test_a_prompt_that_is_cut_keeps_the_last_images(client):
    long = ["the rain in spain " * 20, draw_picture(64, 48), "so"]
    answer = ask(client, "llava", long, truncate=True)
    assert answer.truncated
    with pytest.raises(InvalidArgumentError, match="shorten it"):
        ask(client, "llava", long)
    with pytest.raises(InvalidArgumentError, match="would be cut within its images"):
        ask(client, "qwen2_5_vl", [draw_picture(160, 160), "the rain in spain " * 17], truncate=True)


@pytest.mark.parametrize(
    ("model", "content", "message"),
    [
        (
            "blind",
            [draw_picture(9, 9), "a"],
            r"conversations\[0\].messages\[0\].parts\[0\].image: is an image, and blind",
        ),
        ("qwen2_5_vl", [draw_picture(402, 2), "a"], "is 402 x 2 pixels; a side is at most 200 times the other"),
        ("llava", [Picture(b"GIF89a"), "a"], r"parts\[0\].image: is not an image this server can read"),
        ("llava", [Picture(b""), "a"], r"parts\[0\].image: is empty"),
        ("llava", [*[draw_picture(9, 9)] * 65, "a"], r"parts\[64\].image: is image 65 of the call, the limit is 64"),
        ("llava", ["a"] * 257, "256"),
        ("llava", [Picture(image_id="0" * 32)], "no image has this id"),
    ],
)
def test_images_that_cannot_be_read_are_refused_by_name(client, model, content, message):
    with pytest.raises(Exception, match=message):
        ask(client, model, content)


def test_a_user_cannot_write_the_token_of_an_image(client):
    """In a conversation the text stays text; as a prompt it is refused."""
    [answer] = client.chat("<image> the rain", model="llava", max_new_tokens=2)
    assert answer.prompt_token_count > len("<image>")
    with pytest.raises(InvalidArgumentError, match="has <image>, which stands for an image"):
        client.generate_text("<image> the rain", model="llava", max_new_tokens=2)


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_openai_reads_images_as_data_urls(client, addresses, path):
    picture = draw_picture(90, 60)
    url = "data:image/png;base64," + base64.b64encode(encode(picture)).decode()
    expected = ask(client, "smolvlm", [picture, TEXT])
    if path == "responses":
        parts = [
            {"type": "input_image", "image_url": url, "detail": "auto"},
            {"type": "input_text", "text": TEXT},
        ]
        body = {"model": "smolvlm", "max_output_tokens": NUM_TOKENS, "input": [{"role": "user", "content": parts}]}
        field = "input[0].content[0].image_url"
    else:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
        body = {"model": "smolvlm", "max_tokens": NUM_TOKENS, "messages": [{"role": "user", "content": parts}]}
        field = "messages[0].content[0].image_url.url"
    asked = f"http://{addresses[1]}/v1/{path}"
    answer = httpx2.post(asked, json=body).json()
    said = answer["output"][0]["content"][0]["text"] if path == "responses" else answer["choices"][0]["message"]
    assert (said if path == "responses" else said["content"]) == expected.text
    assert httpx2.post(asked, json={**body, "stream": True}).status_code == 200
    for bad, says in ((url.replace("data:", "https://"), "fetches nothing"), (url + "?", "is not base64")):
        refused = httpx2.post(asked, json=json.loads(json.dumps(body).replace(url, bad)))
        assert refused.status_code == 400
        assert says in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == field


def test_a_conversation_with_an_image_is_tokenized_as_it_is_read(client, addresses):
    picture = draw_picture(90, 60)
    url = "data:image/png;base64," + base64.encodebytes(encode(picture)).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
    body = {"model": "internvl", "messages": [{"role": "user", "content": parts}]}
    answer = httpx2.post(f"http://{addresses[1]}/tokenize", json=body).json()
    assert answer["count"] == ask(client, "internvl", [picture, TEXT]).prompt_token_count
