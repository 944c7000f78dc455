"""A store with a model of every task: the shipped ones, and beside them what these leave out, made of others' files."""

from __future__ import annotations

from pathlib import Path

import tiny_answers
import tiny_bundles
import tiny_tagger
import tiny_tensors

from headway_server.bundles import (
    CHAT_TEMPLATE_FILE,
    Scoring,
    Tagging,
    Task,
    describe_files,
    publish,
    read_manifest,
    staging_folder,
    write_manifest,
)

MODELS = Path(__file__).parents[2] / "models"
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
QUERY = {"query": "goal "}


def write_every_task(store: Path) -> None:
    """Writes the store: `chat` continues conversations, `spare` is there to be unloaded."""
    store.mkdir(parents=True, exist_ok=True)
    for model in MODELS.iterdir():
        if (model / "1" / "bundle.json").is_file() and model.name != "detect":  # which finds nothing in noise
            (store / model.name).symlink_to(model.resolve())
    copy_bundle(MODELS / "shakespeare" / "1", store, "chat", {CHAT_TEMPLATE_FILE: TEMPLATE})
    copy_bundle(MODELS / "multi30k-de-en" / "1", store, "rewriter", {}, task=Task.TEXT_TO_TEXT, languages=None)
    tiny_bundles.write_topic_bundle(store, name="vectors", task=Task.TEXT_EMBEDDING, prompts=QUERY)
    tiny_bundles.write_topic_bundle(store, name="weights", task=Task.TEXT_EMBEDDING, has_sparse_vectors=True)
    scoring = Scoring(activation="sigmoid")
    tiny_bundles.write_topic_bundle(
        store, name="scorer", task=Task.TEXT_SCORING, num_labels=1, scoring=scoring, text_pairs="optional"
    )
    tiny_bundles.write_topic_bundle(store, name="pairs", text_pairs="optional", has_token_types=True)
    tiny_bundles.write_token_bundle(store)
    entailment = ("entailment", "neutral", "contradiction")
    copy_bundle(store / "pairs" / "1", store, "nli", {}, labels=entailment)
    tiny_answers.write_answer_bundle(store)
    tiny_answers.write_mask_bundle(store)
    tiny_tagger.write_tagger_bundle(
        store, name="pages", word_boxes=tiny_tagger.BOXES, tagging=Tagging(aggregation="first")
    )
    tiny_bundles.write_box_bundle(store)
    tiny_bundles.write_map_bundle(store)
    tiny_bundles.write_map_bundle(store, Task.DEPTH_ESTIMATION, name="depths")
    tiny_bundles.write_letter_bundle(store)
    tiny_bundles.write_loudness_bundle(store)
    tiny_bundles.write_whistle_bundle(store)
    tiny_bundles.write_hum_bundle(store)
    tiny_bundles.write_murmur_bundle(store)
    tiny_bundles.write_clap_bundle(store)
    tiny_bundles.write_motion_bundle(store)
    tiny_tensors.publish(store, "tabular", "detector", "series")
    for version in ("1", "2"):
        tiny_bundles.write_topic_bundle(store, name="spare", version=version)


def copy_bundle(bundle: Path, store: Path, name: str, files: dict[str, str], **fields: object) -> None:
    """Publishes a bundle under another name, with more files and other fields of its manifest."""
    manifest = read_manifest(bundle)
    with staging_folder(store) as folder:
        for file in manifest.files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes((bundle / file).read_bytes())
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        described = describe_files(folder)
        write_manifest(folder, manifest.model_copy(update={"name": name, "files": described, **fields}))
        publish(folder, store)
