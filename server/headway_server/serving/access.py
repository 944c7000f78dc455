"""Access control: API keys, names of certificates, scopes and budgets.

A key is 32 random bytes, so its SHA-256 cannot be reversed by guessing. A slow hash, made for passwords, would only
cost time. Keys are looked up by hash in a dictionary: the time of a look-up reveals something of hashes, which are
useless to a caller.

For the event loop's thread only.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import secrets
import time
import tomllib
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from headway_server.bundles import TASK_PARTS
from headway_server.configuration import nearest_name
from headway_server.errors import AccessError, BudgetError, ForbiddenError, UnknownCallerError
from headway_server.serving.counts import Counts, Row

KEY_PREFIX: Final = "hw_"
"""Prefix of every key, for scanners of leaked secrets."""
ADMIN: Final = "admin"
"""The scope for changing the server."""

_KEY_BYTES: Final = 32
_BEARER: Final = "bearer "
_SMOOTHING: Final = 0.1
_SHORTEST_RETRY_S: Final = 0.05
_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_MAX_CERTIFICATES: Final = 10_000
"""Limit of cached names of certificates; the oldest is evicted."""


_Cells: TypeAlias = "MutableSequence[float] | memoryview[float]"
"""Numbers of this process, or in memory shared by processes."""


def _check_scope(scope: str) -> str:
    """Checks a scope of the file: `admin`, `task:TASK`, or `model:NAME`, where `*` stands for any letters."""
    kind, _, name = scope.partition(":")
    if scope == ADMIN or (kind == "model" and name):
        return scope
    if kind == "task":
        if name in list(TASK_PARTS):
            return scope
        raise ValueError(f"there is no task {name!r}{nearest_name(name, list(TASK_PARTS))}")
    raise ValueError("must be admin, task:TASK or model:NAME, such as task:generation or model:*")


Scope = Annotated[str, AfterValidator(_check_scope)]


class Grant(BaseModel):
    """Scopes and budgets of a caller: an entry of the access file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    scopes: tuple[Scope, ...]
    """Each adds rights: `admin`, `task:TASK` or `model:NAME`. A call of a model needs one that covers it."""
    calls_per_s: Annotated[float, Field(gt=0)] | None = None
    """Calls a second, on average."""
    burst: Annotated[int, Field(ge=1)] | None = None
    """Calls at once after a pause. Default: `calls_per_s`."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Concurrent calls."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Input and output tokens, on average; also the limit at once after a pause."""


class KeyGrant(Grant):
    """The grant of an API key."""

    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key, in hexadecimal."""
    expires: datetime | None = None
    """Expiry of the key; UTC without a time zone."""


class AccessFile(BaseModel):
    """The access file, in TOML: grants of keys, certificates and anonymous callers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: Mapping[Annotated[str, StringConstraints(pattern=_NAME)], KeyGrant] = Field(default_factory=dict)
    certificates: Mapping[str, Grant] = Field(default_factory=dict)
    anonymous: Grant | None = None

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """Reads the text of a file.

        Raises:
            AccessError: It is not TOML, or an entry is wrong.
        """
        try:
            parsed = cls.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise AccessError(f"{name}: is not TOML: {error}") from None  # the text may hold secrets
        except ValidationError as error:
            raise AccessError(f"{name}: {_problem(error)}") from None
        owners: dict[str, str] = {}
        for key, grant in parsed.keys.items():
            if (other := owners.setdefault(grant.sha256, key)) != key:
                raise AccessError(f"{name}: keys.{key} and keys.{other} are the same key; remove one of them")
        return parsed

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file.

        Raises:
            AccessError: It cannot be read, is not TOML, or an entry is wrong.
        """
        if (text := read_text(path)) is None:
            raise AccessError(f"{path}: No such file; make it with headway-server keys create")
        return cls.parse(text, str(path))


def read_text(path: Path) -> str | None:
    """Returns the text of an access file; None where there is no such file.

    Raises:
        AccessError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AccessError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise AccessError(f"{path}: is not UTF-8 text") from None


class Principal:
    """A caller: name, rights and budget."""

    def __init__(self, name: str, grant: Grant, *, kind: str = "key", counts: Counts | None = None) -> None:
        """Starts with an unused budget.

        Args:
            name: Name of the key or the certificate; empty for anonymous callers.
            grant: Rights and budget.
            kind: `key` or `certificate`, for messages.
            counts: Counters shared by the workers; None: counted in this process.
        """
        self.name = name
        self._title = f"{kind} {name}" if name else "a caller without a key"
        self._row: Row | None = None
        self._counts = counts
        self._lock: AbstractContextManager[Any] = nullcontext()
        self._num_running = 0
        self._mean_duration_s = _SHORTEST_RETRY_S
        self._calls: _Bucket | None = None
        self._tokens: _Bucket | None = None
        self.change(grant)

    def change(self, grant: Grant) -> None:
        """Replaces rights and budgets; the use of an unchanged budget is kept."""
        self.grant = grant
        self._may_use: dict[tuple[str, str], bool] = {}
        self._expires_at = float("inf")
        if isinstance(grant, KeyGrant) and grant.expires is not None:
            expires = grant.expires
            self._expires_at = (expires if expires.tzinfo else expires.replace(tzinfo=UTC)).timestamp()
        rate, burst, tokens = grant.calls_per_s, grant.burst, grant.tokens_per_minute
        if self._counts is not None and self._row is None and (rate or tokens or grant.concurrency):
            self._row = self._counts.of_caller(self._title)
            self._lock = self._row or self._lock
            self._counts = None if self._row is None else self._counts
        of_calls, of_tokens = (None, None) if self._row is None else self._row.buckets
        with self._lock:
            most = max(1.0, burst or rate or 0)
            self._calls = None if rate is None else _Bucket.changed(self._calls, rate, most, of_calls)
            self._tokens = None if tokens is None else _Bucket.changed(self._tokens, tokens / 60, tokens, of_tokens)

    def check_valid(self) -> None:
        """Checks that the key has not expired.

        Raises:
            UnknownCallerError: It has expired.
        """
        if time.time() >= self._expires_at:
            raise UnknownCallerError(f"the API key {self.name} has expired; ask the server's operator for a new one")

    def check_model(self, task: str, model: str) -> None:
        """Checks that the caller may use a model.

        Raises:
            ForbiddenError: No scope covers it.
        """
        allowed = self._may_use.get((task, model))
        if allowed is None:
            scopes = self.grant.scopes
            allowed = f"task:{task}" in scopes or any(
                fnmatchcase(model, scope.removeprefix("model:")) for scope in scopes if scope.startswith("model:")
            )
            self._may_use[task, model] = allowed
        if not allowed:
            raise ForbiddenError(
                f"{self._title} may not use model {model}; ask the server's operator for the scope "
                f"model:{model} or task:{task}"
            )

    def check_admin(self) -> None:
        """Checks that the caller may change the server.

        Raises:
            ForbiddenError: The scope is missing.
        """
        if ADMIN not in self.grant.scopes:
            raise ForbiddenError(f"{self._title} may not change the server; ask its operator for the scope {ADMIN}")

    def begin(self) -> float:
        """Begins a call; returns the time to pass to `end`.

        Raises:
            BudgetError: The budget is used up; the error has the time to retry.
        """
        with self._lock:
            return self._begin(time.monotonic(), self.grant)

    def _begin(self, now: float, grant: Grant) -> float:
        num_running = self._num_running if self._row is None else self._row.num_running
        if grant.concurrency is not None and num_running >= grant.concurrency:
            raise self._over(f"{grant.concurrency} calls at a time", max(self._mean_duration_s, _SHORTEST_RETRY_S))
        if self._tokens is not None and (delay_s := self._tokens.delay_s(now)) > 0:
            raise self._over(f"{grant.tokens_per_minute} tokens a minute", delay_s)
        if self._calls is not None:
            if (delay_s := self._calls.delay_s(now)) > 0:
                raise self._over(f"{grant.calls_per_s:g} calls a second", delay_s)
            self._calls.level -= 1
        self._count_running(1)
        return now

    def end(self, began_at: float) -> None:
        """Ends a call that `begin` began."""
        self._count_running(-1)
        self._mean_duration_s += _SMOOTHING * (time.monotonic() - began_at - self._mean_duration_s)

    def _count_running(self, change: int) -> None:
        self._num_running += change
        if self._row is not None:
            self._row.set_counts(self._num_running)

    def count_tokens(self, count: int) -> None:
        """Subtracts tokens from the budget, once they are known: the call that exhausts it still finishes."""
        if self._tokens is not None:
            with self._lock:
                self._tokens.level -= count

    @property
    def counts_tokens(self) -> bool:
        """True if tokens are limited."""
        return self._tokens is not None

    def _over(self, budget: str, delay_s: float) -> BudgetError:
        return BudgetError(f"{self._title} has used up its {budget}; try again in {delay_s:.2f} s", delay_s)

    def __repr__(self) -> str:
        return f"Principal({self._title}, {self._num_running} running)"


class _Bucket:
    """A token bucket: fills at a rate up to a capacity, and may become negative."""

    __slots__ = ("_cells", "capacity", "rate_per_s")

    def __init__(self, rate_per_s: float, capacity: float, cells: _Cells | None) -> None:
        """Starts full, or at the level in `cells`.

        Args:
            rate_per_s: Rate of filling.
            capacity: Highest level.
            cells: Level and its time, shared with other workers; None: of this process.
        """
        self.rate_per_s = rate_per_s
        self.capacity = capacity
        self._cells = [0.0, 0.0] if cells is None else cells
        if not self._cells[1]:  # unused so far
            self._cells[0], self._cells[1] = capacity, time.monotonic()

    @property
    def level(self) -> float:
        """The level at its last update."""
        return float(self._cells[0])

    @level.setter
    def level(self, value: float) -> None:
        self._cells[0] = value

    @classmethod
    def changed(cls, old: _Bucket | None, rate_per_s: float, capacity: float, cells: _Cells | None) -> _Bucket:
        """Returns the old bucket if it is the same, else a new one with at most its level."""
        if old is not None and (old.rate_per_s, old.capacity) == (rate_per_s, capacity):
            return old
        new = cls(rate_per_s, capacity, cells)
        if old is not None:
            old.delay_s(time.monotonic())
            new.level = min(new.level, old.level)
        return new

    def delay_s(self, now: float) -> float:
        """Returns the seconds until the level is 1."""
        level, at = self._cells
        level = min(self.capacity, level + max(0.0, now - at) * self.rate_per_s)
        self._cells[0], self._cells[1] = level, max(now, at)
        return max(0.0, (1 - level) / self.rate_per_s)


class Access:
    """Identifies callers by an access file, which may change during calls (`change`)."""

    def __init__(self, file: AccessFile, counts: Counts | None = None) -> None:
        """Starts with the callers of a file.

        Args:
            file: The access file.
            counts: Where budgets are counted, by all workers of the server; None: here.
        """
        self._counts = counts
        self._keys: dict[bytes, Principal] = {}
        self._certificates: Mapping[str, Grant] = {}
        self._by_certificate: dict[str, Principal | None] = {}
        self._anonymous: Principal | None = None
        self.change(file)

    def change(self, file: AccessFile) -> None:
        """Replaces the file; callers in both files keep their use of budgets."""
        known = {caller.name: caller for caller in self._keys.values()}
        self._keys = {
            bytes.fromhex(grant.sha256): self._changed(known.get(name), name, grant)
            for name, grant in file.keys.items()
        }
        self._certificates = file.certificates
        callers = [caller for caller in self._by_certificate.values() if caller is not None]
        self._by_certificate = {}
        for caller in callers:
            if (grant := self._grant_of(caller.name)) is not None:
                caller.change(grant)
                self._by_certificate[caller.name] = caller
        self._anonymous = None if file.anonymous is None else self._changed(self._anonymous, "", file.anonymous)

    def _changed(self, old: Principal | None, name: str, grant: Grant) -> Principal:
        if old is None:
            return Principal(name, grant, counts=self._counts)
        old.change(grant)
        return old

    def identify(self, metadata: Iterable[tuple[str, str | bytes]], certificate_names: Sequence[str] = ()) -> Principal:
        """Identifies a caller by API key, else by certificate, else as anonymous.

        Args:
            metadata: Metadata of the call, with `authorization: Bearer KEY` or `x-api-key: KEY`.
            certificate_names: Names in the client's certificate, verified by the transport.

        Raises:
            UnknownCallerError: The key is unknown or expired, or there is neither key nor certificate.
            ForbiddenError: The certificate is valid but not in the file.
        """
        for key, value in metadata:
            if isinstance(value, bytes):
                continue
            if key == "authorization":
                if value[: len(_BEARER)].lower() != _BEARER:
                    raise UnknownCallerError("the metadata authorization is not of the form 'Bearer KEY'; send it so")
                return self._of_key(value[len(_BEARER) :])
            if key == "x-api-key":
                return self._of_key(value)
        for name in certificate_names:
            if (caller := self._of_certificate(name)) is not None:
                return caller
        if self._anonymous is not None:
            return self._anonymous
        if certificate_names:
            raise ForbiddenError(
                f"the server does not list the certificate of {certificate_names[0]!r}; ask its operator to add it"
            )
        raise UnknownCallerError("the call has no API key; send one as the metadata 'authorization: Bearer KEY'")

    def _of_key(self, key: str) -> Principal:
        caller = self._keys.get(_digest(key))
        if caller is None:
            raise UnknownCallerError(
                "this server does not know the API key; check that it is complete, for this server and not revoked"
            )
        caller.check_valid()
        return caller

    def _of_certificate(self, name: str) -> Principal | None:
        """Returns the caller of a certificate; each name matching a pattern has its own budget."""
        if name not in self._by_certificate:
            if len(self._by_certificate) >= _MAX_CERTIFICATES:
                del self._by_certificate[next(iter(self._by_certificate))]
            grant = self._grant_of(name)
            self._by_certificate[name] = None if grant is None else self._of_name(name, grant)
        return self._by_certificate[name]

    def _of_name(self, name: str, grant: Grant) -> Principal:
        return Principal(name, grant, kind="certificate", counts=self._counts)

    def _grant_of(self, name: str) -> Grant | None:
        """Returns the entry with a certificate's name, else the first with a matching pattern."""
        if (grant := self._certificates.get(name)) is not None:
            return grant
        return next((grant for pattern, grant in self._certificates.items() if fnmatchcase(name, pattern)), None)

    def __repr__(self) -> str:
        return f"Access({len(self._keys)} keys, {len(self._certificates)} certificates)"


def is_local(address: str) -> bool:
    """Returns True for a loopback address."""
    if not address or address.startswith("unix"):  # an in-process transport, or a Unix socket
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def new_key() -> str:
    """Returns a random key."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def format_grant(name: str, key: str, options: Mapping[str, Any]) -> str:
    """Returns the lines of the access file for a new key, with its hash.

    Args:
        name: Of the key.
        key: The key itself.
        options: Fields of `KeyGrant` that are set, apart from the hash.
    """
    lines = [f"[keys.{_toml_key(name)}]", f'sha256 = "{_digest(key).hex()}"']
    lines += [f"{option} = {_toml_value(value)}" for option, value in options.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    # JSON's strings, numbers and lists are TOML's.
    return value.isoformat() if isinstance(value, datetime) else json.dumps(value)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.strip().encode()).digest()


def _problem(error: ValidationError) -> str:
    """Describes the error in an entry without its value, which may be a key."""
    first = error.errors(include_input=False, include_url=False)[0]
    path = ".".join(map(str, first["loc"])).removesuffix(".[key]")
    if first["type"] == "extra_forbidden":
        *above, last = first["loc"]
        known = list(AccessFile.model_fields if not above else (*KeyGrant.model_fields,))
        return f"{path} is no setting{nearest_name(str(last), known)}"
    if first["type"] == "missing":
        return f"{path} is missing"
    if first["loc"][-1] == "[key]":
        return f"{path}: a name has 1 to 64 letters, digits, '.', '_' and '-', and begins with a letter or a digit"
    if first["loc"][-1] == "sha256":
        return f"{path} is not 64 hexadecimal digits; make keys with headway-server keys create"
    return f"{path}: {first['msg'].removeprefix('Value error, ')}"
