"""A hub of models on 127.0.0.1 that speaks as much of the Hugging Face hub's HTTP API as `huggingface_hub` needs.

Facts of the API, as its Python library uses them: a model's description and the tree of its files as JSON, and
`resolve` of a file by HEAD and GET with `X-Repo-Commit`, `ETag`, and for large files a redirect with `X-Linked-Etag`
and `X-Linked-Size`. Refusals name their kind in `X-Error-Code`.
"""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub

TOKEN = "hf_token_that_may_read"
LARGE = (".safetensors", ".bin")


@dataclass(kw_only=True)
class Repository:
    """A model with one commit."""

    files: dict[str, bytes]
    refs: dict[str, str] = field(default_factory=dict)
    """Names of revisions and their commits; `main` is always one."""
    is_private: bool = False
    is_gated: bool = False
    """True if no token may read its files."""
    parameter_count: int | None = None
    breaks_at: str | None = None
    """Path of a file of which half is sent before the connection is closed, every time."""

    @property
    def commit(self) -> str:
        """Of all files."""
        content = repr(sorted((name, hashlib.sha256(data).hexdigest()) for name, data in self.files.items()))
        return hashlib.sha1(content.encode()).hexdigest()

    def commit_of(self, revision: str) -> str | None:
        """Returns the commit that a revision stands for."""
        known = {"main": self.commit, self.commit: self.commit, **self.refs}
        return known.get(revision)

    @classmethod
    def of_folder(cls, folder: Path, **values) -> "Repository":
        """Returns a repository of all files below a folder."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return cls(files={path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}, **values)


class StandInHub:
    """The server; `address` is for HF_ENDPOINT."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        """Method and path of each."""
        hub = self

        class Handler(_Handler):
            def __init__(self, *args, **kwargs) -> None:
                self.hub = hub
                super().__init__(*args, **kwargs)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def fetched(self) -> set[str]:
        """Returns the paths of the files whose content has been sent, in all repositories."""
        return {path.split("/resolve/", 1)[1].partition("/")[2] for method, path in self.requests if method == "FILE"}

    def close(self) -> None:
        """Stops it; connections are refused from here on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._describe(*match.groups())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups(), path)
        elif match := re.fullmatch(r"/large/([^/]+/[^/]+)/(.+)", path):
            repository = self.hub.repositories[match[1]]
            self._send_file(repository, match[2], f"/{match[1]}/resolve/large/{match[2]}")
        else:
            self._refuse(404, "", "no such path")

    def _readable(self, model_id: str) -> Repository | None:
        """Returns a repository that the caller may see, or refuses."""
        sent = self.headers.get("authorization", "").removeprefix("Bearer ")
        if sent and sent != TOKEN:
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return None
        repository = self.hub.repositories.get(model_id)
        if repository is None or (repository.is_private and not sent):
            self._refuse(404 if sent else 401, "RepoNotFound", "Repository not found")
            return None
        return repository

    def _describe(self, model_id: str, what: str | None, revision: str | None) -> None:
        if (repository := self._readable(model_id)) is None:
            return
        if (commit := repository.commit_of(revision or "main")) is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif what == "tree":
            self._send_json([_entry(name, data) for name, data in repository.files.items()])
        else:
            content = {
                "id": model_id,
                "sha": commit,
                "private": repository.is_private,
                "gated": "manual" if repository.is_gated else False,
                "siblings": [{"rfilename": name} for name in repository.files],
            }
            if repository.parameter_count is not None:
                count = repository.parameter_count
                content["safetensors"] = {"parameters": {"BF16": count}, "total": count}
            self._send_json(content)

    def _resolve(self, model_id: str, revision: str, name: str, path: str) -> None:
        if (repository := self._readable(model_id)) is None:
            return
        commit = repository.commit_of(revision)
        if repository.is_gated:
            self._refuse(403 if "authorization" in self.headers else 401, "GatedRepo", "Access is restricted")
        elif commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif (data := repository.files.get(name)) is None:
            self._refuse(404, "EntryNotFound", "Entry not found", commit)
        elif name.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            elsewhere = self.hub.address.replace("127.0.0.1", "localhost")  # another host gets no token
            where = {"Location": f"{elsewhere}/large/{model_id}/{name}", "X-Repo-Commit": commit}
            self._send(302, b"", {**where, **linked})
        else:
            self._send_file(repository, name, path, {"X-Repo-Commit": commit})

    def _send_file(self, repository: Repository, name: str, path: str, headers: dict[str, str] | None = None) -> None:
        data = repository.files[name]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', **(headers or {})}
        status, sent = 200, data
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", "")):
            status, sent = 206, data[int(match[1]) :]
            headers["Content-Range"] = f"bytes {match[1]}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.hub.requests.append(("FILE", path))
            if name == repository.breaks_at:
                self._send(status, sent[: len(sent) // 2], {**headers, "Content-Length": str(len(sent))})
                self.close_connection = True
                return
        self._send(status, sent, headers)

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}
        self._send(status, b"{}", {name: value for name, value in headers.items() if value})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


@contextmanager
def using(hub_address: str, cache: Path, monkeypatch, *, token: str | None = None, offline: bool = False):
    """Has `huggingface_hub`, which reads its environment when it is imported, use a hub and a cache."""
    constants = huggingface_hub.constants
    huggingface_hub.close_session()  # of connections that a hub which is gone might still answer
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub_address)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub_address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        patch.setenv("HF_TOKEN", token) if token else patch.delenv("HF_TOKEN", raising=False)
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
        yield
