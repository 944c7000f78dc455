"""Continuous batching of decoders: sequence, scheduler, runner, sampler, engine (docs/engine.md)."""
