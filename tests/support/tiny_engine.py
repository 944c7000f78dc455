"""An engine over the NumPy decoder, with a byte-level tokenizer: what tests of the engine and its services share."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from numpy_decoder import NumpyDecoder, NumpyEncoder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from headway_server.bundles import (
    Architecture,
    Bundle,
    BundleFile,
    Graph,
    Languages,
    Limits,
    Manifest,
    ParityFigures,
    Precision,
    SamplingDefaults,
    SpecialTokens,
    Task,
    Variant,
)
from headway_server.decoding.core.engine import Engine
from headway_server.decoding.core.step import Stepper
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.output.text import TextAssembly
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.sequence import Sequence
from headway_server.decoding.settings import EngineSettings
from headway_server.observers import NO_OBSERVER, Observer
from headway_server.preprocessing import ChatTemplate, TextTokenizer
from headway_server.tasks.decoding import ModelParts
from headway_server.tasks.generation.model import GenerationModel
from headway_server.tasks.text_to_text.translation import TranslationModel

MAX_LENGTH = 64


def byte_tokenizer(special: Iterable[str] = ()) -> Tokenizer:
    """Byte-level BPE with `<bos>` 0 and `<eos>` 1; its post-processor ends a text with `<eos>`.

    Args:
        special: Further special tokens, whose ids follow those of all others.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<bos>", "<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the cat " * 4], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    tokenizer.add_special_tokens(list(special))
    return tokenizer


TOKENIZER = byte_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size()
EOS_ID = 1
BOS_ID = 0
decode = TextTokenizer(TOKENIZER).decoder()


def make_decoder(num_slots: int = 4, **options) -> NumpyDecoder:
    options = {"max_length": MAX_LENGTH, "likely_id": EOS_ID, "vocab_size": VOCAB_SIZE} | options
    return NumpyDecoder(num_slots=num_slots, **options)


def random_prompt(rng: np.random.Generator, longest: int = 30) -> np.ndarray:
    return rng.integers(2, VOCAB_SIZE, size=rng.integers(1, longest + 1))


def make_sequence(
    input_ids,
    *,
    output=None,
    deadline=None,
    wants_deltas=False,
    eos_id=EOS_ID,
    start_ids=None,
    search=None,
    wants_alignment=False,
    caller="",
    priority=0,
    **parameters,
) -> Sequence:
    """Makes a sequence, with an event loop running; with `start_ids`, the input is a source and these its prompt."""
    parameters = SamplingParameters(**({"max_new_tokens": 20} | parameters))
    return Sequence(
        prompt_ids=np.asarray(input_ids if start_ids is None else start_ids, np.int64),
        source=None if start_ids is None else EncoderInput.of_tokens(np.asarray(input_ids, np.int64)),
        parameters=parameters,
        output=output or TextAssembly(decode, stop_strings=parameters.stop_strings, eager=wants_deltas),
        eos_id=eos_id,
        deadline=deadline,
        wants_deltas=wants_deltas,
        search=search,
        wants_alignment=wants_alignment,
        caller=caller,
        priority=priority,
    )


def slow_down(decoder, seconds: float) -> None:
    """Makes every decode step take at least `seconds`."""
    decode_step = decoder.decode

    def slow(*arguments, **options):
        time.sleep(seconds)
        return decode_step(*arguments, **options)

    decoder.decode = slow


@asynccontextmanager
async def running_engine(decoder, **options):
    """Gives an engine that is started, and closes it; the slots must be free then."""
    engine = Engine(Stepper(decoder, **options))
    engine.start()
    try:
        yield engine
    finally:
        engine.close()
    assert engine._stepper.scheduler.num_free == decoder.num_slots
    assert not engine._stepper.scheduler.waiting


def make_bundle(
    task: Task,
    *,
    max_input_tokens: int = 40,
    max_total_tokens: int = MAX_LENGTH,
    defaults: SamplingDefaults | None = None,
    bos: int = BOS_ID,
    eos: int = EOS_ID,
) -> Bundle:
    """Describes a bundle whose graphs are the NumPy runners; there are no files."""
    graph = Graph(file="none.onnx", inputs=(), outputs=())
    names = ("decoder",) if task is Task.GENERATION else ("encoder", "decoder")
    parity = ParityFigures(max_relative_logit_error=0.0, bound=1e-4, checked_shape_count=1, provider="none")
    variant = Variant(device="cpu", graphs=dict.fromkeys(names, graph), parity=parity, quality=None)
    manifest = Manifest(
        schema_version=1,
        name=f"tiny-{task.value}",
        version="1",
        task=task,
        description="A tiny model.",
        license="Apache-2.0",
        architecture=Architecture(kind="numpy", parameter_count=1, configuration={}),
        variants={Precision.FP32: variant},
        special_tokens=SpecialTokens(bos=bos, eos=eos),
        limits=Limits(max_input_tokens=max_input_tokens, max_total_tokens=max_total_tokens),
        languages=Languages(source="en", target="de") if task is Task.TRANSLATION else None,
        sampling_defaults=defaults,
        opset=23,
        libraries={},
        files=dict.fromkeys(("tokenizer.json", "none.onnx"), BundleFile(sha256="0" * 64, size_bytes=1)),
    )
    return Bundle(path=Path("tiny") / task.value, manifest=manifest)


def make_parts(
    decoders, *, tokenizer=None, encoder=None, max_text_bytes: int = 2**20, observer: Observer = NO_OBSERVER, **settings
) -> ModelParts:
    """Puts NumPy runners together with the tokenizer of the tiny models."""
    return ModelParts(
        precision=Precision.FP32,
        device="cpu",
        tokenizer=tokenizer or TextTokenizer(byte_tokenizer()),
        decoders=decoders,
        encoder=encoder,
        settings=EngineSettings(num_slots=decoders[0].num_slots, **settings),
        max_text_bytes=max_text_bytes,
        observer=observer,
    )


def make_generation_model(
    decoder: NumpyDecoder,
    *,
    max_waiting: int = 300,
    chat_template: ChatTemplate | None = None,
    max_text_bytes: int = 2**20,
    special: Iterable[str] = (),
    observer: Observer = NO_OBSERVER,
    **bundle_options,
) -> GenerationModel:
    tokenizer = TextTokenizer(byte_tokenizer(special))
    return GenerationModel(
        make_bundle(Task.GENERATION, **bundle_options),
        make_parts(
            [decoder], tokenizer=tokenizer, max_text_bytes=max_text_bytes, max_waiting=max_waiting, observer=observer
        ),
        chat_template=chat_template,
    )


def make_chat_template(folder: Path, source: str, *, special: Iterable[str] = ()) -> ChatTemplate:
    """Loads a template that goes with the tokenizer of the tiny models."""
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    byte_tokenizer(special).save(str(folder / "tokenizer.json"))
    return ChatTemplate.load(
        folder / "chat_template.jinja",
        tokenizer_file=folder / "tokenizer.json",
        special_tokens=SpecialTokens(bos=BOS_ID, eos=EOS_ID),
    )


def make_translation_model(
    decoder: NumpyDecoder,
    encoder: NumpyEncoder,
    *,
    max_waiting: int = 300,
    bundle: Bundle | None = None,
    max_text_bytes: int = 2**20,
    **settings,
) -> TranslationModel:
    return TranslationModel(
        bundle or make_bundle(Task.TRANSLATION),
        make_parts([decoder], encoder=encoder, max_text_bytes=max_text_bytes, max_waiting=max_waiting, **settings),
    )
