"""What a decoder's graph has beyond its steps, where it can verify drafted tokens (docs/speculation.md).

Such a graph has an input without content, `verifies`, whose length chooses what it computes. 0: any step. 1: a step of
`chain_width` tokens a row, each bit for bit as if they were decoded one by one, with the states between them as outputs
that are to be bound to one memory with the others. Where a session fixes the length of that axis as it loads the graph,
ONNX Runtime drops what is not computed, and the choice costs nothing.
"""

from __future__ import annotations

from headway_server.bundles.manifest import Graph

VERIFIES = "verifies"
"""The input, (length,) int64, and its axis."""


DECODING_AXES = {VERIFIES: 0}
"""Sizes to fix where steps are of any length."""


def verifying_axes(width: int) -> dict[str, int]:
    """Returns the sizes to fix where all steps verify.

    The lengths are fixed so that ONNX Runtime knows as much of the shapes as without a chain, and fuses alike: a fusion
    more or less shows in the last bits.
    """
    return {VERIFIES: 1, "length": width, "logits_length": width}


def link_name(present: str, number: int) -> str:
    """Returns the name of a state after the first `number` tokens of a step, from 1."""
    return f"{present}.after_{number}"


def chain_width(graph: Graph, present: str) -> int:
    """Returns the tokens of a verifying step; 1 where the graph has none.

    Args:
        graph: A decoder.
        present: One of its state outputs.
    """
    names = {output.name for output in graph.outputs}
    width = 1
    while link_name(present, width) in names:
        width += 1
    return width
