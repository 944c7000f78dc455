"""Makes a bundle of a module: traces it, makes the variants, proves each, describes and publishes them."""

from __future__ import annotations

import copy
import importlib.metadata
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import onnx_ir as ir
from onnx_ir.passes import InPlacePass
from torch import nn

from headway_export import agreement, inputs, parity, quality
from headway_export.activations import RowMaxima, noise_growth, row_maxima
from headway_export.candidate import Candidate
from headway_export.card import Proof, write_card, write_learning_curve
from headway_export.errors import ParityError, SourceError
from headway_export.graphs import parameter_count, shows_attention
from headway_export.reference import Reference, cache_ranges
from headway_export.rewriting import (
    EXPERTS,
    LINEAR_ATTENTION,
    AttendAhead,
    KeepBlocks,
    LayerRange,
    QuantizeBlocks,
    QuantizeCache,
    QuantizeExperts,
    QuantizeProducts,
    ReplaceSoftplus,
    SeparateRows,
    StoreFilters,
    copy_graph,
    rewrite,
)
from headway_export.source import ExportSource, check_chat_template
from headway_export.space import bundle_bytes, check_disk
from headway_export.tasks.table import task_of, tasks_where
from headway_export.tracing import CACHED, Role, TracedGraph, TracedModel, trace
from headway_export.weights import CheckpointFiles, WrittenWeights, save
from headway_server.bundles import (
    BATCH_AXIS,
    CARD_FILE,
    CHAT_TEMPLATE_FILE,
    TOKENIZER_FILE,
    BatchingFigures,
    Bundle,
    BundleFile,
    Embedding,
    Graph,
    Manifest,
    ParityFigures,
    PatchGrid,
    Precision,
    QualityFigure,
    Variant,
    describe_file,
    describe_files,
    find_place,
    publish,
    staging_folder,
    write_manifest,
)
from headway_server.runtime import Runtime, map_large_arrays

EXTERNAL_DATA_THRESHOLD_BYTES = 1 << 26
"""Size of a graph's weights from which they go to a file of their own; a protocol buffer holds 2 GiB at most."""

DEFAULT_PRECISIONS = (Precision.FP32, Precision.INT8, Precision.FP16)

Progress: TypeAlias = Callable[[str], None]

_DEVICES: dict[Precision, Literal["cpu", "cuda"]] = {
    Precision.FP32: "cpu",
    Precision.INT8: "cpu",
    Precision.INT8_STATIC: "cpu",
    Precision.INT4: "cpu",
    Precision.FP16: "cuda",
}
NOISE_GROWTHS = (float("inf"), 16.0, 4.0)
"""Of an activation whose scale is fixed, tried in turn until the variant passes its proof (`noise_growth`)."""
_UNPROVED_BATCHING = BatchingFigures(max_row_error=0.0, bound=0.0, row_counts=(1,))
_UNPROVED = ParityFigures(max_relative_logit_error=0.0, bound=None, checked_shape_count=0, provider="")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How to export."""

    store: Path
    """Folder of the bundles."""
    version: str = "1"
    """Version of the model in the store."""
    precisions: tuple[Precision, ...] = DEFAULT_PRECISIONS
    """Variants to write."""
    cache: Literal["int8", "fp32"] = "int8"
    """Key/value cache of an int8 or int4 decoder."""
    attention: bool | None = None
    """True to write the graph that gives the attention weights too; None: as the source says."""
    replace: bool = False
    """True to replace that version if it exists."""
    external_data_threshold_bytes: int = EXTERNAL_DATA_THRESHOLD_BYTES
    """Size of a graph's weights from which they go to a file of their own."""


def export(source: ExportSource, options: ExportOptions, progress: Progress = lambda _: None) -> Bundle:
    """Exports a model. Nothing is written to the store unless every variant is proved.

    Args:
        source: The module, with everything a bundle says of it.
        options: How to export.
        progress: Called with each step that begins, in a few words.

    Raises:
        ExportError: The module cannot be exported, or a variant does not compute the same function.
        BundleError: That version exists already.
    """
    _check_source(source)
    exported = task_of(source.task)
    if exported.only_in_fp32 is not None and set(options.precisions) != {Precision.FP32}:
        raise SourceError(f"{source.name} does {source.task}, in fp32 alone: {exported.only_in_fp32}; leave others out")
    if Precision.INT4 in options.precisions and not exported.takes_int4:
        those = ", ".join(tasks_where(lambda one: one.takes_int4))
        raise SourceError(f"int4 is a precision of {those}, and {source.name} does {source.task}; leave it out")
    if Precision.INT8_STATIC in options.precisions and not exported.takes_fixed_scales:
        raise SourceError(f"{source.name} does {source.task}, which has no int8-static; leave it out")
    find_place(options.store, source.name, options.version, replace=options.replace)
    count, writes_judge = parameter_count(source.module), not source.checkpoint_files
    check_disk(source.name, options.store, bundle_bytes(count, options.precisions, writes_judge=writes_judge))
    with staging_folder(options.store) as folder:
        if source.tokenizer is not None:
            source.tokenizer.save(str(folder / TOKENIZER_FILE), pretty=False)
        if source.chat_template is not None:
            (folder / CHAT_TEMPLATE_FILE).write_text(source.chat_template, encoding="utf-8", newline="")
        for name, content in source.documents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        prover = _Prover(source, folder, options, progress)
        variants = prover.prove_all()
        write_learning_curve(folder, source)
        files = describe_files(folder)
        manifest = _manifest(source, options, variants, files, prover.opset)
        write_card(folder / CARD_FILE, source, manifest, prover.proofs)
        files = dict(sorted([*files.items(), (CARD_FILE, describe_file(folder / CARD_FILE))]))
        write_manifest(folder, manifest.model_copy(update={"files": files}))
        return publish(folder, options.store, replace=options.replace)


def _check_source(source: ExportSource) -> None:
    exported = task_of(source.task)
    if exported.needs_evaluation and source.evaluation is None and source.diffusion is None:
        raise SourceError(f"{source.name}: its checkpoint carries no evaluation data; {source.task} needs some")
    exported.check_source(source)
    if source.chat_template is not None:
        assert source.tokenizer is not None, "a generation model has one"
        assert source.special_tokens is not None, "a generation model has them"
        check_chat_template(source.chat_template, source.tokenizer, source.special_tokens)


def _check_outputs(source: ExportSource, traced: TracedModel) -> None:
    """Checks that labels or tokenizer belong to the model: its logits have a column for each."""
    graph, exported = traced.graphs[-1], task_of(source.task)
    shapes = {output.name: output.shape for output in graph.outputs}
    if not exported.names_columns:
        return
    needed = exported.output_of(source)
    if needed not in shapes:
        raise SourceError(f"the model gives {', '.join(shapes) or 'nothing'}; {source.task} needs an output {needed}")
    columns = shapes[needed][-1]
    if graph.role == "model" and needed == "logits" and (len(source.labels) or 1) != columns:
        raise SourceError(f"there are {len(source.labels)} labels, and the model has {columns} classes; name each once")
    if source.tokenizer is not None and graph.role == "decoder":
        assert isinstance(columns, int), "the vocabulary is a fixed axis"
        largest = max(source.tokenizer.get_vocab().values(), default=0)
        if largest >= columns:
            raise SourceError(
                f"the tokenizer has a token of id {largest}, and the model's vocabulary ends at {columns - 1}; "
                "they do not belong together"
            )


class _Prover:
    """Makes the variants of one source, fp32 first: the others are judged by it, even where it is not kept."""

    def __init__(self, source: ExportSource, folder: Path, options: ExportOptions, progress: Progress) -> None:
        self._source, self._held_out = inputs.hold_out(source) if _takes_scales(source, options) else (source, None)
        self._folder = folder
        self._options = options
        self._progress = progress
        self._fp32_quality: QualityFigure | None = None
        self._judge: agreement.Judge | None = None
        self._cache_ranges: list[LayerRange] | None = None
        self._opsets: dict[Precision, int] = {}
        self._weights = WrittenWeights()
        self._checkpoint: CheckpointFiles | None = None
        self._reference: Reference | None = None
        num_bytes = sum(parameter.nbytes for parameter in source.module.parameters())
        self._is_large = num_bytes >= options.external_data_threshold_bytes
        if self._is_large:
            map_large_arrays()
        if self._is_large and Precision.FP32 not in options.precisions and source.checkpoint_files:
            self._checkpoint = CheckpointFiles(source.checkpoint_files)
            self._weights.begin_with(self._checkpoint, source.module)
        self.proofs: list[Proof] = []
        """Of every variant that was made; fp32 is among them even where it is not kept."""

    @property
    def opset(self) -> int:
        """The highest opset of the graphs that the bundle holds."""
        return max(opset for precision, opset in self._opsets.items() if precision in self._options.precisions)

    def prove_all(self) -> dict[Precision, Variant]:
        """Makes and proves every variant asked for."""
        wanted = self._options.precisions
        self._give_back()
        self._progress("fp32: tracing")
        traced = self._trace(self._source.module)
        _check_outputs(self._source, traced)
        if Precision.FP16 in wanted and (untried := _untried_on_cuda(traced)) is not None:
            raise SourceError(f"fp16: {untried} was never tried on CUDA; leave this precision out")
        fp32 = self._prove(Precision.FP32, traced)
        self._fp32_quality = fp32.quality
        variants = {Precision.FP32: fp32}
        if {Precision.INT8, Precision.INT8_STATIC} & set(wanted):
            for_cpu = traced
            if task_of(self._source.task).attends_by_operator and shows_attention(self._source.module):
                self._progress("int8: tracing")
                for_cpu = self._trace(self._source.module, known=traced)
            if Precision.INT8 in wanted:
                variants[Precision.INT8] = self._prove(Precision.INT8, self._quantize(for_cpu, Precision.INT8))
            if Precision.INT8_STATIC in wanted:
                quantized = self._quantize(for_cpu, Precision.INT8)
                self._progress("int8-static: reading what activations reach")
                maxima = row_maxima(quantized, self._calibration)
                del quantized
                variants[Precision.INT8_STATIC] = self._prove_static(for_cpu, maxima)
        if Precision.INT4 in wanted:
            variants[Precision.INT4] = self._prove(Precision.INT4, self._quantize(traced, Precision.INT4))
        if Precision.FP16 in wanted:
            self._progress("fp16: tracing")
            half = _halved(self._source.module)
            variants[Precision.FP16] = self._prove(Precision.FP16, self._trace(half))
        if Precision.FP32 not in wanted:
            shutil.rmtree(self._folder / Precision.FP32)
            del variants[Precision.FP32]
        return variants

    def _quantize(
        self, traced: TracedModel, precision: Precision, ranges: Mapping[str, Mapping[str, float]] | None = None
    ) -> TracedModel:
        """Returns a traced model in int8 or int4.

        Args:
            traced: The model in fp32.
            precision: What becomes of its weights.
            ranges: The largest magnitudes of activations with one scale for all rows, by name, by role of a graph.
        """
        self._progress(f"{precision}: quantizing")
        quantized = _copied(traced)
        for graph in _all_graphs(quantized):
            if precision is Precision.INT4:
                rewrite(graph.model, KeepBlocks(self._source.kept) if self._source.kept else QuantizeBlocks())
            rewrite(graph.model, QuantizeExperts(4 if precision is Precision.INT4 else 8))
            fixed = {} if ranges is None else ranges.get(graph.role, {})
            rewrite(graph.model, QuantizeProducts(many_rows=graph.role == "denoiser", ranges=fixed))
            rewrite(graph.model, StoreFilters())
        has_cache = any(tensor.update == "in_place" for tensor in traced.state)
        if has_cache and self._options.cache == "int8":
            if self._cache_ranges is None:
                self._cache_ranges = cache_ranges(self._source, self._calibration)
            rewrite(quantized.graphs[-1].model, QuantizeCache(self._cache_ranges))
        return quantized

    def _prove_static(self, traced: TracedModel, maxima: Mapping[str, RowMaxima]) -> Variant:
        """Proves an int8 model with fixed scales, for as many activations as the proof allows.

        Args:
            traced: The model in fp32.
            maxima: What its activations reach in each row, by role of a graph.

        Raises:
            ParityError: It allows too few for any gain.
        """
        for most in NOISE_GROWTHS:
            ranges = {
                role: {name: float(rows.max()) for name, rows in some.items() if noise_growth(rows) <= most}
                for role, some in maxima.items()
            }
            try:
                return self._prove(Precision.INT8_STATIC, self._quantize(traced, Precision.INT8_STATIC, ranges))
            except ParityError as error:
                failure = error
        raise failure

    def _prove(self, precision: Precision, traced: TracedModel) -> Variant:
        self._progress(f"{precision}: comparing with PyTorch")
        candidate, shows_weights = self._write(precision, traced), traced.attention is not None
        del traced  # of a quantized model nobody else holds it
        self._give_back()
        reference = self._known_reference()
        self._give_back()
        figures = parity.check(candidate, reference)
        self._give_back()
        attention = parity.check_attention(candidate, reference) if shows_weights else None
        batching = task_of(self._source.task).batching(candidate)
        if self._source.evaluation is not None:
            evaluation = self._source.evaluation
            self._progress(f"{precision}: {evaluation.metric} on {evaluation.dataset}")
        self._give_back()
        measured = quality.measure(candidate)
        figure = measured.figure if measured else None
        agreed = None
        if precision is Precision.FP32:
            if set(self._options.precisions) - {Precision.FP32}:
                self._give_back()
                self._progress("fp32: answering inputs that other variants are held against")
                self._judge = agreement.Judge.of(candidate, inputs.draw(candidate, self._held_out))
        else:
            assert self._judge is not None, "fp32 comes first"
            if figure is not None:
                assert self._fp32_quality is not None, "fp32 was judged on the same data"
                quality.check(candidate, figure, self._fp32_quality)
            agreed = self._judge.measure(candidate)
        calibration = measured.calibration if measured else None
        variant = candidate.variant.model_copy(
            update={
                "parity": figures,
                "quality": figure,
                "calibration": calibration,
                "attention": attention,
                "agreement": agreed,
                "batching": batching,
            }
        )
        kept = precision in self._options.precisions
        weak_points = measured.weak_points if measured else ()
        self.proofs.append(Proof(precision=precision, variant=variant, kept=kept, weak_points=weak_points))
        return variant

    def _known_reference(self) -> Reference:
        """Returns the second model, which is made once the weights of the first are read from the files of graphs."""
        if self._reference is None:
            is_alone = set(self._options.precisions) == {Precision.FP32}
            self._reference = Reference(self._source, folder=self._folder, keeps_answers=not is_alone)
            self._weights.share_with(self._reference.module)
        return self._reference

    @property
    def _calibration(self) -> inputs.Inputs:
        """What scales are taken from."""
        assert self._judge is not None, "fp32 comes first"
        return self._judge.drawn.calibration

    def _give_back(self) -> None:
        """Gives back what nobody needs now, where that is much: looking for it takes a quarter of a second."""
        if self._is_large:
            self._weights.give_back()

    def _write(self, precision: Precision, traced: TracedModel) -> Candidate:
        """Writes the graphs of a variant and opens them as a server would."""
        self._give_back()
        graphs: dict[Role, Graph] = {}
        written: dict[Path, ir.Model] = {}
        for graph in _all_graphs(traced):
            whole = self._as_written(precision, graph)
            file = f"{precision}/{graph.role}.onnx"
            path = self._folder / file
            path.parent.mkdir(exist_ok=True)
            threshold_bytes, beside = self._options.external_data_threshold_bytes, []
            if graph is traced.attention:  # it is the last, and reads the weights of those that serve
                beside = list(written)
            elif traced.attention is not None:
                threshold_bytes = 0
            checkpoint = self._checkpoint if precision is Precision.FP32 else None
            save(whole.model, path, threshold_bytes=threshold_bytes, written=beside, checkpoint=checkpoint)
            graphs[graph.role] = Graph(file=file, inputs=whole.inputs, outputs=whole.outputs, run_bytes=graph.run_bytes)
            written[path] = whole.model
        if precision is Precision.FP32 and next(self._source.module.parameters(), None) is not None:
            self._weights.read_from(written, self._source.module, [graph.model for graph in _all_graphs(traced)])
        del written
        opset = self._opsets[precision] = max(
            graph.model.graph.opset_imports.get("", 1) for graph in _all_graphs(traced)
        )
        variant = Variant(
            device=_DEVICES[precision],
            graphs=graphs,
            state=traced.state,
            cross=traced.cross,
            alignment_layer=traced.alignment_layer,
            parity=_UNPROVED,
            quality=None,
            batching=_UNPROVED_BATCHING if self._is_joined(graphs) else None,
        )
        manifest = _manifest(self._source, self._options, {precision: variant}, _unhashed(self._folder), opset)
        return Candidate(
            source=self._source,
            bundle=Bundle(path=self._folder, manifest=manifest),
            precision=precision,
            variant=variant,
            runtime=Runtime(
                device="auto" if variant.device == "cuda" else "cpu",
                map_weights=True,
                # fp32 that only judges is not served; and of many weights a second copy is what memory ends at.
                lay_out_weights=not self._is_large or precision in self._options.precisions,
                keep_memory=not self._is_large,
            ),
        )

    def _is_joined(self, graphs: Mapping[Role, Graph]) -> bool:
        """True if the rows of calls are joined on an axis that the manifest names."""
        if not task_of(self._source.task).measures_batching:
            return False
        return any(BATCH_AXIS in spec.shape for graph in graphs.values() for spec in graph.inputs)

    def _as_written(self, precision: Precision, graph: TracedGraph) -> TracedGraph:
        """Returns the graph as it is written."""
        if graph.role not in CACHED:
            return graph
        prompt, more = self._source.image_prompt, task_of(self._source.task).more_outputs
        ahead: list[InPlacePass] = []
        if prompt is not None and prompt.attention != "causal":  # a whole prompt is seen, whatever the window
            ahead = [AttendAhead(keeps_windows=prompt.attention == "image")]
        for_cpu = [SeparateRows(), ReplaceSoftplus(), *ahead, *([] if more is None else [more()])]
        passes = for_cpu if _DEVICES[precision] == "cpu" else ahead
        if not passes:
            return graph
        model = copy_graph(graph.model)
        rewrite(model, *passes)
        return replace(graph, model=model)

    def _trace(self, module: nn.Module, *, known: TracedModel | None = None) -> TracedModel:
        """Traces a module; for the CPU if what it is otherwise is known."""
        image, audio = self._source.image_preprocessing, self._source.audio_preprocessing
        return trace(
            module,
            self._source.task,
            image_size=image.axes if image else None,
            audio_size=(audio.num_mel_bins, audio.num_frames) if audio else None,
            sound=self._source.sound,
            has_token_types=self._source.has_token_types,
            word_boxes=self._source.word_boxes,
            attention=self._source.attention if (given := self._options.attention) is None else given,
            for_cpu=known is not None,
            known=known,
        )


def _unhashed(folder: Path) -> dict[str, BundleFile]:
    """Returns the files of a variant that is not proved yet, which nobody checks."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): BundleFile(sha256="0" * 64, size_bytes=0) for file in files}


def _untried_on_cuda(traced: TracedModel) -> str | None:
    """Says what a model has that never ran on CUDA; None: nothing."""
    operators = {node.op_type for graph in traced.graphs for node in graph.model.graph.all_nodes()}
    if operators & EXPERTS:
        return "a mixture of experts"
    updates = {tensor.update for tensor in traced.state}
    return "a decoder with such states" if LINEAR_ATTENTION in operators or len(updates) > 1 else None


def _takes_scales(source: ExportSource, options: ExportOptions) -> bool:
    """True if a variant has scales that inputs are read for: of fixed activations, or of an int8 cache."""
    cached = {Precision.INT8, Precision.INT4} if task_of(source.task).has_cache and options.cache == "int8" else set()
    return bool({Precision.INT8_STATIC, *cached} & set(options.precisions))


def _halved(module: nn.Module) -> nn.Module:
    """Returns a copy of a module in fp16, without one in fp32 on the way."""
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach().half(), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, memo).half()


def _copied(traced: TracedModel) -> TracedModel:
    """Returns a traced model whose graphs can be rewritten; both have the same tensors."""
    graphs, attention = (
        tuple(replace(graph, model=copy_graph(graph.model)) for graph in some)
        for some in (traced.graphs, () if traced.attention is None else (traced.attention,))
    )
    return replace(traced, graphs=graphs, attention=attention[0] if attention else None)


def _all_graphs(traced: TracedModel) -> tuple[TracedGraph, ...]:
    return traced.graphs if traced.attention is None else (*traced.graphs, traced.attention)


def _manifest(
    source: ExportSource,
    options: ExportOptions,
    variants: dict[Precision, Variant],
    files: dict[str, BundleFile],
    opset: int,
) -> Manifest:
    return Manifest(
        schema_version=1,
        name=source.name,
        version=options.version,
        task=source.task,
        description=source.description,
        license=source.license,
        architecture=source.architecture,
        origin=source.origin,
        variants=variants,
        special_tokens=source.special_tokens,
        limits=source.limits,
        labels=source.labels,
        classification=source.classification,
        text_pairs=source.text_pairs,
        embedding=_embedding(source, variants),
        scoring=source.scoring,
        tagging=source.tagging,
        word_boxes=source.word_boxes,
        image_preprocessing=source.image_preprocessing,
        image_prompt=source.image_prompt,
        image_question=source.image_question,
        audio_preprocessing=source.audio_preprocessing,
        speech=source.speech,
        codec=source.codec,
        languages=source.languages,
        sampling_defaults=source.sampling_defaults,
        truncation_side=source.truncation_side,
        prompt_prefix=source.prompt_prefix,
        suppressed_tokens=source.suppressed_tokens,
        media_tokens=source.media_tokens,
        opset=opset,
        libraries=_libraries(("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "headway-export")),
        files=files,
        **{"patches": _patches(source, variants), **task_of(source.task).described(source)},
    )


def _embedding(source: ExportSource, variants: dict[Precision, Variant]) -> Embedding | None:
    """Describes the output `embedding`, where the graphs have one."""
    outputs = [output for variant in variants.values() for graph in variant.graphs.values() for output in graph.outputs]
    dimension = next((output.shape[-1] for output in outputs if output.name == "embedding"), None)
    pooling = getattr(source.module, "pooling", None)
    if dimension is None or not isinstance(pooling, str):
        return None
    given: dict[str, Any] = {
        "prompts": source.prompts,
        "default_prompt": source.default_prompt,
        "space": source.space,
        "is_sparse": source.has_sparse_vectors,
        "pools_prompt": source.pools_prompt,
    }
    return Embedding.model_validate({"pooling": pooling, "dimension": dimension, **given})


def _patches(source: ExportSource, variants: dict[Precision, Variant]) -> PatchGrid | None:
    """Describes the patches that the tokens of an image stand for, where there is anything that attends to them.

    Raises:
        SourceError: As many tokens are neither a grid of square patches nor one more.
    """
    image = source.image_preprocessing
    graphs = [variant.graphs["attention"] for variant in variants.values() if "attention" in variant.graphs]
    if image is None or source.image_prompt is not None or not graphs:
        return None
    num_tokens = graphs[0].outputs[0].shape[-1]
    for side in range(1, min(image.height, image.width) + 1):
        rows, columns = image.height // side, image.width // side
        if image.height % side or image.width % side or num_tokens not in (rows * columns, rows * columns + 1):
            continue
        return PatchGrid(rows=rows, columns=columns, has_class_token=num_tokens == rows * columns + 1)
    raise SourceError(
        f"an image of {image.width} x {image.height} pixels is {num_tokens} tokens, which are neither a grid of square "
        "patches nor one with a class token; leave out --attention"
    )


def _libraries(names: Sequence[str]) -> dict[str, str]:
    """Returns the versions of those that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
