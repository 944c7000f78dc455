"""What a decoder holds and reads: weights, cache, and the speed that memory allows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bandwidth import decode_limit
from machine import memory_mib

from headway_server.bundles import Precision, open_bundle
from headway_server.decoding.runner.decoder import slot_sizes
from headway_server.decoding.runner.memory_plan import plan_memory
from headway_server.decoding.settings import EngineSettings

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Sizes of a variant, in bytes."""

    precision: str
    weight_bytes: int
    """Of the files of its graph."""
    cache_bytes: int
    """Of all slots, those of kept prompts included."""
    cache_bytes_per_token: int
    quality: dict[str, Any] | None
    """As measured at export."""
    max_relative_logit_error: float

    @classmethod
    def of(cls, bundle_folder: Path, precision: str, *, num_slots: int) -> Self:
        """Reads them from a bundle."""
        manifest = open_bundle(bundle_folder).manifest
        variant = manifest.variants[Precision(precision)]
        sizes = slot_sizes(manifest, variant)
        plan = plan_memory(EngineSettings(num_slots=num_slots), sizes, available=None, owner=manifest.name)
        max_length = manifest.limits.max_total_tokens
        assert max_length is not None, "the manifest's validator demands it of decoders"
        files = (file.size_bytes for path, file in manifest.files.items() if path.startswith(f"{precision}/"))
        return cls(
            precision=precision,
            weight_bytes=sum(files),
            cache_bytes=plan.total_bytes,
            cache_bytes_per_token=sizes.state_bytes // max_length,
            quality=variant.quality.model_dump(mode="json") if variant.quality else None,
            max_relative_logit_error=variant.parity.max_relative_logit_error,
        )

    def decode_limits(self, bandwidth: float, streams: Iterable[int], length: float) -> list[dict[str, Any]]:
        """Tokens a second that reading weights and cache allows, prefill not counted."""
        return [
            {
                "precision": self.precision,
                "streams": rows,
                "tokens_per_s": round(
                    decode_limit(
                        bandwidth=bandwidth,
                        weight_bytes=self.weight_bytes,
                        cache_bytes_per_token=self.cache_bytes_per_token,
                        rows=rows,
                        length=length,
                    ),
                    1,
                ),
            }
            for rows in streams
        ]

    def resident(self, process_id: int) -> dict[str, float]:
        """Resident memory of a server at its highest so far, and what of it is neither weights nor cache, in MiB."""
        peak = memory_mib(process_id)["peak_resident_mib"] or float("nan")
        weights, cache = self.weight_bytes / _MIB, self.cache_bytes / _MIB
        return {
            "peak_resident_mib": peak,
            "weights_mib": round(weights, 1),
            "cache_mib": round(cache, 1),
            "beyond_mib": round(peak - weights - cache, 1),
        }
