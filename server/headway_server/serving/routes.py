"""Routes of calls to versions of models: default versions, aliases and canaries.

The table is saved in a small file, `routes.json` in the store or the path in the settings. It may be written by hand or
come with the store. The server reads it with each scan of the store, and writes it after a change by a call.

```json
{
  "models": {"ag-news": {"default_version": "3", "canary_version": "4", "canary_share": 0.05}},
  "aliases": {"news": {"model": "ag-news"}, "news-old": {"model": "ag-news", "version": "2"}}
}
```
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headway_server.bundles.manifest import Name
from headway_server.configuration import nearest_name
from headway_server.errors import ModelNotFoundError, StoreError
from headway_server.serving.files import replace_file

_MAX_FILE_BYTES = 2**20


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Route(_Part):
    """The versions of a model for calls without a version."""

    default_version: Name | None = None
    """None: the latest loaded version other than the canary."""
    canary_version: Name | None = None
    """Version for a share of these calls, while it is loaded."""
    canary_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the calls without a version, each drawn independently."""

    @model_validator(mode="after")
    def _check_canary(self) -> Route:
        if self.canary_share and self.canary_version is None:
            raise ValueError("canary_share: requires canary_version")
        if self.canary_version is not None and self.canary_version == self.default_version:
            raise ValueError(f"canary_version: is {self.canary_version}, which is the default version")
        return self


class Alias(_Part):
    """The target of an alias."""

    model: Name
    version: Name | None = None
    """None: by the model's route."""


class Routes(_Part):
    """The table of routes. Immutable."""

    models: dict[Name, Route] = {}
    """Routes by model name; without one, the latest version answers."""
    aliases: dict[Name, Alias] = {}
    """Aliases by name. An alias overrides a model of that name, and cannot refer to another alias."""

    def resolve(self, name: str, version: str) -> tuple[str, str]:
        """Resolves an alias to a model and a version; an empty version is left to `choose`.

        The caller's version overrides the alias's.
        """
        alias = self.aliases.get(name)
        return (name, version) if alias is None else (alias.model, version or alias.version or "")

    def choose(self, name: str, versions: Sequence[str], *, with_canary: bool = True) -> str:
        """Chooses the version for a call without one.

        Args:
            name: Name of the model.
            versions: Candidates, at least one, the latest last.
            with_canary: False to leave out the canary.

        Raises:
            ModelNotFoundError: The default version is not among them.
        """
        route = self.models.get(name)
        if route is None:
            return versions[-1]
        canary = route.canary_version if route.canary_version in versions else None
        if canary is not None and with_canary and random.random() < route.canary_share:  # noqa: S311 (not for secrets)
            return canary
        if route.default_version is None:
            return next((version for version in reversed(versions) if version != canary), versions[-1])
        if route.default_version not in versions:
            raise ModelNotFoundError(
                f"model {name} has the default version {route.default_version}, which cannot answer now; "
                f"those that can are {', '.join(versions)}"
            )
        return route.default_version

    def names(self, path: str) -> bool:
        """True if the table refers to the version at `<model>/<version>`."""
        name, _, version = path.partition("/")
        route = self.models.get(name, Route())
        aliased = (alias.version for alias in self.aliases.values() if alias.model == name)
        return version in (route.default_version, route.canary_version, *aliased)

    def with_route(self, name: str, route: Route) -> Routes:
        """Returns the table with a changed route; an empty route is removed."""
        models = {key: value for key, value in self.models.items() if key != name}
        return Routes(models=models if route == Route() else {**models, name: route}, aliases=self.aliases)

    def with_alias(self, name: str, alias: Alias | None) -> Routes:
        """Returns the table with a changed alias; None: removed."""
        aliases = {key: value for key, value in self.aliases.items() if key != name}
        return Routes(models=self.models, aliases=aliases if alias is None else {**aliases, name: alias})


def read_routes(file: Path) -> Routes:
    """Reads the table; empty without a file.

    Raises:
        StoreError: The file cannot be read, or is not a table of routes.
    """
    try:
        if not file.is_file():
            return Routes()
        with file.open("rb") as stream:
            content = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise StoreError(f"{file.name} cannot be read ({error.strerror})") from error
    if len(content) > _MAX_FILE_BYTES:
        raise StoreError(f"{file.name} has more than {_MAX_FILE_BYTES} bytes")
    try:
        return Routes.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f": {first['msg'].removeprefix('Value error, ')}"
        if first["type"] == "extra_forbidden":
            known = [name for part in (Routes, Route, Alias) for name in part.model_fields]
            problem = f" is no setting{nearest_name(str(first['loc'][-1]), known)}"
        raise StoreError(f"{file.name}{': ' + where if where else ''}{problem}") from error


def write_routes(file: Path, routes: Routes) -> None:
    """Writes the table atomically.

    Raises:
        StoreError: It cannot be written.
    """
    text = routes.model_dump_json(indent=1, exclude_defaults=True) + "\n"
    try:
        replace_file(file, text)
    except OSError as error:
        raise StoreError(f"{file.name} cannot be written ({error.strerror})") from error
