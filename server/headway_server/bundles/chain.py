"""Decoder graphs that can verify drafted tokens (docs/speculation.md).

Such a graph has an input without content, `verifies`, whose length chooses what it computes. 0: any step. 1: a step of
`chain_width` tokens a row, which equals decoding them one by one bit for bit; the states between the tokens are outputs
too, to be bound to the same memory as the others. A session that fixes the length of that axis drops what is not
computed, so the choice costs nothing at run time.
"""

from __future__ import annotations

from headway_server.bundles.manifest import Graph

VERIFIES = "verifies"
"""The input, (length,) int64, and its axis."""


DECODING_AXES = {VERIFIES: 0}
"""Sizes to fix where steps are of any length."""


def verifying_axes(width: int) -> dict[str, int]:
    """Returns the sizes to fix where all steps verify.

    The lengths are fixed so that ONNX Runtime knows the same of the shapes as without a chain, and fuses the same
    nodes: other fusions change the last bits.
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
