"""Callers of Triton over gRPC: python call_triton.py ADDRESS INPUTS_FILE CALLERS SECONDS MIN_ANSWERS.

INPUTS_FILE holds a JSON list of inputs: texts, or images in base64 where IMAGES is given as a sixth argument. Prints
the figures of `closed_loop.measure_callers` as JSON.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton

sys.path.append(str(Path(__file__).resolve().parents[1]))
from closed_loop import measure_callers

START_TIMEOUT_S = 120.0


async def _measure(address: str, data: list[bytes], callers: int, seconds: float, min_answers: int) -> dict[str, Any]:
    inputs = []
    for item in data:
        tensor = triton.InferInput("data", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[item]], object))
        inputs.append([tensor])
    async with triton.InferenceServerClient(address) as client:
        await _wait_until_ready(client)

        async def ask(number: int) -> None:
            answer = await client.infer("classify", inputs[number % len(inputs)])
            answer.as_numpy("label")

        return await measure_callers(ask, num_callers=callers, seconds=seconds, min_answers=min_answers)


async def _wait_until_ready(client: Any) -> None:
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < START_TIMEOUT_S:
        try:
            if await client.is_model_ready("classify"):
                return
        except triton.InferenceServerException:
            pass  # it does not listen yet
        await asyncio.sleep(0.2)
    raise RuntimeError(f"Triton was not ready after {START_TIMEOUT_S:.0f} s")


if __name__ == "__main__":
    texts = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    decode = base64.b64decode if sys.argv[6:] else str.encode
    print(
        json.dumps(
            asyncio.run(
                _measure(
                    sys.argv[1],
                    [decode(text) for text in texts],
                    int(sys.argv[3]),
                    float(sys.argv[4]),
                    int(sys.argv[5]),
                )
            )
        )
    )
