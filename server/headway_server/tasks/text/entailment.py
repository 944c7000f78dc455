"""Zero-shot classification by a model of natural language inference (Yin et al. 2019, arXiv 1909.00161).

A text is the premise, and a sentence made from each label its hypothesis. The entailment score is the label's score.

L labels of the caller, C labels of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Manifest
from headway_server.errors import InvalidInputError
from headway_server.field_rules import most_elements
from headway_server.serving.limits import check_count
from headway_server.tasks.outputs import softmax

MAX_LABELS: Final = most_elements("ClassifyTextRequest.candidate_labels")
DEFAULT_TEMPLATE: Final = "This example is {}."
_PLACEHOLDER: Final = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLabels:
    """Labels of a call."""

    labels: Sequence[str]
    """1 to `MAX_LABELS`."""
    template: str = ""
    """Hypothesis with `{}` for the label; empty: `DEFAULT_TEMPLATE`."""
    are_independent: bool = False
    """True: each label is scored independently, against contradiction. False: probabilities add up to 1."""

    def hypotheses(self) -> list[str]:
        """Returns the hypothesis of each label.

        Raises:
            InvalidInputError: There are too few or too many labels, one is empty, or the template has no `{}`.
        """
        check_count("candidate_labels", len(self.labels), MAX_LABELS, "leave out the least likely ones")
        template = self.template or DEFAULT_TEMPLATE
        if _PLACEHOLDER not in template:
            raise InvalidInputError(
                "hypothesis_template", f"is {template!r}; write {_PLACEHOLDER} where the label goes"
            )
        for index, label in enumerate(self.labels):
            if not label:
                raise InvalidInputError(f"candidate_labels[{index}]", "is empty; give at least one character")
        return [template.replace(_PLACEHOLDER, label) for label in self.labels]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entailment:
    """Indices of a model's labels of entailment and contradiction."""

    entails: int
    contradicts: int | None
    """None: the model has no such label."""

    @classmethod
    def of(cls, manifest: Manifest) -> Entailment | None:
        """Finds the labels by name; None for a model that reads no pairs or has no label `entailment`."""
        names = [label.lower() for label in manifest.labels]
        entails = next((index for index, name in enumerate(names) if name.startswith("entail")), None)
        if manifest.text_pairs == "never" or entails is None:
            return None
        against = next((index for index, name in enumerate(names) if name.startswith(("contra", "not"))), None)
        return cls(entails=entails, contradicts=against)

    def probabilities(self, logits: NDArray[np.float32], *, are_independent: bool) -> NDArray[np.float32]:
        """Returns a probability for each label, (L, C) -> (L,).

        Raises:
            InvalidInputError: The labels are independent, and the model has no label `contradiction`.
        """
        if not are_independent:
            return softmax(logits[:, self.entails])
        if self.contradicts is None:
            raise InvalidInputError(
                "independent_labels", "is set, and this model has no label for contradiction; leave it out"
            )
        return softmax(logits[:, [self.contradicts, self.entails]])[:, 1]
