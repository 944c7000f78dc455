"""What models can do for calls, and which RPC asks for what: the one table of each.

Every door reads them: servicers and OpenAI's API find models by an `Ability`, health and Ray's placement by the name of
an RPC. The names are those of the protocols; what their messages mean is the transports' part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, TypeAlias

from headway_server.bundles import Manifest, Precision, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """Something that calls ask of a model."""

    words: str
    """For messages, such as "embed texts"."""
    tasks: tuple[Task, ...]
    """What models that have it were made for. A call that names no model takes one of the first task that is there."""
    needs: Callable[[Manifest], object] = lambda _: True
    """What the manifest must have beside its task."""
    prefers: Callable[[Manifest, Precision], object] = lambda *_: True
    """What a bundle must have in a precision to be taken by a call that names no model."""
    partner: Task | None = None
    """Task of a second model in the same space, which such calls need too."""

    def covers(self, manifest: Manifest) -> bool:
        """Returns True if a model has the ability, given its partner."""
        return manifest.task in self.tasks and bool(self.needs(manifest))


def _embeds(manifest: Manifest) -> bool:
    return manifest.embedding is not None


def _shows_attention(manifest: Manifest, precision: Precision) -> bool:
    return "attention" in manifest.variants[precision].graphs


def _shares_space(manifest: Manifest) -> bool:
    return bool(space_of(manifest))


def space_of(manifest: Manifest) -> str:
    """Returns the name of the space in which a model's vectors can be compared with another's; empty: none."""
    return manifest.embedding.space.name if manifest.embedding and manifest.embedding.space else ""


GENERATE_TEXTS: Final = Ability(words="generate text", tasks=(Task.GENERATION,))
TRANSLATE_TEXTS: Final = Ability(words="translate texts", tasks=(Task.TRANSLATION,))
REWRITE_TEXTS: Final = Ability(words="rewrite texts", tasks=(Task.TEXT_TO_TEXT,))
CAPTION_IMAGES: Final = Ability(words="caption images", tasks=(Task.CAPTIONING,))
TRANSCRIBE_SPEECH: Final = Ability(words="transcribe speech", tasks=(Task.TRANSCRIPTION,))
SYNTHESIZE_SPEECH: Final = Ability(words="synthesize speech", tasks=(Task.SPEECH_SYNTHESIS,))
GENERATE_IMAGES: Final = Ability(words="generate images", tasks=(Task.IMAGE_GENERATION,))
SEGMENT_IMAGES: Final = Ability(words="segment images", tasks=(Task.SEGMENTATION,))
CLASSIFY_TEXTS: Final = Ability(words="classify texts", tasks=(Task.TEXT_CLASSIFICATION,))
CLASSIFY_TOKENS: Final = Ability(words="classify tokens", tasks=(Task.TOKEN_CLASSIFICATION,))
CLASSIFY_IMAGES: Final = Ability(words="classify images", tasks=(Task.IMAGE_CLASSIFICATION,))
SCORE_TEXTS: Final = Ability(words="score texts", tasks=(Task.TEXT_SCORING,))
EMBED_TEXTS: Final = Ability(
    words="embed texts",
    tasks=(Task.TEXT_EMBEDDING, Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION),
    needs=_embeds,
)
EMBED_IMAGES: Final = Ability(
    words="embed images", tasks=(Task.IMAGE_EMBEDDING, Task.IMAGE_CLASSIFICATION), needs=_embeds
)
LABEL_IMAGES: Final = Ability(
    words="label images with labels of the caller's",
    tasks=(Task.IMAGE_EMBEDDING,),
    needs=_shares_space,
    partner=Task.TEXT_EMBEDDING,
)
RANK_IMAGES_BY_TEXT: Final = Ability(
    words="rank images by a text", tasks=(Task.IMAGE_EMBEDDING,), needs=_shares_space, partner=Task.TEXT_EMBEDDING
)
RANK_TEXTS_BY_IMAGE: Final = Ability(
    words="rank texts by an image", tasks=(Task.TEXT_EMBEDDING,), needs=_shares_space, partner=Task.IMAGE_EMBEDDING
)
INSPECT_TEXTS: Final = Ability(
    words="show what it attends to in a text that it reads",
    tasks=(Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.TEXT_EMBEDDING, Task.TEXT_SCORING),
    prefers=_shows_attention,
)
INSPECT_IMAGES: Final = Ability(
    words="show what it attends to in an image",
    tasks=(Task.IMAGE_CLASSIFICATION, Task.IMAGE_EMBEDDING),
    prefers=_shows_attention,
)
INSPECT_GENERATION: Final = Ability(
    words="show what it attends to in a text that it continues", tasks=(Task.GENERATION,), prefers=_shows_attention
)
INSPECT_TRANSLATION: Final = Ability(
    words="show what it attends to in a translation", tasks=(Task.TRANSLATION,), prefers=_shows_attention
)
KEEP_IMAGES: Final = Ability(
    words="read an image ahead of the calls that name it",
    tasks=(Task.IMAGE_CLASSIFICATION, Task.IMAGE_EMBEDDING, Task.SEGMENTATION),
)
READ_IMAGES: Final = Ability(words="read images", tasks=(*KEEP_IMAGES.tasks, Task.CAPTIONING, Task.IMAGE_GENERATION))


class Scope(Enum):
    """What an RPC is about that asks for no ability."""

    NAMED = auto()
    """The model that it names, whatever that can do."""
    PROBED = auto()
    """The same, and an answer where there is no such model."""
    SERVER = auto()
    """The server, or all its models."""


Asked: TypeAlias = Ability | Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpc:
    """What the calls of an RPC ask for."""

    asked: Asked
    with_field: Mapping[str, Asked] = field(default_factory=dict)
    """What requests ask for that set one of these fields."""
    is_of_all: bool = False
    """True if `asked` is about the models of all processes, where they are in several: their answers are joined."""

    def asked_by(self, value_of: Callable[[str], object]) -> Asked:
        """Returns what a request asks for.

        Args:
            value_of: Returns the value of a field of the request; something false where it is not set.
        """
        return next((asked for name, asked in self.with_field.items() if value_of(name)), self.asked)

    @property
    def abilities(self) -> Iterator[Ability]:
        """All abilities that a request may ask for."""
        return (asked for asked in (self.asked, *self.with_field.values()) if isinstance(asked, Ability))


RPCS: Final[Mapping[str, Rpc]] = {
    "GenerateText": Rpc(asked=GENERATE_TEXTS),
    "StreamGenerateText": Rpc(asked=GENERATE_TEXTS),
    "TranslateText": Rpc(asked=TRANSLATE_TEXTS),
    "StreamTranslateText": Rpc(asked=TRANSLATE_TEXTS),
    "RewriteText": Rpc(asked=REWRITE_TEXTS),
    "StreamRewriteText": Rpc(asked=REWRITE_TEXTS),
    "CaptionImage": Rpc(asked=CAPTION_IMAGES),
    "StreamCaptionImage": Rpc(asked=CAPTION_IMAGES),
    "TranscribeSpeech": Rpc(asked=TRANSCRIBE_SPEECH),
    "StreamTranscribeSpeech": Rpc(asked=TRANSCRIBE_SPEECH),
    "SynthesizeSpeech": Rpc(asked=SYNTHESIZE_SPEECH),
    "StreamSynthesizeSpeech": Rpc(asked=SYNTHESIZE_SPEECH),
    "ClassifyText": Rpc(asked=CLASSIFY_TEXTS),
    "ClassifyTokens": Rpc(asked=CLASSIFY_TOKENS),
    "EmbedText": Rpc(asked=EMBED_TEXTS),
    "ScoreText": Rpc(asked=SCORE_TEXTS),
    "ClassifyImage": Rpc(asked=CLASSIFY_IMAGES, with_field={"candidate_labels": LABEL_IMAGES}),
    "EmbedImage": Rpc(asked=EMBED_IMAGES),
    "GenerateImage": Rpc(asked=GENERATE_IMAGES),
    "StreamGenerateImage": Rpc(asked=GENERATE_IMAGES),
    "SegmentImage": Rpc(asked=SEGMENT_IMAGES),
    "SegmentEverything": Rpc(asked=SEGMENT_IMAGES),
    "SegmentInteractively": Rpc(asked=SEGMENT_IMAGES),
    "RankImages": Rpc(asked=EMBED_IMAGES, with_field={"query_text": RANK_IMAGES_BY_TEXT}),
    "RankTexts": Rpc(
        asked=EMBED_TEXTS, with_field={"query_image": RANK_TEXTS_BY_IMAGE, "query_image_id": RANK_TEXTS_BY_IMAGE}
    ),
    "InspectText": Rpc(asked=INSPECT_TEXTS),
    "InspectImage": Rpc(asked=INSPECT_IMAGES),
    "InspectGeneration": Rpc(asked=INSPECT_GENERATION),
    "InspectTranslation": Rpc(asked=INSPECT_TRANSLATION),
    "PrepareImage": Rpc(asked=READ_IMAGES, with_field={"model": KEEP_IMAGES}),
    "ListModels": Rpc(asked=Scope.SERVER, is_of_all=True),
    "GetModel": Rpc(asked=Scope.NAMED),
    "ListBundles": Rpc(asked=Scope.SERVER, is_of_all=True),
    **{name: Rpc(asked=Scope.SERVER) for name in ("LoadModel", "UnloadModel", "ScanStore", "SetRoute", "SetAlias")},
    # The Open Inference Protocol
    **{
        name: Rpc(asked=Scope.SERVER)
        for name in ("ServerLive", "ServerReady", "ServerMetadata", "RepositoryModelLoad", "RepositoryModelUnload")
    },
    "ModelReady": Rpc(asked=Scope.PROBED),
    **{name: Rpc(asked=Scope.NAMED) for name in ("ModelMetadata", "ModelConfig", "ModelInfer", "ModelStreamInfer")},
    "ModelStatistics": Rpc(asked=Scope.SERVER, is_of_all=True, with_field={"name": Scope.NAMED}),
    "RepositoryIndex": Rpc(asked=Scope.SERVER, is_of_all=True),
}
"""By the name of the RPC, without its service: no two services have one in common."""
