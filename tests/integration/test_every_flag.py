"""Every flag of every command of `headway`, at least once, against a server that has a model of every task.

A flag without an entry in the tables fails the first test. A call that prints nothing, or ends otherwise than its entry
says, fails the second.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from headway_client import Client
from headway_client.cli import app

from .conftest import Doors


class Refused(NamedTuple):
    """A call that its model cannot answer, or whose arguments exclude each other, and the words of its refusal."""

    arguments: str
    words: str


DRAWING = "--temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 3"
MODEL = "--model {model} --model-version 1"
GENERATING = (
    f"{DRAWING} --max-new-tokens 3 --min-new-tokens 1 --repetition-penalty 1.1 --presence-penalty 0.1 "
    "--frequency-penalty 0.1 --logit-bias 3=1 --stop-string QQ --stop-token-id 3 --truncate --echo "
    f"--log-probabilities 1 --prompt-log-probabilities --cache-salt me --priority 1 {MODEL}"
)
CONSTRAINED = (
    "--json-schema {schema} --max-new-tokens 4",
    "--regex [0-9]+ --max-new-tokens 4",
    "--choice yes --choice no",
)
SEARCHING = "--beam-size 2 --hypothesis-count 2 --early-stopping first"
WRITING = (
    f"{DRAWING} --max-new-tokens 4 --min-new-tokens 1 --length-penalty 0.9 --no-repeat-ngram-size 3 "
    f"--max-length-ratio 3 --truncate {MODEL}"
)
SEARCHED = "--max-new-tokens 4 --min-new-tokens 1 --length-penalty 0.9 --no-repeat-ngram-size 3"
INSPECTED = f"--summary mean {MODEL}"

CALLS: dict[str, tuple[str, tuple[str | Refused, ...]]] = {
    "generate-text": (
        "shakespeare",
        (
            f"ROMEO: --stream {GENERATING}",
            "--file texts.txt --no-stream --batch-size 1 --json --sample-count 2 --max-new-tokens 2 "
            "--model shakespeare",
            *(f"a --model shakespeare {constraint}" for constraint in CONSTRAINED),
            Refused("a --model shakespeare --thinking-token-budget 0", "thinking_token_budget"),
        ),
    ),
    "chat": (
        "chat",
        (
            f"--system s --message user:hi {GENERATING}",
            "-m user:hi --json --max-new-tokens 2 --model chat",
            *(f"-m user:hi --model chat {constraint}" for constraint in CONSTRAINED),
            Refused("-m user:hi --model chat --thinking-token-budget 0", "has no delimiters of reasoning"),
            Refused("-m user:hi --model chat --image picture.png", "chat reads text alone"),
            Refused(
                "-m user:hi --model chat --tools tools.json --parallel-tool-calls --tool-choice required",
                "shows no tools",
            ),
            Refused("-m user:hi --model chat --tools tools.json --required-tool-name sun", "is none of the tools"),
            "-m user:hi --model chat --tools tools.json --tool-choice none --no-parallel-tool-calls --max-new-tokens 2",
            Refused("-m user:hi --model chat --chat-template-kwargs variables.json", "is not read by the model's chat"),
            Refused("-m user:hi --model chat --tools 3", "No such file"),
        ),
    ),
    "translate-text": (
        "multi30k-de-en",
        (
            f"Hund {WRITING} --stream --target-prefix A --source-language de --target-language en",
            f"--file texts.txt --no-stream --batch-size 1 --json {SEARCHING} --include-alignment --max-new-tokens 4 "
            "--model multi30k-de-en",
            "Hund --required-phrase dog --forbidden-phrase cat --beam-size 2 --max-new-tokens 6 --model multi30k-de-en",
            "Hund --split-sentences --max-new-tokens 4 --model multi30k-de-en",
        ),
    ),
    "rewrite-text": (
        "rewriter",
        (
            f"Hund {WRITING} --stream --target-prefix A",
            f"--file texts.txt --no-stream --batch-size 1 --json {SEARCHING} --max-new-tokens 4",
            "Hund --required-phrase dog --forbidden-phrase cat --beam-size 2 --max-new-tokens 6",
        ),
    ),
    "caption": (
        "caption",
        (
            f"picture.png --stream --language de --prefix Ein {DRAWING} {SEARCHED} {MODEL}",
            f"--file images.txt --no-stream --batch-size 1 --json --include-attention --language en {SEARCHING}",
            "picture.png --attention drawn.svg --language en --max-new-tokens 4",
            "--image-id {image_id} --language en --max-new-tokens 4",
            Refused("picture.png --question what", "question"),
            "--image-id {image_id} --image-id {image_id} --batch-size 1 --language en --max-new-tokens 4 --json",
            "--image-id {image_id} --stream --language en --max-new-tokens 4",
            Refused("picture.png --image-id {image_id} --language en", "leave out image files"),
            Refused("--image-id {image_id} --attention drawn.svg --language en", "--attention draws over one"),
        ),
    ),
    "generate-image": (
        "fashion-mnist-diffusion",
        (
            f"Coat -o out.png --negative-prompt Bag --step-count 2 --guidance-scale 2 --sampler euler --seed 3 {MODEL}",
            "--output out.png --step-count 1 --image-count 2 --json",
            "Coat -o out.png --step-count 2 --progress 1",
            "-o out.png --image picture.png --mask mask.png --strength 0.5 --step-count 2",
            "-o out.png --image-id {image_id} --step-count 2",
        ),
    ),
    "transcribe": (
        "telephone-transcriber",
        (
            f"speech.wav --stream --language en {DRAWING} {SEARCHED} {MODEL}",
            f"--file audios.txt --no-stream --batch-size 1 --json --task transcribe {SEARCHING} --max-new-tokens 4",
            Refused("speech.wav --timestamps", "include_timestamps"),
            Refused("speech.wav --include-timestamps", "include_timestamps"),
            Refused("speech.wav --task translate", "task: is translate"),
            Refused("speech.wav --condition-on-previous", "condition_on_previous"),
            Refused("speech.wav --prompt one", "prompt"),
        ),
    ),
    "speak": (
        "telephone-speech",
        (
            f"one -o out.wav --voice theo --max-duration 0.1 {DRAWING} {MODEL}",
            "one --output out.ogg --format flac --max-duration 0.1 --json",
            "one -o - --max-duration 0.1 --speaking-rate 1",
        ),
    ),
    "classify-text": (
        "pairs",
        (
            f"goal --top-k 1 --threshold 0.5 --truncate {MODEL}",
            "--file pairs.txt --pairs --batch-size 1 --json --model pairs",
            "goal --candidate-label sport --candidate-label art --hypothesis-template About_{{}} --model nli",
            "goal --candidate-label sport --independent-labels --model nli",
        ),
    ),
    "classify-tokens": (
        "ud-ewt-pos",
        (
            f"goal --truncate {MODEL}",
            "--file texts.txt --batch-size 1 --json",
            "--pages page.json --model pages",
            Refused("goal --pages page.json", "--pages is in place of texts and --file"),
        ),
    ),
    "answer-question": (
        "answers",
        (
            "who --context the_Ada_Lovelace --top-k 2 --max-answer-token-count 3 --window-token-count 9 "
            f"--overlap-token-count 1 --no-answer-threshold 0.5 --split-words {MODEL}",
            "--file texts.txt --context-file texts.txt --batch-size 1 --json",
            "--file pairs.txt --pairs",
            Refused("who", "give one of --context, --context-file and --pairs"),
        ),
    ),
    "fill-mask": (
        "masks",
        (
            f"the[MASK] --top-k 2 --target sea --target star --truncate {MODEL}",
            "--file masks.txt --batch-size 1 --json",
        ),
    ),
    "classify-image": (
        "cifar10",
        (
            f"picture.png --top-k 2 {MODEL}",
            "--file images.txt --batch-size 1 --json",
            "picture.png --candidate-label dog --candidate-label cat --template a_{{}}",
            "--image-id {image_id} --image-id {image_id} --batch-size 1",
            Refused("picture.png --image-id {image_id}", "leave out image files"),
            Refused("--file images.txt --image-id {image_id}", "leave out image files"),
        ),
    ),
    "embed-text": (
        "vectors",
        (
            f"goal --truncate --no-normalize --prompt-name query {MODEL}",
            "--file texts.txt --normalize --batch-size 1 --json --model vectors",
            "--file pairs.txt --pairs --model pairs",
            "goal --sparse --model weights",
            "goal --multi-vector --prompt-name query --model colbert",
        ),
    ),
    "classify-audio": (
        "loudness",
        (f"speech.wav --top-k 2 --truncate {MODEL}", "--file audios.txt --batch-size 1 --json"),
    ),
    "classify-pixels": (
        "maps",
        (
            f"picture.png --output drawn.png --overlay drawn.png {MODEL}",
            "--file images.txt --batch-size 1 --json",
            "--image-id {image_id}",
            Refused("picture.png picture.png --output drawn.png", "give one image"),
            Refused("--image-id {image_id} --overlay drawn.png", "draws over an image file"),
            Refused("picture.png --label red --probability-maps .", "labels"),
            Refused("picture.png --probability-maps .", "a file for each --label"),
            Refused("picture.png --label red --probability-maps absent", "there is no folder"),
        ),
    ),
    "estimate-depth": (
        "depths",
        (
            f"picture.png --output drawn.png {MODEL}",
            "--file images.txt --batch-size 1 --json",
            "--image-id {image_id}",
        ),
    ),
    "classify-video": ("motion", (f"picture.png picture.png --top-k 2 {MODEL}", "picture.png --json")),
    "detect-objects": (
        "boxes",
        (
            f"picture.png --threshold 0.2 --nms-threshold 0.5 --max-object-count 2 --label red --label blue {MODEL}",
            "--file images.txt --batch-size 1 --json",
            "--image-id {image_id}",
        ),
    ),
    "score-text": (
        "scorer",
        (
            f"goal --truncate --query star {MODEL}",
            "--file pairs.txt --pairs --batch-size 1 --json --model scorer",
            Refused("--file pairs.txt --pairs --query star", "exclude each other"),
        ),
    ),
    "embed-image": (
        "cifar10",
        (
            f"picture.png --no-normalize {MODEL}",
            "--file images.txt --normalize --batch-size 1 --json --model cifar10",
            "--image-id {image_id} --model cifar10",
            Refused("picture.png --image-id {image_id} --model cifar10", "leave out image files"),
        ),
    ),
    "prepare-image": ("cifar10", (f"picture.png {MODEL}", "--file images.txt --batch-size 1 --json")),
    "rank-images": (
        "clip-image",
        (
            f"picture.png --query-text goal --top-k 1 {MODEL}",
            "--file images.txt --query-image picture.png --json --model cifar10",
            "--image-id {image_id} --query-image-id {image_id} --model cifar10",
            Refused("picture.png --image-id {image_id} --query-text goal", "leave out image files"),
        ),
    ),
    "rank-texts": (
        "vectors",
        (
            f"goal star --query-text goal --query-prompt-name query --prompt-name query --top-k 1 --truncate {MODEL}",
            "--file texts.txt --query-image picture.png --json",
            "goal --query-image-id {image_id}",
        ),
    ),
    "segment": (
        "segment",
        (
            f"picture.png --point 9,9 --outside 1,1 --output out.png --overlay laid.png --max-mask-count 1 {MODEL}",
            "picture.png --box 2,2,30,30 --json --mask-format png",
            "picture.png --everything --points-per-side 2 --min-predicted-iou 0 --min-stability 0 --max-overlap 1",
            "--image-id {image_id} --point 9,9 --output out.png",
            Refused("--image-id {image_id} --point 9,9 --overlay laid.png", "--overlay draws over an image file"),
            Refused("--point 9,9", "there is no image; give a file, or --image-id"),
        ),
    ),
    "inspect-text": (
        "ag-news",
        (
            f"goal --truncate {INSPECTED}",
            "goal --layer 0 --head 1 --json --model ag-news",
            "goal --picture out.svg --summary mean --model ag-news",
            Refused("goal --text-pair star --model ag-news", "text_pair"),
        ),
    ),
    "inspect-image": (
        "cifar10",
        (
            f"picture.png {INSPECTED}",
            "picture.png --layer 0 --head 1 --json",
            "picture.png --picture out.png --summary mean",
            "--image-id {image_id} --summary mean",
            "picture.png --image-id {image_id} --picture out.png --summary mean",
            Refused("--image-id {image_id} --picture out.png", "--picture draws over an image file"),
            Refused("--summary mean", "there is no image; give a file, or --image-id"),
        ),
    ),
    "inspect-generation": (
        "shakespeare",
        (
            f"ROMEO: --truncate {INSPECTED}",
            "ROMEO: --layer 0 --head 1 --json --model shakespeare",
            "ROMEO: --picture out.svg --summary mean --model shakespeare",
        ),
    ),
    "inspect-translation": (
        "multi30k-de-en",
        (
            f"Hund --truncate --translation dog {INSPECTED}",
            "Hund --layer 0 --head 1 --json --model multi30k-de-en",
            "Hund --picture out.svg --summary mean --model multi30k-de-en",
        ),
    ),
    "infer": (
        "",
        (
            "series --input values=[[1,2,3]] --json --model-version 1",
            "series -i values=[[1,2,3]] --output-name forecast --output out.npz",
            'pairs --input text=["goal"] --parameter top_k=1 --output-name label',
            Refused("series --input values=1,2", "is neither an array file nor JSON"),
            Refused("series --input others=[1] --json", "is 'others'; the model reads values"),
            Refused("series", "there is no input"),
        ),
    ),
    "list-models": ("", ("--task generation", "--capability generate_text", "--json")),
    "get-model": ("", ("spare --model-version 1", "spare --json")),
    "list-bundles": ("", ("--json",)),
    "unload-model": ("", ("spare --model-version 1",)),
    "load-model": ("", ("spare --model-version 1", "spare --json")),
    "scan-store": ("", ("--json",)),
    "set-route": ("", ("spare --default-version 2 --canary-version 1 --canary-share 0.5", "spare --json")),
    "set-alias": ("", ("other spare --model-version 2", "other spare --json")),
    "health": ("", ("--wait 5 --json", "--service headway.v1.GenerationService")),
    "load": (
        "pairs",
        (
            f"classify-text --rate 20 --ramp-to 40 --arrivals constant --duration 0.3 --warmup 0 --max-outstanding 9 "
            f"--seed 3 --batch-size 1 --option top_k=1 --file texts.txt --no-stream --report one.json --html one.html "
            f"--slo p99<60s --processes 1 --json {MODEL}",
            "classify-text --replay times.txt --warmup 0 --model pairs",
            "generate-text --concurrency 1 --duration 0.3 --warmup 0 --stream --option max_new_tokens=2 "
            "--model shakespeare",
            "classify-text --find-max --max-probes 1 --slo p99<60s --duration 1 --warmup 0 --model pairs",
            "--scenario scenario.toml --duration 1 --warmup 0",
        ),
    ),
    "load-compare": ("", ("one.json two.json --html both.html --json",)),
}
"""The model of a command, and its calls, whose arguments are parted by spaces."""

CONNECTED = "--server {address} --profile here --timeout 50 --metadata tenant=7 --api-key key --no-tls"
"""What every call is made with that is to be answered."""
BALANCED = "--load-balancing round-robin"
ENCRYPTED = "--tls --ca-file none.pem --client-cert-file none.pem --client-key-file none.pem --tls-server-name a"
"""What is refused before anybody is called, by the name of the file that is not there."""
WITHOUT_SERVER = {"load-compare"}
QUIET = {"scan-store", "unload-model"}
"""Commands that have nothing to say."""


@dataclass(frozen=True)
class Setting:
    """Where commands are run."""

    folder: Path
    words: dict[str, str]

    def run(self, command: str, arguments: str) -> Any:
        words = [word.format(**self.words) for word in arguments.split()]
        environment = {"HEADWAY_PROFILES_FILE": str(self.folder / "profiles.toml")}
        return CliRunner().invoke(
            app, [command, *(word.replace("_", " ") if "{}" in word else word for word in words)], env=environment
        )


@pytest.fixture(scope="module")
def setting(doors: Doors, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    from PIL import Image

    folder = tmp_path_factory.mktemp("flags")
    for name in ("picture.png", "speech.wav", "page.json"):
        (folder / name).write_bytes((doors.folder / name).read_bytes())
    Image.new("L", (32, 32), 255).save(folder / "mask.png")
    for name, lines in {
        "texts.txt": "goal\nstar\n",
        "pairs.txt": "goal\tstar\natom\tcell\n",
        "masks.txt": "the [MASK]\na <mask> .\n",
        "images.txt": "picture.png\npicture.png\n",
        "audios.txt": "speech.wav\n",
        "times.txt": "0.0\n0.1\n",
        "profiles.toml": '[here]\nserver = "127.0.0.1:1"\n',
        "schema.json": '{"type": "integer"}',
        "tools.json": '[{"name": "clock"}]',
        "variables.json": '{"sun": 1}',
        "scenario.toml": 'rate_per_s = 9\n[[workloads]]\ntask = "classify-text"\noptions = { model = "pairs" }\n',
    }.items():
        (folder / name).write_text(lines)
    with Client(doors.address) as client:
        image_id = client.prepare_image(folder / "picture.png")[0].image_id
    return Setting(folder, {"address": doors.address, "image_id": image_id, "schema": "schema.json"})


@pytest.fixture(autouse=True)
def _in_the_folder(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(setting.folder)


def commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined]  # of a group


def test_every_flag_of_every_command_has_an_entry() -> None:
    assert CALLS.keys() == commands().keys()
    for name, command in commands().items():
        calls = [call.arguments if isinstance(call, Refused) else call for call in CALLS[name][1]]
        of_all = [] if name in WITHOUT_SERVER else [CONNECTED, BALANCED, ENCRYPTED]
        given = {word for call in (*calls, *of_all) for word in call.split()}
        for flag in command.params:
            if flag.param_type_name == "option":
                assert given.intersection(flag.opts), (name, flag.opts)
                assert not flag.secondary_opts or given.intersection(flag.secondary_opts), (name, flag.secondary_opts)


@pytest.mark.parametrize(
    ("command", "call"), [(name, call) for name, (_, calls) in CALLS.items() for call in calls], ids=str
)
def test_a_call_with_these_flags_answers_or_says_why_not(setting: Setting, command: str, call: str | Refused) -> None:
    model = CALLS[command][0]
    arguments, words = (call, None) if isinstance(call, str) else call
    if model and " --model " not in f" {arguments}" and isinstance(call, Refused):
        arguments += f" --model {model}"
    if command not in WITHOUT_SERVER:
        arguments += f" {CONNECTED}"
    else:
        (setting.folder / "two.json").write_bytes((setting.folder / "one.json").read_bytes())
    setting.words["model"] = model
    ended = setting.run(command, arguments)
    if words is not None:
        assert ended.exit_code in (1, 2), ended.output
        assert words in " ".join(ended.stderr.split()), ended.stderr
        return
    assert ended.exit_code == 0, ended.output
    if "--json" in arguments.split():
        assert all(json.loads(line) for line in ended.stdout.splitlines())
    is_quiet = command in QUIET or "--picture" in arguments
    assert is_quiet or ended.stdout_bytes, "it prints nothing"


@pytest.mark.parametrize("command", [name for name in CALLS if name not in WITHOUT_SERVER])
def test_every_command_reads_the_files_that_encrypt_and_balances(setting: Setting, command: str) -> None:
    setting.words["model"] = CALLS[command][0]
    first = next(call for call in CALLS[command][1] if isinstance(call, str))
    ended = setting.run(command, f"{first} --server {setting.words['address']} {ENCRYPTED} {BALANCED}")
    assert ended.exit_code == 2, ended.output
    assert "none.pem: No such file" in ended.stderr
