"""The engine for models that remove noise step by step: samplers, and a batch of rows at different steps."""

from headway_server.diffusion.engine import Denoising, DenoisingEngine, DenoisingError, Progress
from headway_server.diffusion.samplers import PreservedArea, Trajectory, draw_noise, mix
from headway_server.diffusion.schedules import DiffusionSampler, Schedule, TrigonometricSchedule, schedule_of

__all__ = [
    "Denoising",
    "DenoisingEngine",
    "DenoisingError",
    "DiffusionSampler",
    "PreservedArea",
    "Progress",
    "Schedule",
    "Trajectory",
    "TrigonometricSchedule",
    "draw_noise",
    "mix",
    "schedule_of",
]
