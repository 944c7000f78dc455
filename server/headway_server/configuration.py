"""Sources of settings: flags, the environment and a TOML file; and the source of each value."""

from __future__ import annotations

import json
import os
import re
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
)

from headway_server.errors import ConfigurationError

Origin: TypeAlias = Literal["flag", "environment", "file", "default"]
Place: TypeAlias = tuple[str, ...]
"""Path of a setting: its groups and its name, such as `("engine", "num_slots")`."""

FILE_SETTING: Final = "config"
"""The setting that names the file."""
_CLI_ERROR: Final = "error parsing CLI: "
_NEAR: Final = 0.8
"""Similarity at which a variable counts as a misspelt setting; other programs use the prefix too."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean NAME?" for an unknown name; empty if no known name is similar."""
    found = get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


_LINK: Final = re.compile(r"(tcp|udp|sctp)://")
"""Prefix of the values of variables that Kubernetes sets for a Service."""


_LINK_NAME: Final = re.compile(r"\w+_(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP|SCTP)\w*)")
"""Names of its other variables, none of them similar to a setting's."""


class ConfigFile(PydanticBaseSettingsSource):
    """Reads the TOML file named by flags or the environment."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        """Unused: the file is read as a whole."""
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        """Returns the settings in the file; empty without a file.

        Raises:
            ConfigurationError: It cannot be read, or is not TOML.
        """
        path = self.current_state.get(FILE_SETTING)
        return read_toml(Path(path)) if path else {}


def own_variables(source: EnvSettingsSource) -> EnvSettingsSource:
    """Makes a source ignore other programs' variables with the name of a setting.

    Variables cannot be of settings by names of models; one of the group's name may be, such as the HEADWAY_MODELS of
    the compose file. Where a Service is named headway-http, Kubernetes sets HEADWAY_HTTP_PORT to `tcp://10.0.0.1:80`.
    """
    kind = source.settings_cls
    hidden = tuple(
        variable_name(kind, (name,)).lower()
        for name, field in kind.model_fields.items()
        if get_origin(field.annotation) is Mapping
    )
    source.env_vars = {
        name: value
        for name, value in source.env_vars.items()
        if not name.startswith(hidden) and not (name.endswith("_port") and _LINK.match(value or ""))
    }
    return source


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
        ConfigurationError: It cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; name a TOML file by --{FILE_SETTING}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: is not TOML: {error}") from error


class Sources:
    """The values of each source in order of precedence: flags, environment, file."""

    def __init__(self, kind: type[BaseSettings], arguments: Sequence[str]) -> None:
        """Reads the sources of settings of a kind.

        Args:
            kind: The settings.
            arguments: The command line.

        Raises:
            ConfigurationError: The file cannot be read.
            SettingsError: The command line or the environment cannot be read.
        """
        self._kind = kind
        flags = command_line(kind)(args=list(arguments))()
        environment = own_variables(EnvSettingsSource(kind))()
        self.file: str | None = flags.get(FILE_SETTING) or environment.get(FILE_SETTING)
        """Path of the file, if there is one."""
        self._values: dict[Origin, Any] = {
            "flag": flags,
            "environment": environment,
            "file": read_toml(Path(self.file)) if self.file else {},
        }

    def origin(self, place: Place) -> Origin:
        """Returns the source of a setting."""
        for origin, values in self._values.items():
            found: Any = values
            for name in place:
                found = found.get(name) if isinstance(found, Mapping) else None
            if found is not None:
                return origin
        return "default"

    def name(self, place: Place) -> str:
        """Returns a setting's name in its source, for messages."""
        origin = self.origin(place)
        if origin == "file":
            return f"{self.file}: {'.'.join(place)}"
        if origin == "environment":
            return variable_name(self._kind, place)
        return f"{flag_name(place)} ({variable_name(self._kind, place)})"

    def describe(self, place: Place) -> str:
        """Describes the source of a setting."""
        origin = self.origin(place)
        names = {"flag": flag_name(place), "environment": variable_name(self._kind, place), "file": self.file or ""}
        return f"{origin} {names.get(origin, '')}".rstrip()

    def __repr__(self) -> str:
        return f"Sources({', '.join(f'{len(values)} by {origin}' for origin, values in self._values.items())})"


def command_line(kind: type[BaseSettings]) -> CliSettingsSource[Any]:
    """Returns what reads settings of a kind from flags, which do not name a setting's group."""

    def add_argument(parser: ArgumentParser, *flags: str, **options: Any) -> None:
        parser.add_argument(*[flag for flag in flags if "." not in flag] or flags, **options)

    return CliSettingsSource(kind, add_argument_method=add_argument)


def flag_name(place: Place) -> str:
    """Returns the flag of a setting, which does not name its group."""
    return f"--{place[-1].replace('_', '-')}"


def variable_name(kind: type[BaseSettings], place: Place) -> str:
    """Returns the environment variable of a setting."""
    return str(kind.model_config.get("env_prefix", "")) + "__".join(place).upper()


def explain(error: ValidationError, kind: type[BaseSettings], sources: Sources) -> str:
    """Describes the first wrong setting in one line: its name, its value, and the nearest name."""
    first = error.errors()[0]
    place = tuple(map(str, first["loc"]))
    reason = first["msg"].removeprefix("Value error, ")
    if not place:  # settings that do not go together
        return reason
    if first["type"] == "missing":
        return f"{flag_name(place)} is missing; give it, or set {variable_name(kind, place)}"
    if first["type"] in ("model_type", "dict_type"):
        return f"{sources.name(place)} is {first['input']!r}: it is a group of settings, the table [{'.'.join(place)}]"
    if first["type"] == "extra_forbidden":
        if homes := [found for found, _ in _fields(kind) if found[1:] == place]:
            return f"{sources.name(place)} is no setting; write it in the table [{homes[0][0]}]"
        known = _names_beside(kind, place)
        asked = nearest_name(place[-1], known) or f"; there are {', '.join(sorted(known))}"
        return f"{sources.name(place)} is no setting{asked}"
    return f"{sources.name(place)} is {first['input']!r}: {reason}"


def explain_arguments(error: SettingsError, kind: type[BaseSettings]) -> str:
    """Describes in one line why flags or variables cannot be read."""
    message = str(error)
    if not message.startswith(_CLI_ERROR):  # a group in the environment that is not JSON
        return f"environment: {message}; set HEADWAY_<GROUP>__<NAME>, as --help lists them"
    message = message.removeprefix(_CLI_ERROR)
    flag = next((word for word in message.split() if word.startswith("--")), "").partition("=")[0].rstrip(":")
    places = [place for place, _ in _fields(kind)]
    known = set(map(flag_name, places))
    return message + ("" if flag in known else nearest_name(flag, known))


def misspelt_variable(kind: type[BaseSettings]) -> str | None:
    """Returns an error message for an environment variable whose name is almost a setting's; None without one.

    Other variables with the prefix belong to other programs: the client, or an orchestrator.
    """
    known = {variable_name(kind, place) for place, _ in _fields(kind)}
    groups = {variable_name(kind, (name,)) for name in kind.model_fields}
    prefix = str(kind.model_config.get("env_prefix", ""))
    bare = [name.removeprefix(prefix) for name in known]
    for name in sorted(os.environ):
        if not name.startswith(prefix) or not os.environ[name] or name in known | groups or _LINK_NAME.fullmatch(name):
            continue
        if name.partition("__")[0] in groups and "__" in name:
            continue  # one of a group, which checks its own
        in_group = [known for known in bare if known.endswith(f"__{name.removeprefix(prefix)}")]
        if found := in_group or get_close_matches(name.removeprefix(prefix), bare, n=1, cutoff=_NEAR):
            return f"environment: {name} is no setting; did you mean {prefix}{found[0]}?"
    return None


def format_settings(settings: BaseSettings, sources: Sources) -> str:
    """Formats settings as a configuration file, with the source of each as a comment."""
    lines: list[str] = []
    tables: list[str] = []
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            tables += ["", f"[{name}]", *_lines(value, (name,), sources)]
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                header = f"[{name}.{key if key.replace('-', '').replace('_', '').isalnum() else json.dumps(key)}]"
                tables += ["", header, *_lines(entry, (name, key), sources, only_set=True)]
        elif name != FILE_SETTING:
            lines.append(_line(name, settings.model_dump(mode="json", include={name})[name], sources.describe((name,))))
    return "\n".join([*lines, *tables]) + "\n"


def _lines(group: BaseModel, place: Place, sources: Sources, *, only_set: bool = False) -> Iterator[str]:
    for name, value in group.model_dump(mode="json", exclude_unset=only_set).items():
        yield _line(name, value, sources.describe((*place, name)))


def _line(name: str, value: Any, comment: str) -> str:
    # JSON's strings, numbers, booleans and lists are TOML's.
    setting = f"# {name} is not set" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}"
    return f"{setting:<40} # {comment}"


def _fields(kind: type[BaseModel]) -> Iterator[tuple[Place, FieldInfo]]:
    """Yields the settings of a kind, including those of its groups."""
    for name, field in kind.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from (((name, *place), inner) for place, inner in _fields(annotation))
        else:
            yield (name,), field


def _names_beside(kind: type[BaseModel], place: Place) -> list[str]:
    """Returns the known names beside an unknown one."""
    for name in place[:-1]:
        if name not in kind.model_fields:
            continue  # the key of a mapping
        annotation: Any = kind.model_fields[name].annotation
        inner = [annotation, *get_args(annotation)]
        kind = next(part for part in inner if isinstance(part, type) and issubclass(part, BaseModel))
    return list(kind.model_fields)
