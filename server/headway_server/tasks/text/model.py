"""Base of text models: a tokenizer, a graph of token ids, and embeddings.

T tokens of a text, D width of an embedding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import BatchGraph, Postprocess, Tensors
from headway_server.batching.settings import MAX_TEXTS
from headway_server.bundles import BBOX, TOKENIZER_FILE, Bundle, GraphRole, Manifest, SpecialTokens, demanded
from headway_server.errors import InvalidInputError
from headway_server.observers import NO_OBSERVER, ModelUsage, Observer
from headway_server.preprocessing import EncodedText, TextTokenizer
from headway_server.runtime import Runtime, Session
from headway_server.serving.answers import NO_TIMINGS, Answer, CallTimings
from headway_server.serving.calls import counted_tokens, current_caller
from headway_server.serving.limits import (
    check_count,
    check_one_each,
    check_text,
    check_texts,
    check_token_ids,
    num_bytes,
)
from headway_server.settings import ServerSettings
from headway_server.tasks.inspection.inspector import InspectedText, inspected_tokens
from headway_server.tasks.inspection.maps import AttentionRequest
from headway_server.tasks.outputs import EMBEDDING, cosines, logits_postprocess, read_vector
from headway_server.tasks.stateless import (
    StatelessModel,
    StatelessParts,
    expected_outputs,
    late_interaction,
    with_memory,
)
from headway_server.tasks.text.labels import LabelVectors, SetVectors

Result = TypeVar("Result")

BYTES_OF_TOKEN: Final = 24
"""Bytes of a token's id, mask and type."""
BYTES_OF_OFFSETS: Final = 128
"""Bytes of a token's first and last character, as objects."""
_FEW_SPECIAL: Final = 4
_WORK_OF_TEXT: Final = 64
"""Minimum work of a text, in bytes."""
_WARM_UP_LENGTH: Final = 32
"""Tokens of a graph's test run at load time, within its limit."""
_TYPES: Final = "token_type_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInputs:
    """Texts of a call."""

    texts: Sequence[str]
    """1 to `MAX_TEXTS` texts of at least one character."""
    text_pairs: Sequence[str] | None = None
    """Second text of each pair; None: single texts."""
    truncate: bool = False
    """True cuts the end off a text that is too long, of a pair the longer text first; False refuses it."""
    prompt: str = ""
    """Prefix of each text."""
    fields: Sequence[str] = ()
    """Name of each in the request, for error messages; empty: `texts[0]` and so on."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all texts in UTF-8."""
        return sum(map(num_bytes, (*self.texts, *(self.text_pairs or ())))) + len(self.texts) * num_bytes(self.prompt)

    def most_tokens(self, max_tokens: int) -> int:
        """Returns the most tokens that the texts may have; one has at most `max_tokens`, and one for each byte."""
        pairs = self.text_pairs or [""] * len(self.texts)
        before = _FEW_SPECIAL + num_bytes(self.prompt)
        lengths = (before + num_bytes(text) + num_bytes(pair) for text, pair in zip(self.texts, pairs, strict=False))
        return sum(min(length, max_tokens) for length in lengths)

    def num_token_bytes(self, max_tokens: int, *, with_offsets: bool) -> int:
        """Returns the maximum bytes of the tokens; see `most_tokens`."""
        return (BYTES_OF_TOKEN + with_offsets * BYTES_OF_OFFSETS) * self.most_tokens(max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """Texts of a call as token ids of the bundle's tokenizer."""

    input_ids: Sequence[NDArray[np.int64]]
    """1 to `MAX_TEXTS` arrays of at least one token, (T,) each."""
    type_ids: Sequence[NDArray[np.int64]] | None = None
    """(T,) each, 1 in the second text of a pair and 0 elsewhere; None: 0 everywhere."""
    fields: Sequence[str] = ()
    """Name of each in the request, for error messages; empty: `input_ids[0]` and so on."""

    @property
    def texts(self) -> Sequence[str]:
        """An empty text for each; the texts are unknown."""
        return [""] * len(self.input_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tokens."""
        return sum(ids.nbytes for ids in self.input_ids)

    def num_token_bytes(self, max_tokens: int, *, with_offsets: bool) -> int:  # noqa: ARG002 (interface of `TextInputs`)
        """Returns the bytes of the other inputs of the model: a mask, and types."""
        return (BYTES_OF_TOKEN - 8) * sum(map(len, self.input_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedText:
    """Vector of one text, or of one pair."""

    values: NDArray[np.float32]
    """(D,)"""
    num_tokens: int
    truncated: bool

    def sparse(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Returns the indices and the values that are not 0, (N,) each."""
        indices = np.flatnonzero(self.values)
        return indices, self.values[indices]


class Relevance(NamedTuple):
    """Relevance of texts to a query."""

    scores: NDArray[np.float32]
    """(texts,)"""
    num_tokens: int
    """Tokens of the query and the texts; of pairs, the query's in each."""
    timings: CallTimings


class TextModel(StatelessModel):
    """Model that reads texts, and embeds them if its graph has embeddings. Used directly for embedding models."""

    _noun = "texts"
    _role: ClassVar[GraphRole] = "model"
    """Graph that reads the texts."""
    _labels_tokens = False
    """True if the graph has logits for each token, (T, C), instead of for the text, (C,)."""

    def __init__(self, bundle: Bundle, parts: StatelessParts, tokenizer: TextTokenizer) -> None:
        """Assembles a model from its parts."""
        batching = parts.settings.batching
        self._budget = batching.batch_tokens(parts.graph.device)
        super().__init__(bundle, parts, budget=self._budget, max_waiting=batching.max_waiting_texts)
        self.max_input_tokens = demanded(bundle.manifest.limits.max_input_tokens)
        self._max_text_bytes = parts.settings.max_text_bytes
        self._tokenizer = tokenizer
        self.has_types = _TYPES in parts.graph.input_names
        """True if its graph reads types of tokens."""
        self.label_vectors = LabelVectors()
        """Label vectors for callers of an image model in the same space."""

    def usage(self) -> ModelUsage:
        """Returns the number of waiting texts, and the size of the cache of label vectors."""
        has_vectors = self.bundle.manifest.embedding is not None
        return replace(super().usage(), caches=(self.label_vectors.usage(),) if has_vectors else ())

    @property
    def _is_sparse(self) -> bool:
        embedding = self.bundle.manifest.embedding
        return embedding is not None and embedding.is_sparse

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the requested variant, or the best one for the runtime, and runs it once.

        Raises:
            BundleError: The graph or the tokenizer cannot be loaded, or they do not fit the manifest.
            RuntimeUnavailableError: The bundle does not have the variant.
        """
        manifest = bundle.manifest
        precision, variant = runtime.choose_variant(manifest, settings.precision)
        tokenizer = TextTokenizer.load(
            bundle.file(TOKENIZER_FILE),
            truncation_side=bundle.manifest.truncation_side,
            truncates=settings.truncate_texts,
        )
        runtime = with_memory(
            runtime,
            manifest,
            variant,
            largest=demanded(manifest.limits.max_input_tokens),
            batch=settings.batching.batch_tokens(runtime.device),
        )
        session = runtime.open(bundle, variant.graphs[cls._role])
        graph = text_graph(session, manifest.special_tokens, cls._postprocess(manifest))
        length = min(_WARM_UP_LENGTH, manifest.limits.max_input_tokens or 1)
        first = EncodedText(input_ids=np.zeros(length, np.int64), boxes=_no_boxes(manifest, length))
        item = cls._tensors(manifest, first, has_types=_TYPES in graph.input_names)
        max_padding = graph.warm_up(item, length, cls._expected(manifest, length))
        parts = StatelessParts(
            precision=precision,
            graph=graph,
            max_padding=max_padding,
            runtime=runtime,
            settings=settings,
            observer=observer,
        )
        return cls(bundle, parts, tokenizer)

    @classmethod
    def _tensors(cls, manifest: Manifest, text: EncodedText, *, has_types: bool) -> Tensors:  # noqa: ARG003
        """Returns the graph's inputs for a text; see `text_tensors`."""
        return text_tensors(
            text.input_ids,
            text.type_ids,
            has_types=has_types,
            num_seen=text.num_seen,
            num_unpooled=text.num_unpooled,
            boxes=text.boxes,
        )

    def _cost(self, item: Tensors) -> int:
        """Returns the cost of a text in the budget of a batch, in tokens."""
        return len(item["input_ids"])

    @classmethod
    def _expected(cls, manifest: Manifest, length: int) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of the outputs for a text of `length` tokens."""
        is_by_token = cls._labels_tokens or late_interaction(manifest) is not None
        return expected_outputs(manifest, *((length,) if is_by_token else ()))

    @classmethod
    def _postprocess(cls, manifest: Manifest) -> Postprocess | None:
        """Returns the postprocessing of a batch's outputs; see `BatchGraph`."""
        return None if cls._labels_tokens else logits_postprocess(manifest)

    async def embed(
        self, inputs: TextInputs | TokenInputs, *, normalize: bool | None, deadline: float | None, prompt_name: str = ""
    ) -> Answer[EmbeddedText]:
        """Embeds texts; for bundles whose graphs have embeddings.

        Args:
            inputs: Texts.
            normalize: True to scale vectors to length 1; None: dense ones.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
            prompt_name: Name of the model's prompt before each text; empty: its default, if it has one.

        Raises:
            RequestError: The texts cannot be read, there is no such prompt, the queue is full, the deadline passed, the
                server is draining.
        """
        normalize = not self._is_sparse if normalize is None else normalize
        prompt = self._prompt(prompt_name, is_text=isinstance(inputs, TextInputs))
        if prompt and isinstance(inputs, TextInputs):
            inputs = replace(inputs, prompt=prompt)

        def read(row: Tensors, _: int, encoded: EncodedText) -> EmbeddedText:
            values = read_vector(row[EMBEDDING], normalize=normalize)
            return EmbeddedText(values=values, num_tokens=len(encoded), truncated=encoded.truncated)

        return await self._answer(inputs, (EMBEDDING,), read, deadline=deadline)

    async def embed_many(
        self, inputs: TextInputs | TokenInputs, *, normalize: bool | None, deadline: float | None, prompt_name: str = ""
    ) -> Answer[EmbeddedText]:
        """Embeds any number of texts, in parts of `MAX_TEXTS`; arguments and errors are those of `embed`."""
        embedding = self.bundle.manifest.embedding
        assert embedding is not None, "the ability requires it"
        results, timings, count = list[EmbeddedText](), NO_TIMINGS, len(inputs.texts)
        with self._memory.admit(1, 4 * count * embedding.dimension, caller=current_caller()):
            for start in range(0, count, MAX_TEXTS):
                some = slice(start, start + MAX_TEXTS)
                part: TextInputs | TokenInputs
                if isinstance(inputs, TextInputs):
                    part = replace(inputs, texts=inputs.texts[some], fields=inputs.fields[some])
                else:
                    part = replace(inputs, input_ids=inputs.input_ids[some], fields=inputs.fields[some])
                answer = await self.embed(part, normalize=normalize, deadline=deadline, prompt_name=prompt_name)
                results += answer.results
                timings += answer.timings
        return Answer(results=results, timings=timings)

    async def embed_labels(
        self, labels: Sequence[str], templates: Sequence[str], *, deadline: float | None
    ) -> NDArray[np.float32]:
        """Returns vectors of labels, (C, D) of length one; repeated sets of labels are cached.

        Args:
            labels: At least one, none twice.
            templates: Texts with `{}` for the label, whose vectors are averaged. None: the labels alone.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: As `embed`; a label repeats, or a template does not have exactly one `{}`.
        """

        async def embed(texts: Sequence[str], fields: Sequence[str]) -> SetVectors:
            return await self._embed_many(TextInputs(texts=texts, fields=fields), "", deadline)

        return await self.label_vectors.of(labels, templates, max_text_bytes=self._max_text_bytes, embed=embed)

    async def embed_set(
        self, texts: Sequence[str], *, prompt_name: str, truncate: bool, deadline: float | None
    ) -> SetVectors:
        """Returns vectors of candidate texts, of length one; repeated sets are cached.

        Args:
            texts: 1 to `MAX_LABELS`.
            prompt_name: As in `embed`.
            truncate: As in `TextInputs`.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: As `embed`.
        """

        async def embed(texts: Sequence[str], fields: Sequence[str]) -> SetVectors:
            return await self._embed_many(
                TextInputs(texts=texts, fields=fields, truncate=truncate), prompt_name, deadline
            )

        reading = (prompt_name, str(truncate))
        return await self.label_vectors.of_texts(texts, reading, max_text_bytes=self._max_text_bytes, embed=embed)

    async def embed_query(
        self, text: str, *, prompt_name: str = "", truncate: bool = False, deadline: float | None
    ) -> tuple[EmbeddedText, CallTimings]:
        """Returns the vector of length one of a query, `query_text` in error messages; errors: `embed`."""
        inputs = TextInputs(texts=[text], fields=["query_text"], truncate=truncate)
        answer = await self.embed(inputs, normalize=None, deadline=deadline, prompt_name=prompt_name)
        return answer.results[0], answer.timings

    async def relevance(
        self,
        query: str,
        texts: Sequence[str],
        *,
        query_prompt_name: str,
        prompt_name: str,
        truncate: bool,
        deadline: float | None,
    ) -> Relevance:
        """Returns the relevance of each text to a query.

        Args:
            query: The query; `query_text` in error messages.
            texts: 1 to `MAX_LABELS`.
            query_prompt_name: The model's prompt before the query; empty: its default, if it has one.
            prompt_name: The same before each text.
            truncate: As in `TextInputs`.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: As `embed`.
        """
        found, timings = await self.embed_query(
            query, prompt_name=query_prompt_name, truncate=truncate, deadline=deadline
        )
        vectors = await self.embed_set(texts, prompt_name=prompt_name, truncate=truncate, deadline=deadline)
        return Relevance(
            scores=(vectors.vectors @ found.values if self._is_sparse else cosines(found.values, vectors.vectors)),
            num_tokens=found.num_tokens + vectors.num_tokens,
            timings=timings,
        )

    async def _embed_many(self, inputs: TextInputs, prompt_name: str, deadline: float | None) -> SetVectors:
        """Returns vectors of any number of texts; dense ones of length one."""
        results = (await self.embed_many(inputs, normalize=None, deadline=deadline, prompt_name=prompt_name)).results
        return SetVectors(
            np.stack([result.values for result in results]),
            num_truncated=sum(result.truncated for result in results),
            num_tokens=sum(result.num_tokens for result in results),
        )

    async def inspect(
        self,
        text: str,
        *,
        text_pair: str | None,
        request: AttentionRequest,
        truncate: bool,
        deadline: float | None,
    ) -> InspectedText:
        """Computes attention maps of a text, or of a pair.

        Args:
            text: The text.
            text_pair: Second text of a pair; None: a single text.
            request: Layers, heads and summary of the requested weights.
            truncate: As in `TextInputs`.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: An argument is out of its range, the bundle has no attention graph, the weights exceed the
                limit, the queue is full, the deadline passed, the server is draining.
        """
        begun = self._inspector.begin(request, deadline)  # where there is no graph, no other text helps
        check_text("text", text, self._max_text_bytes)
        self._check_paired("text_pair", is_paired=text_pair is not None)
        if text_pair is not None:
            check_text("text_pair", text_pair, self._max_text_bytes)
        with begun as job:
            with job.preparing():
                [encoded] = await self._tokenizer.encode_limited(
                    [text],
                    fields=["text"],
                    max_tokens=self.max_input_tokens,
                    truncate=truncate or self._tokenizer.truncates,
                    text_pairs=None if text_pair is None else [text_pair],
                    with_offsets=True,
                )
                tokens = await inspected_tokens(self._tokenizer, encoded)
            item = text_tensors(encoded.input_ids, encoded.type_ids, has_types=self.has_types)
            maps = await job.read(item, field="text", num_tokens=len(encoded))
        return InspectedText(tokens=tokens, maps=maps, truncated=encoded.truncated, timings=job.timings)

    async def _answer(
        self,
        inputs: TextInputs | TokenInputs,
        outputs: Sequence[str],
        read: Callable[[Tensors, int, EncodedText], Result],
        *,
        deadline: float | None,
        with_offsets: bool = False,
    ) -> Answer[Result]:
        """Tokenizes texts, runs them and reads outputs of each.

        Args:
            inputs: Texts.
            outputs: Names of the outputs.
            read: Makes a result from these outputs, the number of the text and its tokens; called off the event loop.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
            with_offsets: True if `read` needs the characters of each token.
        """
        if isinstance(inputs, TextInputs):
            fields = self._check(inputs)
        else:
            self._check_tokens(inputs)
        caller, count = current_caller(), len(inputs.texts)
        work = float(count * _WORK_OF_TEXT + inputs.num_bytes)
        num_bytes = inputs.num_bytes + inputs.num_token_bytes(self.max_input_tokens, with_offsets=with_offsets)
        with self._admission.admit(count, num_bytes, work=work, deadline=deadline, caller=caller):
            began = time.monotonic()
            if isinstance(inputs, TextInputs):
                encoded = await self._encode(inputs, fields, with_offsets=with_offsets)
            else:
                types: Sequence[NDArray[np.int64] | None] = inputs.type_ids or [None] * len(inputs.input_ids)
                encoded = [
                    EncodedText(input_ids=ids, type_ids=of_ids)
                    for ids, of_ids in zip(inputs.input_ids, types, strict=True)
                ]
            preprocessing_s = time.monotonic() - began
            items = [self._tensors(self.bundle.manifest, text, has_types=self.has_types) for text in encoded]
            with counted_tokens(sum(map(len, encoded))):
                batched = await self._batcher.submit(
                    items,
                    list(map(self._cost, items)),
                    outputs=outputs,
                    read=lambda row, index: read(row, index, encoded[index]),
                    deadline=deadline,
                    caller=caller,
                )
        timings = CallTimings.of(batched.runs, preprocessing_s=preprocessing_s)
        return Answer(results=batched.results, timings=timings)

    async def _encode(self, inputs: TextInputs, fields: Sequence[str], *, with_offsets: bool) -> list[EncodedText]:
        """Tokenizes the texts of a call, within the model's limit; errors: `encode_limited`."""
        encoded = await self._tokenizer.encode_limited(
            [inputs.prompt + text for text in inputs.texts] if inputs.prompt else inputs.texts,
            fields=fields,
            max_tokens=self.max_input_tokens,
            truncate=inputs.truncate or self._tokenizer.truncates,
            text_pairs=inputs.text_pairs,
            with_offsets=with_offsets,
        )
        embedding = self.bundle.manifest.embedding
        if not inputs.prompt or embedding is None or embedding.pools_prompt:
            return encoded
        count = await self._count_prompt(inputs.prompt)
        return [replace(text, num_unpooled=min(count, len(text) - 1)) for text in encoded]

    async def _count_prompt(self, prompt: str) -> int:
        """Returns the tokens of a prompt with those before it, and without those behind a text."""
        each = self._tokenizer.encode_each([prompt], add_special_tokens=True)
        async with aclosing(each):
            [whole] = [text async for text in each]
        inner = self._tokenizer.encode_now(prompt).input_ids
        before = next(
            (
                start
                for start in range(len(whole))
                if np.array_equal(whole.input_ids[start : start + len(inner)], inner)
            ),
            0,
        )
        return before + len(inner)

    def _prompt(self, name: str, *, is_text: bool) -> str:
        """Returns the text of a prompt, or of the default one.

        Raises:
            InvalidInputError: The model has no such prompt, or the call has token ids.
        """
        embedding = self.bundle.manifest.embedding
        assert embedding is not None, "the ability requires it"
        if not name:
            return embedding.prompts[embedding.default_prompt] if embedding.default_prompt and is_text else ""
        if not is_text:
            raise InvalidInputError(
                "prompt_name", "is set together with token ids; put the prompt's tokens before them"
            )
        if name not in embedding.prompts:
            known = ", ".join(embedding.prompts) or "none"
            raise InvalidInputError(
                "prompt_name", f"is {name!r}; model {self.bundle.manifest.name} has the prompts {known}"
            )
        return embedding.prompts[name]

    def _check(self, inputs: TextInputs) -> list[str]:
        """Validates the texts of a call, before any work is done for them, and returns their names for error messages.

        Raises:
            InvalidInputError: There are too few or too many, one is empty or too large, or they are pairs for a model
                of single texts, or the reverse.
        """
        pairs = inputs.text_pairs
        for field, text in zip(inputs.fields, inputs.texts, strict=True) if inputs.fields else ():
            check_text(field, text, self._max_text_bytes)
        fields = check_texts("texts", inputs.texts, MAX_TEXTS, self._max_text_bytes)
        self._check_paired("text_pairs", is_paired=bool(pairs))
        if pairs:
            check_one_each("text_pairs", len(pairs), len(inputs.texts))
            check_texts("text_pairs", pairs, MAX_TEXTS, self._max_text_bytes)
        return list(inputs.fields) or fields

    def _check_paired(self, field: str, *, is_paired: bool) -> None:
        """Checks that a call has second texts, in `field`, if and only if the model reads pairs.

        Raises:
            InvalidInputError: Second texts are missing, or set for a model of single texts.
        """
        manifest = self.bundle.manifest
        if not is_paired and manifest.text_pairs == "required":
            raise InvalidInputError(
                field, f"is empty, and model {manifest.name} reads pairs of texts; give one for every text"
            )
        if is_paired and manifest.text_pairs == "never":
            raise InvalidInputError(field, f"is set, and model {manifest.name} reads single texts; leave it out")

    def _check_tokens(self, inputs: TokenInputs) -> None:
        """Validates token ids, before any work is done for them.

        Raises:
            InvalidInputError: There are too few or too many, one is not in the vocabulary, or the model reads no types.
        """
        check_count("input_ids", len(inputs.input_ids), MAX_TEXTS)
        fields = inputs.fields or [f"input_ids[{index}]" for index in range(len(inputs.input_ids))]
        for field, ids in zip(fields, inputs.input_ids, strict=True):
            check_count(field, len(ids), self.max_input_tokens, "leave out some")
            check_token_ids(field, ids, self._tokenizer.largest_id)
        if inputs.type_ids is not None and not self.has_types:
            raise InvalidInputError(
                _TYPES, f"is set, and model {self.bundle.manifest.name} reads no types of tokens; leave it out"
            )
        for index, types in enumerate(inputs.type_ids or ()):
            check_token_ids(f"{_TYPES}[{index}]", types, 1)


def _no_boxes(manifest: Manifest, length: int) -> NDArray[Any] | None:
    """Returns the boxes of padding, (T, 4), for a graph that reads boxes."""
    return None if manifest.word_boxes is None else np.zeros((length, 4), manifest.word_boxes.dtype)


def text_graph(
    session: Session, special_tokens: SpecialTokens | None, postprocess: Postprocess | None = None
) -> BatchGraph:
    """Returns a batched graph of texts; shorter texts are padded with the pad token.

    Args:
        session: The graph.
        special_tokens: Special tokens of its tokenizer.
        postprocess: See `BatchGraph`.
    """
    pad_id = special_tokens.pad if special_tokens is not None else None
    return BatchGraph(session, padding={"input_ids": pad_id or 0}, postprocess=postprocess)


def text_tensors(
    input_ids: NDArray[np.int64],
    type_ids: NDArray[np.int64] | None = None,
    *,
    has_types: bool = False,
    num_seen: int | None = None,
    num_unpooled: int = 0,
    boxes: NDArray[np.int64] | NDArray[np.float32] | None = None,
) -> Tensors:
    """Returns a graph's inputs for one text, int64 (T,) each, and its boxes.

    Args:
        input_ids: (T,)
        type_ids: (T,), 1 in the second text of a pair; None: 0 everywhere.
        has_types: True if the graph reads token types.
        num_seen: Tokens, from the first, that all attend to; None: all.
        num_unpooled: Tokens, from the first, that a pooling leaves out.
        boxes: Box of each token, (T, 4), in the unit of the manifest's `word_boxes`; None: the graph reads none.
    """
    tensors: dict[str, NDArray[Any]] = {"input_ids": input_ids, "attention_mask": np.ones_like(input_ids)}
    if num_seen is not None:
        tensors["attention_mask"][num_seen:] = 0
    tensors["attention_mask"][:num_unpooled] = 2
    if has_types:
        tensors[_TYPES] = np.zeros_like(input_ids) if type_ids is None else type_ids
    if boxes is not None:
        tensors[BBOX] = boxes
    return tensors
