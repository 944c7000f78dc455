"""Families of `transformers` in one table: which are exported, as what, and which are refused and why.

docs/huggingface.md shows these rows (`models_table`, `refusals_table`, `behind_table`), and `check_family` refuses by
them. A family that is in no row is exported if it passes its checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headway_export.errors import SourceError
from headway_export.source import checkpoint_beside
from headway_server.bundles import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """Families that the tests export, or hold against `transformers`."""

    kind: str
    names: str
    task: str
    compared: str
    """What is compared with `transformers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Families that are refused."""

    names: tuple[str, ...]
    says: str
    """Words of the sentence that they are refused with."""
    why: str
    model_types: tuple[str, ...] = ()
    """Those that are refused by name, before anything else is looked at; none: what the configuration says decides."""
    tasks: tuple[Task, ...] = (Task.GENERATION,)
    """Tasks that they are refused for."""
    is_trained_without: bool = False
    """True if headway-train trains them without what is missing, on texts alone: these are not refused."""


_GREEDY: Final = "greedy answers equal `generate`, token for token"
_LOGITS: Final = "logits, within 1e-4; not served in the tests"
EXPORTED: Final = (
    Families(
        kind="decoders",
        names="GPT-2, GPT-NeoX, OPT, Llama, Qwen2, Qwen3, Phi-3, OLMo 2, SmolLM3, Gemma 2, MPT",
        task="`generation`",
        compared=_GREEDY,
    ),
    Families(
        kind="",
        names=(
            "Gemma, Gemma 3 and 4, VaultGemma, Mistral, StarCoder2, Cohere, Cohere 2, OLMo 3, EXAONE 4, Granite, "
            "Granite 4 without states, StableLM, Phi, nanochat, BLOOM, Falcon, GPT-J, GPT-Neo, CodeGen, XGLM, BioGPT, "
            "MiniCPM3, DiffLlama; the mixtures below"
        ),
        task="`generation`",
        compared=_LOGITS,
    ),
    Families(
        kind="decoders with states",
        names="LFM2, Mamba 2",
        task="`generation`",
        compared="greedy answers equal `generate`, token for token, in the engine; logits of pieces, within 1e-4",
    ),
    Families(
        kind="",
        names=(
            "LFM2-MoE, LFM3, Qwen3.5 and its mixture, Qwen3-Next, OLMo Hybrid, Granite 4 with states, Falcon-H1, "
            "Bamba, Nemotron-H, Zamba 2, Jamba, Mamba, Falcon-Mamba"
        ),
        task="`generation`",
        compared=(
            "logits of pieces, within 1e-4; OLMo Hybrid, Falcon-H1 and Mamba are exported; not served in the tests"
        ),
    ),
    Families(
        kind="decoders that see or hear",
        names="Gemma 4 that attends to later tokens of images in some layers",
        task="`generation` of texts alone",
        compared=_LOGITS,
    ),
    Families(
        kind="",
        names="LLaVA, LLaVA-OneVision, SmolVLM, InternVL, Qwen2.5-VL, Gemma 3 and 4 with images, PaliGemma 2",
        task="`generation` with images ([images-in-chat.md](images-in-chat.md))",
        compared="answers to conversations with images equal `generate`, token for token",
    ),
    Families(
        kind="",
        names="LLaVA-NeXT",
        task="`generation` with images",
        compared=(
            "tokens, pixels and order of vectors of conversations with images; served once by hand, 4 answers equal "
            "`generate`; not served in the tests"
        ),
    ),
    Families(
        kind="",
        names="Idefics 3, Qwen2-VL, Qwen3-VL",
        task="`generation` with images",
        compared=(
            "tokens and pixels of conversations with images; served once by hand, 12 answers equal `generate`; not "
            "served in the tests"
        ),
    ),
    Families(
        kind="",
        names="PaliGemma, Mistral 3 (Mistral Small 3.1, Ministral 3), Pixtral",
        task="`generation` with images",
        compared=(
            "tokens and pixels of prompts with images; served once by hand, 13, 8 and 8 answers equal `generate`; not "
            "served in the tests"
        ),
    ),
    Families(
        kind="decoders that rerank",
        names="Qwen3-Reranker, mxbai-rerank-v2, decoders with `LogitScore`",
        task="`text_scoring` of pairs",
        compared="scores, within 1e-5",
    ),
    Families(
        kind="encoders",
        names="BERT, RoBERTa, DistilBERT, ModernBERT, ELECTRA",
        task="`text_classification` of texts and pairs, one label or several",
        compared="probabilities, within 1e-5",
    ),
    Families(
        kind="",
        names="BART, T5, UMT5 with a decoder (`bart-large-mnli`)",
        task="`text_classification`",
        compared="logits, within 1e-5; not served in the tests",
    ),
    Families(
        kind="",
        names=(
            "ConvBERT, FNet, Longformer, MobileBERT, Nyströmformer with a landmark for each token, X-MOD with a "
            "default language, XLNet, YOSO of expectations"
        ),
        task="`text_classification`",
        compared="logits of the graph, in batches, within 1e-4; not served in the tests",
    ),
    Families(
        kind="",
        names="BERT with a label `entailment`",
        task="`text_classification` with labels of the caller",
        compared="probabilities of the zero-shot pipeline, within 1e-5",
    ),
    Families(
        kind="",
        names="RoBERTa, BERT, ELECTRA with one output",
        task="`text_scoring`: rerankers and regressions",
        compared="scores, within 1e-5",
    ),
    Families(
        kind="",
        names="BERT",
        task="`token_classification`, tags of any scheme ([spans.md](spans.md))",
        compared="logits, within 1e-4; spans of each aggregation strategy",
    ),
    Families(
        kind="",
        names="LayoutLM, LiLT, BROS",
        task="`token_classification` of words with their boxes ([spans.md](spans.md#pages))",
        compared="logits, within 1e-4; labels and probabilities of words",
    ),
    Families(
        kind="",
        names="BERT, DeBERTa V2, Splinter",
        task="`question_answering` ([question-answering.md](question-answering.md))",
        compared="answers in overlapping windows, within 1e-5",
    ),
    Families(
        kind="",
        names="RoBERTa",
        task="`fill_mask` ([question-answering.md](question-answering.md))",
        compared="tokens and probabilities of the fill-mask pipeline, within 1e-5",
    ),
    Families(
        kind="",
        names="BERT, RoBERTa, DistilBERT, ModernBERT, ELECTRA, ALBERT, DeBERTa, DeBERTa V2, MPNet, XLM-RoBERTa",
        task="`question_answering`, `fill_mask`",
        compared="logits, within 1e-5; not served in the tests",
    ),
    Families(
        kind="embedders",
        names=(
            "BERT, XLM-RoBERTa, MPNet, ModernBERT, NomicBERT, Qwen3, as sentence-transformers (MiniLM, E5, BGE, GTE, "
            "nomic) or bare"
        ),
        task="`text_embedding`",
        compared="vectors, within 1e-5",
    ),
    Families(
        kind="",
        names=(
            "GTE, Jina v3 and EuroBERT of transformers' own code, T5's encoder (sentence-t5, GTR), Gemma 3 in both "
            "directions (EmbeddingGemma), static vectors (model2vec)"
        ),
        task="`text_embedding`",
        compared="vectors, within 1e-5; not served in the tests",
    ),
    Families(
        kind="",
        names=("sparse vectors (SPLADE): a masked language model with `SpladePooling`, or with `--pooling splade`"),
        task="`text_embedding`",
        compared="weights, within 1e-5; not served in the tests",
    ),
    Families(
        kind="vision models",
        names="ViT, DeiT, BEiT, DINOv2, Swin, ConvNeXt, ResNet",
        task="`image_classification`, `image_embedding`",
        compared="probabilities and vectors, within 1e-4",
    ),
    Families(
        kind="",
        names=(
            "MobileViT, EfficientNet, MobileNet V1 and V2, Hiera, RegNet, ViT-MSN, PVT, PVT v2, CvT, LeViT, "
            "PoolFormer, Swin v2, ConvNeXt V2, DINOv2 with registers, BiT, FocalNet; DINOv3 as vectors"
        ),
        task="`image_classification`, `image_embedding`",
        compared="probabilities and vectors of the exported module, within 1e-4; not served in the tests",
    ),
    Families(
        kind="",
        names=(
            "folders of timm, with timm and torchvision installed: ResNet, EfficientNet, MobileNet V3, ConvNeXt, ViT, "
            "Swin, RegNet, MobileViT, EVA-02, DINOv2"
        ),
        task="`image_classification`, `image_embedding`",
        compared="probabilities and vectors of timm, within 1e-5, served by hand on 2026-11-28",
    ),
    Families(
        kind="captioners",
        names="ViT-GPT2, BLIP, Donut",
        task="`captioning` ([captions.md](captions.md))",
        compared="captions equal `generate`, greedy, token for token; of Donut behind the prompt of its task",
    ),
    Families(
        kind="",
        names="Florence-2",
        task="`captioning` by questions ([captions.md](captions.md))",
        compared="texts equal `generate` for five questions, greedy and with three beams",
    ),
    Families(
        kind="",
        names="TrOCR, ViT, DeiT or BEiT with a decoder of BERT or RoBERTa",
        task="`captioning`",
        compared=_LOGITS,
    ),
    Families(
        kind="detectors",
        names="DETR, YOLOS",
        task="`object_detection` ([detection.md](detection.md))",
        compared="labels; scores within 1e-4; boxes within a thousandth of the image",
    ),
    Families(
        kind="",
        names="OWL-ViT, OWLv2",
        task="`object_detection` of the caller's labels",
        compared="labels; scores within 1e-4; boxes within a pixel",
    ),
    Families(
        kind="",
        names="Grounding DINO",
        task="`object_detection` of the caller's labels",
        compared="labels; scores within 1e-4; boxes within a thousandth of the image",
    ),
    Families(
        kind="",
        names="MM Grounding DINO",
        task="`object_detection` of the caller's labels",
        compared="logits and boxes of the module's outputs, in float64; not exported in the tests",
    ),
    Families(
        kind="",
        names="Conditional DETR, Deformable DETR, Table Transformer, RT-DETR, RT-DETRv2, D-FINE",
        task="`object_detection`",
        compared="objects of the module's outputs, within a thousandth of the image; not exported in the tests",
    ),
    Families(
        kind="models of pixels",
        names="SegFormer",
        task="`semantic_segmentation` ([pixels.md](pixels.md))",
        compared="labels of pixels, 999 of 1,000",
    ),
    Families(
        kind="",
        names="BEiT, Data2Vec (images), DPT, UPerNet, MobileViT, MobileNet V2",
        task="`semantic_segmentation`",
        compared="labels of pixels by the module's outputs, 999 of 1,000; not exported in the tests",
    ),
    Families(
        kind="",
        names="MaskFormer, Mask2Former",
        task="`semantic_segmentation` by labels of masks",
        compared="labels of pixels, 999 of 1,000; of Mask2Former at a published shape by hand, not served in the tests",
    ),
    Families(
        kind="",
        names="CLIPSeg",
        task="`semantic_segmentation` of the caller's labels",
        compared="labels of pixels, 999 of 1,000; probabilities, within a level of 255",
    ),
    Families(
        kind="",
        names="Depth Anything",
        task="`depth_estimation` ([pixels.md](pixels.md))",
        compared="depth, within 1e-4 of the largest",
    ),
    Families(
        kind="",
        names="DPT, GLPN",
        task="`depth_estimation`",
        compared="depth by the module's outputs, within 1e-4 of the largest; not exported in the tests",
    ),
    Families(
        kind="segmenters",
        names="SAM, SAM 2 (images)",
        task="`segmentation` by points and boxes ([segmentation.md](segmentation.md#published-models))",
        compared="masks, within a pixel in a thousand; predicted IoU, within 1e-4",
    ),
    Families(
        kind="image generators",
        names="Stable Diffusion, DiT, as folders of diffusers",
        task="`image_generation` ([image-generation.md](image-generation.md#published-models))",
        compared="images of the pipelines for the same noise, within 2 levels of 255",
    ),
    Families(
        kind="two towers",
        names="CLIP, SigLIP, SigLIP 2 of a fixed size or of any (NaFlex)",
        task="`image_embedding` and `text_embedding` in one space",
        compared="vectors and probabilities, within 1e-5",
    ),
    Families(
        kind="encoder-decoders",
        names="Marian, M2M-100, NLLB, mBART-50",
        task="`translation`",
        compared="translations equal `generate`, greedy and with four beams",
    ),
    Families(
        kind="",
        names="BART, Pegasus, T5 1.0, T5 1.1 (Flan-T5)",
        task="`text_to_text`",
        compared="texts equal `generate`, greedy and with four beams",
    ),
    Families(
        kind="",
        names="LED (its first token attends to all, as its documentation advises), MVP without prompts",
        task="`text_to_text`",
        compared="greedy texts equal `generate`",
    ),
    Families(
        kind="",
        names="an encoder and a decoder of two families: BERT or RoBERTa, with BERT, RoBERTa or GPT-2 (BERT2BERT)",
        task="`text_to_text`",
        compared=_LOGITS,
    ),
    Families(
        kind="speech",
        names="Whisper, multilingual and English",
        task="`transcription` ([speech.md](speech.md))",
        compared="transcripts equal `generate`; segments and times, token for token",
    ),
    Families(
        kind="",
        names="Moonshine, Speech2Text",
        task="`transcription` ([speech.md](speech.md#moonshine-speech2text-and-speecht5))",
        compared="transcripts equal `generate`, greedy and with three beams",
    ),
    Families(
        kind="",
        names="SpeechT5 that transcribes",
        task="`transcription`",
        compared="logits, within 1e-4; the same, served by hand on 2026-11-28; not served in the tests",
    ),
    Families(
        kind="",
        names="Wav2Vec2, Wav2Vec2-BERT, Parakeet with CTC",
        task="`ctc_transcription` ([speech.md](speech.md#models-without-a-decoder))",
        compared="texts; of long audio of Wav2Vec2, the text and the times of words by the pipeline",
    ),
    Families(
        kind="",
        names=(
            "Wav2Vec2 with layer norm, HuBERT, WavLM, Data2VecAudio, Wav2Vec2-Conformer, SEW, SEW-D, UniSpeech, "
            "UniSpeech-SAT, LASR with CTC"
        ),
        task="`ctc_transcription`",
        compared="texts, also of long audio by the pipeline, by hand on 2026-11-27; not in the tests",
    ),
    Families(
        kind="speakers",
        names="VITS (MMS-TTS)",
        task="`flow_synthesis` ([speech.md](speech.md#published-models-that-speak))",
        compared="samples for the same noise, within 1e-4; voices, speaking rates, streams",
    ),
    Families(
        kind="",
        names="Kokoro",
        task="`flow_synthesis` ([speech.md](speech.md#kokoro))",
        compared="nothing: samples with those of the exported module; by hand with the package `kokoro` on 2026-11-28",
    ),
    Families(
        kind="",
        names="SpeechT5 that speaks",
        task="`spectrogram_synthesis` ([speech.md](speech.md#speecht5))",
        compared="samples for the same dropout, within 1e-4; voices, lengths, streams",
    ),
    Families(
        kind="",
        names="MusicGen (mono)",
        task="`delayed_synthesis` ([speech.md](speech.md#musicgen))",
        compared="samples, greedily, within 1e-4; guidance, lengths, streams",
    ),
    Families(
        kind="staged speakers",
        names="Bark",
        task="`staged_synthesis` ([speech.md](speech.md#bark))",
        compared="samples, greedily, within 1e-4; voices, ends, lengths, streams",
    ),
    Families(
        kind="sounds",
        names="AST, Wav2Vec2",
        task="`audio_classification` ([sounds.md](sounds.md))",
        compared="labels; probabilities of the pipeline, within 1e-5",
    ),
    Families(
        kind="",
        names="HuBERT, WavLM",
        task="`audio_classification`",
        compared="the same, exported and served by hand on 2026-11-27; not in the tests",
    ),
    Families(
        kind="videos",
        names="VideoMAE, TimeSformer, ViViT",
        task="`video_classification` ([videos.md](videos.md))",
        compared="labels; probabilities, within 1e-5",
    ),
    Families(
        kind="any other head",
        names=(
            "LayoutLMv3, MarkupLM, VisualBERT, Decision Transformer, PatchTST, PatchTSMixer, MGP-STR, Swin2SR, "
            "GroupViT, multiple choice of BERT"
        ),
        task="`tensors`, by `--task tensors` ([any-graph.md](any-graph.md#a-folder-of-transformers))",
        compared="every output, within 1e-4",
    ),
)

_READING: Final = (Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.TEXT_SCORING, Task.TEXT_EMBEDDING)
_NO_CACHE: Final = "a bundle's decoder keeps keys and values of each position"
REFUSALS: Final = (
    Refusal(
        names=("DBRX", "Llama 4", "Switch", "NLLB-MoE"),
        says="is a mixture of",
        why="the experts are not computed through the interface that `transformers` has for them",
    ),
    Refusal(
        names=(
            "RWKV", "xLSTM", "RecurrentGemma", "MiniMax",
        ),
        says="keep a recurrent state",
        why="it is computed in a way of their own, and no operator for it is known",
    ),
    Refusal(
        names=("DeepSeek V3.2", "GLM-5"),
        says="has layers of indexed_attention",
        why="they attend to a choice of the keys, which the operator on the key/value cache does not compute",
    ),
    Refusal(
        names=("GPT", "XLNet", "XLM", "CPM-Ant"),
        model_types=("openai-gpt", "xlnet", "xlm", "cpmant"),
        says="has no cache of keys and values that is causal",
        why=_NO_CACHE,
    ),
    Refusal(
        names=("BLIP-2", "InstructBLIP"),
        model_types=("blip-2", "instructblip", "instructblipvideo"),
        says="reads no text without an image",
        why="a bundle's prompt is a text",
        tasks=(Task.GENERATION, Task.CAPTIONING),
    ),
    Refusal(
        names=("Llama 3.2 Vision",),
        model_types=("mllama",),
        says="has layers that attend to images alone",
        why=_NO_CACHE,
    ),
    Refusal(
        names=("MusicGen Melody",),
        model_types=("musicgen_melody",),
        says="hears a melody",
        why="a call that makes audio of texts gives none",
        tasks=(Task.GENERATION, Task.TEXT_TO_TEXT),
    ),
    Refusal(
        names=("ProphetNet", "FSMT", "Pegasus-X"),
        model_types=("prophetnet", "fsmt", "pegasus_x"),
        says="has a decoder with positions or attention of its own kind",
        why="the key/value cache cannot be proved",
        tasks=(Task.GENERATION, Task.TEXT_TO_TEXT, Task.TRANSLATION),
    ),
    Refusal(
        names=("SAM-HQ",),
        model_types=("sam_hq",),
        says="is computed otherwise than it was published",
        why="`transformers` leaves out what its decoder computes of an image, so masks have nothing to be held against",
        tasks=(Task.SEGMENTATION,),
    ),
    Refusal(
        names=("SAM 3", "EdgeTAM"),
        model_types=(
            *("sam3", "sam3_lite_text", "sam3_tracker", "sam3_tracker_video", "sam3_video", "edgetam", "edgetam_video"),
        ),
        says="segments images as neither SAM nor SAM 2 does",
        why="a bundle's prompts are points and boxes of these",
        tasks=(Task.SEGMENTATION,),
    ),
    Refusal(
        names=("LayoutLMv2", "LayoutXLM", "LayoutLMv3", "UDOP"),
        model_types=("layoutlmv2", "layoutxlm", "layoutlmv3", "udop"),
        says="reads the image of a page beside its words and boxes",
        why="no call gives all three, but for tensors (`--task tensors`); without the image answers are others",
        tasks=(*_READING, Task.QUESTION_ANSWERING, Task.GENERATION, Task.TEXT_TO_TEXT),
        is_trained_without=True,
    ),
    Refusal(
        names=("Funnel", "Reformer"),
        model_types=("funnel", "reformer"),
        says="answers a text otherwise where it is padded",
        why="its answer would depend on the other texts of a batch",
        tasks=_READING,
    ),
    Refusal(
        names=("CANINE",),
        model_types=("canine",),
        says="states no vocab_size",
        why="it reads characters, which no tokenizer of a bundle gives",
        tasks=_READING,
    ),
    Refusal(
        names=("MRA", "YOSO of hashes"),
        says="attends by a kernel for CUDA",
        why="`transformers` fetches it as code, and computes zeros or nothing without it",
        tasks=_READING,
    ),
    Refusal(
        names=("Nyströmformer of fewer landmarks than tokens",),
        says="reads texts of exactly",
        why="its landmarks are means of segments of a text that is filled up to one length",
        tasks=_READING,
    ),
    Refusal(
        names=("X-MOD without a default language",),
        says="does not say which adapter reads a text",
        why="`default_language` in `config.json` does, which may be written there",
        tasks=_READING,
    ),
    Refusal(
        names=("BERT as a decoder",),
        says="is an encoder",
        why="it reads a text in both directions, unless `is_decoder` is true",
    ),
)  # fmt: skip
"""Those that are refused; rows without `model_types` by what the configuration says."""

OTHER_HEADS: Final[Mapping[str, str]] = {
    "ForPreTraining": "has the heads that it was trained with first",
    "SpeechEncoderDecoderModel": "writes texts by an encoder and a decoder of two families",
    "ForNextSentencePrediction": "tells whether one sentence follows another",
    "ForTableQuestionAnswering": "finds answers in a table",
    "ForDocumentQuestionAnswering": "finds answers in a document",
    "ForVisualQuestionAnswering": "answers questions about images",
    "ForMultipleChoice": "chooses among answers",
    "ForRNNT": "writes down speech by a transducer",
    "ForTDT": "writes down speech by a transducer",
    "ForAudioFrameClassification": "classifies moments of sounds",
    "ForXVector": "tells speakers apart",
    "ForTextToSpeech": "speaks",
    "ForTextToWaveform": "speaks",
    "ForZeroShotObjectDetection": "finds objects in images",
    "ForImageMatting": "cuts out foregrounds",
    "ForNormalEstimation": "tells slopes in images",
    "ForPoseEstimation": "tells poses in images",
    "ForKeypointDetection": "finds points in images",
    "ForKeypointMatching": "matches points of images",
    "ForImageToImage": "makes images of images",
    "ForImageSuperResolution": "makes images of images",
    "ForMaskedImageModeling": "fills gaps of an image",
    "ForPrediction": "forecasts series",
    "ForTimeSeriesPrediction": "forecasts series",
}
"""What models do that no task of this command does, by what the names of their architectures end with."""

OPTIMUM_SOURCE: Final = (
    "docs/source/onnx/overview.mdx of huggingface/optimum-onnx at 0749e2e1356bce51399d468f881c505378e67032"
)
OPTIMUM: Final = (
    "Arcee", "AST", "Albert", "Bart", "Beit", "Bert", "BlenderBot", "BlenderBotSmall", "Bloom", "Camembert",
    "ChineseCLIP", "CLIP", "CodeGen", "Cohere", "ConvBert", "ConvNext", "ConvNextV2", "D-FINE", "Data2VecAudio",
    "Data2VecText", "Data2VecVision", "Deberta", "Deberta-v2", "Decision Transformer", "DeepSeek-V3", "Deit", "Detr",
    "DINOv2", "DistilBert", "Donut-Swin", "Electra", "Encoder Decoder", "ESM", "Falcon", "Flaubert", "Gemma", "Gemma 2",
    "GLM", "GPT-2", "GPT-BigCode", "GPT-J", "GPT-Neo", "GPT-NeoX", "OPT", "Granite", "GroupVit", "Helium", "Hiera",
    "Hubert", "IBert", "InternLM2", "LayoutLM", "LayoutLM-v3", "Lilt", "Levit", "LongT5", "Llama", "M2-M100", "Marian",
    "MarkupLM", "MaskFormer", "MBart", "MetaClip2", "MGP-STR", "Mistral", "MobileBert", "MobileVit", "MobileNet v1",
    "MobileNet v2", "ModernBert", "MPNet", "MT5", "Musicgen", "Nemotron", "Nystromformer", "OLMo", "OLMo2", "OWL-ViT",
    "PatchTST", "PatchTSMixer", "Pegasus", "Perceiver", "Phi", "Phi3", "Pix2Struct", "PoolFormer", "PVT", "Qwen2",
    "Qwen3", "Qwen3-MoE", "RegNet", "RemBERT", "ResNet", "Roberta", "Roformer", "RT-DETR", "RT-DETRv2", "SAM",
    "Segformer", "SEW", "SEW-D", "Speech2Text", "SigLIP", "SmolLM3", "SpeechT5", "Splinter", "SqueezeBert", "StableLM",
    "Swin", "SwinV2", "T5", "Table Transformer", "TROCR", "UniSpeech", "UniSpeech SAT", "Vision Encoder Decoder",
    "VisualBert", "Vit", "VitMAE", "VitMSN", "Wav2Vec2", "Wav2Vec2 Conformer", "WavLM", "Whisper", "XLM", "XLM-Roberta",
    "Yolos",
)  # fmt: skip
"""Architectures of `transformers` that Optimum-ONNX lists (`OPTIMUM_SOURCE`)."""
BEHIND: Final[Mapping[str, tuple[str, ...]]] = {
    "texts of images": ("Pix2Struct",),
    "texts": ("InternLM2",),
}  # fmt: skip
"""Of these, those that this command does not read, by what they are for."""


def check_family(path: Path, content: Mapping[str, Any], task: Task) -> None:
    """Refuses a family of the table by its name.

    Args:
        path: The folder.
        content: Of its `config.json`.
        task: That it would be exported for.

    Raises:
        SourceError: It is refused for the task.
    """
    model_type = content.get("model_type")
    for row in REFUSALS:
        if row.is_trained_without and checkpoint_beside(path) is not None:
            continue
        if model_type in row.model_types and task in row.tasks:
            raise SourceError(f"{path}: {model_type} {row.says}, and {row.why}; it is not exported for {task}")


def check_heads(path: Path, architectures: Sequence[str]) -> None:
    """Says what a model does that no task of this command does.

    Raises:
        SourceError: All that its architectures name is such.
    """
    found = [(name, what) for name in architectures for head, what in OTHER_HEADS.items() if name.endswith(head)]
    if architectures and len({name for name, _ in found}) == len(architectures):
        name, what = found[0]
        raise SourceError(
            f"{path}: {name} {what}, which is no task of this command; --task tensors serves what a call of it computes"
        )


def models_table() -> str:
    """Returns what is exported, in Markdown."""
    heads = ("kind", "families in the tests", "task", "compared with `transformers`, over the running server")
    return _table(heads, ((one.kind, one.names, one.task, one.compared) for one in EXPORTED))


def refusals_table() -> str:
    """Returns what is refused, in Markdown."""
    rows = ((", ".join(one.names), f"`{one.says}`", one.why) for one in REFUSALS)
    return _table(("families", "says", "why"), rows)


def behind_table() -> str:
    """Returns what Optimum-ONNX exports and this command does not, in Markdown."""
    return _table(("for", "families"), ((what, ", ".join(names)) for what, names in BEHIND.items()))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |") + "\n"
