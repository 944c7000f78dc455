"""Audio to codes and back: the model, the distortion, the data, and a run on short tones."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from rich.console import Console

from headway_training.checkpoint import load_model
from headway_training.data.public import DATASETS
from headway_training.data.sources import OwnData
from headway_training.data.speech import SPOKEN, read_digits, read_recordings
from headway_training.errors import DataError, MissingDataError
from headway_training.models import Codec, CodecConfig
from headway_training.recipes import read_recipe
from headway_training.run import RunOptions, run_training
from headway_training.spectra import mel_cepstral_distortion, mel_magnitudes, spectral_loss

SMALL = {"width": 16, "d_latent": 8, "codebook_size": 16, "num_books": 3}
RATE = 8000


@pytest.fixture
def codec() -> Codec:
    torch.manual_seed(0)
    return Codec(CodecConfig(**SMALL)).eval()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = ["file\tspeaker\ttranscript"]
    for number, (speaker, word) in enumerate([("ann", "low"), ("ann", "high"), ("bob", "low"), ("bob", "high")] * 3):
        frequency = (200 if word == "low" else 400) + 50 * (speaker == "bob")
        samples = 0.3 * np.sin(2 * np.pi * frequency * np.arange(1600 + 170 * number) / RATE)
        soundfile.write(tmp_path / f"{number}.wav", samples, RATE)
        rows.append(f"{number}.wav\t{speaker}\t{word}")
    file = tmp_path / "recordings.tsv"
    file.write_text("\n".join(rows) + "\n")
    return file


@torch.inference_mode()
def test_frames_are_decoded_one_by_one_as_they_are_together(codec: Codec) -> None:
    codes = torch.randint(16, (3, 12, 3))
    whole, last = codec.decode(codes)
    assert whole.shape == (3, 12 * codec.configuration.hop_length)
    for size in (1, 5):
        state, parts = torch.zeros(3, codec.decoder.state_size), []
        for part in codes.split(size, dim=1):
            samples, state = codec.decode(part, state)
            parts.append(samples)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5 * float(whole.abs().max()), rtol=1e-5)
        torch.testing.assert_close(state, last, atol=1e-5 * float(last.abs().max()), rtol=1e-5)


@torch.inference_mode()
def test_samples_do_not_depend_on_codes_that_come_later(codec: Codec) -> None:
    codes = torch.randint(16, (2, 10, 3))
    changed = codes.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 16
    whole, others = codec.decode(codes)[0], codec.decode(changed)[0]
    torch.testing.assert_close(whole[:, :960], others[:, :960])
    assert not torch.allclose(whole[:, 960:1120], others[:, 960:1120])


@torch.inference_mode()
def test_latents_have_unit_root_mean_square_whatever_the_loudness(codec: Codec) -> None:
    samples = torch.randn(2, 10 * codec.configuration.hop_length)
    for loudness in (1e-3, 1.0):
        latents = codec.encoder(loudness * samples)
        assert latents.shape == (2, 8, 10)
        torch.testing.assert_close(latents.square().mean(dim=1), torch.ones(2, 10), atol=1e-3, rtol=0)
    assert codec.encode(samples).shape == (2, 10, 3)


@torch.inference_mode()
def test_each_book_names_the_code_nearest_to_what_is_left(codec: Codec) -> None:
    latents = torch.randn(1, 8, 5)
    found, codes, _ = codec.quantizer(latents)
    left = latents[0].T.clone()  # (F, D)
    for number, book in enumerate(codec.quantizer.books):
        for frame in range(5):
            nearest = (book - left[frame]).square().sum(dim=1).argmin()
            assert codes[0, frame, number] == nearest
            left[frame] -= book[nearest]
    torch.testing.assert_close(found, codec.quantizer.latents(codes))


def test_codes_move_to_the_latents_at_the_end_of_a_step_alone(codec: Codec) -> None:
    latents = torch.randn(4, 8, 30)
    points = latents.transpose(1, 2).flatten(0, 1)

    def farthest() -> float:
        return float(torch.cdist(codec.quantizer.books[0], points).min(dim=1).values.max())

    def learn() -> torch.Tensor:
        codec.quantizer.begin_step()
        codes = codec.quantizer(latents, torch.rand(4, 30))[1]
        codec.quantizer.end_step()
        return codes

    books = codec.quantizer.books.clone()
    codec.quantizer.train()
    codec.quantizer(latents)
    codec.quantizer(latents, torch.rand(4, 30))  # of no step
    assert torch.equal(codec.quantizer.books, books)
    before = farthest()
    learn()
    assert farthest() < min(1.0, before / 2)
    for _ in range(100):
        codes = learn()
    for code in codes[:, :, 0].unique():  # a code is the mean of what it stands for
        torch.testing.assert_close(
            codec.quantizer.books[0, code], points[codes[:, :, 0].flatten() == code].mean(dim=0), atol=0.2, rtol=0
        )


def test_gradients_reach_encoder_and_decoder(codec: Codec) -> None:
    found, loss = codec.train()(torch.randn(2, 800))
    (found.square().sum() + loss.sum()).backward()
    for name, weight in codec.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.any(), name


def test_distortion_is_that_of_the_definition() -> None:
    samples = 0.1 * np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    assert mel_cepstral_distortion(samples, samples, RATE) == 0
    assert mel_cepstral_distortion(samples * 0.5, samples, RATE) < 0.05  # loudness is left out
    tone = (0.1 * np.sin(np.arange(4000) / 3)).astype(np.float32)
    magnitudes = (mel_magnitudes(torch.from_numpy(one)[None], 256, 40, RATE)[0] for one in (samples, tone))
    spectra = [one.clamp(min=1e-5).log().double().numpy() for one in magnitudes]
    cosines = np.cos(np.pi * np.arange(1, 14)[:, None] * (np.arange(40) + 0.5) / 40) * 2 / 40  # (13, M)
    difference = cosines @ (spectra[0] - spectra[1])  # (13, F)
    expected = np.mean(10 / np.log(10) * np.sqrt(2 * np.square(difference).sum(axis=0)))
    assert mel_cepstral_distortion(samples, tone, RATE) == pytest.approx(expected, rel=1e-4)


def test_a_loud_part_that_is_missing_costs_more_than_a_quiet_one() -> None:
    samples = 0.001 * torch.randn(1, 4000, generator=torch.Generator().manual_seed(0))
    samples[:, 1000:2000] += 0.1 * torch.sin(torch.arange(1000) / 3)
    without_loud, without_quiet = samples.clone(), samples.clone()
    without_loud[:, 1000:2000] = 0.001
    without_quiet[:, 3000:] = 0
    assert spectral_loss(samples, samples, RATE) == 0
    assert spectral_loss(without_loud, samples, RATE) > 1.5 * spectral_loss(without_quiet, samples, RATE)
    silence = torch.zeros(1, 4000)
    assert torch.isfinite(spectral_loss(samples, silence, RATE)).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hop_length": 21}, r"sampling_rate must be a multiple of hop_length \(21\), and is 8000"),
        ({"num_books": 0}, "num_books must be an integer of at least 1, and is 0"),
    ],
)
def test_a_shape_that_cannot_be_is_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CodecConfig(**{**SMALL, **changes})


def test_archives_of_digits_prompts_and_captions_are_read_together(table: Path, tmp_path: Path) -> None:
    def pack(name: str, members: dict[str, str]) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            for member, file in members.items():
                archive.add(table.parent / file, member)

    pack("fsdd/train.tar.gz", {f"{digit}_theo_{index}.wav": "0.wav" for digit in (3, 7) for index in (5, 6)})
    pack("fsdd/test_3-4.tar.gz", {"9_yweweler_3.wav": "1.wav"})
    pack("asterisk/train.tar.gz", {"digits/1.wav": "2.wav", "hello.wav": "3.wav"})
    (tmp_path / "asterisk" / "train.tsv").write_text("name\tseconds\ttranscript\ndigits/1\t1\tone\nhello\t1\tHello.\n")
    for part in ("train", "test"):
        pack(f"synthesised/{part}.tar", {"000001.wav": "4.wav", "000002.wav": "5.wav"})
        (tmp_path / "synthesised" / f"{part}.tsv").write_text(
            "name\tvoice\ttranscript\n000001\tflite slt\tA dog runs.\n000002\tespeak-ng en-us+m1\tA cat.\n"
        )
    dataset = DATASETS["voices"]
    settings = read_recipe("telephone-codec", ["data.valid_fraction=0.2"]).data
    with pytest.raises(MissingDataError, match=r"about\.json: install flite and espeak-ng.*headway-train synthesise"):
        dataset.read(dataset, tmp_path, settings)
    (tmp_path / "synthesised" / "about.json").write_text("{}")
    splits = dataset.read(dataset, tmp_path, settings)
    assert (len(splits.train), len(splits.valid), splits.test.texts) == (6, 1, ["nine", "A dog runs."])
    assert splits.test.speakers == ["yweweler", "slt"]
    assert {*splits.train.speakers, *splits.valid.speakers} == {"theo", "allison", "slt"}
    pack("fsdd/wrong.tar.gz", {"x_theo_1.wav": "0.wav"})
    with pytest.raises(DataError, match=r"x_theo_1\.wav is not named DIGIT_SPEAKER_INDEX"):
        read_digits(tmp_path / "fsdd" / "wrong.tar.gz")


def test_what_is_wrong_with_a_table_of_recordings_is_named(table: Path) -> None:
    assert read_recordings(table, columns=SPOKEN).texts[:2] == ["low", "high"]
    content = table.read_text()
    for changed, said in (
        (content.replace("speaker", "who"), "has no column speaker"),
        (content.replace("\tlow", "\t", 1), "line 2: the transcript is empty"),
        (content.replace("0.wav", "gone.wav", 1), "line 2: there is no file 'gone.wav'"),
    ):
        table.write_text(changed)
        with pytest.raises(DataError, match=said):
            read_recordings(table, columns=SPOKEN)


def test_a_run_leaves_a_codec(table: Path, tmp_path: Path) -> None:
    settings = [f"model.{name}={value}" for name, value in SMALL.items()]
    options = RunOptions(
        recipe="telephone-codec",
        settings=(*settings, "optimization.batch_size=6", "optimization.evaluations=1", "tracker=none"),
        own_data=OwnData(train=str(table), valid=str(table)),
        output=tmp_path / "run",
        max_steps=6,
    )
    folder = run_training(options, Console(quiet=True))
    codec, described = load_model(folder)
    assert isinstance(codec, Codec)
    assert (described.task, described.evaluation.metric) == ("audio_coding", "mel_cepstral_distortion")
    assert 0 < described.training.metrics["mel_cepstral_distortion"] < 60
    with np.load(folder / "evaluation.npz") as arrays:
        assert arrays["lengths"].sum() == len(arrays["samples"])
