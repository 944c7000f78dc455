"""diffusers' ONNX pipeline, in its process: python -m benchmarks.contestants.diffusers THREADS FOLDER.

The folder is one of `stable_diffusion.write_graphs`. A request names `precision`, `prompts` (one a caller) and `steps`;
all callers ask at the same moment. With `together` one call draws all of them, otherwise each waits for those before
it. The answer holds what each waits, in seconds. With `noise`, the only prompt's first latent, it holds the `pixels` of
the image.

The scheduler is DDIM at the kit's times: times go down evenly from 1, and the noise at each is that of a quarter turn.
"""

import itertools
import math
import sys
import time
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnxruntime
from transformers import PreTrainedTokenizerFast

from benchmarks.worker import serve

_NUM_TIMES = 1000
_GUIDANCE = 3.0


def _load(folder: Path, threads: int, precision: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    graphs = {
        name: diffusers.OnnxRuntimeModel(
            diffusers.OnnxRuntimeModel.load_model(folder / precision / name / "model.onnx", sess_options=options)
        )
        for name in ("unet", "text_encoder", "vae_decoder")
    }
    max_length = graphs["text_encoder"].model.get_inputs()[0].shape[1]
    # 1 - beta is what the signal's share of the variance changes by; that share is 0 at the last time.
    shares = [math.cos(math.pi / 2 * number / _NUM_TIMES) ** 2 for number in range(_NUM_TIMES)] + [0.0]
    pipeline = diffusers.OnnxStableDiffusionPipeline(
        **graphs,
        vae_encoder=None,
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            model_max_length=max_length,
            pad_token="<pad>",  # noqa: S106 (not a password)
        ),
        scheduler=diffusers.DDIMScheduler(
            trained_betas=[1 - after / before for before, after in itertools.pairwise(shares)],
            prediction_type="v_prediction",
            timestep_spacing="trailing",
            clip_sample=False,
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def main() -> None:
    """Answers requests."""
    diffusers.utils.logging.set_verbosity_error()
    load = cache(partial(_load, Path(sys.argv[2]), int(sys.argv[1])))

    def answer(request: dict[str, Any]) -> Mapping[str, Any]:
        pipeline, prompts = load(request["precision"]), request["prompts"]
        # The pipeline takes a latent for eight pixels.
        side = 8 * pipeline.unet.model.get_inputs()[0].shape[-1]
        settings = {"height": side, "width": side, "guidance_scale": _GUIDANCE}
        settings["num_inference_steps"] = request["steps"]
        if "noise" in request:
            [image] = pipeline(prompts, latents=np.array([request["noise"]], np.float32), **settings).images
            return {"pixels": np.asarray(image).tolist()}
        began, waits = time.perf_counter(), []
        for called in [prompts] if request["together"] else [[prompt] for prompt in prompts]:
            pipeline(called, **settings)
            waits += [time.perf_counter() - began] * len(called)
        return {"waits_s": waits}

    serve(answer, ("diffusers", "onnxruntime", "torch", "transformers"))


if __name__ == "__main__":
    main()
