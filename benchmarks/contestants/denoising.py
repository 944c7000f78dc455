"""Latent diffusion in PyTorch, a call after another: python -m benchmarks.contestants.denoising THREADS CHECKPOINT.

A request names `callers` and `steps`; each caller asks for one image with guidance at the same moment, and waits for
those before it. The answer holds what each waits, in seconds.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.worker import serve
from headway_server.diffusion import Sampler, Trajectory, draw_noise, step_times
from headway_server.diffusion.samplers import guide
from headway_training.checkpoint import load_model
from headway_training.models import LatentDiffusion

GUIDANCE = 3.0


@torch.inference_mode()
def draw(model: LatentDiffusion, label: int, num_steps: int, seed: int) -> torch.Tensor:
    """Draws an image of a label with guidance: float32 (3, I, I), 0 to 1."""
    shape = model.configuration
    trajectory = Trajectory(draw_noise(seed, shape.latent_shape), step_times(num_steps), Sampler.DPM_SOLVER_PP_2M)
    labels = torch.tensor([label, shape.num_classes])
    while not trajectory.is_finished:
        latent = torch.from_numpy(trajectory.latent)[None].expand(2, -1, -1, -1)
        found, other = model.denoiser(latent, torch.full((2,), trajectory.time), labels).numpy()
        trajectory.advance(guide(found, other, GUIDANCE))
    image: torch.Tensor = model.decode(torch.from_numpy(trajectory.latent)[None])[0].clamp(0, 1)
    return image


def main() -> None:
    """Answers requests."""
    torch.set_num_threads(int(sys.argv[1]))
    model, _ = load_model(Path(sys.argv[2]))
    assert isinstance(model, LatentDiffusion)

    def answer(request: dict[str, Any]) -> Mapping[str, Any]:
        began, waits = time.perf_counter(), []
        for caller in range(request["callers"]):
            draw(model, caller % model.configuration.num_classes, request["steps"], caller)
            waits.append(time.perf_counter() - began)
        return {"waits_s": waits}

    serve(answer, ("torch",))


if __name__ == "__main__":
    main()
