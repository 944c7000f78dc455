"""Reads a model folder of Hugging Face's `transformers`, without running any code that lies in it.

One adapter serves a kind of model, not one an architecture. `transformers` sends the attention of its families through
one interface. `HuggingFaceDecoder` registers a function there that calls the `attend` it is given, so that any decoder
of that library follows docs/bring-your-own.md; rotary positions, norms and grouped heads stay with the library's own
code. Encoders are exported as they are.

A decoder is held against `transformers`' own attention before it is exported, so a family that computes anything beside
what `attend` takes is refused with the difference.

B rows, T tokens, H heads, G key and value heads, K head width, D model width, V vocabulary, C classes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Literal, Unpack, cast

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)

from headway_export.errors import SourceError
from headway_export.graphs import parameter_count
from headway_export.reference import CAUSAL, generation_logits
from headway_export.source import (
    ExportSource,
    check_tags,
    find_chat_template,
    limits_of,
    read_evaluation,
)
from headway_server.bundles import (
    TOKENIZER_FILE,
    Architecture,
    ClassificationScheme,
    SamplingDefaults,
    SpecialTokens,
    Task,
)
from headway_training.models.parts.attention import Attend, Scoring

DEFAULT_MAX_LENGTH: Final = 2048
"""Most tokens of a bundle if nothing else is asked for; the proof runs over all of them."""
ORACLE_BOUND: Final = 1e-4
"""Largest relative difference of logits between `attend` and the library's own attention."""

_ATTENTION: Final = "headway"
_CONFIG_FILE: Final = "config.json"
_SAFETENSORS: Final = "model.safetensors"
_PICKLE: Final = "pytorch_model.bin"
_AUTO_CLASSES: Final = {
    Task.GENERATION: AutoModelForCausalLM,
    Task.TEXT_CLASSIFICATION: AutoModelForSequenceClassification,
    Task.TOKEN_CLASSIFICATION: AutoModelForTokenClassification,
}
_HEADS: Final = {
    "ForCausalLM": Task.GENERATION,
    "LMHeadModel": Task.GENERATION,
    "ForSequenceClassification": Task.TEXT_CLASSIFICATION,
    "ForTokenClassification": Task.TOKEN_CLASSIFICATION,
}
"""What the name of an architecture ends with, and the task that it stands for."""
_IGNORED_GENERATION: Final = (
    "no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "sequence_bias",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
"""Entries of `generation_config.json` that change what is generated and that a bundle has no place for."""
_NEUTRAL: Final[tuple[Any, ...]] = (None, 0, 0.0, 1.0, [], {})


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """What is asked for beside the folder."""

    name: str | None = None
    """Name in the store; None: the folder's, in small letters."""
    task: str | None = None
    """Task; None: the one that `architectures` in the configuration stands for."""
    max_length: int | None = None
    """Most tokens; None: the model's, `DEFAULT_MAX_LENGTH` at most."""
    allow_pickle: bool = False
    """True to read weights that are pickled, which can run any code."""
    evaluation_file: Path | None = None
    """Evaluation data in the format of docs/checkpoint.md."""
    license_name: str | None = None
    """Licence of the weights; None: the one that the folder's README states."""


def from_folder(folder: Path, options: FolderOptions) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model folder.

    Args:
        folder: Holds `config.json`, weights, and a tokenizer.
        options: What is asked for beside it.

    Returns:
        What is exported, and notes for the user, a sentence each.

    Raises:
        SourceError: The folder is incomplete, or its model is of a kind that cannot be served.
    """
    content = _read_configuration(folder)
    task = _task_of(folder, content, options.task)
    _check_weights(folder, allow_pickle=options.allow_pickle)
    config = _parse_configuration(folder, content)
    _check_config(folder, config, task)
    tokenizer, has_types = _read_tokenizer(folder)
    vocabulary = int(config.get_text_config().vocab_size)
    if (largest := max(tokenizer.get_vocab().values(), default=0)) >= vocabulary:
        raise SourceError(
            f"{folder}: the tokenizer has a token of id {largest}, and the model's vocabulary ends at "
            f"{vocabulary - 1}; they do not belong together"
        )
    model = _load(folder, task, config, options)
    length, notes = _length_of(folder, model, task, options.max_length)
    module: nn.Module
    defaults = special_tokens = None
    if task is Task.GENERATION:
        module = HuggingFaceDecoder(model, max_length=length)
        _check_against_own_attention(folder, module)
        special_tokens, defaults, more_notes = _generation_settings(folder, config, tokenizer)
        notes += more_notes
    else:
        module = HuggingFaceClassifier(model, max_length=length, has_types=has_types)
        special_tokens = SpecialTokens(pad=config.pad_token_id)
    labels, scheme = _labels_of(folder, config, task)
    return (
        ExportSource(
            name=options.name or _name_of(folder),
            task=task,
            module=module,
            description=f"{type(model).__name__}, exported from a folder of transformers.",
            license=options.license_name or _license_of(folder),
            architecture=Architecture(
                kind=type(model).__name__,
                parameter_count=parameter_count(model),
                configuration={"model_type": config.model_type, "transformers": transformers.__version__},
            ),
            limits=limits_of(module, task),
            tokenizer=tokenizer,
            special_tokens=special_tokens,
            prompt_prefix=_prompt_prefix(tokenizer) if task is Task.GENERATION else (),
            chat_template=find_chat_template(folder) if task is Task.GENERATION else None,
            labels=labels,
            classification=scheme,
            text_pairs=_text_pairs(tokenizer, task),
            sampling_defaults=defaults,
            evaluation=(
                read_evaluation(options.evaluation_file, task, options.evaluation_file.name, len(labels))
                if options.evaluation_file
                else None
            ),
        ),
        notes,
    )


# Models


_attend: ContextVar[Attend] = ContextVar("attend")


def _injected_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (the attention that is injected is causal and has its own)
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,  # noqa: ARG001 (`_check_config` has compared it with the length)
    **further: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer of `transformers`: (B, H, T, K), twice (B, G, T, K) -> (B, T, H, K).

    Raises:
        SourceError: The layer asks for something that `attend` does not take.
    """
    for name in ("softcap", "s_aux", "position_bias", "alibi"):
        if further.get(name) is not None:
            raise SourceError(f"its attention has {name}, which the key/value cache's operator is not given")
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int):
        raise SourceError(f"{type(module).__name__} does not know its number (layer_idx)")
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return _attend.get()(query, key, value, layer=number, scale=scaling), None


transformers.AttentionInterface.register(_ATTENTION, _injected_attention)


class HuggingFaceDecoder(nn.Module):
    """A causal language model of `transformers` as a `Decoder`."""

    def __init__(self, model: nn.Module, *, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.max_length = max_length
        config = cast("Any", model).config
        self._divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        self._factor = float(getattr(config, "logit_scale", None) or 1.0)
        self._cap = getattr(config, "final_logit_softcapping", None)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T), (B, T) -> (B, T, D)."""
        token = _attend.set(attend)
        try:
            output = cast("Any", self.model).base_model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=True
            )
        finally:
            _attend.reset(token)
        return cast("Tensor", output.last_hidden_state)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        logits: Tensor = cast("Any", self.model).get_output_embeddings()(hidden_states)
        if self._divisor != 1.0:
            logits = logits / self._divisor
        if self._factor != 1.0:
            logits = logits * self._factor
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits


class HuggingFaceClassifier(nn.Module):
    """A classifier of texts or tokens of `transformers`, in its own arithmetic."""

    def __init__(self, model: nn.Module, *, max_length: int, has_types: bool) -> None:
        super().__init__()
        self.model = model
        self.max_length = max_length
        self.num_token_types = int(getattr(cast("Any", model).config, "type_vocab_size", 0) or 0) if has_types else 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """(B, T), (B, T), (B, T) -> logits (B, C), or (B, T, C) of a token classifier."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **types)
        return cast("Tensor", output.logits)


def _check_against_own_attention(folder: Path, decoder: HuggingFaceDecoder) -> None:
    """Compares the logits of an adapted decoder with those of `transformers` itself, on random tokens.

    Raises:
        SourceError: They differ: the family computes something that does not go through `attend`.
    """
    model = cast("Any", decoder.model)
    kind = type(model).__name__
    length = min(48, decoder.max_length)
    ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, length)
    attending: set[int] = set()

    def noting(query: Tensor, key: Tensor, value: Tensor, *, layer: int, **scoring: Unpack[Scoring]) -> Tensor:
        attending.add(layer)
        return CAUSAL(query, key, value, layer=layer, **scoring)

    try:
        with _quiet():
            found = generation_logits(decoder, ids, noting)
    except SourceError as error:
        raise SourceError(f"{folder}: {kind}: {error}") from error
    except Exception as error:  # whatever its code raises
        raise SourceError(f"{folder}: {kind} does not run with injected attention ({_first_line(error)})") from error
    if (layers := int(model.config.get_text_config().num_hidden_layers)) != len(attending):
        raise SourceError(
            f"{folder}: {kind}: {len(attending)} of {layers} layers attend through the interface that transformers "
            "has for it; a key/value cache needs all of them, so this family is not supported"
        )
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            expected = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float().numpy()
    finally:
        model.set_attn_implementation(_ATTENTION)
    error_size = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6))
    if not error_size <= ORACLE_BOUND:
        raise SourceError(
            f"{folder}: {kind} computes something that injected attention leaves out: its logits differ by "
            f"{error_size:.1e} from those of transformers (bound {ORACLE_BOUND:.0e}); this family is not supported"
        )


# What the folder says


def _read_configuration(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise SourceError(
            f"{folder}: is no folder; fetch a model first, for example with: hf download ID --local-dir FOLDER"
        )
    file = folder / _CONFIG_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SourceError(f"{folder}: has no {_CONFIG_FILE}, so it is no model folder of transformers") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise SourceError(f"{file}: is not a JSON object")
    return content


def _task_of(folder: Path, content: Mapping[str, Any], asked: str | None) -> Task:
    """Returns the task of a folder.

    Raises:
        SourceError: It cannot be told, or is none that this command exports.
    """
    known = ", ".join(_AUTO_CLASSES)
    if content.get("is_encoder_decoder"):
        raise SourceError(
            f"{folder}: is an encoder-decoder ({content.get('model_type')}), which this command does not export; "
            "a translation model can be exported with --model (docs/bring-your-own.md)"
        )
    if asked is not None:
        if asked not in {str(task) for task in _AUTO_CLASSES}:
            raise SourceError(f"--task {asked}: this command exports {known}")
        return Task(asked)
    architectures = content.get("architectures") or []
    tasks = {task for name in architectures for suffix, task in _HEADS.items() if str(name).endswith(suffix)}
    if len(tasks) != 1:
        raise SourceError(
            f"{folder}: the task cannot be told from architectures {json.dumps(architectures)}; "
            f"give it with --task, one of {known}"
        )
    return tasks.pop()


def _check_weights(folder: Path, *, allow_pickle: bool) -> None:
    """Checks that all weights are there.

    Raises:
        SourceError: They are not, or they are pickled and that is not allowed.
    """
    for name in (_SAFETENSORS, _PICKLE):
        index = folder / f"{name}.index.json"
        files = [name] if (folder / name).exists() else _shards(index) if index.exists() else []
        if missing := [file for file in files if not (folder / file).exists()]:
            raise SourceError(f"{folder}: {index.name} names {missing[0]}, which is not there; fetch the folder again")
        if files and name == _PICKLE and not allow_pickle:
            raise SourceError(
                f"{folder}: its weights are pickled ({files[0]}), and a pickle may run any code when it is read; "
                "give --allow-pickle if you trust where it comes from, or convert it to safetensors"
            )
        if files:
            return
    raise SourceError(f"{folder}: has no weights ({_SAFETENSORS}, or its shards with an index)")


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SourceError(f"{index}: cannot be read as an index of shards ({error})") from error
    return [str(name) for name in names]


def _parse_configuration(folder: Path, content: Mapping[str, Any]) -> Any:
    model_type = content.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        if content.get("auto_map"):
            raise SourceError(
                f"{folder}: model type {model_type} needs code that lies in the folder (auto_map), and no code of a "
                "folder is ever run"
            )
        raise SourceError(
            f"{folder}: model type {model_type} is not one that transformers {transformers.__version__} knows; "
            "a newer version may"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises many kinds
        raise SourceError(f"{folder / _CONFIG_FILE}: cannot be read ({_first_line(error)})") from error


def _check_config(folder: Path, config: Any, task: Task) -> None:
    """Checks what can be told from the configuration alone.

    Raises:
        SourceError: The model needs something that the exported graph does not compute.
    """
    if task is not Task.GENERATION:
        if config.num_labels == 1 or config.problem_type == "regression":
            raise SourceError(
                f"{folder}: has one output, a score, and not labels; no call of the server answers with a score"
            )
        return
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (getattr(config, name, None) or 0) > 1:
            raise SourceError(f"{folder}: is a mixture of experts ({config.model_type}), which is not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    settings: Sequence[Any] = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    kinds = {part.get("rope_type", part.get("type")) for part in settings}
    if changing := kinds & {"dynamic", "longrope"}:
        raise SourceError(
            f"{folder}: its rotary positions are scaled by the running length ({changing.pop()}), so a cached key "
            "would have to change as the text grows; this is not supported"
        )


def _read_tokenizer(folder: Path) -> tuple[Tokenizer, bool]:
    """Returns the tokenizer as transformers reads it, and whether it gives its model the types of a pair's tokens."""
    try:
        read = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return Tokenizer.from_str(read.backend_tokenizer.to_str()), "token_type_ids" in read.model_input_names
    except Exception as error:  # the library raises many kinds
        raise SourceError(
            f"{folder}: has no tokenizer that can be read ({_first_line(error)}); it needs {TOKENIZER_FILE}"
        ) from error


def _prompt_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that a tokenizer puts before a text."""
    framed = tokenizer.encode("a")
    marks = zip(framed.ids, framed.special_tokens_mask, strict=True)
    return tuple(index for index, _ in takewhile(lambda mark: mark[1], marks))


def _load(folder: Path, task: Task, config: Any, options: FolderOptions) -> nn.Module:
    """Loads the weights, in fp32.

    Raises:
        SourceError: They cannot be read, or are not those of the model.
    """
    attention = _ATTENTION if task is Task.GENERATION else "eager"
    try:
        with _quiet():
            model, report = _AUTO_CLASSES[task].from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=not options.allow_pickle or None,
                output_loading_info=True,
            )
    except Exception as error:  # the library raises many kinds
        if isinstance(error, KeyError) and error.args == (_ATTENTION,):  # it chose a class by the attention's name
            raise SourceError(
                f"{folder}: {config.model_type} does not attend through the interface that transformers has for it; "
                "a key/value cache needs that, so this family is not supported"
            ) from error
        raise SourceError(f"{folder}: cannot be loaded for {task} ({_first_line(error)})") from error
    for what in ("missing_keys", "mismatched_keys"):
        if report[what]:
            first = min(map(str, report[what]))
            raise SourceError(
                f"{folder}: {len(report[what])} weights of {type(model).__name__} are "
                f"{'not there' if what == 'missing_keys' else 'of another shape'} ({first} is the first); "
                f"these are not the weights of a model for {task}"
            )
    return cast("nn.Module", model.eval())


@contextmanager
def _quiet() -> Iterator[None]:
    """Lets transformers report through what it returns, and not on the terminal."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
        transformers.logging.enable_progress_bar()


def _length_of(folder: Path, model: nn.Module, task: Task, asked: int | None) -> tuple[int, tuple[str, ...]]:
    """Returns the most tokens of the bundle, and a note if the model could take more.

    Raises:
        SourceError: More are asked for than the model takes.
    """
    config = cast("Any", model).config
    length = int(getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH)
    table = getattr(getattr(cast("Any", model).base_model, "embeddings", None), "position_embeddings", None)
    if isinstance(table, nn.Embedding) and table.padding_idx is not None:  # positions begin after the padding's
        length -= table.padding_idx + 1
    limit = f"the model takes {length} tokens"
    window = _window_of(config) if task is Task.GENERATION else None
    if window is not None and window < length:
        length, limit = window, f"its attention sees a window of {window} tokens, and the bundle has no windows"
    if asked is not None and asked > length:
        raise SourceError(f"{folder}: --max-length {asked}: {limit}")
    chosen = asked or min(length, DEFAULT_MAX_LENGTH)
    if asked is None and chosen < (whole := int(getattr(config, "max_position_embeddings", None) or chosen)):
        if length > chosen:
            return chosen, (f"texts of at most {chosen} tokens: {limit}; --max-length N changes it",)
        if window == length and whole > length:
            return chosen, (f"texts of at most {chosen} tokens: {limit}",)
    return chosen, ()


def _window_of(config: Any) -> int | None:
    """Returns the sliding window of a decoder's attention, in tokens; None: it has none."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return None
    return None if getattr(config, "use_sliding_window", True) is False else int(window)


def _generation_settings(
    folder: Path, config: Any, tokenizer: Tokenizer
) -> tuple[SpecialTokens, SamplingDefaults, tuple[str, ...]]:
    """Reads `generation_config.json`, or what the configuration says in its place."""
    text = config.get_text_config()
    if (folder / "generation_config.json").exists():
        settings = GenerationConfig.from_pretrained(folder, local_files_only=True)
    else:
        settings = GenerationConfig.from_model_config(config)
    ends = _as_ids(settings.eos_token_id) or _as_ids(text.eos_token_id)
    names = _token_names(folder)
    turn_end = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    if turn_end in ends:  # the template knows this one as eos_token
        ends = [turn_end, *(end for end in ends if end != turn_end)]
    begin = tokenizer.token_to_id(names["bos_token"]) if "bos_token" in names else None
    special = SpecialTokens(
        pad=settings.pad_token_id,
        bos=begin if begin is not None else settings.bos_token_id,
        eos=ends[0] if ends else None,
        more_eos=tuple(ends[1:]),
    )
    values: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens}
    if settings.repetition_penalty is not None:
        values["repetition_penalty"] = settings.repetition_penalty
    if settings.do_sample:
        values["temperature"] = 1.0 if settings.temperature is None else settings.temperature
        values["top_k"] = 50 if settings.top_k is None else settings.top_k  # what `generate` takes without one
        values |= {name: getattr(settings, name) for name in ("top_p", "min_p") if getattr(settings, name) is not None}
    ignored = [name for name in _IGNORED_GENERATION if getattr(settings, name, None) not in _NEUTRAL]
    notes = (f"generation_config: {', '.join(ignored)}: not applied by the server",) if ignored else ()
    return special, SamplingDefaults.model_validate(values), notes


def _as_ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(dict.fromkeys(value))


def _token_names(folder: Path) -> dict[str, str]:
    """Returns the special tokens that `tokenizer_config.json` names, by what they are for."""
    try:
        content = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    tokens = {name: content.get(name) for name in ("bos_token", "eos_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _labels_of(folder: Path, config: Any, task: Task) -> tuple[tuple[str, ...], ClassificationScheme | None]:
    if task is Task.GENERATION:
        return (), None
    labels = tuple(str(config.id2label[index]) for index in range(config.num_labels))
    try:
        check_tags(task, labels)
    except SourceError as error:
        raise SourceError(f"{folder}: {error}; token classifiers are served as spans (docs/spans.md)") from error
    if task is Task.TEXT_CLASSIFICATION and config.problem_type == "multi_label_classification":
        return labels, ClassificationScheme(kind="multi_label", thresholds=(0.5,) * len(labels))
    return labels, None


def _text_pairs(tokenizer: Tokenizer, task: Task) -> Literal["never", "optional"]:
    """A classifier reads pairs where its tokenizer knows how to join two texts."""
    joins = tokenizer.num_special_tokens_to_add(True) > tokenizer.num_special_tokens_to_add(False)
    return "optional" if task is Task.TEXT_CLASSIFICATION and joins else "never"


def _name_of(folder: Path) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).strip("._-")[:64].strip("._-")
    if not name:
        raise SourceError(f"{folder}: its name is no name of a model; give one with --name")
    return name


def _license_of(folder: Path) -> str:
    """Returns the licence in the front matter of the folder's README."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "not stated"
    matter = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    stated = re.search(r"^license:\s*(\S+)", matter[1], re.MULTILINE) if matter else None
    return stated[1].strip("\"'") if stated else "not stated"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
