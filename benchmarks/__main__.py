"""The driver: python -m benchmarks shipped|generation|translation|classification.

Everything runs in processes of its own and is measured in turn, round after round, so that whatever slows the machine for
a while slows all contestants; figures are medians over the rounds, ratios are medians of the rounds' ratios. README.md
beside this file says what each row does and what the last line holds.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from tokenizers import Tokenizer

from benchmarks.contestants.base import InProcess, Served, framework
from benchmarks.contestants.headway import Server, running_server
from benchmarks.environments import SCRATCH, python_of
from benchmarks.inputs import (
    AG_NEWS,
    MULTI30K,
    PROMPTS,
    Case,
    InputError,
    Lengths,
    data_folder,
    photographs,
    random_texts,
    shipped_case,
)
from benchmarks.machine import checkout, describe_run, git_commit
from benchmarks.measure import Contestant, Load, Results, format_report
from benchmarks.models import BERT, GPT2, TRANSFORMER, VIT, RandomModel, prepare
from benchmarks.picture import draw
from benchmarks.worker import ROOT, ContestantError, Process, Worker, foreign_environment, tree_environment
from headway_client.load.plan import LoadTask
from headway_server.runtime import usable_cores

SCHEMA_VERSION = 2
PRECISIONS = ("int8", "fp32")
LIBRARIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "generation": {
        "CTranslate2 int8": ("libraries", "ctranslate2"),
        "onnxruntime-genai int8": ("libraries", "genai", "int8"),
        "onnxruntime-genai fp32": ("libraries", "genai", "fp32"),
        "transformers bf16": ("libraries", "transformers", "bf16"),
        "transformers fp32": ("libraries", "transformers", "fp32"),
    },
    "translation": {
        "CTranslate2 int8": ("libraries", "ctranslate2"),
        "Optimum-ONNX fp32": ("optimum", "optimum"),
        "transformers bf16": ("libraries", "transformers", "bf16"),
        "transformers fp32": ("libraries", "transformers", "fp32"),
    },
    "classification": {
        "OpenVINO f32": ("openvino", "openvino", "fp32", "f32"),
        "OpenVINO bf16": ("openvino", "openvino", "fp32", "bf16"),
        "OpenVINO, int8 graph": ("openvino", "openvino", "int8", "f32"),
    },
}
"""Libraries that run in-process, by benchmark and row: environment, module, and its arguments after the threads."""
FRAMEWORKS = {"LitServe": "litserve", "BentoML": "bentoml", "Triton (pytriton)": "triton"}
"""Servers of classifiers by row: their environment, which is also the name of their module."""

Rounds = Annotated[int, typer.Option(min=1, help="Times everything is measured; figures are medians.")]
Seconds = Annotated[float, typer.Option(min=0.1, max=600, help="Shortest measurement.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of every contestant. [default: usable cores]")]
Peers = Annotated[str, typer.Option(help="all, none, or how names of rows begin, with commas between.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny models, short measurements, no peers but those named.")]
Output = Annotated[Path | None, typer.Option(help="File for the JSON object. [default: benchmarks/results/]")]
Picture = Annotated[Path | None, typer.Option(help="File for the picture. [default: docs/]")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens to generate after a prompt.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__)


@app.command()
def shipped(
    *,
    store: Annotated[Path | None, typer.Option(help="Folder of the bundles. [default: models/ of each tree]")] = None,
    rounds: Rounds = 3,
    seconds: Seconds = 3.0,
    starts: Annotated[int, typer.Option(min=1, help="Starts of the server that are timed.")] = 3,
    new_tokens: NewTokens = 64,
    num_slots: Annotated[int, typer.Option(min=1, help="Sequences that a decoder runs at once.")] = 32,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="Variant to run. [default: by device]")] = None,
    threads: Threads = None,
    against: Annotated[Path | None, typer.Option(help="Another checkout, measured in turn with this one.")] = None,
    base: Annotated[str | None, typer.Option(help="The same, by a commit of this repository.")] = None,
    output: Output = None,
) -> None:
    """Measures the models of a store as they are served, beside the bare loop, and beside another checkout."""
    run = _Run("shipped", locals() | {"threads": threads or usable_cores()})
    flags = ["--device", device, "--num-slots", str(num_slots), "--threads", str(run.settings["threads"])]
    flags += ["--precision", precision] if precision else []
    with run as stack:
        if base:
            against = stack.enter_context(checkout(base))
        trees = {"headway, served": ROOT}
        if against:
            trees[f"headway {(git_commit(against) or against.name)[:7]}, served"] = against.resolve()
        stores = {name: store or tree / "models" for name, tree in trees.items()}
        start_times_s: dict[str, list[float]] = {name: [] for name in trees}
        for _ in range(starts - 1):
            for name, tree in trees.items():
                with running_server(tree, stores[name], flags) as server:
                    start_times_s[name].append(server.start_s)
        servers: dict[str, Server] = {}
        for name, tree in trees.items():
            servers[name] = stack.enter_context(running_server(tree, stores[name], flags))
            start_times_s[name].append(servers[name].start_s)
            caller = stack.enter_context(Worker("caller", environment=tree_environment(tree)))
            run.contestants.append(Served(name, caller, address=servers[name].address))
        bare = run.bare(device, num_slots)
        run.contestants.append(InProcess("bare loop", bare, kind="bare", precision=precision or ""))
        for bundle in sorted(file.parent for file in stores["headway, served"].glob("*/*/bundle.json")):
            try:
                run.add_case(shipped_case(bundle, new_tokens, data_folder()))
            except InputError as error:
                _say(f"left out: {bundle.parent.name}: {error}")
        if not run.cases:
            raise ContestantError(f"{stores['headway, served']}: no model there can be measured")
        ready = {name: server.memory_mib() for name, server in servers.items()}
        run.measure((1, 8, 32))
        run.extra["servers"] = [
            {
                "name": name,
                "git_commit": git_commit(trees[name]),
                "start_s": {"median": statistics.median(start_times_s[name]), "all": start_times_s[name]},
                "ready_memory": ready[name],
                "loaded_memory": server.memory_mib(),
            }
            for name, server in servers.items()
        ]
    for server in run.extra["servers"]:
        run.notes.append(
            f"{server['name']}: ready after {server['start_s']['median']:.2f} s (median of {starts}), "
            f"{server['ready_memory']['resident_mib']:.0f} MiB resident then, "
            f"{server['loaded_memory']['resident_mib']:.0f} MiB after the load"
        )
    run.finish()


@app.command()
def generation(
    *,
    rounds: Rounds = 5,
    seconds: Seconds = 4.0,
    new_tokens: NewTokens = 64,
    newcomers: Annotated[int, typer.Option(min=2, help="Newcomers, one a second, while 31 streams run.")] = 20,
    threads: Threads = None,
    peers: Peers = "all",
    quick: Quick = False,
    output: Output = None,
    picture: Picture = None,
) -> None:
    """Measures a GPT-2 small with random weights beside other libraries, and what streams notice of newcomers."""
    run = _Run("generation", locals())
    newcomers = 2 if quick else newcomers
    with run as stack:
        model = run.prepare(GPT2)
        servers = run.serve_random(model, num_slots=32)
        for lengths in PROMPTS:
            run.add_case(_prompts(model, lengths, new_tokens, count=64 if quick else 4096))
        run.add_libraries(peers)
        run.measure((1, 8, 32))
        caller = stack.enter_context(Worker("caller", environment=tree_environment(ROOT)))
        long = _prompts(model, PROMPTS[0], 1024 - 128, count=128)
        new = _prompts(model, Lengths(name="newcomers", percents=(0, 100), tokens=(256, 256)), 16, count=128)
        found = run.extra["newcomers"] = caller.ask(
            running=str(long.write(run.folder)),
            newcomers=str(new.write(run.folder)),
            num_running=31,
            count=newcomers,
            address=servers["int8"].address,
        )
        run.add_memory(model, servers)
    gap, first, idle = found["gap_ms"], found["first_token_ms"], found["idle_first_token_ms"]
    run.notes.append(
        f"31 streams and a newcomer of 256 tokens every second, {newcomers} of them (int8): gap between tokens "
        f"{gap['median']:.1f} ms, p99 {gap['p99']:.1f}, max {gap['max']:.1f}; a newcomer's first token "
        f"{first['median']:.1f} ms, p95 {first['p95']:.1f}; on an idle server {idle['median']:.1f}"
    )
    run.finish(f"Tokens a second, GPT-2 small, {new_tokens} new tokens", picture)


@app.command()
def translation(
    *,
    rounds: Rounds = 5,
    seconds: Seconds = 4.0,
    threads: Threads = None,
    peers: Peers = "all",
    quick: Quick = False,
    output: Output = None,
    picture: Picture = None,
) -> None:
    """Measures a Transformer base with random weights, greedy and with four beams, beside other libraries."""
    run = _Run("translation", locals())
    with run:
        model = run.prepare(TRANSFORMER)
        servers = run.serve_random(model, num_slots=128)
        tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
        texts, token_ids = random_texts(tokenizer, MULTI30K, 256, seed=11)
        for name, beam_size in (("greedy", 1), ("beam 4", 4)):
            run.add_case(
                Case(
                    name=name,
                    task=LoadTask.TRANSLATE,
                    bundle=model.bundle,
                    source=f"sentences of random words, {MULTI30K.name}, as many target tokens as source tokens",
                    texts=texts,
                    token_ids=token_ids,
                    new_tokens=tuple(map(len, token_ids)),
                    beam_size=beam_size,
                    parameters={"max_length_ratio": 1.0},
                    weights=model.folder,
                )
            )
        run.add_libraries(peers)
        run.measure((1, 8, 32))
        run.add_memory(model, servers)
    run.finish("Target tokens a second, Transformer base", picture)


@app.command()
def classification(
    *,
    rounds: Rounds = 3,
    seconds: Seconds = 4.0,
    precision: Annotated[str, typer.Option(help="Variant that all contestants run: int8 or fp32.")] = "int8",
    threads: Threads = None,
    models: Annotated[str, typer.Option(help="all, or names with commas between.")] = "all",
    peers: Peers = "all",
    quick: Quick = False,
    output: Output = None,
    picture: Picture = None,
) -> None:
    """Measures BERT-base and ViT-B/16 with random weights, and shipped classifiers, beside other servers."""
    run = _Run("classification", locals())
    names = _chosen("models", models, (BERT, VIT, "ag-news", "cifar10"))
    with run as stack:
        for name in names:
            run.add_case(_classifier_case(run, name))
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for case in run.cases:
            (store / case.bundle.parent.name).symlink_to(case.bundle.parent)
        num_threads = run.settings["threads"]
        flags = ["--precision", precision, "--threads", str(num_threads)]
        server = stack.enter_context(running_server(ROOT, store, flags))
        caller = stack.enter_context(Worker("caller", environment=tree_environment(ROOT)))
        command = [sys.executable, "-m", "benchmarks.contestants.echo"]
        echo = stack.enter_context(Process(command, environment=tree_environment(ROOT))).read_line()
        bare = run.bare("cpu", 1)
        texts = {case.name for case in run.cases if case.texts}
        run.contestants += [
            Served("headway, served", caller, address=server.address),
            Served("gRPC echo", caller, address=echo, protocol="echo", kind="bare"),
            InProcess("bare, in order", bare, kind="bare", precision=precision, order="in order"),
            InProcess("bare, sorted", bare, kind="bare", cases=texts, precision=precision, order="sorted"),
        ]
        run.add_libraries(peers)
        run.measure((1, 8) if quick else (1, 8, 32, 128), by_case=True)
        run.results.derive("echo, then bare", lambda a, b: 1 / (1 / a + 1 / b), "gRPC echo", "bare, in order")
    run.finish(f"Inputs a second, {precision}", picture, left_out=("gRPC echo", "echo, then bare"))


class _Run:
    """One run of a benchmark: what is measured, what it needs, and the report."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        """Takes the name of the command and its options."""
        self.name = name
        self.quick = bool(settings.get("quick"))
        if self.quick:
            settings |= {"rounds": 2, "seconds": 0.3}
        self.settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
        self.settings["threads"] = settings["threads"] or usable_cores()
        self.about = {"schema_version": SCHEMA_VERSION, "benchmark": name} | describe_run()
        for key in ("command", "git_commit", "hardware", "versions"):
            _say(f"{key}: {self.about[key]}")
        self.cases: list[Case] = []
        self.contestants: list[Contestant] = []
        self.errors: list[tuple[str, str]] = []
        self.extra: dict[str, Any] = {}
        self.notes: list[str] = []
        self.results = Results([], "")

    def __enter__(self) -> ExitStack:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped, as by Ctrl-C
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return self._stack

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._stack.close()
        if isinstance(error, ContestantError):
            _fail(str(error))

    def prepare(self, size: str) -> RandomModel:
        """Makes a random model if it is missing."""
        _say(f"{size}: looked for, and exported if this code has not done so yet (about two minutes)")
        return prepare(size, tiny=self.quick)

    def add_case(self, case: Case) -> None:
        """Adds a block to the table."""
        self.cases.append(case)

    def bare(self, device: str, num_slots: int) -> Worker:
        """Starts the worker that runs graphs without a server."""
        arguments = [str(self.settings["threads"]), device, str(num_slots)]
        return self._stack.enter_context(Worker("contestants.bare", *arguments, environment=tree_environment(ROOT)))

    def serve_random(self, model: RandomModel, *, num_slots: int) -> dict[str, Server]:
        """Starts a server for each precision, and adds these and their bare loops to the contestants."""
        flags = ["--num-slots", str(num_slots), "--threads", str(self.settings["threads"])]
        servers = {
            name: self._stack.enter_context(running_server(ROOT, model.store, [*flags, "--precision", name]))
            for name in PRECISIONS
        }
        caller = self._stack.enter_context(Worker("caller", environment=tree_environment(ROOT)))
        self._bare = self.bare("cpu", num_slots)
        for name, server in servers.items():
            self.contestants.append(Served(f"headway {name}, served", caller, address=server.address))
        for name in PRECISIONS:
            self.contestants.append(InProcess(f"headway {name}, bare loop", self._bare, kind="bare", precision=name))
        return servers

    def add_libraries(self, peers: str) -> None:
        """Adds the peers that were asked for; of those that cannot be installed or started, the report says why."""
        threads, libraries = self.settings["threads"], LIBRARIES[self.name]
        frameworks = FRAMEWORKS if self.name == "classification" else {}
        asked = "none" if self.quick and peers == "all" else peers
        for name in _chosen("peers", asked, (*frameworks, *libraries)):
            try:
                if name in frameworks:
                    caller = self._stack.enter_context(Worker("caller", environment=tree_environment(ROOT)))
                    choices = SCRATCH / f"setups-{self.settings['precision']}-{threads}.json"
                    kind = frameworks[name]
                    self.contestants.append(
                        framework(name, kind, caller, python_of(kind), self.settings["precision"], threads, choices)
                    )
                    continue
                environment, module, *arguments = libraries[name]
                worker = Worker(
                    f"contestants.{module}",
                    str(threads),
                    *arguments,
                    python=python_of(environment),
                    environment=foreign_environment(OMP_NUM_THREADS=str(threads)),
                )
                self.contestants.append(InProcess(name, self._stack.enter_context(worker)))
            except ContestantError as error:
                _say(f"{name}: {error}")
                self.errors.append((name, str(error)))

    def measure(self, callers: Sequence[int], *, by_case: bool = False) -> None:
        """Measures everything, round after round."""
        files = {case.name: case.write(self.folder) for case in self.cases}
        loads = [
            Load(case=case.name, file=files[case.name], rate=case.rate, callers=count, seconds=self.settings["seconds"])
            for case in self.cases
            for count in callers
        ]
        self.results = Results(loads, self.contestants[0].name)
        for number in range(self.settings["rounds"]):
            begun_s = time.perf_counter()
            self.results.add_round(self.contestants, number, by_case=by_case)
            _say(f"round {number + 1} of {self.settings['rounds']} done in {time.perf_counter() - begun_s:.0f} s")

    def add_memory(self, model: RandomModel, servers: Mapping[str, Server]) -> None:
        """Holds the servers' resident memory at its highest against their weights and caches."""
        self.extra["memory"] = {}
        for name, server in servers.items():
            sizes = self._bare.ask(sizes_of=str(model.bundle), precision=name)
            peak = server.memory_mib()["peak_resident_mib"]
            beyond = round(peak - sizes["weights_mib"] - sizes["cache_mib"], 1)
            self.extra["memory"][name] = sizes | {"peak_resident_mib": peak, "beyond_mib": beyond}
            self.notes.append(
                f"resident memory, {name}: {peak:,.0f} MiB at most = {sizes['weights_mib']:,.0f} weights "
                f"+ {sizes['cache_mib']:,.0f} cache + {beyond:,.0f}"
            )

    def finish(self, title: str = "", picture: Path | None = None, *, left_out: tuple[str, ...] = ()) -> None:
        """Prints and writes the report."""
        report = self.about | {
            "settings": self.settings,
            "cases": [{"name": case.name, "task": case.task, "source": case.source} for case in self.cases],
            "ours": self.results.ours,
            "rows": self.results.records(self.contestants),
            "not_started": dict(self.errors),
            **self.extra,
        }
        output = Path(self.settings["output"] or ROOT / "benchmarks" / "results" / f"{self.name}.json")
        files = {output: json.dumps(report, indent=2) + "\n"}
        if title:
            files[picture or ROOT / "docs" / f"{self.name}-benchmark.svg"] = draw(
                report, title=title, left_out=left_out
            )
        for line in (*format_report(report), "", *self.notes, *(f"{name}: {why}" for name, why in self.errors)):
            _say(line)
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            _say(f"written to {file}")
        _say(json.dumps(report))


def _prompts(model: RandomModel, lengths: Lengths, new_tokens: int, *, count: int) -> Case:
    """Returns a case of prompts of random words, continued greedily."""
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    texts, token_ids = random_texts(tokenizer, lengths, count, seed=11)
    return Case(
        name=lengths.name,
        task=LoadTask.GENERATE,
        bundle=model.bundle,
        source=f"random words, {new_tokens} new tokens",
        texts=texts,
        token_ids=token_ids,
        max_new_tokens=new_tokens,
        parameters={"temperature": 0.0},
        weights=model.folder,
    )


def _classifier_case(run: _Run, name: str) -> Case:
    if name not in (BERT, VIT):
        return shipped_case(next((ROOT / "models" / name).glob("*/bundle.json")).parent, 0, data_folder())
    model = run.prepare(name)
    if name == VIT:
        source, images = photographs(data_folder(), longer_side=500)
        return Case(name=name, task=LoadTask.LABEL, bundle=model.bundle, source=source, images=images)
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    texts, token_ids = random_texts(tokenizer, AG_NEWS, 32 if run.quick else 256, seed=3)
    source = f"{len(texts)} texts of random words, {AG_NEWS.name}"
    return Case(name=name, task=LoadTask.CLASSIFY, bundle=model.bundle, source=source, texts=texts, token_ids=token_ids)


def _chosen(option: str, names: str, known: Sequence[str]) -> list[str]:
    """Returns the names that begin as an option asks."""
    if names == "all":
        return list(known)
    asked = [] if (option, names) == ("peers", "none") else [name.strip() for name in names.split(",")]
    if unknown := [name for name in asked if not any(one.startswith(name) for one in known)]:
        _fail(f"--{option} {', '.join(unknown)}: not known; known are {', '.join(known)}")
    return [name for name in known if any(name.startswith(one) for one in asked)]


def _say(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()


def _fail(message: str) -> NoReturn:
    typer.echo(f"benchmark: {message}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
