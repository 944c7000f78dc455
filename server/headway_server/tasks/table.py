"""Table of tasks, of the abilities of their models, and of the ability each RPC needs.

All transports read it. Servicers and OpenAI's API find models by an `Ability`, health and Ray's placement by the name
of an RPC, and the Open Inference Protocol by the tensors of a family. Names of RPCs are those of the protocols;
transports define the meaning of their messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from headway_server.bundles import CHAT_TEMPLATE_FILE, Manifest, Precision, Task, TaskParts
from headway_server.serving.abilities import Ability, Effect, PairAbility, Rpc, Scope, space_of
from headway_server.serving.families import Family

if TYPE_CHECKING:  # families are imported with their first bundle
    from headway_server.tasks.captioning.model import CaptioningModel
    from headway_server.tasks.detection.model import ObjectDetector
    from headway_server.tasks.generation.model import GenerationModel
    from headway_server.tasks.image_generation.model import ImageGenerationModel
    from headway_server.tasks.images.classifier import ImageClassifier
    from headway_server.tasks.images.model import ImageModel
    from headway_server.tasks.mask_filling.model import MaskFiller
    from headway_server.tasks.pixels.model import DepthEstimator, PixelClassifier
    from headway_server.tasks.pixels.zero_shot import ZeroShotPixelClassifier
    from headway_server.tasks.question_answering.model import QuestionAnswerer
    from headway_server.tasks.segmentation.model import SegmentationModel
    from headway_server.tasks.sounds.classifier import AudioClassifier
    from headway_server.tasks.speech.transcripts import Transcriber
    from headway_server.tasks.synthesis.synthesizer import Synthesizer
    from headway_server.tasks.text.classifier import TextClassifier
    from headway_server.tasks.text.model import TextModel
    from headway_server.tasks.text.scorer import TextScorer
    from headway_server.tasks.text_to_text.model import TextToTextModel
    from headway_server.tasks.text_to_text.translation import TranslationModel
    from headway_server.tasks.tokens.classifier import TokenClassifier
    from headway_server.tasks.video.classifier import VideoClassifier


def _embeds(manifest: Manifest) -> bool:
    return manifest.embedding is not None and not manifest.embedding.is_sparse


def _embeds_sparsely(manifest: Manifest) -> bool:
    return manifest.embedding is not None and manifest.embedding.is_sparse


def _compares_tokens(manifest: Manifest) -> bool:
    return manifest.scoring is not None and manifest.scoring.late_interaction is not None


def _relates(manifest: Manifest) -> bool:
    """Returns True if a model computes the relevance of one text to another: by vectors, or as a pair."""
    return manifest.text_pairs != "never" if manifest.task is Task.TEXT_SCORING else manifest.embedding is not None


def _shows_attention(manifest: Manifest, precision: Precision) -> bool:
    return "attention" in manifest.variants[precision].graphs


def _shares_space(manifest: Manifest) -> bool:
    return bool(space_of(manifest))


def _reads_images(manifest: Manifest) -> bool:
    return manifest.task is not Task.GENERATION or manifest.image_prompt is not None


def _has_chat_template(manifest: Manifest) -> bool:
    return CHAT_TEMPLATE_FILE in manifest.files


def _translates_speech(manifest: Manifest) -> bool:
    return manifest.speech is not None and manifest.speech.translate is not None


def _times_speech(manifest: Manifest) -> bool:
    return manifest.ctc is not None or (manifest.speech is not None and manifest.speech.first_timestamp is not None)


GENERATE_TEXTS: Final[Ability[GenerationModel]] = Ability(name="generate_text", words="generate text")
CHAT: Final[Ability[GenerationModel]] = Ability(name="chat", words="continue conversations", needs=_has_chat_template)
TRANSLATE_TEXTS: Final[Ability[TranslationModel]] = Ability(name="translate_text", words="translate texts")
REWRITE_TEXTS: Final[Ability[TextToTextModel]] = Ability(name="rewrite_text", words="rewrite texts")
CAPTION_IMAGES: Final[Ability[CaptioningModel]] = Ability(name="caption_image", words="caption images")
TRANSCRIBE_SPEECH: Final[Ability[Transcriber]] = Ability(name="transcribe_speech", words="transcribe speech")
TRANSLATE_SPEECH: Final[Ability[Transcriber]] = Ability(
    name="translate_speech", words="translate speech", needs=_translates_speech
)
TIME_SPEECH: Final[Ability[Transcriber]] = Ability(
    name="time_speech", words="give times of speech segments", needs=_times_speech
)
SYNTHESIZE_SPEECH: Final[Ability[Synthesizer]] = Ability(name="synthesize_speech", words="synthesize speech")
GENERATE_IMAGES: Final[Ability[ImageGenerationModel]] = Ability(name="generate_image", words="generate images")
SEGMENT_IMAGES: Final[Ability[SegmentationModel]] = Ability(name="segment_image", words="segment images")
CLASSIFY_TEXTS: Final[Ability[TextClassifier]] = Ability(name="classify_text", words="classify texts")
CLASSIFY_TOKENS: Final[Ability[TokenClassifier]] = Ability(
    name="classify_tokens", words="classify tokens of texts", needs=lambda manifest: manifest.word_boxes is None
)
CLASSIFY_PAGES: Final[Ability[TokenClassifier]] = Ability(
    name="classify_pages",
    words="classify words with their boxes, which `pages` has",
    needs=lambda manifest: manifest.word_boxes is not None,
)
CLASSIFY_IMAGES: Final[Ability[ImageClassifier]] = Ability(name="classify_image", words="classify images")
CLASSIFY_AUDIOS: Final[Ability[AudioClassifier]] = Ability(name="classify_audio", words="classify audio")
CLASSIFY_VIDEOS: Final[Ability[VideoClassifier]] = Ability(name="classify_video", words="classify videos")
DETECT_OBJECTS: Final[Ability[ObjectDetector]] = Ability(name="detect_object", words="find objects in images")
CLASSIFY_PIXELS: Final[Ability[PixelClassifier | ZeroShotPixelClassifier]] = Ability(
    name="classify_pixels", words="classify pixels of images"
)
ESTIMATE_DEPTH: Final[Ability[DepthEstimator]] = Ability(name="estimate_depth", words="estimate depth in images")
SCORE_TEXTS: Final[Ability[TextScorer]] = Ability(name="score_text", words="score texts")
ANSWER_QUESTIONS: Final[Ability[QuestionAnswerer]] = Ability(
    name="answer_question", words="find answers to questions in texts"
)
FILL_MASKS: Final[Ability[MaskFiller]] = Ability(name="fill_mask", words="fill masks of texts")
EMBED_TEXTS: Final[Ability[TextModel]] = Ability(name="embed_text", words="embed texts", needs=_embeds)
EMBED_TEXTS_SPARSELY: Final[Ability[TextModel]] = Ability(
    name="embed_text_sparsely", words="embed texts as sparse vectors", needs=_embeds_sparsely
)
EMBED_TOKENS: Final[Ability[TextScorer]] = Ability(
    name="embed_text_multi_vector", words="embed texts as a vector of each token", needs=_compares_tokens
)
RANK_TEXTS: Final[Ability[TextModel]] = Ability(name="rank_text", words="rank texts by a text", needs=_relates)
EMBED_IMAGES: Final[Ability[ImageClassifier]] = Ability(name="embed_image", words="embed images", needs=_embeds)
LABEL_IMAGES: Final[PairAbility[ImageClassifier, TextModel]] = PairAbility(
    name="label_image",
    words="classify images by the caller's labels",
    needs=_shares_space,
    partner=EMBED_TEXTS,
)
RANK_IMAGES_BY_TEXT: Final[PairAbility[ImageClassifier, TextModel]] = PairAbility(
    name="rank_images_by_text", words="rank images by a text", needs=_shares_space, partner=EMBED_TEXTS
)
RANK_TEXTS_BY_IMAGE: Final[PairAbility[TextModel, ImageClassifier]] = PairAbility(
    name="rank_texts_by_image", words="rank texts by an image", needs=_shares_space, partner=EMBED_IMAGES
)
INSPECT_TEXTS: Final[Ability[TextModel]] = Ability(
    name="inspect_text", words="show attention in an input text", prefers=_shows_attention
)
INSPECT_IMAGES: Final[Ability[ImageClassifier]] = Ability(
    name="inspect_image", words="show attention in an image", prefers=_shows_attention
)
INSPECT_GENERATION: Final[Ability[GenerationModel]] = Ability(
    name="inspect_generation", words="show attention in a prompt", prefers=_shows_attention
)
INSPECT_TRANSLATION: Final[Ability[TranslationModel]] = Ability(
    name="inspect_translation", words="show attention in a translation", prefers=_shows_attention
)
PREPARE_IMAGES: Final[Ability[ImageModel | GenerationModel]] = Ability(
    name="prepare_image", words="prepare images for calls that name them by id", needs=_reads_images
)
READ_IMAGES: Final[Ability[object]] = Ability(name="read_image", words="read images", needs=_reads_images)


_TENSORS = "headway_server.services.open_inference.tasks:"
FAMILIES: Final[dict[Task, Family]] = {
    Task.GENERATION: Family(
        loader="headway_server.tasks.generation.model:GenerationModel.load",
        made_for=(GENERATE_TEXTS, CHAT, INSPECT_GENERATION),
        can=(PREPARE_IMAGES, READ_IMAGES),
        tensors=_TENSORS + "GENERATION",
    ),
    Task.TRANSLATION: Family(
        loader="headway_server.tasks.text_to_text.translation:TranslationModel.load",
        made_for=(TRANSLATE_TEXTS, INSPECT_TRANSLATION),
        tensors=_TENSORS + "TRANSLATION",
    ),
    Task.TEXT_TO_TEXT: Family(
        loader="headway_server.tasks.text_to_text.model:TextToTextModel.load",
        made_for=(REWRITE_TEXTS,),
        tensors=_TENSORS + "TEXT_TO_TEXT",
    ),
    Task.TEXT_CLASSIFICATION: Family(
        loader="headway_server.tasks.text.classifier:TextClassifier.load",
        made_for=(CLASSIFY_TEXTS,),
        can=(EMBED_TEXTS, RANK_TEXTS, INSPECT_TEXTS),
        tensors=_TENSORS + "TEXT_CLASSIFICATION",
    ),
    Task.TOKEN_CLASSIFICATION: Family(
        loader="headway_server.tasks.tokens.classifier:TokenClassifier.load",
        made_for=(CLASSIFY_TOKENS, CLASSIFY_PAGES),
        can=(EMBED_TEXTS, RANK_TEXTS, INSPECT_TEXTS),
        tensors=_TENSORS + "TOKEN_CLASSIFICATION",
    ),
    Task.TEXT_SCORING: Family(  # before embedders: a cross-encoder ranks better
        loader="headway_server.tasks.text.scorer:TextScorer.load",
        made_for=(SCORE_TEXTS, RANK_TEXTS, EMBED_TOKENS),
        can=(INSPECT_TEXTS,),
        tensors=_TENSORS + "TEXT_SCORING",
    ),
    Task.TEXT_EMBEDDING: Family(
        loader="headway_server.tasks.text.model:TextModel.load",
        made_for=(EMBED_TEXTS, EMBED_TEXTS_SPARSELY, RANK_TEXTS),
        can=(RANK_TEXTS_BY_IMAGE, INSPECT_TEXTS),
        tensors=_TENSORS + "TEXT_EMBEDDING",
    ),
    Task.QUESTION_ANSWERING: Family(
        loader="headway_server.tasks.question_answering.model:QuestionAnswerer.load",
        made_for=(ANSWER_QUESTIONS,),
        tensors=_TENSORS + "QUESTION_ANSWERING",
    ),
    Task.FILL_MASK: Family(
        loader="headway_server.tasks.mask_filling.model:MaskFiller.load",
        made_for=(FILL_MASKS,),
        tensors=_TENSORS + "FILL_MASK",
    ),
    Task.IMAGE_CLASSIFICATION: Family(
        loader="headway_server.tasks.images.classifier:ImageClassifier.load",
        made_for=(CLASSIFY_IMAGES,),
        can=(EMBED_IMAGES, INSPECT_IMAGES, PREPARE_IMAGES, READ_IMAGES),
        tensors=_TENSORS + "IMAGE_CLASSIFICATION",
    ),
    Task.OBJECT_DETECTION: Family(
        loader="headway_server.tasks.detection:load_detector",
        made_for=(DETECT_OBJECTS,),
        can=(PREPARE_IMAGES, READ_IMAGES),
        tensors=_TENSORS + "OBJECT_DETECTION",
    ),
    Task.SEMANTIC_SEGMENTATION: Family(
        loader="headway_server.tasks.pixels:load_pixel_classifier",
        made_for=(CLASSIFY_PIXELS,),
        can=(PREPARE_IMAGES, READ_IMAGES),
        tensors=_TENSORS + "SEMANTIC_SEGMENTATION",
    ),
    Task.DEPTH_ESTIMATION: Family(
        loader="headway_server.tasks.pixels.model:DepthEstimator.load",
        made_for=(ESTIMATE_DEPTH,),
        can=(PREPARE_IMAGES, READ_IMAGES),
        tensors=_TENSORS + "DEPTH_ESTIMATION",
    ),
    Task.IMAGE_EMBEDDING: Family(
        loader="headway_server.tasks.images.classifier:ImageClassifier.load",
        made_for=(EMBED_IMAGES,),
        can=(LABEL_IMAGES, RANK_IMAGES_BY_TEXT, INSPECT_IMAGES, PREPARE_IMAGES, READ_IMAGES),
        tensors=_TENSORS + "IMAGE_EMBEDDING",
    ),
    Task.SEGMENTATION: Family(
        loader="headway_server.tasks.segmentation.model:SegmentationModel.load",
        made_for=(SEGMENT_IMAGES,),
        can=(PREPARE_IMAGES, READ_IMAGES),
        tensors=_TENSORS + "SEGMENTATION",
    ),
    Task.CAPTIONING: Family(
        loader="headway_server.tasks.captioning.model:CaptioningModel.load",
        made_for=(CAPTION_IMAGES,),
        can=(READ_IMAGES,),
        tensors=_TENSORS + "CAPTIONING",
    ),
    Task.IMAGE_GENERATION: Family(
        loader="headway_server.tasks.image_generation.model:ImageGenerationModel.load",
        made_for=(GENERATE_IMAGES,),
        can=(READ_IMAGES,),
        tensors=_TENSORS + "IMAGE_GENERATION",
    ),
    Task.TRANSCRIPTION: Family(
        loader="headway_server.tasks.speech.model:SpeechModel.load",
        made_for=(TRANSCRIBE_SPEECH, TRANSLATE_SPEECH, TIME_SPEECH),
        tensors=_TENSORS + "TRANSCRIPTION",
    ),
    Task.CTC_TRANSCRIPTION: Family(
        loader="headway_server.tasks.speech.ctc:CtcModel.load",
        made_for=(TRANSCRIBE_SPEECH, TIME_SPEECH),
        tensors=_TENSORS + "TRANSCRIPTION",
    ),
    Task.AUDIO_CLASSIFICATION: Family(
        loader="headway_server.tasks.sounds.classifier:AudioClassifier.load",
        made_for=(CLASSIFY_AUDIOS,),
        tensors=_TENSORS + "AUDIO_CLASSIFICATION",
    ),
    Task.VIDEO_CLASSIFICATION: Family(
        loader="headway_server.tasks.video.classifier:VideoClassifier.load",
        made_for=(CLASSIFY_VIDEOS,),
        tensors=_TENSORS + "VIDEO_CLASSIFICATION",
    ),
    Task.SPEECH_SYNTHESIS: Family(
        loader="headway_server.tasks.synthesis.model:SynthesisModel.load",
        made_for=(SYNTHESIZE_SPEECH,),
        tensors=_TENSORS + "SPEECH_SYNTHESIS",
    ),
    Task.FLOW_SYNTHESIS: Family(
        loader="headway_server.tasks.synthesis.flow:FlowModel.load",
        made_for=(SYNTHESIZE_SPEECH,),
        tensors=_TENSORS + "SPEECH_SYNTHESIS",
    ),
    Task.STAGED_SYNTHESIS: Family(
        loader="headway_server.tasks.synthesis.staged:StagedModel.load",
        made_for=(SYNTHESIZE_SPEECH,),
        tensors=_TENSORS + "SPEECH_SYNTHESIS",
    ),
    Task.SPECTROGRAM_SYNTHESIS: Family(
        loader="headway_server.tasks.synthesis.spectrogram:SpectrogramModel.load",
        made_for=(SYNTHESIZE_SPEECH,),
        tensors=_TENSORS + "SPEECH_SYNTHESIS",
    ),
    Task.DELAYED_SYNTHESIS: Family(
        loader="headway_server.tasks.synthesis.delayed:DelayedModel.load",
        made_for=(SYNTHESIZE_SPEECH,),
        tensors=_TENSORS + "SPEECH_SYNTHESIS",
    ),
    Task.TENSORS: Family(  # no ability: tensors are how models of every task are called, by name
        loader="headway_server.tasks.tensors.model:TensorModel.load",
        tensors=_TENSORS + "TENSORS",
    ),
}
"""Families by task, in the order of preference for calls that name no model."""


def add_task(name: str, parts: TaskParts, family: Family) -> Task:
    """Adds a task from outside headway, before the server starts.

    Args:
        name: Name in manifests: lower case with underscores.
        parts: Required parts of its bundles.
        family: Its serving. With abilities of this table, its models answer the RPCs of these abilities.
    """
    task = Task.add(name, parts)
    FAMILIES[task] = family
    return task


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
    "ClassifyTokens": Rpc(asked=CLASSIFY_TOKENS, with_field={"pages": CLASSIFY_PAGES}),
    "EmbedText": Rpc(asked=EMBED_TEXTS, with_field={"sparse": EMBED_TEXTS_SPARSELY, "multi_vector": EMBED_TOKENS}),
    "ScoreText": Rpc(asked=SCORE_TEXTS),
    "AnswerQuestion": Rpc(asked=ANSWER_QUESTIONS),
    "FillMask": Rpc(asked=FILL_MASKS),
    "ClassifyImage": Rpc(asked=CLASSIFY_IMAGES, with_field={"candidate_labels": LABEL_IMAGES}),
    "ClassifyAudio": Rpc(asked=CLASSIFY_AUDIOS),
    "ClassifyVideo": Rpc(asked=CLASSIFY_VIDEOS),
    "DetectObjects": Rpc(asked=DETECT_OBJECTS),
    "ClassifyPixels": Rpc(asked=CLASSIFY_PIXELS),
    "EstimateDepth": Rpc(asked=ESTIMATE_DEPTH),
    "EmbedImage": Rpc(asked=EMBED_IMAGES),
    "GenerateImage": Rpc(asked=GENERATE_IMAGES),
    "StreamGenerateImage": Rpc(asked=GENERATE_IMAGES),
    "SegmentImage": Rpc(asked=SEGMENT_IMAGES),
    "SegmentEverything": Rpc(asked=SEGMENT_IMAGES),
    "SegmentInteractively": Rpc(asked=SEGMENT_IMAGES),
    "RankImages": Rpc(asked=EMBED_IMAGES, with_field={"query_text": RANK_IMAGES_BY_TEXT}),
    "RankTexts": Rpc(
        asked=RANK_TEXTS, with_field={"query_image": RANK_TEXTS_BY_IMAGE, "query_image_id": RANK_TEXTS_BY_IMAGE}
    ),
    "InspectText": Rpc(asked=INSPECT_TEXTS),
    "InspectImage": Rpc(asked=INSPECT_IMAGES),
    "InspectGeneration": Rpc(asked=INSPECT_GENERATION),
    "InspectTranslation": Rpc(asked=INSPECT_TRANSLATION),
    "PrepareImage": Rpc(asked=READ_IMAGES, with_field={"model": PREPARE_IMAGES}),
    "ListModels": Rpc(asked=Scope.SERVER, effect=Effect.LOOKS, is_of_all=True),
    "GetModel": Rpc(asked=Scope.NAMED, effect=Effect.LOOKS),
    "ListBundles": Rpc(asked=Scope.SERVER, effect=Effect.LOOKS, is_of_all=True),
    **{
        name: Rpc(asked=Scope.SERVER, effect=Effect.CHANGES)
        for name in ("LoadModel", "UnloadModel", "ScanStore", "SetRoute", "SetAlias")
    },
    # The Open Inference Protocol
    **{name: Rpc(asked=Scope.SERVER, effect=Effect.LOOKS) for name in ("ServerLive", "ServerReady", "ServerMetadata")},
    "ModelReady": Rpc(asked=Scope.PROBED, effect=Effect.LOOKS),
    "ModelMetadata": Rpc(asked=Scope.NAMED, effect=Effect.LOOKS),
    "ModelConfig": Rpc(asked=Scope.NAMED, effect=Effect.LOOKS),
    "ModelInfer": Rpc(asked=Scope.NAMED),
    "ModelStreamInfer": Rpc(asked=Scope.NAMED),
    "ModelStatistics": Rpc(asked=Scope.SERVER, effect=Effect.LOOKS, is_of_all=True, with_field={"name": Scope.NAMED}),
    "RepositoryIndex": Rpc(asked=Scope.SERVER, effect=Effect.LOOKS, is_of_all=True),
    **{
        name: Rpc(asked=Scope.SERVER, effect=Effect.CHANGES)
        for name in ("RepositoryModelLoad", "RepositoryModelUnload")
    },
}
"""Abilities by the name of the RPC without its service; names are unique across services."""
