"""Drawing images: the autoencoder, the diffusion transformer, the data, and both runs on tiny pictures."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_pictures import write_picture_data

from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.data.public import DATASETS, FASHION_MNIST_LABELS
from headway_training.data.sources import OwnData
from headway_training.errors import DataError, RecipeError
from headway_training.evaluation import pad, token_mask
from headway_training.metrics import frechet_distance, r_precision
from headway_training.models import Autoencoder, AutoencoderConfig, LatentDiffusion, LatentDiffusionConfig
from headway_training.models.diffusion import mix
from headway_training.recipes import read_recipe
from headway_training.run import RunOptions, run_training
from headway_training.tasks.diffusion import measured_noise

SMALL = {"image_size": 16, "width": 8, "d_latent": 2}
DENOISER = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 32, "patch_size": 2}
SHAPE = LatentDiffusionConfig(**SMALL, **DENOISER, num_classes=3)


@pytest.fixture
def model() -> LatentDiffusion:
    torch.manual_seed(0)
    return LatentDiffusion(SHAPE).eval()


@torch.inference_mode()
def test_images_become_latents_of_unit_variance_and_images_again(model: LatentDiffusion) -> None:
    images = torch.randn(40, 3, 16, 16)
    model.scale_latents(model.encoder(images)[0])
    latents = model.encode(images)
    assert latents.shape == (40, *SHAPE.latent_shape) == (40, 2, 4, 4)
    torch.testing.assert_close(latents.mean(dim=(0, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(latents.std(dim=(0, 2, 3)), torch.ones(2), atol=1e-4, rtol=0)
    assert model.decode(latents).shape == images.shape
    torch.testing.assert_close(model.decode(latents[:1]), model.decode(latents)[:1], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_each_row_has_a_time_and_a_class_of_its_own(model: LatentDiffusion) -> None:
    for parameter in model.denoiser.parameters():  # which starts as zero
        parameter.normal_(std=0.2)
    latent, times, labels = torch.randn(4, 2, 4, 4), torch.tensor([0.1, 0.9, 0.1, 0.1]), torch.tensor([0, 0, 1, 3])
    latent[1:] = latent[0]
    velocity = model.denoiser(latent, times, labels)
    assert velocity.shape == latent.shape
    assert not any(torch.allclose(velocity[0], other, atol=1e-3) for other in velocity[1:])
    for row in range(4):
        alone = model.denoiser(latent[row : row + 1], times[row : row + 1], labels[row : row + 1])
        torch.testing.assert_close(alone[0], velocity[row], atol=1e-5, rtol=1e-5)


def test_a_layer_starts_as_the_identity_and_the_model_at_zero(model: LatentDiffusion) -> None:
    found = model.denoiser(torch.randn(2, 2, 4, 4), torch.rand(2), torch.tensor([0, 3]))
    assert not found.any()


@torch.inference_mode()
def test_each_row_has_a_text_of_its_own_whose_padding_changes_nothing() -> None:
    torch.manual_seed(0)
    texts = {"num_classes": 0, "vocabulary_size": 300, "max_length": 9, "text_num_layers": 1}
    model = LatentDiffusion(LatentDiffusionConfig(**SMALL, **DENOISER, **texts)).eval()
    latent, times = torch.randn(1, 2, 4, 4).expand(3, -1, -1, -1), torch.full((3,), 0.5)
    rows = [[5, 7, 9], [5, 8, 9], [5, 7, 9, 11, 12]]
    mask, ids = token_mask(rows), pad(rows, 0)
    assert not model.denoiser(latent, times, model.text_encoder(ids, mask), mask).any()  # which starts as zero
    for parameter in model.denoiser.parameters():
        parameter.normal_(std=0.2)
    velocity = model.denoiser(latent, times, model.text_encoder(ids, mask), mask)
    assert not torch.allclose(velocity[0], velocity[1], atol=1e-3)
    assert not torch.allclose(velocity[0], velocity[2], atol=1e-3)
    longer_mask, longer_ids = (torch.nn.functional.pad(one, (0, 4)) for one in (mask, ids))
    padded = model.denoiser(latent, times, model.text_encoder(longer_ids, longer_mask), longer_mask)
    torch.testing.assert_close(padded, velocity, atol=1e-5, rtol=1e-5)


def test_patches_are_cut_and_joined_in_place(model: LatentDiffusion) -> None:
    latent = torch.randn(2, 2, 4, 4)
    patches = model.denoiser._cut(latent)
    assert patches.shape == (2, 4, 8)
    torch.testing.assert_close(patches[0, 1].reshape(2, 2, 2), latent[0, :, :2, 2:])
    torch.testing.assert_close(model.denoiser._join(patches), latent)


def test_the_velocity_is_the_derivative_by_the_angle() -> None:
    latents, noise, time = torch.randn(3, 2, 4, 4).double(), torch.randn(3, 2, 4, 4).double(), torch.rand(3).double()
    small = 1e-6
    (before, _), (after, _) = (mix(latents, noise, time + step / (torch.pi / 2)) for step in (-small, small))
    _, velocity = mix(latents, noise, time)
    torch.testing.assert_close((after - before) / (2 * small), velocity, atol=1e-6, rtol=1e-6)
    for end, expected in ((0.0, latents), (1.0, noise)):
        torch.testing.assert_close(mix(latents, noise, torch.full((3,), end).double())[0], expected)


def test_the_frechet_distance_of_normal_distributions_is_that_of_their_moments() -> None:
    random = np.random.default_rng(0)
    mixing = random.normal(size=(3, 3))
    features = random.normal(size=(400, 3)) @ mixing
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(features, features + 2) == pytest.approx(12)
    covariances = [np.cov(one, rowvar=False) for one in (features, features[:200] * 1.5)]
    product = np.linalg.eigvals(covariances[0] @ covariances[1])  # of the product itself, which is not symmetric
    means = features.mean(axis=0) - features[:200].mean(axis=0) * 1.5
    expected = means @ means + np.trace(covariances[0] + covariances[1]) - 2 * np.sqrt(product.real).sum()
    assert frechet_distance(features, features[:200] * 1.5) == pytest.approx(expected)


def test_r_precision_looks_for_an_images_own_text_among_its_candidates() -> None:
    similarity = np.array([[0.1, 0.9, 0.5], [0.2, 0.3, 0.1]])
    assert r_precision(similarity, np.array([[0, 1], [1, 0]])) == 50
    assert r_precision(similarity, np.array([[1, 0], [1, 2]])) == 100


def test_what_is_measured_with_is_always_the_same() -> None:
    noise, times = measured_noise(10, (2, 4, 4))
    again, _ = measured_noise(10, (2, 4, 4))
    np.testing.assert_array_equal(noise, again)
    np.testing.assert_allclose(np.sort(times), (np.arange(10) + 0.5) / 10, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (AutoencoderConfig, {"image_size": 18}, "image_size must be a multiple of 4"),
        (AutoencoderConfig, {"width": 12}, "width must be a multiple of 8, and is 12"),
        (
            LatentDiffusionConfig,
            {"patch_size": 3},
            "patch_size must be a divisor of the latent's side",
        ),
        (LatentDiffusionConfig, {"num_heads": 4}, "head_dim must be a multiple of 8"),
        (LatentDiffusionConfig, {"vocabulary_size": 300}, "one of num_classes .3. and vocabulary_size .300. must be 0"),
        (LatentDiffusionConfig, {"num_classes": 0, "vocabulary_size": 300}, "max_length must be an integer"),
    ],
)
def test_a_shape_that_cannot_be_is_named(kind: type, changes: dict[str, int], said: str) -> None:
    fields = {**SMALL, **({**DENOISER, "num_classes": 3} if kind is LatentDiffusionConfig else {}), **changes}
    with pytest.raises(ValueError, match=said):
        kind(**fields)


def test_fashion_mnist_is_read_whole_or_in_part_and_what_is_cut_off_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "fashion_mnist"
    folder.mkdir()
    for stem, count in (("train", 20), ("t10k-0000-4999", 5)):
        images = np.arange(count * 784, dtype=np.uint64).astype(np.uint8)
        header = np.array([2051, count, 28, 28], ">u4").tobytes()
        (folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        labels = np.array([2049, count], ">u4").tobytes() + bytes(number % 10 for number in range(count))
        (folder / f"{stem}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    dataset = DATASETS["fashion-mnist"]
    settings = read_recipe("fashion-mnist-autoencoder", ["data.valid_fraction=0.1"]).data
    splits = dataset.read(dataset, tmp_path, settings)
    assert (len(splits.train), len(splits.valid), len(splits.test)) == (18, 2, 5)
    assert splits.test.images.shape == (5, 28, 28, 3)
    assert splits.test.images[1, 0, 3].tolist() == [(784 + 3) % 256] * 3
    assert splits.test.labels.tolist() == [0, 1, 2, 3, 4]
    assert splits.labels == FASHION_MNIST_LABELS
    file = folder / "train-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes())[:-1]))
    with pytest.raises(DataError, match="is not a whole file of MNIST's format"):
        dataset.read(dataset, tmp_path, settings)


def settings_of(fields: dict[str, int], *more: str) -> tuple[str, ...]:
    values = [f"model.{name}={value}" for name, value in fields.items() if name != "image_size"]
    sizes = ["preprocessing.height=16", "preprocessing.width=16"]
    return (*values, *sizes, "optimization.batch_size=12", "optimization.evaluations=1", "tracker=none", *more)


def test_two_runs_leave_a_model_that_draws_and_can_be_gone_on_with(pictures: Path, tmp_path: Path) -> None:
    own = OwnData(train=str(pictures), valid=str(pictures))

    def run(recipe: str, name: str, settings: tuple[str, ...], *, steps: int, **options: object) -> Path:
        chosen = RunOptions(
            recipe=recipe,
            settings=settings,
            own_data=own,
            output=tmp_path / name,
            max_steps=steps,
            **options,  # type: ignore[arg-type]
        )
        return run_training(chosen, Console(quiet=True))

    first = run("fashion-mnist-autoencoder", "first", settings_of(SMALL, "optimization.epochs=30"), steps=40)
    autoencoder, described = load_model(first)
    assert type(autoencoder) is Autoencoder
    assert (described.task, described.evaluation.metric) == ("autoencoding", "psnr")
    assert described.training.metrics["psnr"] > 10
    assert (autoencoder.latent_std != 1).all()

    settings = settings_of(SMALL | DENOISER, "optimization.epochs=4", "optimization.state_every_steps=2")
    second = run("fashion-mnist-diffusion", "second", settings, steps=4, init=first)
    model, described = load_model(second)
    assert isinstance(model, LatentDiffusion)
    assert described.labels == ("blue", "green", "red")
    assert 0 < described.training.metrics["velocity_error"] < 3
    for name, weight in autoencoder.state_dict().items():  # which the second run leaves as it is
        torch.testing.assert_close(model.state_dict()[name], weight, msg=name)
    with np.load(second / "evaluation.npz") as arrays:
        assert arrays["images"].shape == (24, 16, 16, 3)

    run("fashion-mnist-diffusion", "second", settings, steps=4, init=first, resume=True)
    again = load_model(second)[0]
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, msg=name)


def test_two_runs_on_emoji_leave_a_model_that_draws_texts(tmp_path: Path) -> None:
    def run(recipe: str, settings: tuple[str, ...], **options: object) -> Path:
        chosen = RunOptions(
            recipe=recipe,
            settings=(*settings, "data.valid_fraction=0.2"),
            data_dir=data,
            output=tmp_path / recipe,
            max_steps=2,
            **options,  # type: ignore[arg-type]
        )
        return run_training(chosen, Console(quiet=True))

    data = write_picture_data(tmp_path / "data")
    first = run("emoji-autoencoder", settings_of(SMALL))
    second = run("emoji-diffusion", settings_of(SMALL | DENOISER | {"text_num_layers": 1}), init=first)
    model, described = load_model(second)
    assert isinstance(model, LatentDiffusion)
    assert (described.labels, described.reads_text) == ((), True)
    assert model.configuration.vocabulary_size == load_tokenizer(second).get_vocab_size()
    assert described.training.metrics["velocity_error"] > 0
    with np.load(second / "evaluation.npz") as arrays:
        assert arrays["images"].shape == (2, 16, 16, 3)
        assert all(" thing, " in text for text in arrays["texts"].tolist()), "name and style"
    described_images = DATASETS["emoji"].read(DATASETS["emoji"], data, read_recipe("emoji-diffusion").data).train
    texts = {described_images.describe(0, np.random.default_rng(seed)) for seed in range(50)}
    assert {described_images.names[0], described_images.titles()[0]} <= texts
    assert any("thing" not in text for text in texts), "search words alone"


def test_a_run_without_an_autoencoder_is_refused_with_what_to_do() -> None:
    recipe = "fashion-mnist-diffusion"
    assert read_recipe(recipe).init.checkpoint == Path("runs/fashion-mnist-autoencoder/checkpoint")
    with pytest.raises(RecipeError, match="and give its checkpoint with --init"):
        read_recipe(recipe, ["init={}"])
