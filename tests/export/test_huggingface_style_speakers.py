"""Kokoro as its folder is read, and against the package `kokoro` where that is installed."""

import json

import pytest
import tiny_voices
import torch

from headway_export import huggingface
from headway_export.errors import SourceError

OPTIONS = huggingface.FolderOptions(allow_pickle=True)
PUBLISHED = {
    **tiny_voices.KOKORO,
    "hidden_dim": 512,
    "style_dim": 128,
    "istftnet": {**tiny_voices.KOKORO["istftnet"], "upsample_initial_channel": 512},
}
"""Of the widths that the package has in its code."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_voices.write_kokoro(tmp_path_factory.mktemp("voices") / "kokoro")


def read(folder):
    return huggingface.from_folder(folder, OPTIONS)


def test_a_folder_is_described_by_its_vocabulary_and_its_voices(folder):
    source, notes = read(folder)
    assert source.labels == tiny_voices.KOKORO_VOICES
    assert source.limits.max_input_tokens == 32
    assert source.tokenizer.encode("ab!").ids == [tiny_voices.KOKORO["vocab"][letter] for letter in "ab!"]
    assert source.flow.max_frames * source.flow.hop_length == 60 * 24_000
    assert any("no phonemizer" in note for note in notes)


def test_a_style_is_that_of_the_number_of_phonemes(folder):
    module = read(folder)[0].module
    stored = torch.load(folder / "voices" / "bo.pt")
    for count in (1, 7):
        _, frames = module.durations(torch.tensor([[0, *[4] * count, 0]]), torch.tensor([1]))
        torch.testing.assert_close(frames[0, :, -6:], stored[count - 1, :, :6].expand(count + 2, -1))


def test_a_transform_and_its_inverse_are_those_of_pytorch(folder):
    generator = read(folder)[0].module.decoder.generator
    samples, window = torch.randn(2, 400), torch.hann_window(20)
    spectrum = torch.stft(samples, 20, 5, window=window, return_complex=True)
    found = generator._spectrum(samples)
    torch.testing.assert_close(found[:, :11], spectrum.abs(), atol=1e-5, rtol=0)
    differences = (found[:, 11:] - spectrum.angle()).abs()
    assert torch.minimum(differences, (differences - 2 * torch.pi).abs()).max() < 1e-3
    expected = torch.istft(spectrum, 20, 5, window=window)
    torch.testing.assert_close(generator._inverted(found[:, :11], found[:, 11:]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab": {"ab": 3}}, "gives 'ab' the number 3"),
        ({"vocab": {"a": 40}}, "gives 'a' the number 40"),
        ({"vocab": {"a": 3, "b": 3}}, "two phonemes the same number"),
        ({"style_dim": 7}, "bo.pt|ada.pt: is no tensor of"),
        ({"n_layer": 3}, "weights are not there, or of another shape"),
    ],
)
def test_folders_that_do_not_fit_are_refused(folder, tmp_path, changes, words):
    changed = tmp_path / "changed"
    changed.mkdir()
    for part in folder.iterdir():
        (changed / part.name).symlink_to(part)
    (changed / "config.json").unlink()
    (changed / "config.json").write_text(json.dumps({**tiny_voices.KOKORO, **changes}))
    with pytest.raises(SourceError, match=words):
        read(changed)


@pytest.mark.filterwarnings("ignore")  # of PyTorch, of how the package makes its layers
def test_samples_are_those_of_the_package_by_the_same_spectrum_of_the_excitation(tmp_path, monkeypatch):
    kokoro = pytest.importorskip("kokoro.model", reason="the package kokoro is not installed")
    folder = tiny_voices.write_kokoro(tmp_path / "kokoro", PUBLISHED, width=1_024, narrow=64)
    module = read(folder)[0].module
    own = kokoro.KModel(repo_id="", config=PUBLISHED, model=folder / "kokoro-v1_0.pth").eval()
    text, spectra = "ab,hi", []
    style = torch.load(folder / "voices" / "bo.pt")[len(text) - 1]
    transform = own.decoder.generator.stft.transform

    def transformed(samples):
        found = transform(samples)
        spectra.append(torch.cat(found, dim=1))
        return found

    monkeypatch.setattr(own.decoder.generator.stft, "transform", transformed)
    expected = own(text, style, 1.0, return_output=True)
    monkeypatch.setattr(module.decoder.generator, "_spectrum", lambda _: spectra[0])
    with torch.inference_mode():
        ids = torch.tensor([[0, *(PUBLISHED["vocab"][letter] for letter in text), 0]])
        durations, frames = module.durations(ids, torch.tensor([1]))
        counts = torch.round(durations[0]).clamp(min=1).long()
        frames = torch.repeat_interleave(frames, counts, dim=1)
        noise = torch.zeros(1, frames.shape[1], module.speech.hop_length)
        samples = module.samples(frames, module.curves(frames), noise)[0]
    assert counts.tolist() == expected.pred_dur.tolist()
    torch.testing.assert_close(samples, expected.audio, atol=1e-4, rtol=0)
