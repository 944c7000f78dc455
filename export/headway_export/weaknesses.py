"""What a model is bad at, with examples, for its card: found while its metric is measured.

N examples, C classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import sacrebleu
from numpy.typing import NDArray

NUM_EXAMPLES = 5
MAX_CHARACTERS = 200
"""Of a text that is quoted."""


def of_classes(
    logits: NDArray[np.float32],
    labels: NDArray[np.int64],
    names: Sequence[str],
    texts: Sequence[str] = (),
) -> tuple[str, ...]:
    """The most frequent confusions, the class that is found least often, and the surest mistakes.

    Args:
        logits: (N, C), as they become probabilities by softmax.
        labels: (N,) the classes that are right.
        names: Of the classes.
        texts: What was classified; without them mistakes are given by their numbers.
    """
    predicted = logits.argmax(axis=-1)  # (N,)
    wrong = np.flatnonzero(predicted != labels)
    if len(wrong) == 0:
        return ()
    pairs = Counter(zip(labels[wrong].tolist(), predicted[wrong].tolist(), strict=True))
    most = pairs.most_common(NUM_EXAMPLES)
    confusions = (f"{names[right]} taken for {names[taken]} {count} times" for (right, taken), count in most)
    found = {name: predicted[labels == index] == index for index, name in enumerate(names)}
    recalls = {name: float(hits.mean()) for name, hits in found.items() if len(hits)}
    hardest = min(recalls, key=recalls.__getitem__)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    probabilities = np.exp(shifted.max(axis=-1)) / np.exp(shifted).sum(axis=-1)  # (N,), of the predicted class
    surest = wrong[np.argsort(-probabilities[wrong], kind="stable")][:NUM_EXAMPLES]
    lines = [
        f"Most frequent confusions: {'; '.join(confusions)}.",
        f"Found least often: {hardest}, {100 * recalls[hardest]:.1f} % of its examples.",
    ]
    for index in surest:
        what = quoted(texts[index]) if texts else f"example {index + 1}"
        lines.append(
            f"{what}: said to be {names[predicted[index]]} with probability {probabilities[index]:.2f}; "
            f"it is {names[labels[index]]}."
        )
    return tuple(lines)


def of_translations(sources: Sequence[str], translations: Sequence[str], references: Sequence[str]) -> tuple[str, ...]:
    """The worst translations by chrF (Popović 2015) of the sentence, sacreBLEU's defaults."""
    metric = sacrebleu.CHRF()
    pairs = zip(translations, references, strict=True)
    scores = [metric.sentence_score(translation, [reference]).score for translation, reference in pairs]
    worst = sorted(range(len(scores)), key=scores.__getitem__)[:NUM_EXAMPLES]
    return tuple(
        f"chrF {scores[index]:.1f}: {quoted(sources[index])} became {quoted(translations[index])}; "
        f"expected {quoted(references[index])}."
        for index in worst
    )


def of_stretches(stretches: Sequence[tuple[str, float]]) -> tuple[str, ...]:
    """The stretches of text that a model expects least.

    Args:
        stretches: Text and its negative log-likelihood in nats.
    """
    rates = [(nats / len(text), text) for text, nats in stretches if text]
    worst = sorted(rates, key=lambda pair: -pair[0])[:NUM_EXAMPLES]
    return tuple(f"{rate:.2f} nats per character: {quoted(text)}" for rate, text in worst)


def quoted(text: str) -> str:
    """A text on one line, in quotes, shortened where it is long, with nothing in it that Markdown reads."""
    line = " ".join(text.split())
    short = line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 1] + "…"
    for mark in "\\`*_[]<>|":
        short = short.replace(mark, "\\" + mark)
    return f"“{short}”"
