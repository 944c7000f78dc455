"""Ids of the hub, against a stand-in of it: what is fetched, what the bundle says of it, and each refusal."""

import json
import os
import subprocess
import sys

import pytest
import tiny_embedders
import tiny_huggingface as tiny
import tiny_voices
import torch
import transformers
from safetensors.torch import save
from stand_in_hub import TOKEN, Repository, StandInHub, using
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.huggingface import FolderOptions, parse_id, sources_from_hub
from headway_server.bundles import open_bundle

ID = "tiny-org/Tiny-Llama"
CARD = "---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny Llama\nOf its authors.\n"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with what a repository of the hub holds beside a model."""
    folder = tiny.write_model(tmp_path_factory.mktemp("hub") / "Tiny-Llama", "llama")
    tiny.write_tokenizer(folder, frame="<s> $A")
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text("Do as you like.")
    for name in (
        "tf_model.h5",
        "flax_model.msgpack",
        "model.onnx",
        "model.gguf",
        "pytorch_model.bin",
        "modeling_own.py",
    ):
        (folder / name).write_bytes(b"not needed")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def hub(llama):
    """A hub with one model."""
    server = StandInHub()
    server.repositories[ID] = Repository.of_folder(llama)
    yield server
    server.close()


@pytest.fixture
def invoke(hub, tmp_path, monkeypatch):
    """Calls the command; returns its exit code and what it prints."""

    def call(*arguments, **settings):
        with using(hub.address, tmp_path / "cache", monkeypatch, **settings):
            result = CliRunner().invoke(app, ["hf", *arguments, "--store", str(tmp_path / "store")])
        assert "Traceback" not in result.output
        return result.exit_code, result.output.strip()

    return call


@pytest.fixture
def refusal(invoke, tmp_path):
    """Returns the sentence that a call is refused with."""

    def call(*arguments, **settings):
        exit_code, output = invoke(*arguments, **settings)
        assert exit_code == 2, output
        *said, output = output.splitlines()
        assert all(" fetching " in line for line in said), said
        store = tmp_path / "store"
        assert not store.exists() or not any(store.iterdir())
        return output

    return call


@pytest.fixture
def read(hub, tmp_path, monkeypatch):
    """Reads a model of the hub without exporting it; returns it and what was said before weights were fetched."""

    def call(revision=None, model_id=ID, options=None, **settings):
        said = []
        with using(hub.address, tmp_path / "cache", monkeypatch, **settings):
            (source,), notes = sources_from_hub(model_id, revision, options or FolderOptions(), said.append)
        return source, notes, said

    return call


def test_an_id_is_fetched_exported_and_pinned_to_its_commit(hub, invoke, tmp_path):
    exit_code, output = invoke(ID)
    assert exit_code == 0, output
    repository = hub.repositories[ID]
    manifest = open_bundle(tmp_path / "store" / "tiny-llama" / "1").manifest
    assert (manifest.name, manifest.license) == ("tiny-llama", "apache-2.0")
    origin = manifest.origin
    assert (origin.id, origin.revision, origin.commit) == (ID, "main", repository.commit)
    assert (tmp_path / "store" / "tiny-llama" / "1" / "upstream" / "README.md").read_text() == CARD
    assert "upstream/LICENSE" in manifest.files
    card = (tmp_path / "store" / "tiny-llama" / "1" / "README.md").read_text()
    assert f"{ID} at commit {repository.commit}" in card
    size = len(repository.files["model.safetensors"]) / 2**20
    assert f"{ID} at commit {repository.commit[:12]}: fetching {size:.1f} MiB of weights in 1 files" in output


def test_only_what_is_needed_is_fetched_and_once(hub, read):
    read()
    assert hub.fetched() == {
        "README.md",
        "LICENSE",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    before = len([entry for entry in hub.requests if entry[0] == "FILE"])
    _, _, said = read()
    assert len([entry for entry in hub.requests if entry[0] == "FILE"]) == before
    assert said[0].endswith("is in the cache")


def test_shards_are_fetched_by_their_index(hub, read, tmp_path):
    folder = tmp_path / "sharded"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny.write_model(tmp_path / "whole", "llama"), dtype=torch.bfloat16
    )
    model.save_pretrained(folder, max_shard_size="20KB")
    tiny.write_tokenizer(folder, frame="<s> $A")
    hub.repositories["tiny-org/sharded"] = Repository.of_folder(folder)
    source, _, _ = read(model_id="tiny-org/sharded")
    assert source.architecture.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    assert len([name for name in hub.fetched() if name.startswith("model-0000")]) > 1


def test_modules_of_sentence_transformers_are_fetched(hub, read, tmp_path):
    folder = tiny_embedders.write_sentence_transformer(tmp_path / "embedder", "bert")
    hub.repositories["tiny-org/embedder"] = Repository.of_folder(folder)
    source, _, _ = read(model_id="tiny-org/embedder")
    assert (source.name, source.task) == ("embedder", "text_embedding")
    assert "1_Pooling/config.json" in hub.fetched()


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, read, refusal):
    repository = hub.repositories[ID]
    repository.refs["v1.0"] = repository.commit
    for revision in ("v1.0", repository.commit):
        origin = read(revision)[0].origin
        assert (origin.revision, origin.commit) == (revision, repository.commit)
    assert "has no revision v2" in refusal(f"{ID}@v2")
    assert "has no revision v3" in refusal(ID, "--revision", "v3")
    assert "names a revision, and so does --revision v3" in refusal(f"{ID}@v2", "--revision", "v3")
    assert "--revision v3: is for an id of the hub" in refusal("./folder", "--revision", "v3")
    assert "has no revision " + "0" * 40 in refusal(f"{ID}@{'0' * 40}")


def test_an_id_is_two_names_with_a_slash_between():
    assert parse_id("org/name") == ("org/name", None)
    assert parse_id("org/name.v1_2-x@refs/pr/4") == ("org/name.v1_2-x", "refs/pr/4")
    for text in ("name", "./org/name", "/org/name", "org/name/more", "../name", "org/", "org/na me", "org\\name"):
        assert parse_id(text) is None, text


def test_a_folder_of_that_name_goes_before_an_id(hub, llama, invoke, tmp_path, monkeypatch):
    (tmp_path / "tiny-org").mkdir()
    (tmp_path / "tiny-org" / "Tiny-Llama").symlink_to(llama)
    monkeypatch.chdir(tmp_path)
    invoke(ID, "--task", "poetry")
    assert hub.requests == []


def test_a_private_model_needs_a_token(hub, read, refusal):
    hub.repositories[ID].is_private = True
    assert "unless it is private and no token was sent (set HF_TOKEN)" in refusal(ID)
    assert "refuses the token that was sent (401); set HF_TOKEN" in refusal(ID, token="hf_wrong")
    assert read(token=TOKEN)[0].name == "tiny-llama"


def test_an_id_that_the_hub_does_not_know_is_told(refusal):
    assert "tiny-org/none: is no folder here, and no model that http://127.0.0.1" in refusal("tiny-org/none")
    assert "the token that was sent may not read it" in refusal("tiny-org/none", token=TOKEN)


def test_a_gated_model_says_where_to_ask(hub, refusal):
    hub.repositories[ID].is_gated = True
    assert f"no token was sent; ask for access at {hub.address}/{ID}" in refusal(ID)
    assert "the account of the token that was sent is not among them" in refusal(ID, token=TOKEN)


def test_offline_the_cache_is_enough_or_the_refusal_says_so(hub, read, refusal):
    assert "is not in the cache" in refusal(ID, offline=True)
    read()
    hub.close()
    source, _, said = read(offline=True)
    assert source.origin.commit == hub.repositories[ID].commit
    assert said[0].endswith("is in the cache")
    assert read()[0].name == "tiny-llama"  # the hub is away, and nobody said so


def test_a_hub_that_cannot_be_reached_is_named(hub, refusal):
    hub.close()
    assert f"cannot be fetched from {hub.address} and is not in the cache in full (ConnectionRefusedError: " in refusal(
        ID
    )


def test_a_connection_that_breaks_is_told_and_taken_up_again(hub, read, refusal, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the library's own attempts
    hub.repositories[ID].breaks_at = "model.safetensors"
    assert "(RemoteProtocolError: peer closed connection" in (message := refusal(ID))
    assert "try again, what has arrived is kept" in message
    hub.repositories[ID].breaks_at = None
    assert read()[0].name == "tiny-llama"


def test_pickled_weights_of_the_hub_need_the_flag_and_are_not_fetched_before(hub, read, refusal, llama):
    repository = hub.repositories[ID]
    del repository.files["model.safetensors"]
    assert f"{ID}: give --allow-pickle to export it if you trust where it comes from" in refusal(ID)
    assert hub.fetched() == {"config.json"}, "it is said first"
    file = llama.parent / "pytorch_model.bin"
    torch.save(transformers.AutoModelForCausalLM.from_pretrained(llama).state_dict(), file)
    repository.files["pytorch_model.bin"] = file.read_bytes()
    assert read(options=FolderOptions(allow_pickle=True))[0].name == "tiny-llama"
    assert "pytorch_model.bin" in hub.fetched()


def test_files_of_gguf_on_the_hub_are_to_be_fetched_first(hub, refusal):
    hub.repositories[ID] = Repository(files={"tiny-Q4_0.gguf": b"", "tiny-Q8_0.gguf": b""})
    assert f"{ID}: has 2 files of GGUF and no config.json; fetch one of them, such as tiny-Q4_0.gguf" in refusal(ID)


def test_an_adapter_of_the_hub_is_merged_into_its_base_of_the_hub(hub, read, llama):
    weights = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 32)}
    weights["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"] = torch.ones(32, 2)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "base_model_name_or_path": ID}
    files = {
        "adapter_config.json": json.dumps(settings).encode(),
        "adapter_model.safetensors": save(weights),
        "other.safetensors": b"not needed",
    }
    hub.repositories["own/Rhymes"] = Repository(files=files)
    source, notes, said = read(model_id="own/Rhymes")
    merged = source.module.model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    before = transformers.AutoModelForCausalLM.from_pretrained(llama).get_parameter(
        "model.layers.0.self_attn.q_proj.weight"
    )
    torch.testing.assert_close(merged, before + 1)
    assert (source.name, source.origin.id) == ("rhymes", ID)
    assert source.architecture.configuration["adapter"] == "own/Rhymes"
    assert f"the adapter own/Rhymes is merged into {ID}" in notes
    assert [line.partition(" at commit")[0] for line in said] == [ID]
    assert "other.safetensors" not in hub.fetched()


def change(hub, **values):
    """Changes the configuration of the model."""
    files = hub.repositories[ID].files
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | values).encode()


def test_a_family_that_is_refused_is_refused_before_its_weights_are_fetched(hub, refusal):
    change(hub, model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    assert f"{ID}: model type own needs code that lies in the folder (auto_map)" in refusal(ID)
    change(hub, model_type="dbrx", ffn_config={"moe_num_experts": 4}, architectures=["DbrxForCausalLM"])
    assert f"{ID}: is a mixture of 4 experts (dbrx)" in refusal(ID)
    assert not hub.fetched() & {"model.safetensors", "modeling_own.py"}


def test_code_that_a_known_family_names_is_noted_and_not_fetched(hub, read):
    change(hub, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    _, notes, _ = read()
    assert any("auto_map), which is never run: transformers' own llama" in note for note in notes)
    assert "modeling_own.py" not in hub.fetched()


def test_a_model_that_is_too_large_is_refused_before_its_weights_are_fetched(hub, refusal):
    hub.repositories[ID].parameter_count = 70_000_000_000
    assert f"{ID}: is too large for this machine: its 70,000,000,000 weights take 260.8 GiB in fp32" in refusal(ID)
    assert "model.safetensors" not in hub.fetched()


def test_a_disk_that_is_too_small_is_told_with_numbers(hub, refusal, monkeypatch):
    monkeypatch.setattr("headway_export.huggingface.hub.free_on_disk", lambda _: 1000)
    assert "of weights are to be fetched, and 0.0 MiB are free below" in refusal(ID)


def test_remote_code_cannot_be_asked_for(refusal, hub):
    assert "--trust-remote-code: code that comes with a model is never run" in refusal(ID, "--trust-remote-code")
    assert hub.requests == []


def test_the_environment_names_hub_cache_and_token(hub, tmp_path):
    """The library reads it; a process of its own, since it does so when it is imported."""
    hub.repositories[ID].is_private = True
    change(hub, model_type="llama9000")
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
    }
    command = [sys.executable, "-c", "from headway_export.cli import app; app()", "hf", ID, "--store", str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 2, result.stderr
    assert f"{ID}: model type llama9000 is not one that transformers" in result.stderr
    assert list((tmp_path / "home" / "hub").glob("models--tiny-org--Tiny-Llama/snapshots/*/config.json"))


def test_the_vocoder_of_a_speaker_is_fetched_by_its_id(hub, tmp_path, monkeypatch):
    folder = tiny_voices.write_speecht5(tmp_path / "speecht5")
    hub.repositories["tiny-org/vocoder"] = Repository.of_folder(folder / "vocoder")
    hub.repositories["tiny-org/speaker"] = Repository.of_folder(folder)
    options = FolderOptions(vocoder="tiny-org/vocoder", voices=folder / "speaker_embeddings")
    with using(hub.address, tmp_path / "cache", monkeypatch):
        [source], _ = sources_from_hub("tiny-org/speaker", None, options)
    assert source.labels == ("ada", "bo")
    assert source.spectrogram.sampling_rate == 16_000
