"""Continuous batching of decoders (docs/engine.md). Each part imports only those below it; a linter checks it.

core/           the engine's thread, its lanes, a step, the scheduler, prefill and the prefix cache
beam_search/    searches of many sequences at once        speculation/   drafts by prompt lookup
sampling/       from logits to tokens
constraints/    texts that follow a schema, an expression or a list of choices
output/         from tokens to text
runner/         decoder and encoder on ONNX Runtime, and the memory of their state
sequence.py     one prompt or source, its result and its reply
parameters.py   sampling and search parameters
interfaces.py   interfaces of runners, constraints and output assemblers
settings.py     settings of operators
"""
