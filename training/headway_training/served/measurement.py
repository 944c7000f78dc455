"""Asking a served model about examples, and measuring its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from headway_client import Client, Model, SegmentPrompt
from headway_training.data.audio import encode_audio
from headway_training.data.examples import (
    LabeledTexts,
    MultiLabeledTexts,
    ParallelTexts,
    PlainText,
    SpanLabeledTexts,
)
from headway_training.data.files import cut_before_spaces
from headway_training.data.pictures import Pictures
from headway_training.data.questions import Questions
from headway_training.data.speech import Recordings, spoken_words
from headway_training.errors import EvaluationError
from headway_training.metrics import (
    accuracy,
    answer_scores,
    corpus_bleu,
    frechet_distance,
    macro_f1,
    multi_label_f1,
    nearest_neighbour_labels,
    r_precision,
    score_transcripts,
    span_scores,
)
from headway_training.served.data import (
    CaptionedFiles,
    NeighbouringImages,
    PromptedFiles,
    SegmentedFiles,
    encode_png,
)

if TYPE_CHECKING:
    from headway_training.tasks.segmentation import MeasuredPicture

_NUM_CANDIDATES = 100
"""Texts that a drawing's own is looked for among (Xu et al. 2018, section 4.1)."""
_PICTURES = (Pictures, CaptionedFiles, SegmentedFiles, NeighbouringImages, PromptedFiles)
"""Examples that are not labels of images."""


class Measurement:
    """Asks a served model, a few requests at a time, and measures its answers."""

    def __init__(
        self,
        client: Client,
        model: Model,
        settings: Mapping[str, Any],
        *,
        batch_size: int,
        concurrency: int,
        console: Console,
    ) -> None:
        """Takes whom it asks about which model.

        Args:
            client: Of the server.
            model: The model that is measured.
            settings: Options of the client's call.
            batch_size: Inputs of a request.
            concurrency: Requests in flight at a time.
            console: Where progress is shown.
        """
        self._client = client
        self._model = model
        self._batch_size = batch_size
        self._concurrency = concurrency
        self._console = console
        self._named = {"model": model.name, "model_version": model.version}
        self._options = {**settings, **self._named}
        # A text past the model's limit is cut, as it is when a card is made.
        self._text_options = {"truncate": True, **self._options}

    def measure(  # noqa: PLR0911 (a case for each kind of data)
        self, examples: Any, labels: Sequence[str]
    ) -> dict[str, float | str]:
        """The figures of some examples; the first one is the metric of the model's task."""
        if isinstance(examples, _PICTURES):
            return self._measure_pictures(examples)
        if isinstance(examples, PlainText):
            return self._score_text(examples.text)
        if isinstance(examples, ParallelTexts):
            texts = self._ask(
                examples.sources,
                lambda part: [result.text for result in self._client.translate_text(part, **self._text_options)],
            )
            score, signature = corpus_bleu(texts, examples.targets)
            return {"sacrebleu": score, "sacrebleu_signature": signature}
        if isinstance(examples, Recordings):
            audios = [encode_audio(samples, examples.sampling_rate) for samples in examples.samples]
            if self._model.task == "speech_synthesis":
                return self._measure_speech(examples, audios)
            transcripts = self._ask(audios, partial(self._transcribe, self._options))
            return dict(score_transcripts(transcripts, examples.texts, examples.sources))
        if isinstance(examples, SpanLabeledTexts):
            found = self._ask(examples.texts, self._find_spans)
            expected = [[(start, end, labels[label]) for start, end, label in row] for row in examples.spans]
            precision, recall, f1 = span_scores(found, expected)  # type: ignore[arg-type]  # labels are names on both sides
            return {"span_f1": f1, "span_precision": precision, "span_recall": recall}
        if isinstance(examples, Questions):
            pairs = list(zip(examples.questions, examples.contexts, strict=True))
            threshold = None if all(examples.answers) else 0.0  # or else there is always an answer
            f1, exact = answer_scores(self._ask(pairs, partial(self._answer, threshold)), examples.answers)
            return {"answer_f1": f1, "exact_match": exact}
        if isinstance(examples, MultiLabeledTexts):
            selected = self._ask(_pairs(examples), lambda part: self._classify(part, labels))
            truth = [[index in row for index in range(len(labels))] for row in examples.labels]
            micro, macro = multi_label_f1(selected, truth)
            return {"micro_f1": micro, "macro_f1": macro}
        if isinstance(examples, LabeledTexts):
            predicted = self._ask(_pairs(examples), lambda part: self._classify(part, None))
        else:
            predicted = self._ask(examples.images, self._label)
        actual = [labels[index] for index in examples.labels]
        return {"accuracy": accuracy(predicted, actual), "macro_f1": macro_f1(predicted, actual)}

    def _measure_pictures(self, examples: Any) -> dict[str, float | str]:
        """The figures of a task of images that does not name labels."""
        if isinstance(examples, PromptedFiles):
            return self._measure_drawings(examples)
        if isinstance(examples, NeighbouringImages):
            return self._measure_neighbours(examples)
        if isinstance(examples, SegmentedFiles):
            return self._measure_segments(examples)
        if isinstance(examples, CaptionedFiles) and self._model.task == "captioning":
            return self._measure_captions(examples)
        return self._measure_recalls(examples)

    def _measure_drawings(self, examples: PromptedFiles) -> dict[str, float | str]:
        """How well drawings of the data's prompts show what they were asked for, and how near they are to its images.

        Each prompt is drawn once, with its index as the seed. What tells is another model that the server has: for
        labels a classifier that knows them all, for texts an embedder of images with a partner that reads texts. What
        it says of the data's own images stands beside what it says of drawings.
        """
        prompts = examples.prompts
        if len(prompts) < 2:
            raise EvaluationError("a distance between sets of images needs at least two of each; there is one")
        judge, reader = self._find_judges()
        named: Any = {"model": judge.name, "model_version": judge.version}
        drawn = self._ask(list(enumerate(prompts)), self._draw, "drawing")
        vectors, known = (self._embed_images(images, "images", named) for images in (drawn, examples.images))
        figures: dict[str, float | str] = {"frechet_distance": frechet_distance(vectors, known)}
        if learned := examples.trained_on[: len(prompts)]:
            learned_vectors = self._embed_images(learned, "images that were learned from", named)
            figures["frechet_distance_to_trained_on"] = frechet_distance(vectors, learned_vectors)
            figures["frechet_distance_of_trained_on"] = frechet_distance(learned_vectors, known)
        figures["judge"] = judge.name
        if reader is None:

            def label(images: Sequence[bytes]) -> list[str]:
                return [one.labels[0].label for one in self._client.classify_image(images, top_k=1, **named)]

            right, right_of_images = (
                accuracy(self._ask(images, label, "naming images"), prompts) for images in (drawn, examples.images)
            )
            return {"label_accuracy": right, "label_accuracy_of_images": right_of_images, **figures}
        texts = list(dict.fromkeys(prompts))

        def read(part: Sequence[str]) -> list[NDArray[np.float32]]:
            answer = self._client.embed_text(part, truncate=True, model=reader.name, model_version=reader.version)
            return list(answer.to_numpy())

        candidates = _candidates(prompts, texts)
        read_vectors = np.stack(self._ask(texts, read, "reading texts")).T
        right, right_of_images = (r_precision(one @ read_vectors, candidates) for one in (vectors, known))
        return {"r_precision": right, "r_precision_of_images": right_of_images, **figures}

    def _find_judges(self) -> tuple[Model, Model | None]:
        """The model that looks at drawings, and the one that reads texts into its space; None for labels.

        Raises:
            EvaluationError: The server has no such model.
        """
        models = self._client.list_models().models
        if self._model.labels:
            classifiers = [one for one in models if one.task == "image_classification" and one.embedding_dimension]
            knowing = [one for one in classifiers if set(self._model.labels) <= set(one.labels)]
            if not knowing:
                raise EvaluationError(
                    f"no loaded classifier of images that gives embeddings knows the labels of {self._model.name}; "
                    "load one too"
                )
            return knowing[-1], None
        readers = {one.embedding_space: one for one in models if one.task == "text_embedding"}
        for one in reversed(models):
            if one.task == "image_embedding" and one.embedding_space and one.embedding_space in readers:
                return one, readers[one.embedding_space]
        raise EvaluationError(
            "no loaded embedder of images shares its space with a loaded embedder of texts; load two such models too"
        )

    def _draw(self, part: Sequence[tuple[int, str]]) -> list[bytes]:
        return [self._client.generate_image(prompt, seed=seed, **self._options).results[0].png for seed, prompt in part]

    def _measure_recalls(self, examples: Pictures | CaptionedFiles) -> dict[str, float | str]:
        """Recall of images and texts by the vectors of two models that share a space."""
        from headway_training.tasks.contrastive import (  # noqa: PLC0415 (torch, which other tasks do without)
            caption_recalls,
            measure_recalls,
        )

        space = self._model.embedding_space
        models = self._client.list_models("text_embedding").models
        partners = [model for model in models if space and model.embedding_space == space]
        if not partners:
            raise EvaluationError(f"{self._model.name} shares its space with no loaded model of texts; load that too")
        partner = partners[-1]

        def texts(lines: Sequence[str]) -> NDArray[np.float32]:
            def embed(part: Sequence[str]) -> list[NDArray[np.float32]]:
                answer = self._client.embed_text(part, truncate=True, model=partner.name, model_version=partner.version)
                return list(answer.to_numpy())

            return np.stack(self._ask(lines, embed, "reading texts"))

        def images(kind: str) -> NDArray[np.float32]:
            encoded = [encode_png(image) for image in getattr(examples, kind).images]
            return self._embed_images(encoded, kind.replace("_", " "))

        if isinstance(examples, Pictures):
            return dict(measure_recalls(examples, images=images, texts=texts))
        vectors = self._embed_images(examples.images, "images")
        captions = [[text for several in row.values() for text in several] for row in examples.captions]
        return dict(caption_recalls(captions, vectors, texts))

    def _measure_neighbours(self, examples: NeighbouringImages) -> dict[str, float | str]:
        """Accuracy of labels by the votes of the nearest images that have one."""
        known = self._embed_images(examples.known.images, "known images")
        asked = self._embed_images(examples.images, "images")
        found = nearest_neighbour_labels(known, np.array(examples.known.labels), asked)
        return {"knn_accuracy": accuracy(found, examples.labels)}

    def _embed_images(
        self, images: Sequence[bytes], what: str, options: Mapping[str, Any] | None = None
    ) -> NDArray[np.float32]:
        """The vectors of image files, (N, D), by the model that is measured or by that which `options` name."""
        options = self._options if options is None else options

        def embed(part: Sequence[bytes]) -> list[NDArray[np.float32]]:
            return list(self._client.embed_image(part, **options).to_numpy())

        return np.stack(self._ask(images, embed, f"looking at {what}"))

    def _measure_captions(self, examples: CaptionedFiles) -> dict[str, float | str]:
        """CIDEr-D, BLEU and METEOR of the captions in each language of the data."""
        from headway_training.tasks.captioning import score_captions  # noqa: PLC0415 (torch, as above)

        options = {name: value for name, value in self._options.items() if name != "language"}
        written = {
            language: self._ask(examples.images, partial(self._caption, options, language))
            for language in examples.captions[0]
        }
        references = {language: [row[language] for row in examples.captions] for language in written}
        return dict(score_captions(written, references))

    def _caption(self, options: Mapping[str, Any], language: str, images: Sequence[bytes]) -> list[str]:
        chosen = {**options, "language": language} if language else options
        return [result.text for result in self._client.caption_image(images, **chosen)]

    def _measure_segments(self, examples: SegmentedFiles) -> dict[str, float | str]:
        """Mean IoU at one point and at one box, by the kind of picture."""
        from headway_training.tasks.segmentation import mean_ious  # noqa: PLC0415 (torch, as above)

        found: dict[str, list[float]] = {}
        for kind, values in self._ask(examples.pictures, lambda part: [self._cut_out(one) for one in part]):
            for name, numbers in values.items():
                found.setdefault(name if name == "iou_error" else f"{kind}_{name}", []).extend(numbers)
        return dict(mean_ious(found))

    def _cut_out(self, picture: MeasuredPicture) -> tuple[str, dict[str, list[float]]]:
        """The kind of a picture, and the IoU of what its points and its boxes are answered with."""
        height, width = picture.image.shape[:2]
        scale = np.array((width, height, width, height), np.float32)
        points = [SegmentPrompt(points=[(float(x), float(y))]) for x, y in picture.points * scale[:2]]
        boxes = [
            SegmentPrompt(box=(left, top, right, bottom))
            for left, top, right, bottom in (picture.boxes * scale).tolist()
        ]
        found: dict[str, list[float]] = {}
        for name, prompts in (("point", points), ("box", boxes)):
            answer = self._client.segment_image(encode_png(picture.image), prompts=prompts, **self._options)
            for row, result in enumerate(answer):
                segment = picture.mask(row)
                masks = [mask.to_numpy() for mask in result.masks]
                ious = [float((mask & segment).sum() / (mask | segment).sum()) for mask in masks]
                found.setdefault(name, []).append(ious[0])  # that of the mask which the answer has first
                found.setdefault(f"{name}_best", []).append(max(ious))
                errors = [abs(mask.predicted_iou - iou) for mask, iou in zip(result.masks, ious, strict=True)]
                found.setdefault("iou_error", []).extend(errors)
        return picture.kind, found

    def _ask(
        self, inputs: Sequence[Any], call: Callable[[Sequence[Any]], Sequence[Any]], what: str = "measuring"
    ) -> list[Any]:
        """Answers every input, in order; the first error of a call ends it."""
        parts = [inputs[start : start + self._batch_size] for start in range(0, len(inputs), self._batch_size)]
        with ThreadPoolExecutor(max_workers=self._concurrency) as pool:
            answers = track(
                pool.map(call, parts),
                what,
                total=len(parts),
                console=self._console,
                disable=not self._console.is_terminal,
            )
            return [answer for part in answers for answer in part]

    def _find_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int, str]]]:
        answer = self._client.classify_tokens(texts, **self._text_options)
        return [[(one.span.start, one.span.end, one.label) for one in result.spans] for result in answer]

    def _answer(self, threshold: float | None, pairs: Sequence[tuple[str, str]]) -> list[str]:
        questions, contexts = zip(*pairs, strict=True)
        options: Any = {"no_answer_threshold": threshold, **self._options}
        found = self._client.answer_question(questions, contexts, **options)
        return [result.answers[0].text if result.answers else "" for result in found]

    def _transcribe(self, options: Mapping[str, Any], audios: Sequence[bytes]) -> list[str]:
        return [result.text for result in self._client.transcribe_speech(audios, **options)]

    def _measure_speech(self, examples: Recordings, audios: Sequence[bytes]) -> dict[str, float | str]:
        """Word error rates of what a transcriber of the same server hears, by voice.

        Each text is said once, in the voice of its recording where the model has that, with its index as the seed.
        Figures that begin with `recorded_` are of the recordings themselves.
        """
        judges = self._client.list_models("transcription").models
        if not judges:
            raise EvaluationError("no loaded model transcribes speech, which tells what is said; load one too")
        judge = judges[-1]

        def speak(rows: Sequence[int]) -> list[bytes]:
            said = []
            for row in rows:
                speaker = examples.speakers[row]
                voice = speaker if speaker in self._model.labels else None
                answer = self._client.synthesize_speech(
                    [examples.texts[row]], voice=voice, seed=row, format="flac", **self._options
                )
                said.append(answer[0].audio)
            return said

        hear = partial(self._transcribe, {"model": judge.name, "model_version": judge.version})
        words = [spoken_words(text) or text for text in examples.texts]
        figures: dict[str, float | str] = {}
        for prefix, heard in (("", self._ask(range(len(words)), speak, "speaking")), ("recorded_", audios)):
            transcripts = [spoken_words(text) or text for text in self._ask(heard, hear, "listening")]
            scores = score_transcripts(transcripts, words, examples.speakers)
            figures |= {f"{prefix}{name}": value for name, value in scores.items()}
        return {**figures, "judge": judge.name}

    def _label(self, images: Sequence[bytes]) -> list[str]:
        return [result.labels[0].label for result in self._client.classify_image(images, top_k=1, **self._options)]

    def _classify(self, pairs: Sequence[tuple[str, str]], labels: Sequence[str] | None) -> list[Any]:
        """The likeliest label of each text; or, given the labels, whether each of them applies.

        Texts with a pair go in a call of their own, as a call has pairs or none.
        """
        answers: dict[int, Any] = {}
        for has_pair in (False, True):
            own = [index for index, (_, pair) in enumerate(pairs) if bool(pair) == has_pair]
            if own:
                more = {"text_pairs": [pairs[index][1] for index in own]} if has_pair else {}
                options = {**self._text_options, **more, "top_k": 1 if labels is None else 0}
                results = self._client.classify_text([pairs[index][0] for index in own], **options)
                answers |= zip(own, results, strict=True)
        scores = [answers[index].labels for index in range(len(pairs))]
        if labels is None:
            return [row[0].label for row in scores]
        selected = [{score.label for score in row if score.selected} for row in scores]
        return [[label in row for label in labels] for row in selected]

    def _score_text(self, text: str) -> dict[str, float | str]:
        """Nats per character of a running text, from the log-probabilities that the server answers of prompts.

        The definition is that of docs/checkpoint.md, windows of the model's length at half a window's stride. A caller
        has no tokenizer, so the text is cut before white space and not after a number of tokens, and a prompt has one
        token less than a window, as it leaves room for an answer. The figures agree to a few thousandths.
        """
        limit = min(self._model.max_input_token_count, self._model.max_token_count - 1)
        chunks, counts = self._cut(text, limit)
        windows = []
        for index in range(len(chunks)):
            first, num_tokens = index, counts[index]
            while first > 0 and num_tokens < limit:  # the server cuts off the rest
                first -= 1
                num_tokens += counts[first]
            windows.append(("".join(chunks[first : index + 1]), counts[index]))

        def score(part: Sequence[tuple[str, int]]) -> list[tuple[float, int]]:
            answers = self._read_prompts([window for window, _ in part], score=True)
            return [
                (
                    -sum(token.log_probability or 0.0 for token in answer.prompt_tokens[-count:]),
                    len(answer.prompt_tokens[0].text),
                )
                for (_, count), answer in zip(part, answers, strict=True)
            ]

        scores = self._ask(windows, score)
        num_tokens = sum(counts) - 1  # the text's first token has nothing before it
        if num_tokens == 0:
            raise EvaluationError("the text is a single token; nats per character need at least 2")
        nats = sum(one for one, _ in scores)
        return {"nats_per_character": nats / (len(text) - scores[0][1]), "nats_per_token": nats / num_tokens}

    def _cut(self, text: str, limit: int) -> tuple[list[str], list[int]]:
        """Cuts a text into chunks of about half a window, each shorter than `limit`, and counts their tokens."""
        half = (limit + 1) // 2
        (sample,) = self._read_prompts([text[:half]])
        chunks = list(cut_before_spaces([text], max(1, round(half * min(len(text), half) / sample.prompt_token_count))))
        while True:
            counts = [answer.prompt_token_count for answer in self._ask(chunks, self._read_prompts, "counting tokens")]
            is_long = [count >= limit and len(chunk) > 1 for count, chunk in zip(counts, chunks, strict=True)]
            if not any(is_long):
                return chunks, counts
            chunks = [
                part
                for chunk, long in zip(chunks, is_long, strict=True)
                for part in (cut_before_spaces([chunk], (len(chunk) + 1) // 2) if long else [chunk])
            ]

    def _read_prompts(self, prompts: Sequence[str], *, score: bool = False) -> Sequence[Any]:
        """Has prompts read, with one token after them; longer ones lose their beginning."""
        answer = self._client.generate_text(
            prompts,
            model=self._model.name,
            model_version=self._model.version,
            max_new_tokens=1,
            temperature=0.0,
            truncate=True,
            prompt_log_probabilities=score,
        )
        return answer.results


def _candidates(prompts: Sequence[str], texts: Sequence[str]) -> NDArray[np.int64]:
    """The numbers of each prompt's text and of up to 99 others, always the same ones: (N, K)."""
    random, count = np.random.default_rng(0), min(_NUM_CANDIDATES, len(texts))
    rows = []
    for prompt in prompts:
        own = texts.index(prompt)
        others = random.choice(len(texts) - 1, count - 1, replace=False)
        rows.append([own, *(others + (others >= own))])
    return np.array(rows, np.int64)


def _pairs(examples: LabeledTexts | MultiLabeledTexts) -> list[tuple[str, str]]:
    """Texts with what they are paired with; empty if there is nothing."""
    return list(zip(examples.texts, examples.text_pairs or [""] * len(examples), strict=True))
