"""What translates side by side: headway served, headway bare, and other libraries, behind one interface.

All get sentences of the same lengths, and every translation has as many tokens as its source.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from peers.environment import PeerProcess
from random_model import RandomModel
from sentences import Sentence, SentenceSource
from tokenizers import Tokenizer
from translation_limits import BareTranslation, BareTranslator

from headway.v1 import translation_service_pb2 as pb
from headway.v1 import translation_service_pb2_grpc as pb_grpc
from headway_client.connection import Connection

_SEED = 11
_NUM_SENTENCES = 256
"""Sentences of the sides that get them all at once; they go round."""
_WARM_UP_SHARE = 0.25
"""Of a measurement's time that passes before it, with the same callers."""

Kind = Literal["served", "bare", "peer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationLoad:
    """What is asked at a time."""

    beam_size: int
    num_callers: int
    seconds: float
    """Shortest measurement."""

    @property
    def case(self) -> str:
        """What is asked for."""
        return "greedy" if self.beam_size == 1 else f"beam {self.beam_size}"

    @property
    def num_streams(self) -> int:
        """Sentences at a time."""
        return self.num_callers

    @property
    def key(self) -> str:
        """A name for it."""
        return f"{self.case} x {self.num_callers}"


class Translator(Protocol):
    """One row of the table."""

    name: str
    kind: Kind
    precision: str

    def measure(self, load: TranslationLoad) -> dict[str, Any]:
        """Measures once; the result has at least `tokens_per_s`."""


def sentence_source(model: RandomModel) -> SentenceSource:
    """Returns sentences."""
    return SentenceSource(Tokenizer.from_file(str(model.folder / "tokenizer.json")), seed=_SEED)


class Served:
    """headway's server, a sentence a call over gRPC from this process."""

    kind: Kind = "served"

    def __init__(self, model: RandomModel, address: str, precision: str) -> None:
        self.name = f"headway {precision}, served"
        self.precision = precision
        self._address = address
        self._model = model.name
        self._sentences = sentence_source(model)

    def measure(self, load: TranslationLoad) -> dict[str, Any]:
        """Keeps so many callers busy."""
        return asyncio.run(self._measure(load))

    async def _measure(self, load: TranslationLoad) -> dict[str, Any]:
        calls: list[_Call] = []
        async with Connection(self._address).open_async() as channel:
            await channel.channel_ready()
            stub = pb_grpc.TranslationServiceStub(channel)

            first_s = time.perf_counter() + _WARM_UP_SHARE * load.seconds
            last_s = first_s + load.seconds

            async def keep_busy() -> None:
                while time.perf_counter() < last_s:
                    calls.append(await self._ask(stub, self._sentences.take(1)[0], load.beam_size))

            begun_s, cpu_s = time.perf_counter(), time.process_time()
            # Calls that run at the end are waited for, and count by the part of their time before it.
            await asyncio.gather(*(keep_busy() for _ in range(load.num_callers)))
            ended_s, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        latencies_ms = [(call.ended_s - call.sent_s) * 1e3 for call in calls if call.ended_s >= first_s]
        return {
            "tokens_per_s": sum(call.tokens_within(first_s, last_s) for call in calls) / (last_s - first_s),
            "latency_p50_ms": float(np.median(latencies_ms)),
            "latency_p99_ms": float(np.percentile(latencies_ms, 99)),
            "client_cores": cpu_s / (ended_s - begun_s),
        }

    async def _ask(self, stub: Any, sentence: Sentence, beam_size: int) -> _Call:
        length = len(sentence.token_ids)
        parameters = pb.TranslationParameters(max_new_tokens=length, beam_size=beam_size)
        request = pb.TranslateTextRequest(model=self._model, texts=[sentence.text], parameters=parameters)
        sent_s = time.perf_counter()
        answer = await stub.TranslateText(request)
        if answer.results[0].new_token_count != length:
            raise RuntimeError(f"an answer has {answer.results[0].new_token_count} tokens; {length} were asked for")
        return _Call(sent_s=sent_s, ended_s=time.perf_counter(), num_tokens=length)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call as it went, by `time.perf_counter`."""

    sent_s: float
    ended_s: float
    num_tokens: int

    def tokens_within(self, first_s: float, last_s: float) -> float:
        """Its tokens, by the part of its time that lies within."""
        part_s = min(self.ended_s, last_s) - max(self.sent_s, first_s)
        return self.num_tokens * max(0.0, part_s) / (self.ended_s - self.sent_s)


class Bare:
    """The same graphs without a server: all rows busy, no ranking of beams and no reordering."""

    kind: Kind = "bare"

    def __init__(self, model: RandomModel, translator: BareTranslator, precision: str, *, num_slots: int) -> None:
        self.name = f"headway {precision}, bare loop"
        self.precision = precision
        self._translator = translator
        self._model = BareTranslation(
            folder=model.bundle,
            precision=precision,
            num_threads=translator.num_threads,
            sources=tuple(sentence.token_ids for sentence in sentence_source(model).take(_NUM_SENTENCES)),
            num_slots=num_slots,
        )

    def measure(self, load: TranslationLoad) -> dict[str, Any]:
        """Keeps so many sentences running."""
        return self._translator.measure(self._model, load.num_callers, load.beam_size, load.seconds)


class PeerTranslator:
    """Another library, batch after batch in its own process; it is given tokens and gives tokens.

    A batch has sentences of nearly the same length, the best it can get: next to no padding, and all end together.
    """

    kind: Kind = "peer"

    def __init__(self, model: RandomModel, process: PeerProcess) -> None:
        self.name = process.peer.name
        self.precision = process.peer.precision
        self._process = process
        sentences = sentence_source(model).take(_NUM_SENTENCES)
        self._sources = sorted((sentence.token_ids for sentence in sentences), key=len)

    def measure(self, load: TranslationLoad) -> dict[str, Any]:
        """Runs batches of so many sentences.

        Raises:
            PeerError: It cannot.
        """
        size = load.num_callers
        batches = [self._sources[start : start + size] for start in range(0, len(self._sources), size)]
        # Short and long ones in turn, so that a measurement that ends within a round has seen both.
        np.random.default_rng(_SEED).shuffle(batches)  # type: ignore[arg-type]  # a list is shuffled in place
        wanted = [[len(source) for source in batch] for batch in batches]
        figures: dict[str, Any] = self._process.measure(
            load.key, batches, 0, load.seconds, wanted=wanted, beam_size=load.beam_size
        )
        return figures
