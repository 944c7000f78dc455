"""The server's answers equal PyTorch's for the same checkpoint."""

import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from headway_client import Client
from headway_export import reference
from headway_export.source import from_checkpoint

TIE_MARGIN = 1e-4


def _greedy_continuation(logits_after, ids: np.ndarray, count: int) -> list[int]:
    """Decodes by computing everything anew for every token; stops before a tie, where either token is right."""
    chosen: list[int] = []
    for _ in range(count):
        logits = logits_after(np.concatenate([ids, np.array(chosen, np.int64)]))[-1]
        second, first = np.sort(logits)[-2:]
        if first - second < TIE_MARGIN:
            break
        chosen.append(int(logits.argmax()))
    return chosen


def test_generated_text(tiny_checkpoints: dict[str, Path], fp32_client: Client):
    source = from_checkpoint(tiny_checkpoints["generation"])
    for prompt in ("the early bird", "all that glitters is", "look before you leap. the pen is mightier than", "z"):
        ids = np.array(source.tokenizer.encode(prompt, add_special_tokens=False).ids)
        expected = _greedy_continuation(lambda row: reference.generation_logits(source.module, row), ids, 60)
        assert len(expected) > 30
        text = fp32_client.generate_text([prompt], max_new_tokens=len(expected), temperature=0).results[0].text
        assert text == source.tokenizer.decode(expected)


def test_text_of_a_model_with_grouped_heads_and_rotary_positions(llama_checkpoint: Path, llama_server: tuple[str, str]):
    source = from_checkpoint(llama_checkpoint)
    precision, address = llama_server
    prompts = ["the early bird", "all that glitters is", "look before you leap. the pen is mightier than", "z"]
    with Client(address) as client:
        together = [
            answer.text for answer in client.generate_text(prompts * 3, max_new_tokens=60, temperature=0).results
        ]
        alone = [client.generate_text([prompt], max_new_tokens=60, temperature=0).results[0].text for prompt in prompts]
    assert together == alone * 3
    for prompt, text in zip(prompts, alone, strict=True):
        ids = np.array(source.tokenizer.encode(prompt, add_special_tokens=False).ids)
        expected = _greedy_continuation(lambda row: reference.generation_logits(source.module, row), ids, 60)
        assert len(expected) > 30
        assert precision == "int8" or text.startswith(source.tokenizer.decode(expected))


def test_translations(tiny_checkpoints: dict[str, Path], fp32_client: Client):
    source = from_checkpoint(tiny_checkpoints["translation"])
    lines = (tiny_checkpoints["translation"] / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["source"] for line in lines[:40]]
    answers = fp32_client.translate_text(texts).results
    for text, answer in zip(texts, answers, strict=True):
        source_ids = np.array(source.tokenizer.encode(text).ids)

        def logits_after(target: np.ndarray, source_ids: np.ndarray = source_ids) -> np.ndarray:
            return reference.translation_logits(source.module, source_ids, target)

        expected = _greedy_continuation(logits_after, np.array([1]), answer.new_token_count)
        assert source.tokenizer.decode(expected[: len(expected) - (expected[-1:] == [2])]) == answer.text


def test_translations_carry_pytorchs_log_probability(tiny_checkpoints: dict[str, Path], fp32_client: Client):
    source = from_checkpoint(tiny_checkpoints["translation"])
    answer = fp32_client.translate_text(["one two three four"]).results[0]
    target = np.array([1, *source.tokenizer.encode(answer.text).ids])
    logits = reference.translation_logits(
        source.module, np.array(source.tokenizer.encode("one two three four").ids), target[:-1]
    )
    log_probabilities = torch.from_numpy(logits).log_softmax(-1)[torch.arange(len(target) - 1), target[1:]]
    assert abs(float(log_probabilities.sum()) - answer.log_probability) < 1e-3


def test_text_probabilities(tiny_checkpoints: dict[str, Path], fp32_client: Client):
    source = from_checkpoint(tiny_checkpoints["text_classification"])
    texts = ["the bright desert", "snow", "a long winter near the old fire of ice"]
    for text, result in zip(texts, fp32_client.classify_text(texts).results, strict=True):
        logits = reference.outputs(source.module, np.array(source.tokenizer.encode(text).ids))["logits"]
        expected = dict(zip(source.labels, torch.from_numpy(logits).softmax(-1).tolist(), strict=True))
        assert {label.label: round(label.probability, 4) for label in result.labels} == {
            label: round(probability, 4) for label, probability in expected.items()
        }


def test_image_probabilities(tiny_checkpoints: dict[str, Path], fp32_client: Client):
    source = from_checkpoint(tiny_checkpoints["image_classification"])
    with np.load(tiny_checkpoints["image_classification"] / "evaluation.npz") as arrays:
        images = arrays["images"][:8]
    files = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        files.append(file.getvalue())
    preprocessing = source.image_preprocessing
    for image, result in zip(images, fp32_client.classify_image(files).results, strict=True):
        pixels = ((image / 255 - np.array(preprocessing.mean)) / np.array(preprocessing.std)).astype(np.float32)
        logits = reference.outputs(source.module, np.ascontiguousarray(pixels.transpose(2, 0, 1)))["logits"]
        expected = torch.from_numpy(logits).softmax(-1).numpy()
        found = {label.label: label.probability for label in result.labels}
        np.testing.assert_allclose([found[label] for label in source.labels], expected, atol=1e-4)
