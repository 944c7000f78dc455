"""Transcripts of speech: the model, the metric, windows of recordings, the data, and a run on tiny data."""

import json
import tarfile
from itertools import groupby, product
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_transcriber import RECIPE, SETTINGS, TONES, write_tones, write_wav

from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.data.audio import LogMel, encode_audio, read_audio
from headway_training.data.examples import Splits
from headway_training.data.speech import (
    Recordings,
    hold_out_transcripts,
    read_digits,
    read_recordings,
    read_transcribed,
    spoken_words,
)
from headway_training.data.synthesis import synthesise
from headway_training.errors import DataError, MissingDataError, RecipeError
from headway_training.evaluation import write_greedily
from headway_training.metrics import score_transcripts, word_error_rate, word_errors
from headway_training.models import Transcriber, TranscriberConfig
from headway_training.models.parts.attention import causal_attention, cross_attention
from headway_training.recipes import read_recipe
from headway_training.tasks import IGNORED
from headway_training.tasks.transcription import TranscriptionTask, spaced
from headway_training.tokenizers import train_tokenizer

TINY = {
    "num_mel_bins": 8,
    "num_frames": 24,
    "vocabulary_size": 50,
    "max_target_length": 12,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "d_model": 16,
    "num_heads": 2,
    "d_ff": 32,
}


@pytest.mark.parametrize("frames_per_position", [2, 4])
@torch.inference_mode()
def test_windows_do_not_see_each_other_and_the_second_half_of_a_transcript_is_not_seen_by_the_first(
    frames_per_position: int,
) -> None:
    torch.manual_seed(0)
    model = Transcriber(TranscriberConfig(**TINY, frames_per_position=frames_per_position)).eval()
    windows, targets = torch.randn(3, 8, 24), torch.randint(0, 50, (3, 6))
    logits = model(windows, targets)
    assert model.encode(windows).shape == (3, 24 // frames_per_position, 16)
    torch.testing.assert_close(model(windows[1:2], targets[1:2])[0], logits[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(windows, targets[:, :3]), logits[:, :3], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(windows.flip(0), targets), logits)


@torch.inference_mode()
def test_greedy_transcripts_are_the_likeliest_tokens_of_the_whole_model() -> None:
    torch.manual_seed(0)
    model = Transcriber(TranscriberConfig(**TINY)).eval()
    windows = torch.randn(3, 8, 24)
    rows = write_greedily(model, windows, (2, 5), -1, batch_size=2)
    assert [len(row) for row in rows] == [11] * 3  # of 12 positions the last predicts one more, and two are given
    keys_values = model.cross_keys_values(model.encode(windows))
    given = torch.tensor([[2, 5, *row] for row in rows])[:, :12]
    attend_cross = cross_attention(keys_values, torch.ones(3, 12))
    hidden = model.decode(given, torch.arange(12), causal_attention(), attend_cross)
    assert model.logits(hidden)[:, 1:].argmax(dim=-1).tolist() == rows


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frames_per_position": 3}, "frames_per_position must be 2 or 4, and is 3"),
        ({"num_frames": 26, "frames_per_position": 4}, "num_frames must be a multiple of frames_per_position"),
    ],
)
def test_a_window_that_cannot_be_is_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TranscriberConfig(**{**TINY, **fields})


def test_word_error_rate_counts_substitutions_deletions_and_insertions() -> None:
    assert word_errors(["a", "b", "c"], ["a", "x", "c", "d"]) == 2
    assert word_errors([], ["a", "b"]) == word_errors(["a", "b"], []) == 2
    assert word_errors(list("sitting"), list("kitten")) == 3
    assert word_error_rate(["The off-camera dog!", ""], ["the off camera dog", "is it?"]) == pytest.approx(100 * 2 / 6)
    assert word_error_rate(["it\u2019s one two three"], ["it's"]) == 300
    scores = score_transcripts(["a", "b", "c d"], ["a", "x", "c d"], ["p", "p", "q"])
    assert scores == {"wer": 25, "wer_p": 50, "wer_q": 0}
    assert score_transcripts(["a"], ["a"], ["p"]) == {"wer": 0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Please press 1, or 42 -- now.", "please press one or forty two now"),
        ("press * then # or O\u2019clock", "press star then pound or o'clock"),
        ("off-camera", "off camera"),
        ("dial 500", None),
        ("caf\u00e9", None),
        ("...", None),
    ],
)
def test_texts_become_words_as_they_are_spoken(text: str, words: str | None) -> None:
    assert spoken_words(text) == words


def _recordings(texts: list[str], seconds: float, source: str = "one") -> Recordings:
    """Each has samples of its own number."""
    samples = [np.full(int(seconds * 8000), 1000 * (row + 1), np.int16) for row in range(len(texts))]
    return Recordings(samples=samples, texts=texts, speakers=texts, sources=[source] * len(texts))


def _task(train: Recordings, *settings: str) -> TranscriptionTask:
    """A task without any change at random but what `settings` say."""
    quiet = [f"speech.{name}=0" for name in ("silence_share", "speed_change", "gain_change", "noise_share")]
    quiet += ["speech.hidden_frames=0", "speech.least_source_share=0"]
    recipe = read_recipe(RECIPE, [*SETTINGS, *quiet, *settings])
    valid = train.take(np.arange(1))
    splits = Splits(train=train, valid=valid, test=valid, train_name="", test_name="", license="", home="")
    tokenizer = train_tokenizer(spaced(train.texts), recipe.tokenizer, "transcription", ["<en>"])
    return TranscriptionTask(recipe, splits, tokenizer)


def test_a_window_is_filled_with_recordings_of_its_source_as_far_as_they_fit() -> None:
    train = _recordings(["low", "middle", "high"], 0.25)
    several = Recordings(
        samples=[*train.samples, np.full(2000, 9000, np.int16)],
        texts=[*train.texts, "other"],
        speakers=[""] * 4,
        sources=["one", "one", "one", "two"],
    )
    task = _task(several, "speech.join_share=1", "model.max_target_length=40")
    levels = dict(zip(several.texts, (1000, 2000, 3000, 9000), strict=True))
    counts = set()
    for first in (0, 1, 2, 3):
        window, ids = task._make_window(first, np.random.default_rng(first))
        words = task.tokenizer.decode(ids).split()
        edges = np.flatnonzero(np.diff(window, prepend=0) > 0)
        assert [round(float(window[edge]) * 32768) for edge in edges] == [levels[word] for word in words]
        assert words[0] == several.texts[first]
        assert ("other" in words) == (first == 3)
        counts.add(len(words))
    assert max(counts) > 1


def test_nobody_speaks_in_a_silent_window_and_changes_keep_its_size() -> None:
    task = _task(_recordings(["low", "high"], 0.5), "speech.silence_share=0.5", "speech.noise_share=1")
    batch = task.collate(np.array([0, 1] * 6), torch.Generator().manual_seed(0))
    assert batch.tensors["input_features"].shape == (12, 16, 120)
    silent = [row[1:] for row in batch.tensors["targets"].tolist() if row[1] == task._special.eos]
    assert 0 < len(silent) < 12
    assert all(value == IGNORED for row in silent for value in row[1:])
    changed = _task(_recordings(["low"], 1.1), "speech.speed_change=0.5", "speech.hidden_bands=16")
    for seed in range(5):
        window, _ = changed._make_window(0, np.random.default_rng(seed))
        assert len(window) == 9600
    features = changed.collate(np.array([0] * 4), torch.Generator().manual_seed(0)).tensors["input_features"]
    assert any(len(torch.unique(row)) == 1 for window in features for row in window)


@torch.inference_mode()
def test_a_share_of_the_loss_is_that_of_all_ways_in_which_positions_spell_a_transcript() -> None:
    train = _recordings(["low", "high low"], 0.1)
    alone, shared = (
        _task(train, "audio.num_frames=12", "speech.join_share=0", f"speech.alignment_share={share}")
        for share in (0, 0.25)
    )
    shape = TranscriberConfig(**TINY | {"num_frames": 12, "num_mel_bins": 16}, frames_per_position=4)
    torch.manual_seed(0)
    model = Transcriber(shape).eval()
    tensors = dict(shared.collate(np.array([0, 0]), torch.Generator().manual_seed(0)).tensors)
    pad, eos = shared._special.pad, shared._special.eos
    tensors["target_ids"] = torch.tensor([[4, 5, 7, 8], [4, 5, 7, pad]])
    tensors["targets"] = torch.tensor([[IGNORED, 7, 8, eos], [IGNORED, 7, eos, IGNORED]])
    chances = model.logits(model.encode(tensors["input_features"])).softmax(dim=-1)  # (2, 3, V)
    spelled = torch.zeros(2)
    for row, wanted in enumerate(([7, 8], [7])):
        for spelling in product((7, 8, pad), repeat=3):
            if [token for token, _ in groupby(spelling) if token != pad] == wanted:
                spelled[row] += torch.stack([chances[row, at, token] for at, token in enumerate(spelling)]).prod()
    written = alone.loss(model, tensors)
    torch.testing.assert_close(shared.loss(model, tensors), 0.75 * written - 0.25 * spelled.log().sum())


def test_small_sources_come_several_times_and_what_does_not_fit_is_left_out() -> None:
    texts = [f"low {'high ' * (row % 3)}".strip() for row in range(10)]
    many, few = _recordings(texts, 0.3), _recordings(["middle", "too long"], 0.3, "few")
    train = Recordings(
        samples=[*many.samples, few.samples[0], np.zeros(20_000, np.int16)],
        texts=[*many.texts, *few.texts],
        speakers=[""] * 12,
        sources=[*many.sources, *few.sources],
    )
    task = _task(train, "speech.least_source_share=0.5", "optimization.batch_size=4")
    drawn = np.concatenate(task.epoch_batches(0, 0))
    assert sorted(set(drawn.tolist())) == list(range(11))
    assert (drawn == 10).sum() == round(0.5 * 11)
    assert task.notes == ("recordings of more than 1.2 s or 14 tokens are left out: 1",)
    with pytest.raises(RecipeError, match=r"audio\.sampling_rate is 16000"):
        _task(train, "audio.sampling_rate=16000", "audio.num_frames=240")
    with pytest.raises(DataError, match=r"a recording to measure on, number \d+ \(.*\), has 2"):
        _task(train.take(np.array([11, 0])))


def test_archives_tables_and_files_of_a_users_own_are_read(tmp_path: Path) -> None:
    sound = (1000 * np.sin(np.arange(800))).astype(np.int16)
    assert np.array_equal(read_audio(encode_audio(sound, 8000), 8000), sound)
    with tarfile.open(tmp_path / "digits.tar.gz", "w:gz") as archive:
        for name in ("7_theo_5.flac", "0_lucas_6.flac"):
            _add(archive, name, encode_audio(sound, 8000))
    digits = read_digits(tmp_path / "digits.tar.gz")
    assert (digits.texts, digits.speakers, digits.sources) == (["seven", "zero"], ["theo", "lucas"], ["fsdd"] * 2)
    assert digits.seconds == pytest.approx(0.2)
    rows = ["a\t0.1\tPress 1.", "b\t0.1\tDial 500", "c/d\t0.1\tYes"]
    (tmp_path / "prompts.tsv").write_text("\n".join(["name\tseconds\ttranscript", *rows]) + "\n")
    with tarfile.open(tmp_path / "prompts.tar", "w") as archive:
        for name, samples in (("a", sound), ("b", sound), ("c/d", np.tile(sound, 20))):
            _add(archive, f"{name}.flac", encode_audio(samples, 8000))
    files = (tmp_path / "prompts.tar", tmp_path / "prompts.tsv")
    assert read_transcribed(*files, lambda row: (row["name"], "")).sources == ["a", "c/d"]
    assert read_transcribed(*files, lambda _: ("x", ""), most_seconds=1).texts == ["press one"]
    assert read_transcribed(*files, lambda _: ("x", ""), write=str).texts == ["Press 1.", "Dial 500", "Yes"]
    (tmp_path / "prompts.tsv").write_text("name\ttranscript\nmissing\tyes\n")
    with pytest.raises(DataError, match=r"there is no missing, which prompts\.tsv names"):
        read_transcribed(*files, lambda _: ("x", ""))
    table = write_tones(tmp_path / "own", "train", rate=16_000)
    own = read_recordings(table, 8000)
    assert own.texts[:4] == [*TONES, "low low"]
    assert len(own.samples[0]) == 3200
    assert read_recordings(table).sampling_rate == 16_000
    table.write_text("file\ttranscript\nnone.wav\t\n")
    with pytest.raises(DataError, match="line 2: the transcript is empty"):
        read_recordings(table, 8000)
    table.write_text("file\ttranscript\nnone.wav\tlow\n")
    with pytest.raises(MissingDataError, match=r"train\.tsv, line 2: there is no file 'none\.wav'"):
        read_recordings(table, 8000)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    import io

    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def test_no_transcript_is_in_two_parts() -> None:
    texts = [f"prompt {row % 10}" for row in range(30)]
    parts = hold_out_transcripts(_recordings(texts, 0.01), 0.1)
    assert [len(part) for part in parts] == [24, 3, 3]
    assert sum(len(set(part.texts)) for part in parts) == 10


_SPEAKER = """#!/bin/sh
case "$1" in --version) echo "{name} version: {version}-test"; exit 1;; esac
for last; do :; done
cp {sound} "$last"
"""


def test_captions_are_read_by_each_synthesiser_in_turn_and_their_versions_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, data = tmp_path / "bin", tmp_path / "data"
    programs.mkdir()
    write_wav(tmp_path / "said.wav", np.zeros(16_000), 16_000)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    (data / "multi30k").mkdir(parents=True)
    for part in ("train", "val", "test_2016_flickr"):
        lines = "".join(f"A dog, {'very ' * row}old.\n" for row in range(130))
        (data / "multi30k" / f"{part}.en").write_text(lines)
    import gzip

    for file in (data / "multi30k").iterdir():
        file.with_suffix(".en.gz").write_bytes(gzip.compress(file.read_bytes()))
    monkeypatch.setattr("headway_training.data.synthesis.HELD_OUT_CAPTIONS", 1)
    for name, version in (("flite", "2.2"), ("espeak-ng", "1.51")):
        script = programs / name
        script.write_text(_SPEAKER.format(name=name, version=version, sound=tmp_path / "said.wav"))
        script.chmod(0o755)
    folder = synthesise(data, Console(quiet=True), num_captions=2, seed=3)
    about = json.loads((folder / "about.json").read_text())
    assert about == {"versions": {"flite": "2.2-test", "espeak-ng": "1.51-test"}, "seed": 3, "num_captions": 2}
    table = (folder / "train.tsv").read_text().splitlines()
    assert [row.split("\t")[2].split()[0] for row in table[1:]] == ["flite", "espeak-ng"] * 2
    read = read_transcribed(
        folder / "train.tar", folder / "train.tsv", lambda row: (row["voice"].split()[0], row["voice"])
    )
    assert [len(one) for one in read.samples] == [8000] * 4
    assert len(set(read.texts)) == 4
    with pytest.raises(DataError, match=r"has 130 captions that can be read, and 200 are asked for"):
        synthesise(data, Console(quiet=True), num_captions=100)
    assert (folder / "about.json").is_file(), "what was there stays"


def test_a_missing_synthesiser_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="flite is not installed; on Debian: apt-get install flite espeak-ng"):
        synthesise(tmp_path, Console(quiet=True), num_captions=1)


def test_a_run_learns_to_write_which_tones_it_hears(transcriber_checkpoint: Path) -> None:
    model, checkpoint = load_model(transcriber_checkpoint)
    assert isinstance(model, Transcriber)
    assert checkpoint.training is not None
    assert checkpoint.training.metrics["wer"] < 10
    assert checkpoint.language_tokens == {"en": load_tokenizer(transcriber_checkpoint).token_to_id("<en>")}
    with np.load(transcriber_checkpoint / "evaluation.npz") as stored:
        assert stored["rate"] == 8000
        assert stored["lengths"].sum() == len(stored["samples"])
        assert stored["transcripts"].tolist()[:2] == ["low", "middle"]
    audio = checkpoint.audio_preprocessing
    assert audio is not None
    assert LogMel(audio).of_recording(np.zeros(10, np.int16)).shape == (16, 120)
