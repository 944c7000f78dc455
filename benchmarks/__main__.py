"""The driver: python -m benchmarks shipped|generation|translation|classification|huggingface.

Everything runs in processes of its own and is measured in turn, round after round, so that whatever slows the machine
for a while slows all contestants; figures are medians over the rounds, ratios are medians of the rounds' ratios.
README.md beside this file says what each row does and what the last line holds.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self

import typer

from benchmarks import huggingface as huggingface_models
from benchmarks import inputs
from benchmarks.contestants.base import Framework, Measured
from benchmarks.contestants.headway import Server, running_server
from benchmarks.environments import SCRATCH, python_of
from benchmarks.huggingface import ImportedModel
from benchmarks.inputs import Case, InputError, Lengths, photographs, random_texts, shipped_case
from benchmarks.machine import checkout, describe_run, git_commit
from benchmarks.measure import Contestant, Kind, Load, Results, format_report
from benchmarks.models import BERT, GPT2, TRANSFORMER, VIT, RandomModel, prepare
from benchmarks.picture import draw
from benchmarks.worker import ROOT, ContestantError, Process, Worker, foreign_environment, tree_environment
from headway_server.runtime import usable_cores

SCHEMA_VERSION = 2
PRECISIONS = ("int8-static", "int8", "fp32")
_PRECISIONS_OF_DECODERS = (*PRECISIONS, "int4")
"""Those that an imported decoder can be asked for."""
_ENCODERS = {
    "OpenVINO int8 by NNCF": "openvino openvino nncf f32",
    "OpenVINO bf16": "openvino openvino fp32 bf16",
    "OpenVINO f32": "openvino openvino fp32 f32",
    "Optimum-ONNX int8": "optimum optimum int8",
    "Optimum-ONNX fp32": "optimum optimum fp32",
    "transformers bf16": "libraries transformers bf16",
    "transformers fp32": "libraries transformers fp32",
}
LIBRARIES = {
    "generation": {
        "CTranslate2 int8": "libraries ctranslate2",
        "onnxruntime-genai int8": "libraries genai int8",
        "onnxruntime-genai fp32": "libraries genai fp32",
        "transformers bf16": "libraries transformers bf16",
        "transformers fp32": "libraries transformers fp32",
    },
    "translation": {
        "CTranslate2 int8": "libraries ctranslate2",
        "Optimum-ONNX fp32": "optimum optimum fp32",
        "transformers bf16": "libraries transformers bf16",
        "transformers fp32": "libraries transformers fp32",
    },
    "classification": {
        "OpenVINO f32": "openvino openvino fp32 f32",
        "OpenVINO bf16": "openvino openvino fp32 bf16",
        "OpenVINO, int8 graph": "openvino openvino int8 f32",
    },
    "huggingface generation": {
        "CTranslate2 int8": "libraries ctranslate2",
        "llama.cpp Q8_0": "llama llama Q8_0",
        "llama.cpp Q4_K_M": "llama llama Q4_K_M",
        "onnxruntime-genai int8": "libraries genai int8",
        "onnxruntime-genai int4": "libraries genai int4",
        "transformers bf16": "libraries transformers bf16",
        "transformers fp32": "libraries transformers fp32",
    },
    "huggingface translation": {
        "CTranslate2 int8": "libraries ctranslate2",
        "Optimum-ONNX fp32": "optimum optimum fp32",
        "transformers bf16": "libraries transformers bf16",
        "transformers fp32": "libraries transformers fp32",
    },
    "huggingface text_embedding": {
        "sentence-transformers bf16, compiled": "libraries sentence_transformers bf16,compile",
        "sentence-transformers bf16": "libraries sentence_transformers bf16",
        "sentence-transformers fp32": "libraries sentence_transformers fp32",
        "OpenVINO int8 by NNCF": "openvino openvino nncf f32",
        "OpenVINO bf16": "openvino openvino fp32 bf16",
        "OpenVINO f32": "openvino openvino fp32 f32",
    },
    "huggingface text_classification": _ENCODERS,
    "huggingface image_classification": _ENCODERS,
}
"""Libraries that run in-process, by benchmark and row: environment, module, and its arguments after the threads."""
_CTRANSLATE2 = {"CTranslate2 served, int8": "libraries ctranslate2_served"}
FRAMEWORKS: dict[str, dict[str, str]] = {
    "generation": _CTRANSLATE2,
    "translation": _CTRANSLATE2,
    "huggingface generation": _CTRANSLATE2,
    "huggingface translation": _CTRANSLATE2,
    "huggingface text_embedding": {"Infinity, served": "infinity infinity"},
    "classification": {
        "LitServe": "litserve litserve",
        "BentoML": "bentoml bentoml",
        "Triton (pytriton)": "triton triton",
    },
}
"""Servers by benchmark and row: environment and module."""

Rounds = Annotated[int, typer.Option(min=1, help="Times everything is measured; figures are medians.")]
Seconds = Annotated[float, typer.Option(min=0.1, max=600, help="Shortest measurement.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of every contestant. [default: usable cores]")]
Peers = Annotated[str, typer.Option(help="all, none, or how names of rows begin, with commas between.")]
Precisions = Annotated[str, typer.Option(help="all, or variants of headway with commas between.")]
Callers = Annotated[str, typer.Option(help="Numbers of callers, with commas between.")]
Cases = Annotated[str, typer.Option(help="all, or how names of cases begin, with commas between.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Tiny models, few and short measurements, and only peers that are named.")
]
Output = Annotated[
    Path | None, typer.Option(help="JSON file; the picture is written beside it. [default: in benchmarks/results/]")
]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens to generate after a prompt.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__)


@app.command()
def shipped(
    *,
    store: Annotated[Path | None, typer.Option(help="Folder of the bundles. [default: models/ of each tree]")] = None,
    rounds: Rounds = 3,
    seconds: Seconds = 3.0,
    new_tokens: NewTokens = 64,
    num_slots: Annotated[int, typer.Option(min=1, help="Sequences that a decoder runs at once.")] = 32,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str, typer.Option(help="Variant to run. [default: by device]")] = "",
    threads: Threads = None,
    against: Annotated[Path | None, typer.Option(help="Another checkout, measured in turn with this one.")] = None,
    base: Annotated[str, typer.Option(help="The same, by a commit of this repository.")] = "",
    output: Output = None,
) -> None:
    """Measures the models of a store as they are served, beside the bare loop and beside another checkout."""
    with _Run("shipped", locals()) as run:
        against = run.stack.enter_context(checkout(base)) if base else against
        trees = {"headway, served": ROOT}
        if against:
            trees[f"headway {(git_commit(against) or against.name)[:7]}, served"] = against.resolve()
        flags = ["--device", device, "--num-slots", str(num_slots), "--threads", str(run.threads)]
        flags += ["--precision", precision] if precision else []
        start_times_s: dict[str, list[float]] = {name: [] for name in trees}
        servers: dict[str, Server] = {}
        for number in range(rounds):
            with ExitStack() as starting:
                for name, tree in trees.items():
                    stack = run.stack if number == rounds - 1 else starting  # the last ones stay
                    servers[name] = stack.enter_context(running_server(tree, store or tree / "models", flags))
                    start_times_s[name].append(servers[name].start_s)
        for name, server in servers.items():
            caller = run.worker("caller", tree=trees[name])
            run.add(name, "served", caller, protocol="headway", address=server.address)
        bare = run.worker("contestants.bare", str(run.threads), device, str(num_slots))
        run.add("bare loop", "bare", bare, precision=precision)
        for manifest in sorted((store or ROOT / "models").glob("*/*/bundle.json")):
            try:
                run.cases.append(shipped_case(manifest.parent, new_tokens, run.data))
            except InputError as error:
                _say(f"left out: {manifest.parent.parent.name}: {error}")
        ready = {name: server.memory_mib() for name, server in servers.items()}
        run.measure()
        for name, server in servers.items():
            median_s, loaded = statistics.median(start_times_s[name]), server.memory_mib()
            figures = {"start_s": median_s, "all_start_s": start_times_s[name]}
            run.extra[name] = figures | {"ready_memory": ready[name], "loaded_memory": loaded}
            before, after = ready[name]["resident_mib"], loaded["resident_mib"]
            held = f"{before:.0f} MiB resident then, {after:.0f} after the load"
            run.notes.append(f"{name}: ready after {median_s:.2f} s (median of {rounds}), {held}")
        run.finish()


@app.command()
def generation(
    *,
    rounds: Rounds = 5,
    seconds: Seconds = 4.0,
    new_tokens: NewTokens = 64,
    threads: Threads = None,
    precisions: Precisions = "all",
    cases: Cases = "all",
    callers: Callers = "1,8,32",
    peers: Peers = "all",
    quick: Quick = False,
    output: Output = None,
) -> None:
    """Measures a GPT-2 small with random weights beside other libraries, and what streams notice of newcomers."""
    with _Run("generation", locals()) as run:
        model = run.prepare(GPT2)[GPT2]
        address = run.serve_random(model, num_slots=32)
        run.cases += [
            _prompts(model, lengths, new_tokens, count=64 if run.quick else 4096) for lengths in inputs.PROMPTS
        ]
        run.add_peers(peers)
        run.measure()
        running = _prompts(model, inputs.PROMPTS[0], 1024 - 128, count=128).write(run.folder)
        newcomers = _prompts(model, inputs.LONG_PROMPTS, 16, count=128).write(run.folder)
        asked = {"running": str(running), "newcomers": str(newcomers), "num_running": 31, "address": address}
        run.extra["newcomers"] = found = run.worker("caller").ask(**asked, count=2 if quick else 20)
        gap, first, idle = found["gap_ms"], found["first_token_ms"], found["idle_first_token_ms"]
        run.notes.append(
            f"31 streams and {first['count']} newcomers of 256 tokens, one a second: gap between tokens "
            f"{gap['median']:.1f} ms, p99 {gap['p99']:.1f}, max {gap['max']:.1f}; a newcomer's first token "
            f"{first['median']:.1f} ms, p95 {first['p95']:.1f}; on an idle server {idle['median']:.1f}"
        )
        run.finish(f"Tokens a second, GPT-2 small, {new_tokens} new tokens")


@app.command()
def translation(
    *,
    rounds: Rounds = 5,
    seconds: Seconds = 4.0,
    threads: Threads = None,
    precisions: Precisions = "all",
    cases: Cases = "all",
    callers: Callers = "1,8,32",
    peers: Peers = "all",
    quick: Quick = False,
    output: Output = None,
) -> None:
    """Measures a Transformer base with random weights, greedy and with four beams, beside other libraries."""
    with _Run("translation", locals()) as run:
        model = run.prepare(TRANSFORMER)[TRANSFORMER]
        run.serve_random(model, num_slots=128)
        run.cases += _sentences(model)
        run.add_peers(peers)
        run.measure()
        run.finish("Target tokens a second, Transformer base")


@app.command()
def classification(
    *,
    rounds: Rounds = 3,
    seconds: Seconds = 4.0,
    precision: Annotated[str, typer.Option(help="Variant that all contestants run: int8 or fp32.")] = "int8",
    threads: Threads = None,
    models: Annotated[str, typer.Option(help="all, or names with commas between.")] = "all",
    callers: Callers = "1,8,32,128",
    peers: Peers = "all",
    quick: Quick = False,
    output: Output = None,
) -> None:
    """Measures BERT-base and ViT-B/16 with random weights, and shipped classifiers, beside other servers."""
    with _Run("classification", locals()) as run:
        names = _chosen("models", models, (BERT, VIT, "ag-news", "cifar10"))
        random_models = run.prepare(*(name for name in names if name in (BERT, VIT)))
        run.cases += [_classifier(run, name, random_models.get(name)) for name in names]
        store = Path(run.stack.enter_context(tempfile.TemporaryDirectory()))
        for case in run.cases:
            (store / case.bundle.parent.name).symlink_to(case.bundle.parent)
        flags = ["--precision", precision, "--threads", str(run.threads)]
        server = run.stack.enter_context(running_server(ROOT, store, flags))
        command = [sys.executable, "-m", "benchmarks.contestants.echo"]
        echo = run.stack.enter_context(Process(command, tree_environment(ROOT))).read_line()
        caller, bare = run.worker("caller"), run.worker("contestants.bare", str(run.threads), "cpu", "1")
        run.add("headway, served", "served", caller, protocol="headway", address=server.address)
        run.add("gRPC echo", "bare", caller, protocol="echo", address=echo)
        run.add("bare, in order", "bare", bare, precision=precision, order="in order")
        texts = {case.name for case in run.cases if case.texts}
        run.add("bare, sorted", "bare", bare, cases=texts, precision=precision, order="sorted")
        run.add_peers(peers)
        run.measure()
        run.finish(f"Inputs a second, {precision}", not_drawn=("gRPC echo",))


@app.command()
def huggingface(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(huggingface_models.SIZES)}.")],
    *,
    rounds: Rounds = 3,
    seconds: Seconds = 2.0,
    new_tokens: NewTokens = 64,
    threads: Threads = None,
    precisions: Precisions = "int8-static",
    cases: Cases = "all",
    callers: Callers = "1,8,32",
    peers: Peers = "all",
    output: Output = None,
) -> None:
    """Measures an imported model of a real size with random weights beside those who run it otherwise."""
    (model,) = _chosen("model", model, tuple(huggingface_models.SIZES), exactly=True)
    task = huggingface_models.SIZES[model][0]
    with _Run(f"huggingface {task}", locals()) as run:
        _say(f"{model}: looked for, and imported if this code has not done so yet (minutes)")
        known = _PRECISIONS_OF_DECODERS if task == "generation" else PRECISIONS
        others = [one for one in _chosen("precisions", precisions, known, exactly=True) if one != "fp32"]
        imported = huggingface_models.import_model(model, ("fp32", *others))
        run.serve_random(imported, num_slots=128 if task == "translation" else 32, known=known)
        if task == "generation":
            run.cases.append(_prompts(imported, inputs.PROMPTS[0], new_tokens, count=4096))
        elif task == "translation":
            named = huggingface_models.LANGUAGES if imported.has_languages else {}
            run.cases += [replace(one, parameters=one.parameters | named) for one in _sentences(imported)]
        elif task == "image_classification":
            source, images = photographs(run.data, longer_side=500)
            run.cases.append(Case(name="images", task=task, bundle=imported.bundle, source=source, images=images))
        else:
            texts, token_ids = random_texts(imported.tokenizer, inputs.AG_NEWS, 64)
            source = f"{len(texts)} texts of random words, {inputs.AG_NEWS.name}"
            run.cases.append(
                Case(name="texts", task=task, bundle=imported.bundle, source=source, texts=texts, token_ids=token_ids)
            )
        run.cases = [replace(case, name=f"{case.name}, {model}", weights=imported.folder) for case in run.cases]
        run.add_peers(peers)
        run.measure()
        run.finish(f"{model}, random weights, a second")


class _Run:
    """One run of a benchmark: what is measured, what it needs, and the report."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.quick = name, bool(options.get("quick"))
        self.file_name = "-".join([*name.split(), *filter(None, [options.get("model")])])
        self.settings = options | ({"rounds": 1, "seconds": 0.1} if self.quick else {})
        self.settings["threads"] = self.threads = options["threads"] or usable_cores()
        if "peers" in options:  # before models are made, which takes minutes
            self._peers(options["peers"])
        self.data = Path(os.environ["HEADWAY_DATA_DIR"]) if os.environ.get("HEADWAY_DATA_DIR") else None
        self.cases: list[Case] = []
        self.contestants: list[Contestant] = []
        self.not_started: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        self.notes: list[str] = []
        self.servers: dict[str, Server] = {}
        self.results: Results | None = None
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped, as by Ctrl-C
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.about = {"schema_version": SCHEMA_VERSION, "benchmark": self.name} | describe_run()
        for key in ("command", "git_commit", "hardware", "versions"):
            _say(f"{key}: {self.about[key]}")
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        if isinstance(error, SystemExit):
            self.notes.append("ended before it was done")
            if self.results and any(self.results.rows.values()):
                self.finish()
        self.stack.close()
        if isinstance(error, ContestantError):
            _fail(str(error))

    def prepare(self, *sizes: str) -> dict[str, RandomModel]:
        """Makes the random models that are missing."""
        for size in sizes:
            _say(f"{size}: looked for, and exported if this code has not done so yet (about two minutes)")
        return prepare(*sizes, tiny=self.quick)

    def worker(self, module: str, *arguments: str, tree: Path = ROOT) -> Worker:
        """Starts a worker that imports headway."""
        return self.stack.enter_context(Worker(module, *arguments, environment=tree_environment(tree)))

    def add(self, name: str, kind: Kind, worker: Worker, *, cases: set[str] | None = None, **request: Any) -> None:
        """Adds a contestant that a worker measures."""
        self.contestants.append(Measured(name=name, kind=kind, worker=worker, request=request, cases=cases))

    def serve_random(
        self, model: RandomModel | ImportedModel, *, num_slots: int, known: Sequence[str] = PRECISIONS
    ) -> str:
        """Adds a server for each chosen precision of the known ones, and their bare loops.

        Returns the address of the first server.

        Imported models have no bare loop.
        """
        threads, caller = str(self.threads), self.worker("caller")
        flags = ["--num-slots", str(num_slots), "--threads", threads, "--precision"]
        precisions = _chosen("precisions", self.settings["precisions"], known, exactly=True)
        for name in precisions:
            server = self.servers[name] = self.stack.enter_context(running_server(ROOT, model.store, [*flags, name]))
            self.add(f"headway {name}, served", "served", caller, protocol="headway", address=server.address)
        bare = self.worker("contestants.bare", threads, "cpu", str(num_slots))
        for name in precisions if isinstance(model, RandomModel) else ():
            self.add(f"headway {name}, bare loop", "bare", bare, precision=name)
        return self.servers[precisions[0]].address

    def _peers(self, peers: str) -> list[str]:
        """Returns the rows of the named peers."""
        known = (*FRAMEWORKS.get(self.name, {}), *LIBRARIES[self.name])
        return _chosen("peers", "none" if self.quick and peers == "all" else peers, known)

    def add_peers(self, peers: str) -> None:
        """Adds the peers that were asked for; of those that cannot be installed or started, the report says why."""
        frameworks, libraries = FRAMEWORKS.get(self.name, {}), LIBRARIES[self.name]
        threads = str(self.threads)
        for name in self._peers(peers):
            try:
                if name in frameworks:
                    precision = self.settings.get("precision", "int8")
                    framework = Framework(name, frameworks[name], self.worker("caller"), precision, self.threads)
                    if not self.quick:
                        framework.choices = SCRATCH / f"setups-{precision}-{threads}.json"
                    self.contestants.append(framework)
                    continue
                environment, module, *arguments = libraries[name].split()
                python, variables = python_of(environment), foreign_environment(OMP_NUM_THREADS=threads)
                worker = Worker(f"contestants.{module}", threads, *arguments, environment=variables, python=python)
                self.add(name, "peer", self.stack.enter_context(worker))
            except ContestantError as error:
                _say(f"{name}: {error}")
                self.not_started[name] = str(error)

    def measure(self) -> None:
        """Measures everything, round after round; where servers of peers have to be started, case by case."""
        by_case = any(isinstance(contestant, Framework) for contestant in self.contestants)
        seconds, rounds = self.settings["seconds"], self.settings["rounds"]
        callers = [int(count) for count in self.settings.get("callers", "1,8,32").split(",")]
        names = _chosen("cases", self.settings.get("cases", "all"), [case.name for case in self.cases])
        self.cases = [case for case in self.cases if case.name in names]
        loads = [
            Load(case=case.name, file=file, rate=case.rate, callers=count, seconds=seconds)
            for case, file in [(case, case.write(self.folder)) for case in self.cases]
            for count in (callers[:2] if self.quick else callers)
        ]
        if not loads:
            raise ContestantError("there is no model that can be measured")
        self.results = Results(self.contestants, loads)
        for number in range(rounds):
            begun_s = time.perf_counter()
            self.results.add_round(number=number, by_case=by_case)
            _say(f"round {number + 1} of {rounds} done in {time.perf_counter() - begun_s:.0f} s")

    def finish(self, title: str = "", *, not_drawn: tuple[str, ...] = ()) -> None:
        """Prints and writes the report, and draws it if the picture has a title."""
        assert self.results is not None, "measured before"
        for name, server in self.servers.items():
            self.extra[f"{name} memory"] = memory = server.memory_mib()
            self.notes.append(f"the {name} server held at most {memory['peak_resident_mib']:,.0f} MiB")
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in self.settings.items()}
        cases = [{"name": case.name, "task": case.task, "source": case.source} for case in self.cases]
        report = self.about | {"settings": settings, "cases": cases, "rows": self.results.records()} | self.extra
        report["not_started"] = self.not_started
        for line in (*format_report(report), "", *self.notes, *map(": ".join, self.not_started.items())):
            _say(line)
        output: Path = self.settings["output"] or ROOT / "benchmarks" / "results" / f"{self.file_name}.json"
        _write(report, output)
        if title:
            drawn = draw(report, title=title, not_drawn=not_drawn)
            output.with_suffix(".svg").write_text(drawn, encoding="utf-8")


def _prompts(model: RandomModel | ImportedModel, lengths: Lengths, new_tokens: int, *, count: int) -> Case:
    """Returns a case of prompts of random words, continued greedily."""
    texts, token_ids = random_texts(model.tokenizer, lengths, count)
    return Case(
        name=lengths.name,
        task="generation",
        bundle=model.bundle,
        source=f"random words, {new_tokens} new tokens",
        texts=texts,
        token_ids=token_ids,
        max_new_tokens=new_tokens,
        parameters={"temperature": 0.0},
        weights=model.folder,
    )


def _sentences(model: RandomModel | ImportedModel) -> list[Case]:
    """Returns cases of sentences of random words, translated greedily and with four beams."""
    texts, token_ids = random_texts(model.tokenizer, inputs.MULTI30K, 256)
    greedy = Case(
        name="greedy",
        task="translation",
        bundle=model.bundle,
        source=f"sentences of random words, {inputs.MULTI30K.name}, as many target tokens as source tokens",
        texts=texts,
        token_ids=token_ids,
        new_tokens=tuple(map(len, token_ids)),
        parameters={"max_length_ratio": 1.0},
        weights=model.folder,
    )
    return [greedy, replace(greedy, name="beam 4", beam_size=4)]


def _classifier(run: _Run, name: str, model: RandomModel | None) -> Case:
    if model is None:
        return shipped_case(next((ROOT / "models" / name).glob("*/bundle.json")).parent, 0, run.data)
    if name == VIT:
        source, images = photographs(run.data, longer_side=500)
        return Case(name=name, task="image_classification", bundle=model.bundle, source=source, images=images)
    texts, _ = random_texts(model.tokenizer, inputs.AG_NEWS, 32 if run.quick else 256)
    source = f"{len(texts)} texts of random words, {inputs.AG_NEWS.name}"
    return Case(name=name, task="text_classification", bundle=model.bundle, source=source, texts=texts)


def _chosen(option: str, names: str, known: Sequence[str], *, exactly: bool = False) -> list[str]:
    """Returns the names that are, or begin, as an option asks."""
    fits = str.__eq__ if exactly else str.startswith
    asked = [] if names in ("all", "none") else [name.strip() for name in names.split(",")]
    unknown = [name for name in asked if not any(fits(one, name) for one in known)]
    if unknown or (names == "none" and option != "peers"):
        _fail(f"--{option} {', '.join(unknown) or names}: not known; known are {', '.join(known)}")
    return [name for name in known if names == "all" or any(fits(name, one) for one in asked)]


def _write(report: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _say(f"written to {output.parent}")
    _say(json.dumps(report))


def _say(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()


def _fail(message: str) -> NoReturn:
    typer.echo(f"benchmark: {message}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
