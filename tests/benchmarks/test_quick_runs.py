"""Each benchmark runs on tiny models, and its last line holds what benchmarks/README.md says."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.models import BERT, GPT2, TRANSFORMER, VIT, prepare
from quick_run import ROOT, run_benchmark

KEYS = {
    "schema_version",
    "benchmark",
    "started_at",
    "command",
    "git_commit",
    "hardware",
    "versions",
    "settings",
    "cases",
    "rows",
    "not_started",
}
LATENCIES = {"latency_p50_ms", "latency_p99_ms"}
STREAM = {"first_token_p50_ms", "token_gap_p50_ms", "token_gap_p99_ms"}
TASKS = {"generation", "translation", "text_classification", "token_classification", "image_classification"}
PRECISIONS = ("int8-static", "int8", "fp32")
RANDOM_ROWS = [f"headway {precision}, {kind}" for kind in ("served", "bare loop") for precision in PRECISIONS]


def report_of(output: Path, *arguments: str) -> dict:
    ended = run_benchmark(*arguments, "--output", str(output))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert json.loads(output.read_text(encoding="utf-8")) == last
    assert set(last) >= KEYS
    assert last["not_started"] == {}
    assert [row["errors"] for row in last["rows"]] == [{}] * len(last["rows"])
    return last


@pytest.fixture(scope="module")
def shipped(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    output = tmp_path_factory.mktemp("benchmarks") / "shipped.json"
    least = ["--rounds", "1", "--seconds", "0.1", "--new-tokens", "8"]
    return report_of(output, "shipped", "--store", str(tiny_store), "--against", str(ROOT), *least)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[dict]]]:
    """Reports of the comparisons. Two run at a time, because what takes long is their starting, on one core each."""
    output = tmp_path_factory.mktemp("benchmarks")
    prepare(GPT2, TRANSFORMER, BERT, VIT, tiny=True)  # one process makes all models faster than one makes each
    with ThreadPoolExecutor(max_workers=2) as pool:

        def run(name: str, *arguments: str) -> Future[dict]:
            return pool.submit(report_of, output / f"{name}.json", name, "--quick", *arguments)

        yield {
            "generation": run("generation", "--new-tokens", "8"),
            "translation": run("translation"),
            "classification": run("classification"),
        }


@pytest.fixture(scope="module")
def generation(reports: dict[str, Future[dict]]) -> dict:
    return reports["generation"].result()


@pytest.fixture(scope="module")
def translation(reports: dict[str, Future[dict]]) -> dict:
    return reports["translation"].result()


@pytest.fixture(scope="module")
def classification(reports: dict[str, Future[dict]]) -> dict:
    return reports["classification"].result()


def loads(report: dict) -> list[tuple[str, str, int]]:
    return [(row["name"], load["case"], load["callers"]) for row in report["rows"] for load in row["loads"]]


def test_shipped_measures_every_model_served_from_two_trees_and_bare(shipped: dict) -> None:
    tasks = {case["name"]: case["task"] for case in shipped["cases"]}
    assert set(tasks.values()) == TASKS
    ours, theirs, bare = (row["name"] for row in shipped["rows"])
    assert (ours, bare) == ("headway, served", "bare loop")
    assert loads(shipped) == [(row, case, n) for row in (ours, theirs, bare) for case in tasks for n in (1, 8, 32)]
    for load in (load for row in shipped["rows"][:2] for load in row["loads"]):
        assert (load["error_count"], load["call_count"] > 0) == (0, True), load
        assert load["inputs_per_s"] > 0
        assert set(load) >= LATENCIES
        assert (set(load) >= STREAM) == (tasks[load["case"]] == "generation")
        assert (load.get("tokens_per_s", 0) > 0) == (tasks[load["case"]] in ("generation", "translation"))
        assert load["ours_times"]["least"] <= load["ours_times"]["median"] <= load["ours_times"]["greatest"]


def test_shipped_tells_start_and_memory_of_each_server(shipped: dict) -> None:
    for row in shipped["rows"][:2]:
        server = shipped[row["name"]]
        assert server["start_s"] > 0
        assert server["loaded_memory"]["peak_resident_mib"] >= server["ready_memory"]["resident_mib"] > 0


@pytest.mark.comparison
def test_generation_measures_every_precision_served_and_bare(generation: dict) -> None:
    prompts = ["prompts of 128 tokens", "prompts of 32 to 256 tokens"]
    assert loads(generation) == [(row, case, n) for row in RANDOM_ROWS for case in prompts for n in (1, 8)]
    for row in generation["rows"]:
        assert all(len(load["rounds"]) == 1 for load in row["loads"])
        # On a busy machine a moment of a tenth of a second may pass between two tokens.
        assert sum(load["tokens_per_s"] for load in row["loads"]) > 0
    assert generation["int8 memory"]["peak_resident_mib"] > 0


@pytest.mark.comparison
def test_generation_measures_newcomers_and_running_streams(generation: dict) -> None:
    newcomers = generation["newcomers"]
    assert newcomers["first_token_ms"]["count"] == newcomers["idle_first_token_ms"]["count"] == 2
    assert newcomers["gap_ms"]["count"] > 0


@pytest.mark.comparison
def test_translations_are_measured_greedy_and_with_beams_and_are_as_long_as_their_sources(translation: dict) -> None:
    cases = ("greedy", "beam 4")
    assert loads(translation) == [(row, case, n) for row in RANDOM_ROWS for case in cases for n in (1, 8)]
    for load in translation["rows"][0]["loads"]:
        mean = load["tokens_per_s"] / load["inputs_per_s"]
        assert 10 < mean < 24, "a sentence has 16 tokens on average, and a quick run measures a handful of sentences"


@pytest.mark.comparison
def test_classification_measures_every_model_beside_bare_and_echo(classification: dict) -> None:
    texts, images = ["bert-base", "ag-news"], ["vit-b16", "cifar10"]
    rows = dict.fromkeys(("headway, served", "gRPC echo", "bare, in order"), texts + images) | {"bare, sorted": texts}
    assert set(loads(classification)) == {
        (row, case, n) for row, cases in rows.items() for case in cases for n in (1, 8)
    }
    assert all(load["inputs_per_s"] > 0 for row in classification["rows"] for load in row["loads"])


@pytest.mark.comparison
def test_a_picture_lies_beside_the_figures(generation: dict) -> None:
    picture = ElementTree.parse(Path(generation["settings"]["output"]).with_suffix(".svg"))
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}rect"))) == 1 + len(RANDOM_ROWS) * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generation", "--quick", "--peers", "nobody"], "known are CTranslate2 served, int8"),
        (["classification", "--quick", "--models", "nothing"], "known are bert-base"),
        (["shipped", "--store", "absent"], "no such folder"),
        (["shipped", "--base", "0" * 40], "no files of commit 0000"),
    ],
)
def test_a_wrong_option_is_told_with_what_there_is(arguments: list[str], message: str) -> None:
    ended = run_benchmark(*arguments)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
