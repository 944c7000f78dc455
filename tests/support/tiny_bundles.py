"""Tiny classifiers, built node by node and published as real bundles: no training, no export, answers known by hand.

The topic model averages the vectors of a text's words; each word points to one topic, so a text's topic is the one
most of its words belong to. The colour model compares the means of an image's channels. The box model finds an object
in each quarter of an image but the last, by the same means. The letter model hears a letter in each hundredth of a
second, by how loud it is, and the loudness model tells how loud a whole sound is.
"""

import json
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headway_server.bundles import (
    Architecture,
    Bundle,
    Ctc,
    DelayedCodes,
    Depth,
    Detection,
    Embedding,
    FlowSpeech,
    Graph,
    GraphRole,
    ImagePreprocessing,
    LateInteraction,
    Limits,
    Manifest,
    ParityFigures,
    Precision,
    QualityFigure,
    SamplingDefaults,
    Scoring,
    SemanticSegmentation,
    SoundPreprocessing,
    SpecialTokens,
    SpectrogramSpeech,
    SpeechStages,
    Task,
    TensorSpec,
    Variant,
    VideoFrames,
    describe_files,
    publish,
    staging_folder,
    write_manifest,
)

TOPICS = {
    "sports": ("goal", "match", "team"),
    "science": ("atom", "cell", "star"),
    "business": ("bank", "price", "stock"),
}
COLOURS = ("red", "green", "blue")
MAX_INPUT_TOKENS = 32
_SPECIAL = ("[PAD]", "[CLS]", "[UNK]")
_OPSET = 20
COLOUR_PREPROCESSING = ImagePreprocessing(
    height=8, width=8, resize="shorter_side", resize_size=10, interpolation="bilinear", mean=(0.5,) * 3, std=(0.25,) * 3
)
FITTED = ImagePreprocessing(
    height=24, width=24, resize="fit", resize_size=16, interpolation="bilinear", mean=(0.5,) * 3, std=(0.25,) * 3
)
"""Of images that keep their proportions."""


def write_topic_bundle(
    store: Path,
    *,
    name: str = "topics",
    version: str = "1",
    task: Task = Task.TEXT_CLASSIFICATION,
    num_idle_products: int = 0,
    offers_embeddings: bool = True,
    has_token_types: bool = False,
    replace: bool = False,
    num_labels: int = 3,
    prompts: dict[str, str] | None = None,
    has_sparse_vectors: bool = False,
    run_bytes: int | None = None,
    **fields: object,
) -> Bundle:
    """Publishes the topic model.

    With another `task`, a bundle that says it was made for that; one for vectors or scores has no labels, though its
    graph still gives logits. With idle products, a run multiplies matrices of
    512 x 512 so many times before it answers: a call that takes a while. With token types, a word in the second text of
    a pair counts ten times. With `replace`, over the bundle that is there. Labels past the topics are unlikely.
    `fields` go into the manifest.
    """
    words, tokenizer = _topic_words()
    ids = TensorSpec(name="input_ids", dtype="int64", shape=("batch", "length"))
    mask = TensorSpec(name="attention_mask", dtype="int64", shape=("batch", "length"))
    with staging_folder(store) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        types = TensorSpec(name="token_type_ids", dtype="int64", shape=("batch", "length"))
        nodes = _topic_nodes(words, num_idle_products, has_token_types, num_labels)
        inputs = [ids, mask, types] if has_token_types else [ids, mask]
        graph = _save(folder, nodes, inputs, embedding="means" if offers_embeddings else None, num_labels=num_labels)
        manifest = _manifest(
            folder,
            graph.model_copy(update={"run_bytes": run_bytes}),
            name=name,
            version=version,
            task=task,
            labels=(
                ()
                if task in (Task.TEXT_EMBEDDING, Task.TEXT_SCORING)
                else (*TOPICS, *(f"topic {number}" for number in range(num_labels - len(TOPICS))))
            ),
            special_tokens=SpecialTokens(pad=0, unk=2),
            limits=Limits(max_input_tokens=MAX_INPUT_TOKENS),
            embedding=(
                Embedding(pooling="mean", dimension=len(TOPICS), prompts=prompts or {}, is_sparse=has_sparse_vectors)
                if offers_embeddings
                else None
            ),
            **fields,
        )
        write_manifest(folder, manifest)
        return publish(folder, store, replace=replace)


def write_token_bundle(store: Path, *, name: str = "colbert") -> Bundle:
    """Publishes the topic model with a vector of each token, which scores pairs by late interaction.

    A query is filled up to eight tokens with [UNK], whose vector has equal numbers. "price" is skipped in texts.
    """
    words, tokenizer = _topic_words()
    ids, mask = (
        TensorSpec(name=key, dtype="int64", shape=("batch", "length")) for key in ("input_ids", "attention_mask")
    )
    nodes = [
        _constant("vectors", _topic_vectors(words) + np.float32(0.5)),
        helper.make_node("Gather", ["vectors", "input_ids"], ["embedded"]),  # (B, T, C)
        helper.make_node("LpNormalization", ["embedded"], ["token_vectors"], axis=-1, p=2),
    ]
    late = LateInteraction(
        dimension=len(TOPICS), max_query_tokens=8, query_filler=2, skipped_tokens=(words.index("price"),)
    )
    with staging_folder(store) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        vectors = TensorSpec(name="token_vectors", dtype="float32", shape=("batch", "length", len(TOPICS)))
        graph = _save_graph(folder, nodes, [ids, mask], [vectors])
        manifest = _manifest(
            folder,
            graph,
            name=name,
            version="1",
            task=Task.TEXT_SCORING,
            special_tokens=SpecialTokens(pad=0, unk=2),
            limits=Limits(max_input_tokens=MAX_INPUT_TOKENS),
            scoring=Scoring(activation="none", late_interaction=late),
            text_pairs="required",
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


def write_colour_bundle(
    store: Path, *, name: str = "colours", version: str = "1", task: Task = Task.IMAGE_CLASSIFICATION
) -> Bundle:
    """Publishes the colour model; with another `task`, without labels."""
    pixels = TensorSpec(name="pixel_values", dtype="float32", shape=("batch", 3, 8, 8))
    nodes = [
        _constant("axes", np.array([2, 3])),
        _constant("two", np.float32(2)),
        helper.make_node("ReduceMean", ["pixel_values", "axes"], ["logits"], keepdims=0),
        helper.make_node("Mul", ["logits", "two"], ["doubled"]),
    ]
    with staging_folder(store) as folder:
        graph = _save(folder, nodes, [pixels], embedding="doubled")
        manifest = _manifest(
            folder,
            graph,
            name=name,
            version=version,
            task=task,
            labels=COLOURS if task is Task.IMAGE_CLASSIFICATION else (),
            image_preprocessing=COLOUR_PREPROCESSING,
            embedding=Embedding(pooling="doubled", dimension=len(COLOURS)),
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


def write_box_bundle(store: Path, *, name: str = "boxes", version: str = "1") -> Bundle:
    """Publishes the box model: a box for each colour, whose score is the higher the more an image has of it."""
    pixels = TensorSpec(name="pixel_values", dtype="float32", shape=("batch", 3, "height", "width"))
    places = np.array([[x, y, 0.5, 0.5] for x, y in ((0.25, 0.25), (0.75, 0.25), (0.25, 0.75))], np.float32)
    nodes = [
        _constant("axes", np.array([2, 3])),
        _constant("last", np.array([2])),
        _constant("classes", 4 * np.eye(3, 4, dtype=np.float32)),
        _constant("places", places),
        _constant("none", np.zeros(4, np.float32)),
        helper.make_node("ReduceMean", ["pixel_values", "axes"], ["means"], keepdims=0),  # (B, 3)
        helper.make_node("Unsqueeze", ["means", "last"], ["colours"]),  # (B, 3, 1)
        helper.make_node("Mul", ["colours", "classes"], ["logits"]),  # (B, 3, 4)
        helper.make_node("Mul", ["colours", "none"], ["nowhere"]),
        helper.make_node("Add", ["nowhere", "places"], ["boxes"]),
    ]
    outputs = {"logits": (3, len(COLOURS) + 1), "boxes": (3, 4)}
    specs = tuple(TensorSpec(name=key, dtype="float32", shape=("batch", *shape)) for key, shape in outputs.items())
    with staging_folder(store) as folder:
        graph = _save_graph(folder, nodes, [pixels], specs)
        manifest = _manifest(
            folder,
            graph,
            name=name,
            version=version,
            task=Task.OBJECT_DETECTION,
            labels=COLOURS,
            image_preprocessing=FITTED,
            detection=Detection(scores="softmax", num_queries=3, max_objects=3),
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


def write_map_bundle(store: Path, task: Task = Task.SEMANTIC_SEGMENTATION, *, name: str = "maps") -> Bundle:
    """Publishes the map model: each pixel's label is its strongest colour, or its depth is its brightness."""
    pixels = TensorSpec(name="pixel_values", dtype="float32", shape=("batch", 3, "height", "width"))
    is_depth = task is Task.DEPTH_ESTIMATION
    output, shape = ("depth", ()) if is_depth else ("logits", (len(COLOURS),))
    nodes = [
        _constant("channels", np.array([1])),
        helper.make_node("AveragePool", ["pixel_values"], ["pooled"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("ReduceMean", ["pooled", "channels"], ["depth"], keepdims=0)
        if is_depth
        else helper.make_node("Identity", ["pooled"], ["logits"]),
    ]
    spec = TensorSpec(name=output, dtype="float32", shape=("batch", *shape, "rows", "columns"))
    with staging_folder(store) as folder:
        graph = _save_graph(folder, nodes, [pixels], [spec])
        manifest = _manifest(
            folder,
            graph,
            name=name,
            version="1",
            task=task,
            labels=() if is_depth else COLOURS,
            image_preprocessing=FITTED,
            depth=Depth(kind="metric") if is_depth else None,
            semantic_segmentation=None if is_depth else SemanticSegmentation(),
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


def write_named_box_bundle(store: Path, *, name: str = "named", version: str = "1") -> Bundle:
    """Publishes the named box model: as the box model, of colours that the caller names, several in a label."""
    pixels = TensorSpec(name="pixel_values", dtype="float32", shape=("batch", 3, "height", "width"))
    places = np.array([[x, y, 0.5, 0.5] for x, y in ((0.25, 0.25), (0.75, 0.25), (0.25, 0.75))], np.float32)
    nodes = [
        _constant("axes", np.array([2, 3])),
        _constant("last", np.array([2])),
        _constant("classes", 4 * np.eye(3, dtype=np.float32)),
        _constant("places", places),
        _constant("none", np.zeros(4, np.float32)),
        helper.make_node("ReduceMean", ["pixel_values", "axes"], ["means"], keepdims=0),  # (B, 3)
        helper.make_node("Unsqueeze", ["means", "last"], ["colours"]),  # (B, 3, 1)
        helper.make_node("Mul", ["colours", "classes"], ["label_queries"]),  # (B, 3, 3)
        helper.make_node("Identity", ["means"], ["logit_offsets"]),
        helper.make_node("Mul", ["colours", "none"], ["nowhere"]),
        helper.make_node("Add", ["nowhere", "places"], ["boxes"]),
    ]
    outputs = {"label_queries": (3, 3), "logit_offsets": (3,), "boxes": (3, 4)}
    specs = tuple(TensorSpec(name=key, dtype="float32", shape=("batch", *shape)) for key, shape in outputs.items())
    texts = [TensorSpec(name=key, dtype="int64", shape=("batch", "length")) for key in ("input_ids", "attention_mask")]
    embedding = TensorSpec(name="embedding", dtype="float32", shape=("batch", 3))
    words = {word: index for index, word in enumerate(("[PAD]", *COLOURS, "[UNK]"))}
    reading = [
        _constant("table", np.eye(len(words), 3, k=-1, dtype=np.float32)),
        _constant("length", np.array([1])),
        _constant("end", np.array([2])),
        helper.make_node("Gather", ["table", "input_ids"], ["each"]),  # (B, T, 3)
        helper.make_node("Cast", ["attention_mask"], ["flat"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["flat", "end"], ["mask"]),
        helper.make_node("Mul", ["each", "mask"], ["seen"]),
        helper.make_node("ReduceSum", ["seen", "length"], ["embedding"], keepdims=0),
    ]
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with staging_folder(store) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        graph = _save_graph(folder, nodes, [pixels], specs)
        encoder = _save_graph(folder, reading, texts, [embedding], role="text_encoder")
        manifest = _manifest(
            folder,
            graph,
            text_encoder=encoder,
            name=name,
            version=version,
            task=Task.OBJECT_DETECTION,
            image_preprocessing=FITTED,
            special_tokens=SpecialTokens(pad=0),
            limits=Limits(max_input_tokens=4),
            detection=Detection(scores="best_sigmoid", num_queries=3, max_objects=3, labels="embedded", threshold=0.1),
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


FRAMES = 4
"""Frames that the motion model reads."""
MOTIONS = ("darker", "steady", "brighter")


def write_motion_bundle(store: Path, *, name: str = "motion", version: str = "1") -> Bundle:
    """Publishes the motion model: it tells whether the last frame of a video is brighter than the first."""
    pixels = TensorSpec(name="pixel_values", dtype="float32", shape=("batch", FRAMES, 3, 8, 8))
    logits = TensorSpec(name="logits", dtype="float32", shape=("batch", len(MOTIONS)))
    weights = np.zeros((FRAMES, len(MOTIONS)), np.float32)
    weights[0], weights[-1] = (8, 0, -8), (-8, 0, 8)
    nodes = [
        _constant("axes", np.array([2, 3, 4])),
        _constant("weights", weights),
        _constant("biases", np.array([0, 1, 0], np.float32)),
        helper.make_node("ReduceMean", ["pixel_values", "axes"], ["means"], keepdims=0),  # (B, F)
        helper.make_node("MatMul", ["means", "weights"], ["changes"]),
        helper.make_node("Add", ["changes", "biases"], ["logits"]),
    ]
    with staging_folder(store) as folder:
        graph = _save_graph(folder, nodes, [pixels], [logits])
        manifest = _manifest(
            folder,
            graph,
            name=name,
            version=version,
            task=Task.VIDEO_CLASSIFICATION,
            labels=MOTIONS,
            image_preprocessing=COLOUR_PREPROCESSING,
            video=VideoFrames(num_frames=FRAMES),
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


LETTERS = ("<pad>", "|", "A", "B")
"""Tokens of the letter model, from the quietest to the loudest."""
RATE = 16_000
SOUND = SoundPreprocessing(sampling_rate=RATE, min_samples=160, window_samples=2 * RATE)


def write_letter_bundle(store: Path, *, name: str = "letters", version: str = "1") -> Bundle:
    """Publishes the letter model, whose windows are two seconds long."""
    samples = TensorSpec(name="input_values", dtype="float32", shape=("batch", "samples"))
    logits = TensorSpec(name="logits", dtype="float32", shape=("batch", "output_frames", len(LETTERS)))
    places = np.arange(len(LETTERS), dtype=np.float32) * 0.25
    nodes = [
        _constant("one", np.array([1])),
        _constant("slopes", (places * 2)[np.newaxis]),
        _constant("biases", -(places**2)),  # 2 x p - p^2 is the largest at the nearest place
        helper.make_node("Abs", ["input_values"], ["loudness"]),
        helper.make_node("Unsqueeze", ["loudness", "one"], ["channels"]),  # (B, 1, N)
        helper.make_node("AveragePool", ["channels"], ["means"], kernel_shape=[160], strides=[160]),  # (B, 1, F)
        helper.make_node("Transpose", ["means"], ["frames"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["frames", "slopes"], ["products"]),  # (B, F, V)
        helper.make_node("Add", ["products", "biases"], ["logits"]),
    ]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(LETTERS)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("|", " "), decoders.Fuse()])
    with staging_folder(store) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        graph = _save_graph(folder, nodes, [samples], [logits])
        manifest = _manifest(
            folder,
            graph,
            name=name,
            version=version,
            task=Task.CTC_TRANSCRIPTION,
            sound=SOUND,
            ctc=Ctc(blank=0, word_delimiter=1, samples_per_frame=160, stride_samples=RATE // 4),
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


LOUDNESS = ("quiet", "noisy", "loud")


def write_loudness_bundle(store: Path, *, name: str = "loudness", version: str = "1", **fields: object) -> Bundle:
    """Publishes the loudness model: it tells how loud a sound of at most two seconds is, by its mean."""
    samples = TensorSpec(name="input_values", dtype="float32", shape=("batch", "samples"))
    logits = TensorSpec(name="logits", dtype="float32", shape=("batch", len(LOUDNESS)))
    places = np.arange(len(LOUDNESS), dtype=np.float32) * 0.25
    nodes = [
        _constant("one", np.array([1])),
        _constant("slopes", (places * 16)[np.newaxis]),
        _constant("biases", -8 * places**2),
        helper.make_node("Abs", ["input_values"], ["loudness"]),
        helper.make_node("ReduceMean", ["loudness", "one"], ["mean"], keepdims=1),  # (B, 1)
        helper.make_node("MatMul", ["mean", "slopes"], ["products"]),  # (B, C)
        helper.make_node("Add", ["products", "biases"], ["logits"]),
    ]
    with staging_folder(store) as folder:
        graph = _save_graph(folder, nodes, [samples], [logits])
        manifest = _manifest(
            folder,
            graph,
            name=name,
            version=version,
            task=Task.AUDIO_CLASSIFICATION,
            labels=LOUDNESS,
            **{"sound": SOUND, **fields},
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


WHISTLE = FlowSpeech(
    sampling_rate=8_000,
    hop_length=8,
    num_channels=1,
    noise_scale=0.5,
    duration_noise_scale=1.0,
    speaking_rate=1.0,
    context_frames=2,
    frames_per_run=16,
    max_frames=4_000,
    blank=0,
)


def write_whistle_bundle(store: Path, *, name: str = "whistle", version: str = "1") -> Bundle:
    """Publishes the whistle model: its letters last at least 20 frames, and those behind others are louder."""
    ids = TensorSpec(name="input_ids", dtype="int64", shape=("batch", "length"))
    noise = TensorSpec(name="duration_noise", dtype="float32", shape=("batch", 2, "length"))
    latents = TensorSpec(name="latents", dtype="float32", shape=("batch", "frames", 1))
    rows = {"durations": (), "means": (1,), "deviations": (1,)}
    found = [TensorSpec(name=key, dtype="float32", shape=("batch", "length", *last)) for key, last in rows.items()]
    samples = TensorSpec(name="samples", dtype="float32", shape=("batch", "samples"))
    text = [
        _constant("first", np.array(0)),
        _constant("last", np.array([2])),
        _constant("least", np.array(20, np.float32)),
        _constant("step", np.array(0.02, np.float32)),
        helper.make_node("Gather", ["duration_noise", "first"], ["drawn"], axis=1),  # (B, T)
        helper.make_node("Abs", ["drawn"], ["longer"]),
        helper.make_node("Add", ["longer", "least"], ["durations"]),
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["numbers", "step"], ["loudness"]),
        helper.make_node("Unsqueeze", ["loudness", "last"], ["means"]),
        helper.make_node("Mul", ["means", "step"], ["deviations"]),
    ]
    waveform = [
        _constant("shape", np.array([0, -1])),
        helper.make_node("Concat", ["latents"] * WHISTLE.hop_length, ["repeated"], axis=2),  # (B, F, hop)
        helper.make_node("Reshape", ["repeated", "shape"], ["samples"]),
    ]
    tokens = ["_", *string.ascii_lowercase]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="_"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("[^a-z]"), "")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    with staging_folder(store) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        graphs: dict[GraphRole, Graph] = {
            "text_encoder": _save_graph(folder, text, [ids, noise], found, role="text_encoder"),
            "waveform_decoder": _save_graph(folder, waveform, [latents], [samples], role="waveform_decoder"),
        }
        manifest = _manifest(
            folder,
            graphs,
            name=name,
            version=version,
            task=Task.FLOW_SYNTHESIS,
            limits=Limits(max_input_tokens=101),
            flow=WHISTLE,
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


HUM = SpeechStages(
    sampling_rate=8_000,
    hop_length=80,
    num_books=3,
    codebook_size=8,
    num_inputs=64,
    text_offset=24,
    text_pad=60,
    semantic_infer=61,
    semantic_rate=50,
    coarse_rate=100,
    first_code=16,
    coarse_pad=32,
    coarse_infer=33,
    coarse_input=8,
    coarse_history=8,
    coarse_window=4,
    coarse_sampling=SamplingDefaults(temperature=1.0),
    fine_input=16,
    fine_history=8,
    fine_temperature=0.5,
)
"""How the humming model speaks."""


def write_hum_bundle(store: Path, *, name: str = "hum", version: str = "1") -> Bundle:
    """Publishes the humming model: its tokens follow from the one before, and its samples are codes."""
    ids, places = (
        TensorSpec(name=name, dtype="int64", shape=("slots", axis))
        for name, axis in (("input_ids", "length"), ("logits_positions", "logits_length"))
    )
    codes = TensorSpec(name="codes", dtype="int64", shape=("batch", HUM.fine_input, HUM.num_books))
    book = TensorSpec(name="book", dtype="int64", shape=("batch",))
    fine = TensorSpec(name="logits", dtype="float32", shape=("batch", HUM.fine_input, HUM.codebook_size))
    samples = TensorSpec(name="samples", dtype="float32", shape=("batch", "samples"))

    def decoder(num_tokens: int) -> tuple[list[onnx.NodeProto], TensorSpec]:
        table = np.random.default_rng(0).normal(size=(HUM.num_inputs, num_tokens)).astype(np.float32)
        nodes = [
            _constant("size", np.array(HUM.num_inputs)),
            _constant("table", table),
            _constant("last", np.array([-1])),
            _constant("width", np.array([1, 1, num_tokens])),
            helper.make_node("Mod", ["input_ids", "size"], ["tokens"]),
            helper.make_node("Gather", ["table", "tokens"], ["all"]),  # (R, T, V)
            helper.make_node("Unsqueeze", ["logits_positions", "last"], ["places"]),
            helper.make_node("Expand", ["places", "width"], ["index"]),
            helper.make_node("GatherElements", ["all", "index"], ["logits"], axis=1),
        ]
        return nodes, TensorSpec(name="logits", dtype="float32", shape=("slots", "logits_length", num_tokens))

    windows = [
        _constant("axis", np.array([2])),
        _constant("classes", np.array(HUM.codebook_size)),
        _constant("values", np.array([0, 1], np.float32)),
        _constant("ends", np.array([1])),
        helper.make_node("ReduceSum", ["codes", "axis"], ["sums"], keepdims=0),  # (B, F)
        helper.make_node("Unsqueeze", ["book", "ends"], ["books"]),
        helper.make_node("Add", ["sums", "books"], ["added"]),
        helper.make_node("Mod", ["added", "classes"], ["chosen"]),
        helper.make_node("OneHot", ["chosen", "classes", "values"], ["logits"]),
    ]
    waveform = [
        _constant("axis", np.array([2])),
        _constant("repeats", np.array([1, 1, HUM.hop_length])),
        _constant("shape", np.array([0, -1])),
        _constant("scale", np.array(0.02, np.float32)),
        helper.make_node("ReduceSum", ["codes", "axis"], ["sums"], keepdims=1),  # (B, F, 1)
        helper.make_node("Cast", ["sums"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["numbers", "scale"], ["levels"]),
        helper.make_node("Tile", ["levels", "repeats"], ["held"]),
        helper.make_node("Reshape", ["held", "shape"], ["samples"]),
    ]
    frames = codes.model_copy(update={"shape": ("batch", "frames", HUM.num_books)})
    vocabulary = {letter: index for index, letter in enumerate("_" + string.ascii_lowercase)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    with staging_folder(store) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        voice = {"semantic": [1, 2, 3], "coarse": [[1, 2], [3, 4], [5, 6], [7, 0]], "fine": [[1, 2, 3]] * 4}
        (folder / "voices.json").write_text(json.dumps({"low": voice}))
        graphs: dict[GraphRole, Graph] = {}
        for role, num_tokens in (("decoder", HUM.first_code + 1), ("coarse_decoder", 34)):
            nodes, logits = decoder(num_tokens)
            graphs[role] = _save_graph(folder, nodes, [ids, places], [logits], role=role)  # type: ignore[index]
        graphs["fine_decoder"] = _save_graph(folder, windows, [codes, book], [fine], role="fine_decoder")
        graphs["codec_decoder"] = _save_graph(folder, waveform, [frames], [samples], role="codec_decoder")
        manifest = _manifest(
            folder,
            graphs,
            name=name,
            version=version,
            task=Task.STAGED_SYNTHESIS,
            limits=Limits(max_input_tokens=16, max_total_tokens=40),
            special_tokens=SpecialTokens(eos=HUM.first_code),
            labels=("low",),
            stages=HUM,
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


MURMUR = SpectrogramSpeech(
    sampling_rate=8_000,
    hop_length=80,
    num_bins=1,
    frames_per_step=2,
    num_layers=1,
    num_units=1,
    kept=0.5,
    kept_scale=2.0,
    speaker_width=1,
    end_probability=0.5,
    frames_per_token=20.0,
    context_frames=2,
    frames_per_run=16,
)
"""How the murmuring model speaks."""


def write_murmur_bundle(store: Path, *, name: str = "murmur", version: str = "1") -> Bundle:
    """Publishes the murmuring model: what is kept of a step's dropout gets louder, and it never ends by itself."""
    ids = TensorSpec(name="input_ids", dtype="int64", shape=("batch", "length"))
    read = TensorSpec(name="cross_key_0", dtype="float32", shape=("batch", 1, "length", 1))
    step = [
        TensorSpec(name=key, dtype="float32", shape=("slots", *width))
        for key, width in (("frame", (1,)), ("dropout", (1, 1)), ("speaker", (1,)))
    ]
    step.append(TensorSpec(name="source_mask", dtype="int64", shape=("sources", "source_length")))
    frames = TensorSpec(name="frames", dtype="float32", shape=("slots", 1, 4))
    spectrogram = TensorSpec(name="spectrogram", dtype="float32", shape=("batch", "frames", 1))
    samples = TensorSpec(name="samples", dtype="float32", shape=("batch", "samples"))
    text = [
        _constant("places", np.array([1, 3])),
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["numbers", "places"], ["cross_key_0"]),
    ]
    decoder = [
        _constant("last", np.array([2])),
        _constant("slower", np.array([0.9, 0.9, 0, 0], np.float32)),
        _constant("never", np.array([0, 0, -9, -9], np.float32)),
        helper.make_node("Add", ["frame", "speaker"], ["voiced"]),
        helper.make_node("Unsqueeze", ["voiced", "last"], ["before"]),  # (R, 1, 1)
        helper.make_node("Add", ["before", "dropout"], ["louder"]),
        helper.make_node("Mul", ["louder", "slower"], ["levels"]),
        helper.make_node("Add", ["levels", "never"], ["frames"]),
    ]
    waveform = [
        _constant("shape", np.array([0, -1])),
        _constant("scale", np.array(0.02, np.float32)),
        helper.make_node("Mul", ["spectrogram", "scale"], ["levels"]),
        helper.make_node("Concat", ["levels"] * MURMUR.hop_length, ["repeated"], axis=2),
        helper.make_node("Reshape", ["repeated", "shape"], ["samples"]),
    ]
    vocabulary = {letter: index for index, letter in enumerate("_" + string.ascii_lowercase)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    with staging_folder(store) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "voices.json").write_text(json.dumps({"low": [0.5], "high": [1.0]}))
        graphs: dict[GraphRole, Graph] = {
            "encoder": _save_graph(folder, text, [ids], [read], role="encoder"),
            "decoder": _save_graph(folder, decoder, step, [frames], role="decoder"),
            "waveform_decoder": _save_graph(folder, waveform, [spectrogram], [samples], role="waveform_decoder"),
        }
        manifest = _manifest(
            folder,
            graphs,
            name=name,
            version=version,
            task=Task.SPECTROGRAM_SYNTHESIS,
            limits=Limits(max_input_tokens=16, max_total_tokens=40),
            special_tokens=SpecialTokens(),
            labels=("low", "high"),
            spectrogram=MURMUR,
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


CLAP = DelayedCodes(
    sampling_rate=8_000,
    hop_length=80,
    num_books=2,
    codebook_size=8,
    guidance_scale=2.0,
    max_frames=40,
    context_frames=2,
    frames_per_run=16,
)
"""How the clapping model writes."""


def write_clap_bundle(store: Path, *, name: str = "clap", version: str = "1") -> Bundle:
    """Publishes the clapping model: the codes of a step follow from those before, and samples are codes."""
    width = CLAP.num_books * CLAP.codebook_size
    ids = TensorSpec(name="input_ids", dtype="int64", shape=("batch", "length"))
    read = TensorSpec(name="cross_key_0", dtype="float32", shape=("batch", 1, "length", 1))
    step = [
        TensorSpec(name="codes", dtype="int64", shape=("slots", CLAP.num_books)),
        TensorSpec(name="condition", dtype="float32", shape=("slots",)),
        TensorSpec(name="source_mask", dtype="int64", shape=("sources", "source_length")),
    ]
    logits = TensorSpec(name="logits", dtype="float32", shape=("slots", 1, width))
    codes = TensorSpec(name="codes", dtype="int64", shape=("batch", "frames", CLAP.num_books))
    states = TensorSpec(name="states", dtype="float32", shape=("batch", "frames", 1))
    samples = TensorSpec(name="samples", dtype="float32", shape=("batch", "samples"))
    text = [
        _constant("places", np.array([1, 3])),
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["numbers", "places"], ["cross_key_0"]),
    ]
    decoder = [
        _constant("table", np.random.default_rng(0).normal(size=(CLAP.codebook_size + 1, width)).astype(np.float32)),
        _constant("axis", np.array([1])),
        _constant("behind", np.array([1, 2])),
        helper.make_node("Gather", ["table", "codes"], ["rows"]),  # (R, K, K * V)
        helper.make_node("ReduceSum", ["rows", "axis"], ["sums"], keepdims=1),
        helper.make_node("Unsqueeze", ["condition", "behind"], ["scale"]),
        helper.make_node("Mul", ["sums", "scale"], ["logits"]),
    ]
    codec = [
        _constant("axis", np.array([2])),
        helper.make_node("ReduceSum", ["codes", "axis"], ["sums"], keepdims=1),  # (B, F, 1)
        helper.make_node("Cast", ["sums"], ["states"], to=TensorProto.FLOAT),
    ]
    waveform = [
        _constant("shape", np.array([0, -1])),
        _constant("scale", np.array(0.02, np.float32)),
        helper.make_node("Mul", ["states", "scale"], ["levels"]),
        helper.make_node("Concat", ["levels"] * CLAP.hop_length, ["repeated"], axis=2),
        helper.make_node("Reshape", ["repeated", "shape"], ["samples"]),
    ]
    vocabulary = {letter: index for index, letter in enumerate("_" + string.ascii_lowercase)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    with staging_folder(store) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        graphs: dict[GraphRole, Graph] = {
            "encoder": _save_graph(folder, text, [ids], [read], role="encoder"),
            "decoder": _save_graph(folder, decoder, step, [logits], role="decoder"),
            "codec_decoder": _save_graph(folder, codec, [codes], [states], role="codec_decoder"),
            "waveform_decoder": _save_graph(folder, waveform, [states], [samples], role="waveform_decoder"),
        }
        manifest = _manifest(
            folder,
            graphs,
            name=name,
            version=version,
            task=Task.DELAYED_SYNTHESIS,
            limits=Limits(max_input_tokens=16, max_total_tokens=CLAP.steps_of(CLAP.max_frames)),
            special_tokens=SpecialTokens(),
            sampling_defaults=SamplingDefaults(temperature=1.0),
            delayed=CLAP,
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


def letters(text: str) -> NDArray[np.float32]:
    """Returns a sound of 0.1 s a token, in which the letter model hears a text; `_` is the blank."""
    loudness = [0.25 * LETTERS.index({"_": "<pad>", " ": "|"}.get(letter, letter)) for letter in text]
    return np.repeat(np.array(loudness, np.float32), RATE // 10)


def _topic_words() -> tuple[list[str], Tokenizer]:
    """Returns the vocabulary, and its tokenizer."""
    words = [*_SPECIAL, *(word for topic in TOPICS.values() for word in topic)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A [CLS]:1 $B:1", special_tokens=[("[CLS]", 1)]
    )
    return words, tokenizer


def _topic_vectors(words: list[str]) -> np.ndarray:
    """Returns the vector of each word, (words, topics) float32."""
    vectors = np.zeros((len(words), len(TOPICS)), np.float32)
    for topic, members in enumerate(TOPICS.values()):
        for strength, word in enumerate(members):
            vectors[words.index(word), topic] = 2 + strength
    return vectors


def _topic_nodes(
    words: list[str], num_idle_products: int, has_token_types: bool, num_labels: int
) -> list[onnx.NodeProto]:
    mixing = np.eye(len(TOPICS), num_labels, dtype=np.float32) + np.float32(0.1)  # so that a matrix product takes part
    return [
        _constant("vectors", _topic_vectors(words)),
        _constant("mixing", mixing),
        _constant("length_axis", np.array([1])),
        _constant("last_axis", np.array([-1])),
        helper.make_node("Gather", ["vectors", "input_ids"], ["embedded"]),  # (B, T, C)
        helper.make_node("Cast", ["attention_mask"], ["ones"], to=TensorProto.FLOAT),  # (B, T)
        *(_type_nodes() if has_token_types else [helper.make_node("Identity", ["ones"], ["mask"])]),
        helper.make_node("Unsqueeze", ["mask", "last_axis"], ["mask3"]),  # (B, T, 1)
        helper.make_node("Mul", ["embedded", "mask3"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "length_axis"], ["sums"], keepdims=0),  # (B, C)
        helper.make_node("ReduceSum", ["mask", "length_axis"], ["counts"], keepdims=1),  # (B, 1)
        helper.make_node("Div", ["sums", "counts"], ["means"]),
        helper.make_node("MatMul", ["means", "mixing"], ["logits" if not num_idle_products else "first_logits"]),
        *(_idle_nodes(num_idle_products) if num_idle_products else ()),
    ]


def _type_nodes() -> list[onnx.NodeProto]:
    """Makes tokens of type 1 weigh ten."""
    return [
        _constant("nine", np.float32(9)),
        helper.make_node("Cast", ["token_type_ids"], ["types"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["types", "nine"], ["more"]),
        helper.make_node("Add", ["ones", "more"], ["weights"]),
        helper.make_node("Mul", ["weights", "ones"], ["mask"]),  # (B, T)
    ]


def _idle_nodes(num_products: int) -> list[onnx.NodeProto]:
    """Multiplies zeros, which hang on the input so that nothing is computed ahead, and adds what comes out."""
    size = 512
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (size, size)) for name in ("old", "new")]
    condition = [helper.make_tensor_value_info(name, TensorProto.BOOL, ()) for name in ("go", "go_on")]
    step = helper.make_tensor_value_info("step", TensorProto.INT64, ())
    nodes = [helper.make_node("MatMul", ["old", "old"], ["new"]), helper.make_node("Identity", ["go"], ["go_on"])]
    body = helper.make_graph(nodes, "body", [step, condition[0], values[0]], [condition[1], values[1]])
    return [
        _constant("num_products", np.array(num_products)),
        _constant("go_ahead", np.array(True)),
        _constant("zeros", np.zeros((size, size), np.float32)),
        _constant("zero", np.float32(0)),
        helper.make_node("ReduceSum", ["first_logits"], ["anything"], keepdims=0),
        helper.make_node("Mul", ["anything", "zero"], ["nothing"]),
        helper.make_node("Add", ["zeros", "nothing"], ["start"]),
        helper.make_node("Loop", ["num_products", "go_ahead", "start"], ["product"], body=body),
        helper.make_node("ReduceMax", ["product"], ["corner"], keepdims=0),
        helper.make_node("Add", ["first_logits", "corner"], ["logits"]),
    ]


def _constant(name: str, value: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


def _save(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[TensorSpec],
    *,
    embedding: str | None = None,
    num_labels: int = 3,
) -> Graph:
    """Writes the graph from `inputs` to float32 logits; a tensor of three named by `embedding` is an output."""
    outputs = [TensorSpec(name="logits", dtype="float32", shape=("batch", num_labels))]
    if embedding is not None:
        outputs.append(TensorSpec(name="embedding", dtype="float32", shape=("batch", 3)))
        nodes = [*nodes, helper.make_node("Identity", [embedding], ["embedding"])]
    return _save_graph(folder, nodes, inputs, outputs)


def _save_graph(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    role: str = "model",
) -> Graph:
    """Writes a graph of these tensors."""
    types = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}
    ins, outs = (
        [helper.make_tensor_value_info(spec.name, types[spec.dtype], spec.shape) for spec in specs]
        for specs in (inputs, outputs)
    )
    graph = helper.make_graph(nodes, "model", ins, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, folder / f"{role}.onnx")
    return Graph(file=f"{role}.onnx", inputs=tuple(inputs), outputs=tuple(outputs))


def _manifest(
    folder: Path, graph: Graph | dict[GraphRole, Graph], *, text_encoder: Graph | None = None, **fields: object
) -> Manifest:
    """Fills in what all tiny bundles have in common; reads the folder's files, so they come first."""
    parity = ParityFigures(
        max_relative_logit_error=0.0, bound=1e-4, checked_shape_count=1, provider="CPUExecutionProvider"
    )
    quality = QualityFigure(metric="accuracy", value=99.5, example_count=200, dataset="made up", higher_is_better=True)
    graphs: dict[GraphRole, Graph] = {"model": graph} if isinstance(graph, Graph) else graph
    if text_encoder is not None:
        graphs = graphs | {"text_encoder": text_encoder}
    variant = Variant(device="cpu", graphs=graphs, parity=parity, quality=quality)
    fields.setdefault("description", "A tiny model for tests.")
    return Manifest(
        schema_version=1,
        license="Apache-2.0",
        architecture=Architecture(kind="tiny", parameter_count=9, configuration={}),
        variants={Precision.FP32: variant},
        opset=_OPSET,
        libraries={"onnx": onnx.__version__},
        files=describe_files(folder),
        **fields,
    )
