"""What the documents say that each door offers is what the tables of the code say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import typer
from documents import names, rows

from headway_client.cli import app
from headway_export.cli import app as export_app
from headway_server.bundles import Task
from headway_server.diffusion import DiffusionSampler
from headway_server.services.open_inference.tasks import TensorTask
from headway_server.serving.abilities import Ability
from headway_server.serving.families import tasks_with
from headway_server.tasks.table import FAMILIES, RPCS
from headway_server.transports.http import OPENAI_ABILITIES
from headway_training.cli import app as training_app

LIKE_ANOTHER = {"RankTexts with `query_image_id`", "PrepareImage"}
"""What has no row: it asks for what its neighbour does, or for no model."""


def asked_by_row() -> dict[str, Ability[Any]]:
    """Returns what the RPCs of the table ask for."""
    return {
        name if not field else f"{name} with `{field}`": ability
        for name, rpc in RPCS.items()
        for field, ability in (("", rpc.asked), *rpc.with_field.items())
        if isinstance(ability, Ability) and not name.startswith("Stream")
    }


def test_the_table_of_ways_in_is_that_of_the_abilities(root: Path) -> None:
    table = {row[0]: row[1:] for row in rows(root / "docs" / "api.md", "what is asked")}
    asked = asked_by_row()
    assert {row.replace("`", "", 2) for row in table} == asked.keys() - LIKE_ANOTHER
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # of a group
    for row, (tasks, _, openai, command, _) in table.items():
        ability = asked[row.replace("`", "", 2)]
        assert tasks == ", ".join(tasks_with(FAMILIES, ability)), row
        assert names(openai) == {path for path, own in OPENAI_ABILITIES.items() if own is ability}
        assert names(command) <= commands.keys(), row


def test_panels_of_the_page_offer_every_model_that_can_what_they_call(root: Path) -> None:
    panels = root / "server" / "headway_server" / "transports" / "http" / "page" / "panels"
    texts = {file: file.read_text(encoding="utf-8") for file in panels.glob("*.js")}
    titles = {re.findall(r'^  (?:title|tab): "(.*)"', text, re.MULTILINE)[-1]: text for text in texts.values()}
    viewer = (panels.parent / "viewer.js").read_text(encoding="utf-8")
    inspected = dict(re.findall(r'^  (\w+): "(Inspect\w+)"', viewer, re.MULTILINE))
    asked = asked_by_row()
    for row in rows(root / "docs" / "api.md", "what is asked"):
        name, title = row[0].split("`")[1], row[-1]
        called = f'"{name}"', f'"Stream{name}"'
        if title.startswith(("no ", "of ")):
            assert title != "no panel" or not any(call in text for call in called for text in texts.values()), row
            continue
        if title == "Attention":
            listed = [capability for capability, method in inspected.items() if method == name]
        else:
            assert any(call in titles[title] for call in called), row
            listed = json.loads(*re.findall(r"^  capabilities: (\[.*\]),$", titles[title], re.MULTILINE))
        assert asked[row[0].replace("`", "", 2)].name in listed, row


def test_access_md_lists_every_task(root: Path) -> None:
    text = (root / "docs" / "access.md").read_text(encoding="utf-8")
    [line] = [line for line in text.split("\n") if line.startswith("| `task:TASK` |")]
    assert names(line) - {"task:TASK"} == set(Task)


def test_oip_md_describes_the_tensors_and_parameters_of_every_task(root: Path) -> None:
    document = root / "docs" / "oip.md"
    titles = {task.replace("_", " "): task for task in Task}
    tensor_tasks: dict[str, TensorTask] = {task: resolve_name(family.tensors) for task, family in FAMILIES.items()}
    tensors, parameters = (rows(document, head) for head in ("task | inputs", "task | parameters"))
    assert {row[0] for row in tensors} == titles.keys()
    assert {row[0] for row in parameters} == {"all", *titles}
    common = set.intersection(*(set(task.parameters) for task in tensor_tasks.values()))
    for title, told in parameters:
        if title != "all" and "those of" not in told:
            values = {"first", "heuristic", "never", "wav", "flac", "opus", "mp3", *DiffusionSampler}
            assert names(told) - values == tensor_tasks[titles[title]].parameters.keys() - common, title
    for title in ("transcription", "speech synthesis", "image generation", "segmentation"):
        [(inputs, outputs)] = [row[1:] for row in tensors if row[0] == title]
        task = tensor_tasks[titles[title]]
        assert names(inputs) == {spec.name for spec in task.inputs(None)}  # type: ignore[arg-type]  # which is not looked at
        assert names(outputs) == {spec.name for spec in task.outputs(None)}, title  # type: ignore[arg-type]  # as above


def test_api_md_lists_every_capability(root: Path) -> None:
    listed = {name: set(tasks.split(", ")) for name, tasks, _ in rows(root / "docs" / "api.md", "capability")}
    abilities = {ability for family in FAMILIES.values() for ability in family.abilities}
    assert listed == {f"`{ability.name}`": set(tasks_with(FAMILIES, ability)) for ability in abilities}


def test_a_flag_has_the_same_short_form_in_all_programs() -> None:
    forms: dict[str, set[frozenset[str]]] = {}
    for program in (app, training_app, export_app):
        for command in typer.main.get_command(program).commands.values():  # type: ignore[attr-defined]  # of a group
            for option in command.params:
                short = frozenset(word for word in option.opts if not word.startswith("--"))
                for word in option.opts if option.param_type_name == "option" else ():
                    forms.setdefault(word, set()).add(short)
    assert {word: found for word, found in forms.items() if len(found) > 1} == {}
