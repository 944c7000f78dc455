"""The picture of a study, drawn by matplotlib: the extra `pictures`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headway_training.scaling.records import Study

_CURVE_POINTS = 64


def draw(study: Study, file: Path) -> str:
    """Draws the losses of pilots over their tokens, a colour for each size, and the law as curves.

    The pilot that was held out has a ring, and a cross where it was predicted.

    Returns:
        Where the picture is, or what to install for one.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 (an extra)
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return "no picture is drawn: pip install 'headway-training[pictures]'"
    assert study.law is not None
    assert study.held_out is not None
    law, held_out, largest = study.held_out.law, study.held_out, study.pilots[-1]
    with mpl.rc_context({"svg.hashsalt": "headway", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.add_subplot()
        counts = sorted({pilot.size.parameter_count for pilot in study.pilots})
        colours = mpl.colormaps["viridis"](np.linspace(0.0, 0.85, len(counts)))
        tokens = [pilot.token_count for pilot in study.pilots]
        along = np.geomspace(min(tokens), max(tokens), _CURVE_POINTS)
        for count, colour in zip(counts, colours, strict=True):
            own = [pilot for pilot in study.pilots if pilot.size.parameter_count == count]
            axes.plot(
                [one.token_count for one in own], [one.loss or 0.0 for one in own], "o", color=colour, markersize=4
            )
            losses = [law.loss(count, float(one)) for one in along]
            axes.plot(along, losses, color=colour, linewidth=1, label=f"N = {count:,}")
        axes.plot(largest.token_count, held_out.measured, "o", color="black", markersize=9, fillstyle="none")
        axes.plot(
            largest.token_count, held_out.predicted, "x", color="black", markersize=7, label="held out, predicted"
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")
        axes.set_xlabel("D, tokens")
        axes.set_ylabel(study.metric.replace("_", " "))
        axes.set_title(law.describe(), fontsize=9)
        axes.grid(visible=True, which="both", linewidth=0.3)
        axes.legend(fontsize=8)
        figure.savefig(file, metadata={"Date": None})
    return f"drawn in {file}"
