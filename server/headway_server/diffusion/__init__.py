"""The engine for models that remove noise step by step: samplers, and a batch of rows at different steps."""

from headway_server.diffusion.engine import Denoising, DenoisingEngine, DenoisingError, Progress
from headway_server.diffusion.samplers import DiffusionSampler, PreservedArea, Trajectory, draw_noise, mix, step_times

__all__ = [
    "Denoising",
    "DenoisingEngine",
    "DenoisingError",
    "DiffusionSampler",
    "PreservedArea",
    "Progress",
    "Trajectory",
    "draw_noise",
    "mix",
    "step_times",
]
