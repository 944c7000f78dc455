"""Decoder graphs that can verify drafted tokens (docs/speculation.md).

Such a graph has an empty input, `verifies`, whose length selects the computation. 0: any step. 1: a step of
`chain_width` tokens a row, bitwise equal to decoding them one by one. The states between the tokens are outputs too, to
be bound to the memory of the state. A session that fixes the length of that axis removes the other branch, so the
selection costs nothing at run time.
"""

from __future__ import annotations

from headway_server.bundles.manifest import Graph

VERIFIES = "verifies"
"""The input, (length,) int64, and its axis."""


DECODING_AXES = {VERIFIES: 0}
"""Fixed axes of a session for any step."""


def verifying_axes(width: int) -> dict[str, int]:
    """Returns the fixed axes of a session for verification.

    Fixed lengths give ONNX Runtime the same shape information as without a chain, and so the same fusions: other
    fusions change the last bits.
    """
    return {VERIFIES: 1, "length": width, "logits_length": width}


def link_name(present: str, number: int) -> str:
    """Returns the name of a state after the first `number` tokens of a step, from 1."""
    return f"{present}.after_{number}"


def chain_width(graph: Graph, present: str) -> int:
    """Returns the tokens of a verification step; 1 without one.

    Args:
        graph: A decoder.
        present: One of its state outputs.
    """
    names = {output.name for output in graph.outputs}
    width = 1
    while link_name(present, width) in names:
        width += 1
    return width
