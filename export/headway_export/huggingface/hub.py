"""Models of the hub: what an id stands for, which of its files are needed, and their way into the library's cache.

`huggingface_hub` speaks to the hub and reads HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE. A revision is resolved
to a commit once, and everything is of that commit.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import huggingface_hub
from huggingface_hub import HfApi, constants, errors, utils
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from headway_export.errors import SourceError
from headway_export.huggingface.adapters import CONFIG_FILE as ADAPTER_FILE
from headway_export.huggingface.adapters import WEIGHTS_FILE as ADAPTER_WEIGHTS
from headway_export.huggingface.embedders import MODULES_FILE
from headway_export.huggingface.folder import DOCUMENTS, as_source_error, weight_files
from headway_export.space import bytes_text, check_memory, free_on_disk
from headway_server.bundles import Origin
from headway_training.folders import CONFIG_FILE, check_pickle, first_line

_ID: Final = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)(?:@([^@\s]+))?", re.ASCII)
_SUFFIXES: Final = (".json", ".txt", ".model", ".spm", ".jinja", ".metadata")
"""Of files that describe a model or belong to its tokenizer."""
_INDEX: Final = ".index.json"
_MODULE_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")
_MOST_DESCRIPTION_BYTES: Final = 256 << 20
"""Of one file that is no weights; the largest vocabularies take a tenth of it."""


def parse_id(text: str, revision: str | None = None) -> tuple[str, str | None] | None:
    """Returns id and revision that `ORG/NAME` or `ORG/NAME@REVISION` stands for; None: it is no id.

    Args:
        text: What is given.
        revision: The revision that is given beside it.

    Raises:
        SourceError: Both name a revision.
    """
    if (match := _ID.fullmatch(text)) is None:
        return None
    if match[2] and revision:
        raise SourceError(f"{text}: names a revision, and so does --revision {revision}; give one of them")
    return match[1], match[2] or revision


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model of the hub at one commit, whose `config.json` is in the cache."""

    origin: Origin
    path: Path
    """Folder of the commit in the library's cache: what has been fetched of it."""
    sizes: Mapping[str, int]
    """Bytes of each of its files, fetched or not, by path."""

    @classmethod
    def find(cls, model_id: str, revision: str | None) -> HubModel:
        """Asks the hub, or offline the cache, for a model.

        Raises:
            SourceError: There is no such model or revision, it may not be read, or the hub cannot be reached.
        """
        api = HfApi()
        with _translated(model_id, revision):
            resolved = api.resolve_revision(model_id, revision=revision)
            path = huggingface_hub.snapshot_download(
                model_id, revision=resolved, allow_patterns=[CONFIG_FILE, MODULES_FILE, ADAPTER_FILE]
            )
            try:
                files = huggingface_hub.get_cached_repo_tree(model_id, revision=resolved)
                sizes = {file.path: file.size for file in files}
            except errors.CachedRepoTreeNotFoundError:  # an older version of the library has filled the cache
                there = (file for file in Path(path).rglob("*") if file.is_file())
                sizes = {file.relative_to(path).as_posix(): file.stat().st_size for file in there}
        origin = Origin(id=model_id, revision=str(resolved), commit=resolved.resolved)
        return cls(origin=origin, path=Path(path), sizes=sizes)

    def check_files(self, *, allow_pickle: bool) -> None:
        """Checks, by the names of its files, that its weights are not pickled, or may be, and are no GGUF.

        Raises:
            SourceError: They are pickled and may not, or there are files of GGUF alone.
        """
        if CONFIG_FILE not in self.sizes and (found := [name for name in self.sizes if name.endswith(".gguf")]):
            raise SourceError(
                f"{self.origin.id}: has {len(found)} files of GGUF and no {CONFIG_FILE}; fetch one of them, such as "
                f"{found[0]}, and give that file"
            )
        for folder in sorted(self._folders()):
            with as_source_error():
                check_pickle(self.path / folder, self._files_in(folder), allow_pickle=allow_pickle)

    @property
    def holds_adapter(self) -> bool:
        """True if it is an adapter, and no model."""
        return ADAPTER_FILE in self.sizes and CONFIG_FILE not in self.sizes

    def fetch_adapter(self) -> None:
        """Fetches an adapter, whose weights are few, and the tokenizer that may lie beside it.

        Raises:
            SourceError: It cannot be fetched.
        """
        self._fetch([*self._descriptions(), ADAPTER_WEIGHTS])

    def fetch_descriptions(self) -> None:
        """Fetches all that is needed beside weights.

        Raises:
            SourceError: It cannot be fetched.
        """
        self._fetch(self._descriptions())

    def fetch_weights(
        self,
        folder: Path,
        *,
        working: int = 0,
        allow_pickle: bool,
        is_mapped: bool,
        tell: Callable[[str], None],
    ) -> None:
        """Fetches the weights that the cache does not have, and says before how many bytes that are.

        Args:
            folder: Where the model lies: `path`, or a folder below it.
            working: Bytes that an export computes with beside weights.
            allow_pickle: True if they may be pickled.
            is_mapped: True if they will be mapped from disk, and the bundle has no fp32.
            tell: Called with a sentence for the user.

        Raises:
            SourceError: There are none, they are pickled and that is not allowed, they are too large for this machine
                by what the hub says of them, or they cannot be fetched.
        """
        names = self._weights(folder, allow_pickle=allow_pickle)
        missing = [name for name in names if not (self.path / name).exists()]
        num_bytes, cached = sum(self.sizes[name] for name in missing), len(names) - len(missing)
        where = f"{self.origin.id} at commit {self.origin.commit[:12]}"
        if not missing:
            tell(f"{where}: is in the cache")
            return
        if (count := self._parameter_count()) is not None:
            check_memory(self.origin.id, count, working=working, is_mapped=is_mapped)
        free = free_on_disk(self.path)
        if num_bytes > free:
            raise SourceError(
                f"{self.origin.id}: {bytes_text(num_bytes)} of weights are to be fetched, and "
                f"{bytes_text(free)} are free below {constants.HF_HUB_CACHE}; make room, or name another folder by "
                "HF_HOME"
            )
        of_them = f", {cached} more are in the cache" if cached else ""
        tell(f"{where}: fetching {bytes_text(num_bytes)} of weights in {len(missing)} files{of_them}")
        self._fetch(missing)

    def _parameter_count(self) -> int | None:
        """Returns the number of weights that the hub states; None: it states none, or is not to be asked."""
        if constants.is_offline_mode():
            return None
        with _translated(self.origin.id, self.origin.commit):
            stated = HfApi().model_info(self.origin.id, revision=self.origin.commit).safetensors
        return None if stated is None else stated.total

    def _descriptions(self) -> Iterator[str]:
        folders = self._folders()
        for name, size in self.sizes.items():
            folder, _, file = name.rpartition("/")
            if folder not in folders or size > _MOST_DESCRIPTION_BYTES:
                continue
            if file.endswith(_INDEX):
                if file.removesuffix(_INDEX) in _MODULE_WEIGHTS:
                    yield name
            elif file.endswith(_SUFFIXES) or (not folder and DOCUMENTS.fullmatch(file)):
                yield name

    def _weights(self, folder: Path, *, allow_pickle: bool) -> list[str]:
        of_model = folder.relative_to(self.path).as_posix().removeprefix(".")
        names = [
            self._joined(of_model, file)
            for file in weight_files(folder, self._files_in(of_model), allow_pickle=allow_pickle)
        ]
        for module in sorted(self._folders() - {of_model, ""}):  # what follows a pooling has few weights or none
            there = [file for file in _MODULE_WEIGHTS[: 1 + allow_pickle] if file in self._files_in(module)]
            names += [self._joined(module, file) for file in there[:1]]
        return names

    def _folders(self) -> set[str]:
        """Returns the folder itself, and those of modules of sentence-transformers."""
        try:
            modules = json.loads((self.path / MODULES_FILE).read_text(encoding="utf-8"))
            return {"", *(str(module["path"]).strip("/") for module in modules)}
        except (OSError, ValueError, KeyError, TypeError):  # `read_layout` says what is wrong with it
            return {""}

    def _files_in(self, folder: str) -> set[str]:
        return {file for name in self.sizes for place, _, file in [name.rpartition("/")] if place == folder}

    def _fetch(self, names: Iterable[str]) -> None:
        wanted = [re.sub(r"([*?[])", r"[\1]", name) for name in names]  # they are patterns
        with _translated(self.origin.id, self.origin.commit):
            huggingface_hub.snapshot_download(self.origin.id, revision=self.origin.commit, allow_patterns=wanted)

    @staticmethod
    def _joined(folder: str, file: str) -> str:
        return f"{folder}/{file}" if folder else file


@contextmanager
def _translated(model_id: str, revision: str | None) -> Iterator[None]:
    """Turns whatever the library raises into a sentence about a model.

    Raises:
        SourceError: The library has raised.
    """
    before, has_bars = utils.logging.get_verbosity(), not are_progress_bars_disabled()
    utils.logging.set_verbosity(logging.ERROR)
    if has_bars and not sys.stderr.isatty():
        disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of disks that are nearly full, which is checked here
            yield
    except Exception as error:  # the library raises many kinds
        raise SourceError(f"{model_id}: {_sentence(error, model_id, revision)}") from error
    finally:
        utils.logging.set_verbosity(before)
        if has_bars:
            enable_progress_bars()


def _sentence(error: Exception, model_id: str, revision: str | None) -> str:  # noqa: PLR0911 (a table)
    """Says what was found, and what to do."""
    hub, has_token = constants.ENDPOINT, huggingface_hub.get_token() is not None
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        whom = "the account of the token that was sent is not among them" if has_token else "no token was sent"
        return (
            f"is gated: only accounts whom its owner lets in may fetch it, and {whom}; ask for access at "
            f"{hub}/{model_id}, and set HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {revision}; name a branch, a tag or a commit that {hub}/{model_id} lists"
    if isinstance(error, errors.RepositoryNotFoundError):
        token = "the token that was sent may not read it" if has_token else "no token was sent (set HF_TOKEN)"
        return f"is no folder here, and no model that {hub} knows, unless it is private and {token}"
    if status in (401, 403):
        return f"{hub} refuses the token that was sent ({status}); set HF_TOKEN to one that may read this model"
    if status is not None:
        return f"{hub} answers {status}; try again later"
    if constants.is_offline_mode():
        return (
            f"{_named(revision)} is not in the cache {constants.HF_HUB_CACHE} in full, and HF_HUB_OFFLINE forbids to "
            "fetch it; unset that, or fetch it with --revision of a commit that the cache has"
        )
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return (
        f"{_named(revision)} cannot be fetched from {hub} and is not in the cache in full "
        f"({type(cause).__name__}: {first_line(cause)}); try again, what has arrived is kept"
    )


def _named(revision: str | None) -> str:
    return f"revision {revision}" if revision else "it"
