"""DINO: an image encoder that learns without labels, from a moving average of itself (Caron et al. 2021).

B images, V views of an image (G global ones first), I image size, D model width, K prototypes.

The student reads all views of an image, the teacher the global ones, and the student learns to say of each view what
the teacher says of another. The teacher is never trained: it is the moving average of the student. Its outputs are
centred, which keeps one prototype from being the answer to every image, and sharpened, which keeps all prototypes from
being equally likely.

Deviations from the paper: the weight decay is constant; the student drops no layers; prototypes have length one, and
the head starts from weights that keep the size of its inputs.
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)
from torch.optim.swa_utils import get_ema_multi_avg_fn

from headway_training.models.base import AttentionKind, Model
from headway_training.models.configuration import Configuration
from headway_training.models.parts.initialisation import initialise_truncated_normal
from headway_training.models.vit import ImageEmbedder
from headway_training.processes import sum_over_processes

NUM_GLOBAL_VIEWS = 2
"""G: views of most of an image, which the teacher reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DINOConfig(Configuration):
    """Shape of the projection head, and how student and teacher are compared.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    d_hidden: int
    """Width of the head's two hidden layers."""
    d_bottleneck: int
    """Width of the vector of length one that the prototypes are compared with."""
    num_prototypes: int
    """Outputs of the head."""
    student_temperature: float
    """Divides the student's outputs before the softmax."""
    teacher_temperature: float
    """Divides the teacher's, at the end of its warm-up: the lower, the sharper."""
    centre_momentum: float
    """Share of the centre that a step leaves as it was."""

    def __post_init__(self) -> None:
        self._check_integers("d_hidden", "d_bottleneck", "num_prototypes")
        self._check_share("centre_momentum")
        for name in ("student_temperature", "teacher_temperature"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, and is {value!r}")


class ProjectionHead(nn.Module):
    """Three layers, a bottleneck of length one, and the cosines with the prototypes (section 3.1 and appendix C).

    Args:
        d_model: D.
        configuration: of the head.
    """

    def __init__(self, d_model: int, configuration: DINOConfig) -> None:
        super().__init__()
        widths = (d_model, configuration.d_hidden, configuration.d_hidden)
        hidden: list[nn.Module] = []
        for width, following in pairwise(widths):
            hidden += [nn.Linear(width, following), nn.GELU()]
        self.projection = nn.Sequential(*hidden, nn.Linear(configuration.d_hidden, configuration.d_bottleneck))
        self.prototypes = nn.Linear(configuration.d_bottleneck, configuration.num_prototypes, bias=False)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                initialise_truncated_normal(layer, std=layer.in_features**-0.5)

    def forward(self, embeddings: Tensor, *, learns_prototypes: bool = True) -> Tensor:
        """Float (..., D) -> (..., K), -1 to 1; without `learns_prototypes` their gradient is zero."""
        weight = self.prototypes.weight
        # The same numbers, of which the gradient is all or nothing; data parallelism wants one of every weight.
        weight = torch.lerp(weight.detach(), weight, float(learns_prototypes))
        points = self.projection(embeddings).float()
        with _without_autocast(points.device.type):  # temperatures divide what bf16 would round
            return F.linear(F.normalize(points, dim=-1), F.normalize(weight.float(), dim=-1))


class Branch(nn.Module):
    """An encoder and its head: the student, or the teacher."""

    def __init__(self, encoder: ImageEmbedder, head: ProjectionHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head


class DINO(Model):
    """A student and its teacher, of which the teacher's encoder is what training is for.

    The teacher's weights are buffers: they are kept with the model and resumed, and no optimizer has them.

    Args:
        encoder: The student's; the teacher begins as a copy of it.
        configuration: of the head and of the comparison.
    """

    centre: Tensor

    def __init__(self, encoder: ImageEmbedder, configuration: DINOConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.student = Branch(encoder, ProjectionHead(encoder.configuration.d_model, configuration))
        self.teacher = _with_buffers(copy.deepcopy(self.student))
        self.register_buffer("centre", torch.zeros(configuration.num_prototypes))
        self.temperature = configuration.teacher_temperature
        """What divides the teacher's outputs in this step."""
        self.learns_prototypes = True
        """Whether the last layer is trained in this step."""
        self._outputs: Tensor | None = None  # of this step, (K + 1): the teacher's summed, and their number

    @property
    def embedder(self) -> ImageEmbedder:
        """The teacher's encoder."""
        return self.teacher.encoder

    def use_attention(self, kind: AttentionKind) -> Self:
        """Chooses the kernel of both encoders, as `Model.use_attention` does."""
        self.student.encoder.use_attention(kind)
        self.teacher.encoder.use_attention(kind)
        return super().use_attention(kind)

    def begin_step(self, *, temperature: float, learns_prototypes: bool) -> None:
        """Sets what the coming step computes with, and forgets outputs that no step has used."""
        self.temperature, self.learns_prototypes = temperature, learns_prototypes
        self._outputs = None

    def forward(self, global_views: Tensor, local_views: Tensor, counted: Tensor | None = None) -> Tensor:
        """The loss of each image (equation 3), the mean over pairs of a global view and another one.

        Args:
            global_views: float (B, G, 3, I, I), normalised.
            local_views: float (B, V - G, 3, J, J), J a multiple of the patch size.
            counted: bool (B,), the images that the centre is to learn of; None: all.

        Returns:
            float (B).
        """
        first = global_views.transpose(0, 1).flatten(0, 1)  # (G B, 3, I, I)
        with torch.no_grad():
            taught = self.teacher.head(self.teacher.encoder.pooled(first))  # (G B, K)
        embeddings = self.student.encoder.pooled(first)  # (G B, D)
        if local_views.shape[1]:
            others = local_views.transpose(0, 1).flatten(0, 1)  # ((V - G) B, 3, J, J)
            embeddings = torch.cat((embeddings, self.student.encoder.pooled(others, interpolate=True)))
        found = self.student.head(embeddings, learns_prototypes=self.learns_prototypes)  # (V B, K)
        rows, count = global_views.shape[:2]
        self._note(taught, torch.ones(rows, device=taught.device) if counted is None else counted.float())
        targets = self._probabilities(taught, self.temperature).reshape(count, rows, -1)  # (G, B, K)
        logs = F.log_softmax(found / self.configuration.student_temperature, dim=-1)
        logs = logs.reshape(-1, rows, logs.shape[-1])  # (V, B, K)
        others_of_each = logs.sum(dim=0) - logs[:count]  # (G, B, K)
        num_pairs = count * (logs.shape[0] - 1)
        return -(targets * others_of_each).sum(dim=(0, 2)) / num_pairs

    @torch.no_grad()
    def end_step(self, *, momentum: float) -> None:
        """Moves the teacher towards the student by 1 - `momentum`, and the centre towards the step's mean output."""
        averages = dict(self.teacher.named_buffers())
        weights = dict(self.student.named_parameters())
        move = get_ema_multi_avg_fn(momentum)  # type: ignore[no-untyped-call] # torch's
        move([averages[name] for name in weights], list(weights.values()), 0)
        if self._outputs is None:
            return
        outputs = sum_over_processes(self._outputs)
        self.centre.lerp_(outputs[:-1] / outputs[-1], 1 - self.configuration.centre_momentum)
        self._outputs = None

    @torch.no_grad()
    def spread(self, embeddings: Tensor) -> tuple[float, float]:
        """How sharp the teacher's outputs are, and how much they tell of images.

        Args:
            embeddings: The teacher encoder's of N images, (N, D).

        Returns:
            The mean entropy of an output, in nats, log K at most; and what is lacking from it to the entropy of the
            mean output, which is the information that an output has of its image. The information is 0 in both kinds of
            collapse: where all images have the same output, and where all outputs are uniform.
        """
        outputs = self.teacher.head(embeddings.to(self.centre.device))
        probabilities = self._probabilities(outputs, self.configuration.teacher_temperature)
        entropy = _entropy(probabilities).mean()
        return float(entropy), float(_entropy(probabilities.mean(dim=0)) - entropy)

    def _probabilities(self, outputs: Tensor, temperature: float) -> Tensor:
        return F.softmax((outputs - self.centre) / temperature, dim=-1)

    def _note(self, outputs: Tensor, counted: Tensor) -> None:
        """Adds outputs of the teacher, (G B, K), to those that the centre moves towards; `counted` is 0 or 1, (B)."""
        weights = counted.repeat(NUM_GLOBAL_VIEWS)
        weighted = outputs * weights[:, None]
        found = torch.cat((weighted.sum(dim=0), weights.sum(dim=0, keepdim=True)))
        self._outputs = found if self._outputs is None else self._outputs + found


def cosine_momentum(start: float, step: int, num_steps: int) -> float:
    """The teacher's momentum of step `step` of `num_steps`, counted from 0: from `start` to 1 like half a cosine."""
    return 1 - (1 - start) * (1 + math.cos(math.pi * step / max(1, num_steps))) / 2


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Switches it off where there is any: the `meta` device, on which models are counted, has none."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _entropy(probabilities: Tensor) -> Tensor:
    """(..., K) -> (...), in nats."""
    entropy: Tensor = torch.special.entr(probabilities).sum(dim=-1)
    return entropy


def _with_buffers(branch: Branch) -> Branch:
    """Turns every weight into a buffer."""
    for module in branch.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, weight.detach())
    return branch
