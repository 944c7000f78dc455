"""CTranslate2 in int8 behind a gRPC server: a text in, a text out; calls that wait at the same time share a batch.

    python -m benchmarks.contestants.ctranslate2_served CASE_FILE PORT INTER_THREADS INTRA_THREADS BATCH_SIZE BATCH_TYPE

As many batches run at a time as there are inter-threads, each in a call of the library. A batch takes those of the
waiting texts that are as long as the one that waits longest or nearest to it, up to BATCH_SIZE `examples`, or `tokens`
of source and target with their padding.
"""

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ctranslate2
import grpc
from tokenizers import Tokenizer

from benchmarks.contestants.ctranslate2 import converted_model, vocabulary_of
from benchmarks.contestants.in_process import Case

METHOD = "/headway.benchmarks.Texts/Answer"


@dataclass(slots=True, eq=False)
class _Call:
    tokens: list[str]
    limit: int
    """New tokens of the answer."""
    answer: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Server:
    def __init__(self, case: Case, inter_threads: int, intra_threads: int, batch_size: int, batch_type: str) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(case["bundle"]) / "tokenizer.json"))
        converted = converted_model(case)
        self._vocabulary = vocabulary_of(converted)
        self._ids = {token: index for index, token in enumerate(self._vocabulary)}
        kind = ctranslate2.Translator if case["task"] == "translation" else ctranslate2.Generator
        threads = {"inter_threads": inter_threads, "intra_threads": intra_threads}
        self._model = kind(str(converted), "cpu", compute_type="int8", **threads)
        self._case, self._batch_size, self._batch_type = case, batch_size, batch_type
        self._waiting: list[_Call] = []
        self._idle = inter_threads
        self._pool = ThreadPoolExecutor(inter_threads)

    async def answer(self, request: bytes, _: Any) -> bytes:
        """Answers one call."""
        ids = self._tokenizer.encode(request.decode()).ids
        call = _Call([self._vocabulary[one] for one in ids], self._case["max_new_tokens"] or len(ids))
        self._waiting.append(call)
        asyncio.get_running_loop().call_soon(self._run_waiting)
        return await call.answer

    def _run_waiting(self) -> None:
        while self._waiting and self._idle:
            self._idle -= 1
            batch = self._take()
            run = asyncio.get_running_loop().run_in_executor(self._pool, self._run, batch)
            run.add_done_callback(lambda done, batch=batch: self._give(batch, done))  # type: ignore[misc]

    def _take(self) -> list[_Call]:
        first = len(self._waiting[0].tokens)
        nearest = sorted(self._waiting, key=lambda call: abs(len(call.tokens) - first))
        size = self._batch_size
        if self._batch_type == "tokens":
            fits = (n for n in range(1, len(nearest) + 1) if n * max(len(c.tokens) for c in nearest[:n]) <= size)
            size = max(fits, default=1)
        batch = nearest[:size]
        self._waiting = [call for call in self._waiting if call not in batch]
        return batch

    def _run(self, batch: list[_Call]) -> list[bytes]:
        """Runs in a thread of the pool; the library lets go of the interpreter's lock."""
        texts, limits = [call.tokens for call in batch], [call.limit for call in batch]
        if isinstance(self._model, ctranslate2.Translator):
            # Random weights end no answer. Greedily the callback ends each at its length; beams run to the longest.
            is_greedy = self._case["beam_size"] == 1
            ends = {"callback": lambda step: step.step + 1 >= limits[step.batch_id]} if is_greedy else {}
            lengths = {"max_decoding_length": max(limits), "min_decoding_length": max(limits)}
            translated = self._model.translate_batch(texts, beam_size=self._case["beam_size"], **lengths, **ends)
            ids = [[self._ids[token] for token in one.hypotheses[0]] for one in translated]
        else:
            lengths = {"max_length": max(limits), "min_length": max(limits)}
            options = {"sampling_topk": 1, "include_prompt_in_result": False}
            ids = [one.sequences_ids[0] for one in self._model.generate_batch(texts, **lengths, **options)]
        if any(len(one) < limit for one, limit in zip(ids, limits, strict=True)):
            raise RuntimeError(f"answers have {[*map(len, ids)]} tokens, {limits} were asked for")
        return [self._tokenizer.decode(one[:limit]).encode() for one, limit in zip(ids, limits, strict=True)]

    def _give(self, batch: list[_Call], done: asyncio.Future[list[bytes]]) -> None:
        self._idle += 1
        for number, call in enumerate(batch):
            if error := done.exception():
                call.answer.set_exception(error)
            else:
                call.answer.set_result(done.result()[number])
        self._run_waiting()


async def _serve(case: Case) -> None:
    texts = _Server(case, int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    server = grpc.aio.server()
    _, service, method = METHOD.split("/")
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(texts.answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[2]}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
