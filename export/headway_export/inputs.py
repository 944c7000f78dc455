"""What variants read beside the proof with PyTorch: inputs that judge them, and others that scales are taken from.

They come from the evaluation data, from texts, images and recordings that are given, or are drawn (`synthetic.py`).
Where there is no evaluation data, a decoder reads what its fp32 variant writes. A generator goes on from beginnings
that are drawn, at a temperature of 1; an encoder-decoder writes of each source greedily and at that temperature.

N inputs, T tokens, S source tokens, R rows of a step, P tokens that are given, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headway_export import synthetic
from headway_export.candidate import Candidate, encode_sources, features_of, pixel_values_of, run_batch
from headway_export.source import EvaluationData, ExportSource
from headway_server.batching import Tensors
from headway_server.bundles import EMBEDDING_TASKS, ENCODER_DECODER_TASKS, Task
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.diffusion import mix
from headway_server.preprocessing.audio import LogMel
from headway_server.tasks.text.model import text_tensors
from headway_training.evaluation import evaluation_windows
from headway_training.tasks.diffusion import measured_noise
from headway_training.tokenizers import encode_pairs

GENERATED: Final = "generated"
"""In place of a data set's name, where inputs are drawn."""
NUM_CALIBRATED: Final = 32
"""Inputs that scales are taken from, at most."""
_HELD_OUT_SHARE: Final = 10
"""Scales are taken from one evaluation example of so many at most, or else from those that judge as well."""
_GIVEN_SHARE: Final = 4
"""Likewise of inputs that are given."""

_MOST_PRODUCTS: Final = 1.25e11
"""Multiplications with weights that fp32 may take for the inputs that judge: 5 s of two cores or less."""
_NUM_PREDICTIONS: Final = (384, 2048)
"""Of a decoder: the least and the most."""
_NUM_SOURCES: Final = (8, 32)
"""Of an encoder-decoder."""
_NUM_ITEMS: Final = (128, 2048)
"""Of a model without state."""
_NUM_IMAGES: Final = (128, 512)
_NUM_VECTORS: Final = (64, 128)
"""Of a model of embeddings, whose cosines differ little."""
_NUM_MASKED: Final = (32, 64)
"""Images of a segmentation model, each of which is thousands of predictions."""
_LENGTHS: Final = (4, 64)
"""Tokens of a drawn text."""
_FULL_SHARE: Final = 32
"""One drawn text of so many is as long as the model reads."""
_START: Final = 4
"""Tokens of a beginning that a generator goes on from."""
_SOURCES_AT_A_TIME: Final = 4
_PATCH_PIXELS: Final = 256
"""Of an image, counted as one position."""
_SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderText:
    """What a decoder reads."""

    token_ids: NDArray[np.int64]
    """(T,)"""
    num_given: int = 1
    """Tokens before the first that the model has to predict."""
    source: NDArray[Any] | None = None
    """What the encoder reads, if there is one: tokens, (S,), pixels, (3, height, width), or (mel bins, frames)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs whose right answers are not looked at."""

    dataset: str
    """Name of what they come from, or `GENERATED`."""
    texts: tuple[DecoderText, ...] = ()
    """Of a model that writes."""
    items: tuple[Tensors, ...] = ()
    """Of a model without state."""
    prompts: tuple[Any, ...] = ()
    """What each item shows, of a model that draws images: labels' numbers or texts."""

    def __len__(self) -> int:
        """The number of inputs."""
        return len(self.texts) or len(self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The inputs of a proof."""

    judged: Inputs
    """Those that variants are judged by."""
    calibration: Inputs
    """Those that the scales of an int8 cache and of fixed activations are taken from."""
    is_disjoint: bool
    """True if no input is in both."""


def hold_out(source: ExportSource) -> tuple[ExportSource, EvaluationData | None]:
    """Takes from the evaluation data what scales are taken from, where it is enough.

    Returns:
        The source with the rest; and what was taken, None where everything judges.
    """
    data, length = source.evaluation, source.limits.max_total_tokens
    if data is None:
        return source, None
    if len(data) >= _HELD_OUT_SHARE * NUM_CALIBRATED:
        taken = np.linspace(0, len(data) - 1, NUM_CALIBRATED).astype(np.int64)
        rest = np.setdiff1d(np.arange(len(data)), taken)
        return replace(source, evaluation=data.take(rest)), data.take(taken)
    if source.task is not Task.GENERATION or length is None:
        return source, None
    # A few long texts: the end of each.
    num_tokens = sum(map(len, source.encode(data.texts, frame=False)))
    share = NUM_CALIBRATED * length / max(num_tokens, 1)
    if share * _HELD_OUT_SHARE > 1:
        return source, None
    ends = [len(text) - int(len(text) * share) for text in data.texts]
    parts = list(zip(data.texts, ends, strict=True))
    return (
        replace(source, evaluation=replace(data, texts=[text[:end] for text, end in parts])),
        replace(data, texts=[text[end:] for text, end in parts]),
    )


def draw(candidate: Candidate, held_out: EvaluationData | None = None) -> Drawn:
    """Returns the inputs of a source.

    Args:
        candidate: The fp32 variant, with evaluation data that judges, if there is any.
        held_out: Evaluation data that does not.
    """
    source = candidate.source
    if source.evaluation is not None:
        judged = of_evaluation(source, source.evaluation, candidate=candidate)
        apart = source.evaluation if held_out is None else held_out
        calibration = of_evaluation(source, apart, NUM_CALIBRATED, candidate=candidate)
        return Drawn(judged=judged, calibration=calibration, is_disjoint=held_out is not None)
    return _Draw(candidate).all()


# Evaluation data


def of_evaluation(
    source: ExportSource, data: EvaluationData, most: int | None = None, *, candidate: Candidate | None = None
) -> Inputs:
    """Returns inputs of evaluation data, evenly from all of it.

    Args:
        source: The model.
        data: The data.
        most: How many; None: as many as judge.
        candidate: The fp32 variant, for a model that draws images.
    """
    match source.task:
        case Task.GENERATION | Task.SPEECH_SYNTHESIS:
            texts = list(_windows(source, data))
            needed = _num_predictions(source) // max(1, sum(len(text.token_ids) for text in texts) // len(texts)) + 1
            return Inputs(dataset=data.dataset, texts=tuple(_evenly(texts, most or needed)))
        case task if task in ENCODER_DECODER_TASKS:
            rows = data.take(_places(len(data), most or _num_sources(source)))
            return Inputs(dataset=data.dataset, texts=tuple(_pairs(source, rows)))
        case Task.IMAGE_GENERATION:
            rows = data.take(_places(len(data), most or _affordable(source, _image_positions(source), *_NUM_MASKED)))
            assert candidate is not None, "the caller gives it"
            items = tuple(_noisy_latents(candidate, rows))
            return Inputs(dataset=data.dataset, items=items, prompts=tuple(rows.texts or rows.labels.tolist()))
        case _ if source.image_preprocessing is not None:
            rows = data.take(_places(len(data), most or _num_images(source)))
            return Inputs(dataset=data.dataset, items=_image_items(source, rows.images))
        case _:
            rows = data.take(_places(len(data), most or _num_texts(source)))
            return Inputs(dataset=data.dataset, items=tuple(text_items(source, rows.texts, rows.text_pairs)))


def _windows(source: ExportSource, data: EvaluationData) -> Iterator[DecoderText]:
    """Yields what a generation model or one that speaks reads, in windows of the model's length."""
    limit = source.limits.max_total_tokens
    assert limit is not None, "a decoder has a length"
    for ids, first in zip(data.sequences, data.prompt_lengths, strict=True):
        yield DecoderText(token_ids=ids, num_given=first)
    if source.task is Task.GENERATION:
        for ids in source.encode(data.texts, frame=False):
            for start, end, _ in evaluation_windows(len(ids), limit):
                yield DecoderText(token_ids=ids[start:end])


def _pairs(source: ExportSource, data: EvaluationData) -> Iterator[DecoderText]:
    """Yields sources with what is to be written of them."""
    limit = source.limits.max_total_tokens
    if data.captions:
        pixels = pixel_values_of(source, data.images)
        for language, captions in data.captions.items():
            start = source.caption_start(language)
            for image, ids in zip(pixels, source.encode([several[0] for several in captions]), strict=True):
                yield _framed(start, ids, limit, image)
        return
    if data.recordings:
        written = source.encode([f" {text}" for text in data.references])
        start = source.caption_start("")
        for features, ids in zip(features_of(source, data, slice(None)), written, strict=True):
            yield _framed(start, ids, limit, features)
        return
    pairs = source.encode_sources(data.texts, data.languages)
    for (given, start), ids in zip(pairs, source.encode(data.references), strict=True):
        yield _framed(start, ids, limit, given)


def _framed(start: NDArray[np.int64], ids: NDArray[np.int64], limit: int | None, source: NDArray[Any]) -> DecoderText:
    """Returns a target that begins with what is given and is cut at the limit."""
    return DecoderText(token_ids=np.concatenate([start, ids])[:limit], num_given=len(start), source=source)


def _noisy_latents(candidate: Candidate, data: EvaluationData) -> Iterator[Tensors]:
    """Yields what a denoiser reads beside its condition, of the images' latents."""
    encoder = candidate.open_diffusion()["vae_encoder"]
    pixels = pixel_values_of(candidate.source, data.images)
    latents = [run_batch(encoder, [{"pixel_values": image}])[0]["latent"] for image in pixels]
    noise, times = measured_noise(len(latents), latents[0].shape)
    for latent, own, time in zip(latents, noise, times, strict=True):
        yield {"latent": mix(latent, own, time), "timestep": time}


# Given and drawn inputs


@dataclass
class _Draw:
    """Draws the inputs of a source without evaluation data; those that are given come in place of drawn ones."""

    candidate: Candidate
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(_SEED))

    @property
    def source(self) -> ExportSource:
        """What is exported."""
        return self.candidate.source

    def all(self) -> Drawn:
        """Returns all inputs."""
        source = self.source
        given = bool(source.texts or source.recordings or source.images is not None)
        if source.task is Task.GENERATION:
            parts = self._windows_of_given() if source.texts else self._written()
        elif source.task in ENCODER_DECODER_TASKS:
            parts = self._rewritten()
        else:
            parts = self._items()
        judged, calibration = parts
        dataset = source.texts_name if given else GENERATED
        name = "items" if judged and not isinstance(judged[0], DecoderText) else "texts"
        return Drawn(
            judged=Inputs(dataset=dataset, **{name: tuple(judged)}),
            calibration=Inputs(dataset=dataset, **{name: tuple(calibration)}),
            is_disjoint=judged is not calibration,
        )

    # Decoders

    def _windows_of_given(self) -> tuple[list[Any], list[Any]]:
        """Cuts the texts that are given into windows."""
        source, limit = self.source, self.source.limits.max_total_tokens
        assert limit is not None, "a decoder has a length"
        prefix = np.array(source.prompt_prefix, np.int64)
        texts = [np.concatenate([prefix, ids]) for ids in source.encode(source.texts, frame=False)]
        windows = [text[start : start + limit] for text in texts for start in range(0, len(text), limit)]
        windows = [window for window in windows if len(window) > 1] or texts[:1]
        judged, calibration = _apart([DecoderText(token_ids=window) for window in windows])
        length = max(1, sum(len(text.token_ids) for text in judged) // len(judged))
        few = _evenly(judged, _num_predictions(source) // length + 1)
        return few, few if judged is calibration else calibration

    def _written(self) -> tuple[list[Any], list[Any]]:
        """Lets the model write: short texts, and as many predictions in texts of the model's length."""
        source, limit = self.source, self.source.limits.max_total_tokens
        assert limit is not None, "a decoder has a length"
        assert source.tokenizer is not None, "a text model has its tokenizer"
        prefix = np.array(source.prompt_prefix, np.int64)
        length = min(limit, _LENGTHS[1] + len(prefix))
        total = _num_predictions(source)
        half = total // 2 if limit > length else total
        count = -(-half // length)
        num_calibrated = max(8, count // 4)
        beginnings = self._beginnings(count + num_calibrated, min(_START, length - 1))
        starts = np.stack([np.concatenate([prefix, one])[:length] for one in beginnings])
        tokens = source.special_tokens
        ends = () if tokens is None or tokens.eos is None else (tokens.eos, *tokens.more_eos)
        written: list[NDArray[np.int64]] = []
        runner: DecoderRunner | None = None
        for at in range(0, len(starts), NUM_CALIBRATED):
            some = starts[at : at + NUM_CALIBRATED]
            runner = self.candidate.open_decoder(len(some), max_length=length, beside=runner)
            forbidden = (*source.suppressed_tokens, *ends)
            written += _write(runner, some, length, np.ones(len(some), bool), (), forbidden, self.generator)
        judged, calibration = written[:count], written[count:]
        return self._with_long(judged, len(prefix), half), self._with_long(calibration, len(prefix), 1)

    def _with_long(self, texts: list[NDArray[np.int64]], num_prefix: int, wanted: int) -> list[DecoderText]:
        """Adds texts of the model's length that are joined from the others, of `wanted` tokens in all, one at least."""
        limit = self.source.limits.max_total_tokens
        assert limit is not None, "a decoder has a length"
        found = [*texts]
        for _ in range(max(1, wanted // limit) if limit > len(texts[0]) else 0):
            order = self.generator.permutation(len(texts))
            joined = np.concatenate([texts[place][num_prefix:] for place in order])
            found.append(np.concatenate([texts[0][:num_prefix], np.resize(joined, limit)])[:limit])
        return [DecoderText(token_ids=ids) for ids in found]

    def _beginnings(self, count: int, length: int) -> list[NDArray[np.int64]]:
        """Draws the first tokens of texts."""
        assert self.source.tokenizer is not None, "a text model has its tokenizer"
        texts = synthetic.draw_texts(self.source.tokenizer, [4 * length] * count, self.generator)
        common = np.array(synthetic.common_tokens(self.source.tokenizer)[: 4 * length])
        encoded = self.source.encode(texts, frame=False)  # may be of fewer tokens than were drawn
        return [np.concatenate([ids, self.generator.choice(common, length)])[:length] for ids in encoded]

    # Encoder-decoders

    def _rewritten(self) -> tuple[list[Any], list[Any]]:
        """Lets the model write of sources."""
        judged, calibration = self._sources()
        texts = self._write_of(judged)
        return texts, texts if judged is calibration else self._write_of(calibration)

    def _sources(self) -> tuple[list[tuple[NDArray[Any], NDArray[np.int64]]], ...]:
        """Returns what is encoded, and the tokens that are given to the decoder: those that judge, and others."""
        source, count = self.source, _num_sources(self.source)
        num_others = max(_SOURCES_AT_A_TIME, count // 2)
        read: list[tuple[NDArray[Any], NDArray[np.int64]]]
        spoken: Sequence[str] = ("",) if source.languages is None else source.languages.sources or ("",)
        written: Sequence[str] = ("",) if source.languages is None else source.languages.targets

        def codes() -> tuple[str, str]:
            return str(self.generator.choice(spoken)), str(self.generator.choice(written))

        if (audio := source.audio_preprocessing) is not None:
            log_mel = LogMel(audio)
            sounds = list(source.recordings) or synthetic.draw_speech(
                count + num_others, audio.sampling_rate, audio.window_samples, self.generator
            )
            heard = [log_mel.features(one) for one in _evenly(sounds, 2 * count)]
            read = [(one, source.caption_start(codes()[1])) for one in heard]
        elif source.image_preprocessing is not None:
            images = self._pixels(count + num_others)
            read = [(item["pixel_values"], source.caption_start(codes()[1])) for item in images]
        else:
            texts = _evenly(source.texts, 2 * count) or self._drawn_texts(count + num_others)
            read = [*source.encode_sources(texts, [codes() for _ in texts])]
        if source.texts or source.recordings or source.images is not None:
            judged, others = _apart(read)
            few = judged[:count]
            return few, few if others is judged else others
        return read[:count], read[count:]

    def _write_of(self, sources: Sequence[tuple[NDArray[Any], NDArray[np.int64]]]) -> list[DecoderText]:
        """Writes of each source twice, and of one up to the model's limit."""
        source, tokens = self.source, self.source.special_tokens
        limit = source.limits.max_total_tokens
        assert tokens is not None, "a text model has its special tokens"
        assert limit is not None, "a decoder has a length"
        length, texts = min(_LENGTHS[1], limit), list[DecoderText]()
        ends = [token for token in (tokens.eos, *tokens.more_eos) if token is not None]
        encoder, runner = self.candidate.open_encoder(), None
        for at in range(0, len(sources), _SOURCES_AT_A_TIME):
            some = sources[at : at + _SOURCES_AT_A_TIME]
            rows = 2 * len(some)
            runner = self.candidate.open_decoder(rows, max_length=length, beside=runner)
            encoded = encode_sources(encoder, [one for one, _ in some])
            runner.set_sources(encoded)
            for row in range(rows):
                runner.begin(row, encoded[row // 2])
            starts = np.stack([some[row // 2][1] for row in range(rows)])
            if source.audio_preprocessing is not None:
                starts = self._hear_languages(runner, starts)
            is_drawn = np.arange(rows) % 2 == 1
            written = _write(runner, starts, length, is_drawn, ends, source.suppressed_tokens, self.generator)
            texts += [
                DecoderText(token_ids=ids, num_given=len(starts[row]), source=some[row // 2][0])
                for row, ids in enumerate(written)
            ]
        if limit > length:
            texts.append(_repeated(texts[0], limit))
        return texts

    def _hear_languages(self, runner: DecoderRunner, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Replaces what rows, (R, P), begin with by what is given for the language that the model hears in each."""
        languages = self.source.languages
        if languages is None or not languages.target_tokens:
            return starts
        codes = languages.targets
        tokens = [languages.target_tokens[code] for code in codes]
        logits = runner.decode(starts[:, 0], np.zeros(len(starts), np.int64))[:, tokens]
        return np.stack([self.source.caption_start(codes[place]) for place in logits.argmax(axis=1)])

    # Models without state

    def _items(self) -> tuple[list[Any], list[Any]]:
        source = self.source
        if source.image_preprocessing is not None:
            count = _num_images(source)
            if source.images is not None:
                judged, others = _apart(list(_image_items(source, source.images[_places(len(source.images), count)])))
                return judged, others
            items = self._pixels(count + NUM_CALIBRATED)
            return items[:count], items[count:]
        count = _num_texts(source)
        if source.texts:
            return _apart(text_items(source, *self._paired(_evenly(source.texts, count))))
        texts = self._drawn_texts(count + NUM_CALIBRATED)
        items = text_items(source, *self._paired(texts))
        return items[:count], items[count:]

    def _paired(self, texts: Sequence[str]) -> tuple[Sequence[str], Sequence[str] | None]:
        """Adds second texts, if the model reads such: another one, the same, a part of it, or one of both in turn."""
        if self.source.text_pairs == "never":
            return texts, None
        pairs = []
        for number, text in enumerate(texts):
            words, other = text.split(), texts[(number + 1) % len(texts)]
            half = " ".join(words[: (len(words) + 1) // 2])
            pairs.append((other, text, half, f"{half} {other}")[number % 4] or other)
        return texts, pairs

    def _drawn_texts(self, count: int) -> list[str]:
        """Draws texts of several lengths, some of them as long as the model reads."""
        source, limit = self.source, self.source.limits.max_input_tokens or _LENGTHS[1]
        assert source.tokenizer is not None, "a text model has its tokenizer"
        shortest, longest = min(_LENGTHS[0], limit), min(_LENGTHS[1], limit)
        lengths = np.exp(self.generator.uniform(np.log(shortest), np.log(longest + 1), count)).astype(int)
        lengths[:: min(_FULL_SHARE, max(1, count // 2))] = 2 * limit  # encoding may join tokens, and cuts at the limit
        return synthetic.draw_texts(source.tokenizer, lengths.tolist(), self.generator)

    def _pixels(self, count: int) -> list[Tensors]:
        """Returns the images that are given, or draws some."""
        source = self.source
        assert source.image_preprocessing is not None, "an image model has its preprocessing"
        if source.images is not None:
            return list(_image_items(source, source.images[_places(len(source.images), count)]))
        height, width = source.image_preprocessing.height, source.image_preprocessing.width
        return list(_image_items(source, synthetic.draw_images(count, height, width, self.generator)))


def _write(  # noqa: PLR0917 (a text's parts, which belong together)
    runner: DecoderRunner,
    starts: NDArray[np.int64],
    length: int,
    is_drawn: NDArray[np.bool_],
    ends: Collection[int],
    forbidden: Sequence[int],
    generator: np.random.Generator,
) -> list[NDArray[np.int64]]:
    """Writes on at starts, (R, P), and returns what stands before the end of each row, starts included.

    Args:
        runner: A decoder, with its sources.
        starts: What is given of each row.
        length: Most tokens of a row.
        is_drawn: (R,), True to draw a row's tokens at a temperature of 1 rather than to take the likeliest.
        ends: Tokens that end a row.
        forbidden: Tokens that are never written.
        generator: What tokens are drawn with.
    """
    rows, num_given = starts.shape
    tokens, stops = starts, np.full(rows, length)
    for position in range(length):
        logits = runner.decode(tokens[:, position], np.full(rows, position))  # (R, V)
        if position + 1 < num_given:
            continue
        logits[:, list(forbidden)] = -np.inf
        chosen = logits.argmax(axis=-1)
        for row in np.flatnonzero(is_drawn):
            chances = np.cumsum(np.exp(logits[row] - logits[row].max()), dtype=np.float64)
            chosen[row] = np.searchsorted(chances, generator.uniform(0, chances[-1]), side="right")
        ended = np.isin(chosen, list(ends)) & (stops == length)
        stops[ended] = position + 1
        if position + 1 == length or (stops < length).all():
            break
        tokens = np.concatenate([tokens, chosen[:, np.newaxis]], axis=1)
    return [row[:stop] for row, stop in zip(tokens, stops, strict=True)]


def _repeated(text: DecoderText, limit: int) -> DecoderText:
    """Repeats what was written up to the model's length."""
    written = text.token_ids[text.num_given :]
    written = written if len(written) else text.token_ids[-1:]
    ids = np.concatenate([text.token_ids, np.resize(written, limit)])[:limit]
    return replace(text, token_ids=ids)


# How many


def _affordable(source: ExportSource, positions: float, least: int, most: int) -> int:
    """Returns how many inputs of so many positions are affordable."""
    return int(np.clip(_MOST_PRODUCTS / (source.architecture.parameter_count * positions), least, most))


def _num_predictions(source: ExportSource) -> int:
    """Returns how many tokens a generator predicts, each of which it may have to write first."""
    return _affordable(source, 2, *_NUM_PREDICTIONS)


def _num_sources(source: ExportSource) -> int:
    """Returns how many sources an encoder-decoder reads."""
    limit, written = source.limits.max_input_tokens or 1, 2 * _LENGTHS[1]
    is_text = source.audio_preprocessing is None and source.image_preprocessing is None
    return _affordable(source, written + (min(limit, _LENGTHS[1]) if is_text else limit), *_NUM_SOURCES)


def _num_texts(source: ExportSource) -> int:
    limit = source.limits.max_input_tokens or _LENGTHS[1]
    least, most = _NUM_VECTORS if source.task in EMBEDDING_TASKS else _NUM_ITEMS
    if source.task is Task.TOKEN_CLASSIFICATION:  # a text is many predictions
        most //= 8
    return _affordable(source, min(limit, 24 + limit / _FULL_SHARE), least, most)


def _num_images(source: ExportSource) -> int:
    bounds = {Task.SEGMENTATION: _NUM_MASKED, Task.IMAGE_EMBEDDING: _NUM_VECTORS}.get(source.task, _NUM_IMAGES)
    return _affordable(source, _image_positions(source), *bounds)


def _image_positions(source: ExportSource) -> int:
    assert source.image_preprocessing is not None, "an image model has its preprocessing"
    return max(1, source.image_preprocessing.height * source.image_preprocessing.width // _PATCH_PIXELS)


def _places(length: int, count: int) -> NDArray[np.int64]:
    """Returns `count` places of a list, evenly from all of it; all of them if there are no more."""
    return np.arange(length) if count >= length else np.linspace(0, length - 1, count).astype(np.int64)


def _evenly(values: Sequence[Any], count: int) -> list[Any]:
    return [values[place] for place in _places(len(values), count)]


def _apart(values: list[Any]) -> tuple[list[Any], list[Any]]:
    """Parts inputs into those that judge and those that scales are taken from; the same twice, if they are too few."""
    count = min(NUM_CALIBRATED, len(values) // _GIVEN_SHARE)
    if count < 2:
        return values, values
    taken = set(_places(len(values), count).tolist())
    return [one for at, one in enumerate(values) if at not in taken], [values[at] for at in sorted(taken)]


# As a graph reads them


def text_items(source: ExportSource, texts: Sequence[str], pairs: Sequence[str] | None) -> list[Tensors]:
    """Makes a graph's inputs of texts, or of pairs of them, as a server does, cut to the model's length."""
    limit, has_types = source.limits.max_input_tokens, source.has_token_types
    assert limit is not None, "the source has read the module's length"
    assert source.tokenizer is not None, "a text model has its tokenizer"
    if pairs is None:
        return [text_tensors(ids, has_types=has_types) for ids in source.encode(texts, limit)]
    encoded = zip(*encode_pairs(source.tokenizer, texts, pairs, limit), strict=True)
    return [text_tensors(np.array(ids), np.array(types), has_types=has_types) for ids, types in encoded]


def _image_items(source: ExportSource, images: NDArray[np.uint8]) -> tuple[Tensors, ...]:
    return tuple({"pixel_values": pixels} for pixels in pixel_values_of(source, images))
