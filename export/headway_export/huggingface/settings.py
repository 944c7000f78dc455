"""What becomes of the settings of a folder that are about more than its weights: each is read, or named in a note.

A setting that is in no list here is named. What a preprocessor of images or sounds says is compared by what it makes
(`images.py`, `speech.py`), and what `config.json` says of a model by its logits.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from transformers import GenerationConfig

from headway_export.errors import SourceError
from headway_export.huggingface.folder import as_source_error
from headway_export.source import TOKENIZER_CONFIG_FILE
from headway_server.bundles import Task
from headway_training.folders import open_tokenizer

SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p")
"""Settings of draws that a bundle has defaults for."""
_OTHER_SAMPLING: Final = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_OF_BEAMS: Final = ("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups")
_ENDS: Final = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")
_NEUTRAL: Final = dict.fromkeys((
    "diversity_penalty", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "min_length",
    "min_new_tokens", "min_p", "no_repeat_ngram_size", "penalty_alpha", "top_k",
), 0) | dict.fromkeys((
    "encoder_repetition_penalty", "guidance_scale", "length_penalty", "num_beam_groups", "num_beams",
    "repetition_penalty", "temperature", "top_h", "top_p", "typical_p",
), 1)  # fmt: skip
"""Numbers that a setting of generation may have without a change of any answer."""
_HOW_IT_RUNS: Final = frozenset((
    "_from_model_config", "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
    "assistant_lookbehind", "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "disable_compile", "is_assistant", "low_memory", "max_cache_len", "max_matching_ngram_size",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "prefill_chunk_size", "prompt_lookup_num_tokens",
    "return_dict_in_generate", "speculation_type", "target_lookbehind", "transformers_version", "use_cache", "use_mtp",
))  # fmt: skip
"""Settings of generation that change no token of an answer: how it is computed, and what is told beside it."""

_OF_TOKENIZERS: Final = frozenset((
    "add_bos_token", "add_eos_token", "add_prefix_space", "add_special_tokens", "added_tokens_decoder",
    "additional_special_tokens", "audio_token", "auto_map", "backend", "bos_token", "chat_template",
    "clean_up_tokenization_spaces", "cls_token", "cls_token_box", "do_basic_tokenize", "do_lower_case",
    "do_split_on_punc", "dropout", "eos_token", "errors", "extra_ids", "extra_special_tokens", "from_slow",
    "full_tokenizer_file", "image_token", "init_inputs", "is_fast", "is_local", "keep_accents", "lang_codes_to_id",
    "language", "language_codes", "legacy", "legacy_behaviour", "local_files_only", "mask_token", "mask_token_sent",
    "max_len", "max_length", "model_input_names", "model_max_length", "model_specific_special_tokens", "name_or_path",
    "never_split", "num_madeup_words", "offset", "only_label_first_subword", "pad_to_multiple_of", "pad_token",
    "pad_token_box", "pad_token_label", "pad_token_type_id", "padding", "padding_side", "predict_timestamps",
    "processor_class", "question_token", "remove_space", "replace_word_delimiter_char", "response_schema",
    "return_attention_mask", "return_overflowing_tokens",
    "return_token_type_ids", "sep_token", "sep_token_box", "separate_vocabs", "source_lang", "sp_model",
    "sp_model_kwargs", "space", "spaces_between_special_tokens", "special_tokens_map_file", "split_by_punct",
    "split_special_tokens", "src_lang", "stride", "strip_accents", "target_lang", "task", "tgt_lang",
    "tokenize_chinese_chars", "tokenizer_class", "tokenizer_file", "tokenizer_type", "transformers_version",
    "trim_offsets", "truncation", "truncation_side", "truncation_strategy", "unk_token", "use_default_system_prompt",
    "use_fast", "video_token", "vocab_file", "vocab_size", "vocab_type", "word_delimiter_token",
    "wordpieces_prefix",
    # Read by `flow_speakers.py` and `speech.py`
    "add_blank", "do_upper_case", "is_uroman", "lang_codes", "normalize", "phonemize",
))  # fmt: skip
"""What `transformers` puts into the tokenizer that a bundle has, what is read here, and what changes no id."""

_WRITES: Final = frozenset((Task.GENERATION, Task.TRANSLATION, Task.TEXT_TO_TEXT, Task.TRANSCRIPTION))


def generation_notes(
    settings: GenerationConfig, *, applied: Collection[str], asked: Mapping[str, str]
) -> tuple[str, ...]:
    """Returns notes on the settings of generation that a bundle has no place for.

    Args:
        settings: As `transformers` parses them.
        applied: Those that the bundle has, beside the tokens that begin, end and pad.
        asked: Those that a call may give, by what it calls them.
    """
    known = {*_HOW_IT_RUNS, *_ENDS, *applied}
    if not settings.do_sample:
        known.update((*SAMPLING, *_OTHER_SAMPLING, "do_sample"))
    if _is_neutral("num_beams", settings.num_beams):
        known.update(_OF_BEAMS)
    if settings.max_new_tokens is not None:
        known.add("max_length")  # the other one holds
    stated = {
        name: value for name, value in settings.to_dict().items() if name not in known and not _is_neutral(name, value)
    }
    notes = []
    if ignored := [name for name in stated if name not in asked]:
        notes.append(f"generation_config: {', '.join(ignored)}: not applied by the server")
    if given := [f"{asked[name]} {value}" for name, value in stated.items() if name in asked]:
        notes.append(f"generation_config: {', '.join(given)}: give these with a call, whose defaults are others")
    return tuple(notes)


def _is_neutral(name: str, value: Any) -> bool:
    """Returns True for what a setting is where it changes nothing."""
    if value is None or value is False or value in ([], {}, ()):
        return True
    return value is not True and name in _NEUTRAL and value == _NEUTRAL[name]


def truncation_side(path: Path) -> Literal["right", "left"]:
    """Returns which end of a text the tokenizer of a folder cuts; errors are those of `read_settings`."""
    return "left" if read_settings(path / TOKENIZER_CONFIG_FILE).get("truncation_side") == "left" else "right"


def length_notes(path: Path, longest: int) -> tuple[str, ...]:
    """Returns a note if the tokenizer of a folder cuts shorter texts than the bundle takes.

    Args:
        path: The folder.
        longest: Tokens of the longest text of the bundle.

    Raises:
        SourceError: The tokenizer's settings are no JSON object.
    """
    stated = read_settings(path / TOKENIZER_CONFIG_FILE).get("model_max_length")
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not 0 < stated < longest:
        return ()
    return (
        f"{TOKENIZER_CONFIG_FILE}: model_max_length {stated:g}: transformers cuts texts there, and the bundle takes "
        f"{longest} tokens; --max-length N changes it",
    )


def read_settings(file: Path) -> dict[str, Any]:
    """Returns the object in a file, or an empty one where there is no file.

    Raises:
        SourceError: It is no JSON object.
    """
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise SourceError(f"{file}: is not a JSON object")
    return content


def folder_notes(path: Path, content: Mapping[str, Any], task: Task) -> tuple[str, ...]:
    """Returns notes on what a folder says to the library's tokenizers and pipelines that the server does not do.

    Args:
        path: The folder that has the tokenizer.
        content: Of its `config.json`.
        task: Of the bundle.

    Raises:
        SourceError: The tokenizer's settings are no JSON object.
    """
    notes = []
    if names := content.get("task_specific_params"):
        notes.append(
            f"config.json: task_specific_params ({', '.join(map(str, names))}): pipelines of transformers apply them, "
            "the server does not; give what they say with a call"
        )
    settings = read_settings(path / TOKENIZER_CONFIG_FILE)
    if task in _WRITES and settings.get("clean_up_tokenization_spaces") and _cleans(path):
        notes.append(
            f"{TOKENIZER_CONFIG_FILE}: clean_up_tokenization_spaces: transformers takes out spaces before punctuation "
            "in what the model writes, and the server does not"
        )
    if settings.get("split_special_tokens"):
        notes.append(
            f"{TOKENIZER_CONFIG_FILE}: split_special_tokens: special tokens in a text are read as such by the server"
        )
    if unknown := sorted(set(settings) - _OF_TOKENIZERS):
        notes.append(f"{TOKENIZER_CONFIG_FILE}: {', '.join(unknown)}: not applied by the server")
    return tuple(notes)


def _cleans(path: Path) -> bool:
    """Returns True if `transformers` changes the spaces of what a tokenizer writes."""
    with as_source_error():
        own = open_tokenizer(path)
    if (inner := getattr(own, "backend_tokenizer", None)) is None:
        return True
    ids = inner.encode("It is n't so , he said . Why ?", add_special_tokens=False).ids
    return bool(own.decode(ids) != inner.decode(ids))
