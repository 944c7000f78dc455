"""Every RPC through a real channel, to a server in a process of its own, in each precision that runs on a CPU."""

import asyncio
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from headway_client import (
    AsyncClient,
    AttentionSummary,
    Client,
    FailedPreconditionError,
    FinishReason,
    HealthStatus,
    InvalidArgumentError,
    NotFoundError,
)
from headway_client.cli import app

PROMPTS = ["a bird in the hand is worth", "practice makes", "the pen"]


def _picture(colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, "PNG")
    return file.getvalue()


def test_the_server_is_healthy_and_lists_its_models(client: Client):
    assert client.health() is HealthStatus.SERVING
    assert client.health("headway.v1.GenerationService") is HealthStatus.SERVING
    listed = client.list_models()
    assert [model.name for model in listed.models] == [
        "tiny-classification",
        "tiny-generation",
        "tiny-images",
        "tiny-tokens",
        "tiny-translation",
    ]
    assert listed.rejected_bundles == ()


def test_a_model_shows_its_manifest(client: Client):
    details = client.get_model("tiny-translation")
    assert details.model.source_language == "en"
    assert '"schema_version"' in details.manifest_json


def test_text_is_generated_and_streamed_alike(client: Client):
    answer = client.generate_text(PROMPTS, max_new_tokens=30)
    assert [result.new_token_count for result in answer.results] == [30, 30, 30]
    assert {result.finish_reason for result in answer.results} == {FinishReason.LENGTH}
    for prompt, result in zip(PROMPTS, answer.results, strict=True):
        with client.stream_generate_text(prompt, max_new_tokens=30) as stream:
            assert "".join(delta.text for delta in stream) == result.text
            assert stream.answer.results[0].text == result.text


def test_a_seed_gives_the_same_text_whatever_else_runs(client: Client):
    settings = {"temperature": 1.0, "top_k": 20, "seed": 11, "max_new_tokens": 30}
    alone = client.generate_text([PROMPTS[0]], **settings).results[0]
    among = client.generate_text([*PROMPTS[1:], PROMPTS[0]], **settings).results[-1]
    assert alone.text == among.text


def test_text_is_translated_and_streamed_alike(client: Client):
    answer = client.translate_text(["one two three", "ten", "five six seven eight"])
    assert answer.results[0].text == "drei zwei eins"
    assert answer.results[1].text == "zehn"
    with client.stream_translate_text("one two three") as stream:
        assert "".join(delta.text for delta in stream) == "drei zwei eins"


def test_texts_and_pictures_are_classified(client: Client):
    texts = client.classify_text(["the old summer", "ice under a glacier"]).results
    assert [text.labels[0].label for text in texts] == ["warm", "cold"]
    assert sum(label.probability for label in texts[0].labels) == pytest.approx(1, abs=1e-5)
    images = client.classify_image([_picture((200, 60, 60)), _picture((60, 60, 200))]).results
    assert [image.labels[0].label for image in images] == ["red", "blue"]
    assert (images[0].width, images[0].height) == (40, 30)


def test_spans_of_texts_are_labelled(client: Client):
    spans = client.classify_tokens(["near the lazy dog", "in bath"]).results[1].spans
    assert [(span.label, span.span.start, span.span.end) for span in spans] == [("place", 3, 7)]


def test_what_no_model_can_do_is_refused_by_name(client: Client):
    with pytest.raises(FailedPreconditionError):
        client.embed_text(["text"], model="tiny-generation")
    with pytest.raises(FailedPreconditionError):
        client.classify_tokens(["text"], model="tiny-generation")
    with pytest.raises(FailedPreconditionError, match="tiny-translation"):
        client.translate_text(["one"], model="tiny-generation")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda client: client.generate_text(["a", ""]), InvalidArgumentError, r"prompts\[1\]"),
        (lambda client: client.generate_text(["a" * 500]), InvalidArgumentError, r"prompts\[0\].*159.*500|500.*159"),
        (lambda client: client.generate_text(["a"], temperature=9), InvalidArgumentError, "temperature.*9.*2"),
        (lambda client: client.translate_text(["one " * 90]), InvalidArgumentError, r"texts\[0\].*24"),
        (lambda client: client.translate_text(["one"], target_language="fr"), InvalidArgumentError, "fr"),
        (lambda client: client.classify_text([]), InvalidArgumentError, "texts"),
        (lambda client: client.classify_text(["the " * 99]), InvalidArgumentError, r"texts\[0\].*40"),
        (lambda client: client.classify_text(["the"], model="nope"), NotFoundError, "nope"),
        (lambda client: client.classify_text(["the"], model_version="7"), NotFoundError, "7"),
        (lambda client: client.classify_image([b"no picture"]), InvalidArgumentError, r"images\[0\]"),
        (lambda client: client.classify_image([_picture((9, 9, 9))[:60]]), InvalidArgumentError, r"images\[0\]"),
        (lambda client: client.classify_image([b""]), InvalidArgumentError, r"images\[0\]"),
    ],
)
def test_bad_input_is_refused_by_name_and_the_server_goes_on(client: Client, call, error, words):
    with pytest.raises(error, match=words):
        call(client)
    assert client.translate_text(["ten"]).results[0].text == "zehn"


def test_many_calls_at_once_answer_as_one_by_one(client: Client):
    from concurrent.futures import ThreadPoolExecutor

    generator = np.random.default_rng(5)
    calls = [(PROMPTS[index % 3], int(generator.integers(1, 40))) for index in range(24)]
    one_by_one = [client.generate_text([prompt], max_new_tokens=count).results[0].text for prompt, count in calls]
    with ThreadPoolExecutor(12) as pool:
        at_once = pool.map(lambda call: client.generate_text([call[0]], max_new_tokens=call[1]).results[0].text, calls)
        assert list(at_once) == one_by_one


def test_what_models_attend_to_is_shown_alike_by_both_clients(client: Client):
    text, image = "the old summer", _picture((200, 60, 60))

    async def ask() -> list[object]:
        async with AsyncClient(client.server) as other:
            return [
                (await other.inspect_text(text, layers=[1]))[0],
                (await other.inspect_image(image, summary="rollout"))[0],
                (await other.inspect_generation(text, summary=AttentionSummary.MAXIMUM))[0],
                (await other.inspect_translation("one two", translation="zwei eins"))[0],
            ]

    found = [
        client.inspect_text(text, layers=[1])[0],
        client.inspect_image(image, summary="rollout")[0],
        client.inspect_generation(text, summary=AttentionSummary.MAXIMUM)[0],
        client.inspect_translation("one two", translation="zwei eins")[0],
    ]
    assert asyncio.run(ask()) == found
    assert found[0].attention.to_numpy().shape == (4, 4, 4)
    assert found[1].attention.to_numpy().sum(axis=-1) == pytest.approx(1, abs=1e-5)
    with pytest.raises(ValueError, match="'median' is not a valid AttentionSummary"):
        client.inspect_text(text, summary="median")


def test_the_commands_print_and_draw_what_models_attend_to(client: Client, tmp_path: Path):
    def run(*arguments: str) -> str:
        ended = CliRunner().invoke(app, [*arguments, "--server", client.server])
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    printed = run("inspect-text", "the old summer", "--summary", "mean", "--layer", "0").splitlines()
    assert printed[0] == "==> layer 0 <=="
    assert [line.split()[0] for line in printed[1:]] == ["'[CLS]'", "'", "'", "'"]
    assert run("inspect-translation", "one two three", "--summary", "mean").startswith("drei zwei eins\n==> encoder")
    (tmp_path / "image.png").write_bytes(_picture((200, 60, 60)))
    for name, *arguments in (
        ("text.svg", "inspect-generation", "the pen"),
        ("image.png", "inspect-image", str(tmp_path / "image.png")),
        ("both.svg", "inspect-translation", "one two"),
    ):
        run(*arguments, "--picture", str(tmp_path / f"drawn-{name}"))
        assert (tmp_path / f"drawn-{name}").stat().st_size > 1000


def test_texts_are_spoken_and_streamed_alike(voice_client: Client):
    asked = {"voice": "bob", "seed": 4, "temperature": 1.2, "max_duration_seconds": 0.6}
    answer = voice_client.synthesize_speech(["low", "both high"], **asked)
    for text, spoken in zip(["low", "both high"], answer.results, strict=True):
        assert spoken.audio.startswith(b"RIFF")
        with voice_client.stream_synthesize_speech(text, **asked) as stream:
            pcm = b"".join(part.pcm for part in stream)
        assert spoken.audio.endswith(pcm)
        assert len(pcm) == round(spoken.duration_seconds * spoken.sampling_rate) * 2 > 0
        assert stream.answer.results[0].seed == 4
    with pytest.raises(InvalidArgumentError, match="voice: is 'eve'; the model has ann, bob"):
        voice_client.synthesize_speech(["low"], voice="eve")
