"""The worker that runs SAM ViT-B's geometry with random weights: as its users run it in ONNX Runtime, and ours.

Theirs is the architecture of Kirillov et al. 2023, appendix A, by transformers, as two graphs: the image encoder, and
what the authors' own export writes: the prompt encoder, the mask decoder and the best mask brought to the pixels of the
image, for one prompt of one image. Ours is the kit's segmenter of the same sizes, run as the server runs it: prompts of
several images in a run of the decoder, and the best mask of each brought to the pixels of its image by NumPy.

What differs: their encoder attends within windows of 14 x 14 patches in 8 of its 12 layers and has relative positions,
ours attends globally in all of them. Their decoder learns its cells from the patches alone; ours also reads the detail
of each patch, which makes its embedding three times theirs. Their prompts have a padded point beside the one given.

I side of what a model reads, L patches along it, Q points of a prompt, S side of a mask in cells.
"""

import logging
import shutil
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.worker import serve

IMAGE_SIZE: Final = (640, 480)
"""Width and height of the image whose pixels masks are brought to."""
THEIRS, THEIRS_INT8 = "SAM, fp32", "SAM, decoder in dynamic int8"
OURS, OURS_INT8 = "headway, fp32", "headway, int8"
_ALONE, _SHARED = "one prompt a run", "shared runs"
SIDES: Final = {
    f"{name}, {way}": (name, way)
    for name, ways in (
        (THEIRS, (_ALONE,)),
        (THEIRS_INT8, (_ALONE,)),
        (OURS, (_ALONE, _SHARED)),
        (OURS_INT8, (_ALONE, _SHARED)),
    )
    for way in ways
}
"""Who answers prompts, and how."""
_SIZES: Final = {"image_size": 1024, "num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 3072, "window": 14}
_TINY: Final = {"image_size": 128, "num_layers": 2, "d_model": 32, "num_heads": 2, "d_ff": 64, "window": 3}
_PATCH, _WIDTH, _HEADS, _D_FF, _DETAIL = 16, 256, 8, 2048, 32
"""Of a patch, and of the decoder; the detail of a cell is as wide as theirs is before the masks."""
_NAME: Final = "sam-sized"
_OPSET: Final = 20
_EXTERNAL_BYTES: Final = 64 * 2**20


def make(folder: Path, *, tiny: bool) -> None:
    """Writes the graphs of both, and ours as a bundle each; what is there is left."""
    if (folder / "made").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of optional packages that are not needed
    warnings.filterwarnings("ignore", module=r"(torch|transformers|copyreg|onnxscript)\b.*")
    sizes = _TINY if tiny else _SIZES
    _write_theirs(folder, sizes)
    _write_ours(folder, sizes)
    (folder / "made").touch()


def _write_theirs(folder: Path, sizes: dict[str, int]) -> None:
    import torch  # noqa: PLC0415 (as the rest: only the process that makes the graphs needs it)
    from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415
    from torch import Tensor, nn  # noqa: PLC0415
    from torch.nn import functional as F  # noqa: N812, PLC0415 (torch's own convention)
    from transformers import SamConfig, SamModel  # noqa: PLC0415

    side, layers = sizes["image_size"], sizes["num_layers"]
    vision = {
        "hidden_size": sizes["d_model"],
        "num_hidden_layers": layers,
        "num_attention_heads": sizes["num_heads"],
        "mlp_dim": sizes["d_ff"],
        "image_size": side,
        "window_size": sizes["window"],
        "global_attn_indexes": [layers * quarter // 4 - 1 for quarter in range(1, 5) if layers * quarter // 4],
    }
    prompts = {"image_size": side, "image_embedding_size": side // _PATCH}
    torch.manual_seed(1)
    config = SamConfig(vision_config=vision, prompt_encoder_config=prompts, attn_implementation="eager")
    model = SamModel(config).eval()

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model.vision_encoder

        def forward(self, image: Tensor) -> Tensor:
            """(1, 3, I, I) -> (1, 256, L, L)."""
            embeddings: Tensor = self.encoder(image).last_hidden_state
            return embeddings

    class Decoder(nn.Module):
        places: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = model.prompt_encoder, model.mask_decoder
            self.register_buffer("places", model.get_image_wide_positional_embeddings().detach())

        def forward(
            self, image_embeddings: Tensor, point_coords: Tensor, point_labels: Tensor, mask: Tensor, has_mask: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            """One prompt: (1, 256, L, L), (1, Q, 2), (1, Q), (1, 1, S, S), (1,) -> mask, its IoU, its logits."""
            points, none = self.encoder(point_coords[:, None], point_labels[:, None], None, None)
            dense = has_mask * self.encoder.mask_embed(mask) + (1 - has_mask) * none
            found = self.decoder(image_embeddings, self.places, points, dense, multimask_output=True)
            masks, ious = (part[:, 0] for part in found)  # (1, 3, S, S), (1, 3): those of one point or one box
            best = ious.argmax(dim=1)
            logits, iou = masks.index_select(1, best), ious.index_select(1, best)
            wide, high = IMAGE_SIZE
            scale = side / max(IMAGE_SIZE)
            enlarged = F.interpolate(logits, (side, side), mode="bilinear", align_corners=False)
            cropped = enlarged[..., : round(high * scale), : round(wide * scale)]
            return F.interpolate(cropped, (high, wide), mode="bilinear", align_corners=False), iou, logits

    grid = side // _PATCH
    image = torch.zeros(1, 3, side, side)
    embeddings, mask = torch.zeros(1, _WIDTH, grid, grid), torch.zeros(1, 1, 4 * grid, 4 * grid)
    inputs = (embeddings, torch.zeros(1, 2, 2), torch.ones(1, 2), mask, torch.zeros(1))
    num_points = {1: torch.export.Dim("points", min=1, max=64)}
    graphs: tuple[tuple[str, nn.Module, tuple[Tensor, ...], Any], ...] = (
        ("encoder", Encoder().eval(), (image,), None),
        ("decoder", Decoder().eval(), inputs, ({}, num_points, num_points, {}, {})),
    )
    with torch.inference_mode():
        for name, module, example, dynamic in graphs:
            program = torch.onnx.export(
                module, example, dynamic_shapes=dynamic, opset_version=_OPSET, dynamo=True, verbose=False
            )
            assert program is not None, "no file was given"
            program.save(str(folder / f"sam-{name}.onnx"), external_data=name == "encoder")
    decoder = str(folder / "sam-decoder.onnx")
    quantize_dynamic(decoder, str(folder / "sam-decoder-int8.onnx"), weight_type=QuantType.QUInt8)


def _write_ours(folder: Path, sizes: dict[str, int]) -> None:
    """Writes what the exporter would, without its proof, which would take many minutes at this size."""
    import onnxruntime  # noqa: PLC0415 (as above)
    import torch  # noqa: PLC0415

    from headway_export.rewriting import QuantizeProducts, rewrite  # noqa: PLC0415
    from headway_export.tracing import trace  # noqa: PLC0415
    from headway_export.weights import save  # noqa: PLC0415
    from headway_server import bundles  # noqa: PLC0415
    from headway_training.models.segmentation import SegmentationConfig, Segmenter  # noqa: PLC0415

    side = sizes["image_size"]
    shape = SegmentationConfig(
        image_size=side,
        patch_size=_PATCH,
        stem="patches",
        image_num_layers=sizes["num_layers"],
        image_d_model=sizes["d_model"],
        image_num_heads=sizes["num_heads"],
        image_d_ff=sizes["d_ff"],
        d_detail=_DETAIL,
        d_model=_WIDTH,
        num_heads=_HEADS,
        d_ff=_D_FF,
    )
    torch.manual_seed(1)
    module = Segmenter(shape).eval()
    traced = trace(module, bundles.Task.SEGMENTATION, image_size=(side, side))
    unproved = bundles.ParityFigures(
        max_relative_logit_error=0.0, bound=0.0, checked_shape_count=0, provider="CPUExecutionProvider"
    )
    variants = {}
    with bundles.staging_folder(folder) as staged:
        for precision in (bundles.Precision.FP32, bundles.Precision.INT8):
            (staged / precision).mkdir()
            graphs = {}
            for graph in traced.graphs:
                if precision is bundles.Precision.INT8:
                    rewrite(graph.model, QuantizeProducts())
                file = f"{precision}/{graph.role}.onnx"
                save(graph.model, staged / file, threshold_bytes=_EXTERNAL_BYTES)
                graphs[graph.role] = bundles.Graph(file=file, inputs=graph.inputs, outputs=graph.outputs)
            variants[precision] = bundles.Variant(device="cpu", graphs=graphs, parity=unproved, quality=None)
        parameter_count = sum(map(torch.numel, module.parameters()))
        manifest = bundles.Manifest(
            schema_version=1,
            name=_NAME,
            version="1",
            task=bundles.Task.SEGMENTATION,
            description="Random weights, to measure speed with; not proved.",
            license="none",
            architecture=bundles.Architecture(
                kind="segmenter", parameter_count=parameter_count, configuration=shape.to_dict()
            ),
            variants=variants,
            image_preprocessing=bundles.ImagePreprocessing(
                height=side, width=side, resize="stretch", interpolation="bilinear", mean=(0.5,) * 3, std=(0.3,) * 3
            ),
            opset=traced.graphs[0].model.graph.opset_imports[""],
            libraries={"torch": torch.__version__, "onnxruntime": onnxruntime.__version__},
            files=bundles.describe_files(staged),
        )
        bundles.write_manifest(staged, manifest)
        bundles.publish(staged, folder)


class Contestants:
    """Both models, loaded."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        """Opens the graphs; each session has as many threads as there are cores."""
        import onnxruntime  # noqa: PLC0415 (the process that makes the graphs loads none)

        from headway_server.batching import BatchGraph  # noqa: PLC0415
        from headway_server.bundles import Precision, open_bundle  # noqa: PLC0415
        from headway_server.preprocessing.image import ImageTransform  # noqa: PLC0415
        from headway_server.runtime import Runtime  # noqa: PLC0415
        from headway_server.tasks.segmentation.decoder import PromptGraph  # noqa: PLC0415

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.log_severity_level = 3
        self._theirs = {
            name: onnxruntime.InferenceSession(str(folder / f"{file}.onnx"), options)
            for name, file in (("encoder", "sam-encoder"), (THEIRS, "sam-decoder"), (THEIRS_INT8, "sam-decoder-int8"))
        }
        bundle, runtime = open_bundle(folder / _NAME / "1"), Runtime(device="cpu", num_threads=num_threads)
        self._ours: dict[str, tuple[BatchGraph, PromptGraph]] = {}
        for name, precision in ((OURS, Precision.FP32), (OURS_INT8, Precision.INT8)):
            graphs = bundle.manifest.variants[precision].graphs
            encoder, decoder = (runtime.open(bundle, graphs[role], in_lanes=False) for role in ("encoder", "decoder"))
            self._ours[name] = BatchGraph(encoder), PromptGraph(decoder)
        preprocessing = bundle.manifest.image_preprocessing
        assert preprocessing is not None, "it was written with one"
        self._side = preprocessing.width
        wide, high = IMAGE_SIZE
        self._transform = ImageTransform(scale=(self._side / wide, self._side / high), offset=(0.0, 0.0))
        self._random = np.random.default_rng(1)

    def embed(self, name: str) -> float:
        """Returns the seconds that an encoder takes for an image."""
        pixels = self._random.standard_normal((1, 3, self._side, self._side), np.float32)
        began = time.perf_counter()
        if name == THEIRS:
            self._theirs["encoder"].run(None, {self._theirs["encoder"].get_inputs()[0].name: pixels})
        else:
            self._ours[name][0].session.run({"pixel_values": pixels})
        return time.perf_counter() - began

    def answer(self, side: str, num_images: int, num_runs: int, seconds: float) -> dict[str, float]:
        """Answers prompts, one about each of so many images, again and again.

        Args:
            side: One of `SIDES`.
            num_images: Images that there are prompts about, and prompts that wait at a time.
            num_runs: Most prompts of a shared run.
            seconds: To go on for, after once through the images.

        Returns:
            Prompts a second, and the milliseconds from the images' prompts to their last mask.
        """
        name, way = SIDES[side]
        shape: tuple[int, ...] = (1, _WIDTH, self._side // _PATCH, self._side // _PATCH)
        if name in self._ours:
            shape = self._ours[name][1].embedding_shape
        embeddings = [self._random.standard_normal(shape, np.float32) for _ in range(num_images)]
        run = self._answer_ours if name in self._ours else self._answer_theirs
        step = min(num_images, num_runs) if way == _SHARED else 1

        def once() -> float:
            began = time.perf_counter()
            for start in range(0, num_images, step):
                masks = run(name, embeddings[start : start + step])
                assert all(mask.shape == IMAGE_SIZE[::-1] for mask in masks)
            return time.perf_counter() - began

        once()
        times = [once()]
        while sum(times) < seconds:
            times.append(once())
        return {"prompts_per_s": num_images * len(times) / sum(times), "ms": 1e3 * statistics.median(times)}

    def _answer_theirs(self, name: str, embeddings: Sequence[NDArray[np.float32]]) -> list[NDArray[np.bool_]]:
        """One call a prompt; the graph brings the mask to the image's pixels."""
        cells = self._side // _PATCH * 4
        masks = []
        for embedding in embeddings:
            inputs = {
                "image_embeddings": embedding,
                "point_coords": self._random.random((1, 1, 2), np.float32) * self._side,
                "point_labels": np.ones((1, 1), np.float32),
                "mask": np.zeros((1, 1, cells, cells), np.float32),
                "has_mask": np.zeros(1, np.float32),
            }
            mask, *_ = self._theirs[name].run(None, inputs)
            masks.append(mask[0, 0] > 0)
        return masks

    def _answer_ours(self, name: str, embeddings: Sequence[NDArray[np.float32]]) -> list[NDArray[np.bool_]]:
        """One run for all prompts; each has the mask that is surest brought to the image's pixels."""
        from headway_server.tasks.segmentation import decoder  # noqa: PLC0415 (as above)
        from headway_server.tasks.segmentation.masks import PixelMask  # noqa: PLC0415

        graph = self._ours[name][1]
        inside = np.array([decoder.INSIDE])
        items = [decoder.as_item(one, self._random.random((1, 2), np.float32), inside) for one in embeddings]
        outputs = graph.run(graph.collate(items), [decoder.MASKS, decoder.PREDICTED_IOU])
        masks = []
        for row in graph.split(outputs, items):
            best = decoder.answer_order(row[decoder.PREDICTED_IOU], "point")[0]
            logits = row[decoder.MASKS][best]
            masks.append(PixelMask.of_logits(logits, self._transform, IMAGE_SIZE, (self._side,) * 2).pixels())
        return masks


class _Worker:
    """Answers the requests of the benchmark."""

    def __init__(self) -> None:
        self._contestants: Contestants | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Makes the graphs of `make`; opens those of `folder`; times an encoder or a side."""
        if "make" in request:
            make(Path(request["make"]), tiny=request["tiny"])
            return {}
        if "folder" in request:
            self._contestants = Contestants(Path(request["folder"]), request["threads"])
            return {}
        assert self._contestants is not None, "a folder is named first"
        if "encoder" in request:
            return {"seconds": self._contestants.embed(request["encoder"])}
        return dict(self._contestants.answer(**request))


if __name__ == "__main__":
    serve(_Worker().answer, ["onnxruntime", "torch", "transformers"])
