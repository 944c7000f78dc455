"""Reads a model folder of Hugging Face's `transformers`, or one of the hub, without running any code that lies in it.

One adapter serves a kind of model, not one an architecture; `kinds.py` lists the kinds (docs/huggingface.md).
"""

from headway_export.huggingface.folder import FolderOptions, in_a_sentence
from headway_export.huggingface.hub import parse_id
from headway_export.huggingface.kinds import from_folder, sources_from_folder, sources_from_hub

__all__ = ["FolderOptions", "from_folder", "in_a_sentence", "parse_id", "sources_from_folder", "sources_from_hub"]
