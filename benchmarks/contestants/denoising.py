"""Latent diffusion in PyTorch, a call after another: python -m benchmarks.contestants.denoising THREADS CHECKPOINT.

A request names `prompts`, one a caller, and `steps`; all callers ask for an image with guidance at the same moment, and
each waits for those before it. The answer holds what each waits, in seconds.
"""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.worker import serve
from headway_server.diffusion import DiffusionSampler, Trajectory, TrigonometricSchedule, draw_noise
from headway_server.diffusion.samplers import guide
from headway_training.checkpoint import Checkpoint, load_model
from headway_training.models import LatentDiffusion

GUIDANCE = 3.0

Conditions = Callable[[str], tuple[Tensor, ...]]
"""The denoiser's inputs of a prompt and, as the second row, of anything."""


@torch.inference_mode()
def draw(model: LatentDiffusion, conditions: tuple[Tensor, ...], num_steps: int, seed: int) -> Tensor:
    """Draws an image of two rows of conditions with guidance: float32 (3, I, I), 0 to 1."""
    shape = model.configuration
    steps = TrigonometricSchedule().steps(num_steps, DiffusionSampler.DPM_SOLVER_PP_2M)
    trajectory = Trajectory(draw_noise(seed, shape.latent_shape), steps)
    while not trajectory.is_finished:
        latent = torch.from_numpy(trajectory.latent)[None].expand(2, -1, -1, -1)
        found, other = model.denoiser(latent, torch.full((2,), trajectory.time), *conditions).numpy()
        trajectory.advance(guide(found, other, GUIDANCE))
    image: Tensor = model.decode(torch.from_numpy(trajectory.latent)[None])[0].clamp(0, 1)
    return image


def _reader(model: LatentDiffusion, record: Checkpoint, folder: Path) -> Conditions:
    """Returns what reads prompts: labels of the model, or texts."""
    encoder = model.text_encoder
    if encoder is None:
        return lambda prompt: (torch.tensor([record.labels.index(prompt), len(record.labels)]),)
    assert record.special_tokens is not None, "a model of texts has them"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=model.configuration.max_length, pad_id=record.special_tokens.pad)

    @torch.inference_mode()
    def read(prompt: str) -> tuple[Tensor, ...]:
        texts = tokenizer.encode_batch([prompt, ""])
        mask = torch.tensor([text.attention_mask for text in texts])
        return encoder(torch.tensor([text.ids for text in texts]), mask), mask

    return read


def main() -> None:
    """Answers requests."""
    torch.set_num_threads(int(sys.argv[1]))
    model, record = load_model(Path(sys.argv[2]))
    assert isinstance(model, LatentDiffusion)
    read = _reader(model, record, Path(sys.argv[2]))

    def answer(request: dict[str, Any]) -> Mapping[str, Any]:
        began, waits = time.perf_counter(), []
        for seed, prompt in enumerate(request["prompts"]):
            draw(model, read(prompt), request["steps"], seed)
            waits.append(time.perf_counter() - began)
        return {"waits_s": waits}

    serve(answer, ("torch",))


if __name__ == "__main__":
    main()
