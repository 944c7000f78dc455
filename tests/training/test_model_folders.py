"""Fine-tuning of model folders of Hugging Face `transformers`: whole and by LoRA, resumed, and what is refused."""

import json
import shutil

import pytest
import tiny_huggingface as tiny
import tiny_tuning
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from headway_training.checkpoint import load_model, read_checkpoint
from headway_training.cli import app
from headway_training.data import OwnData
from headway_training.errors import CheckpointError, DataError, ResumeError
from headway_training.huggingface import open_folder
from headway_training.run import RunOptions, run_training

LORA = ("lora.rank=4", "lora.dropout=0.1")
ON_CHATS = ("optimization.batch_size=", "augmentation.subword_splitting=")
"""What the recipe of running text has and conversations do not."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    tiny_tuning.write_folders(root)
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_tuning.write_data(tmp_path_factory.mktemp("data"))


def _weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", tiny_tuning.RECIPES)
@pytest.mark.parametrize("settings", [(), LORA], ids=["whole", "lora"])
def test_the_loss_falls_and_what_is_left_is_a_model_folder(root, data, name, settings):
    folder = tiny_tuning.tune(root, data, name, *settings, to=f"falls-{name}-{len(settings)}", steps=30)
    checkpoint = read_checkpoint(folder)
    history = checkpoint.training.history
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    config = transformers.AutoConfig.from_pretrained(folder)
    if checkpoint.labels:
        assert [config.id2label[index] for index in range(config.num_labels)] == list(checkpoint.labels)
    assert not any("lora" in tensor for tensor in _weights(folder))
    model = getattr(transformers, config.architectures[0])
    _, report = model.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    if name != "pictures":
        own = transformers.AutoTokenizer.from_pretrained(root / tiny_tuning.FOLDERS[name])
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer("the old fire").input_ids == own("the old fire").input_ids
        assert tokenizer.chat_template == own.chat_template


def test_lora_changes_the_matrices_it_names_and_the_head_alone(root, data):
    settings = ("lora.rank=2", 'lora.target_modules=["query", "value"]')
    folder = tiny_tuning.tune(root, data, "topics", *settings, to="named")
    before, after = _weights(root / "bert"), _weights(folder)
    changed = {name for name, tensor in after.items() if name not in before or not torch.equal(tensor, before[name])}
    layer = "bert.encoder.layer.0.attention.self."
    assert changed == {f"{layer}query.weight", f"{layer}value.weight", "classifier.weight", "classifier.bias"}
    difference = after[f"{layer}query.weight"] - before[f"{layer}query.weight"]
    assert torch.linalg.matrix_rank(difference, rtol=1e-4) == 2


def test_a_state_of_lora_holds_what_is_trained_alone(root, data):
    tiny_tuning.tune(root, data, "story", *LORA, to="small-state")
    (state,) = (root / "small-state" / "state").glob("step-*.pt")
    parts = torch.load(state, weights_only=True)["parts"]
    assert parts[0]
    assert all("lora_" in name for name in parts[0])
    assert all("lora_" in name for name in load_file(root / "small-state" / "best.safetensors"))


def test_a_resumed_run_must_start_from_the_same_folder(root, data, tmp_path):
    tiny_tuning.tune(root, data, "story", to="begun", steps=2)
    other = shutil.copytree(root / "gpt2", tmp_path / "other")
    options = RunOptions(
        recipe="tiny-shakespeare",
        settings=(*tiny_tuning.RECIPES["story"][1], "name=story"),
        own_data=OwnData(train=str(data["story"]), valid=str(data["story"])),
        output=root / "begun",
        init=other,
        max_steps=2,
        resume=True,
    )
    with pytest.raises(ResumeError, match=r"begun with other settings: recipe\.init\.checkpoint was .*gpt2"):
        run_training(options, Console(quiet=True))


def test_a_head_is_kept_where_the_labels_are_the_folders_and_fresh_where_they_are_not(root, data, tmp_path):
    still = ("optimization.learning_rate=1e-9", "optimization.weight_decay=0")
    first = tiny_tuning.tune(root, data, "topics", to="head-1")
    again = tiny_tuning.tune(root, data, "topics", *still, to="head-2", steps=1)
    assert not torch.equal(_weights(first)["classifier.weight"], _weights(again)["classifier.weight"])
    tuned = RunOptions(
        recipe="ag-news",
        settings=(*tiny_tuning.RECIPES["topics"][1], *still),
        own_data=OwnData(train=str(data["topics"]), valid=str(data["topics"])),
        output=tmp_path / "kept",
        init=first,
        max_steps=1,
    )
    kept = run_training(tuned, Console(quiet=True))
    torch.testing.assert_close(_weights(first)["classifier.weight"], _weights(kept)["classifier.weight"])
    licences = [read_checkpoint(folder).license for folder in (first, kept)]
    assert licences == ["that of bert, which it was fine-tuned from"] * 2


def test_another_set_of_as_many_labels_gives_an_own_checkpoint_a_fresh_head(tmp_path, reviews, tiny_settings, capsys):
    def run(to, file, init=None, rate=1e-9):
        options = RunOptions(
            recipe="ag-news",
            settings=(
                *(one for one in tiny_settings["ag-news"] if init is None or not one.startswith("tokenizer.")),
                *("optimization.evaluations=1", f"optimization.learning_rate={rate}"),
            ),
            own_data=OwnData(train=str(file), valid=str(file)),
            output=tmp_path / to,
            init=init,
            max_steps=1,
        )
        return run_training(options, Console(soft_wrap=True))

    first = run("first", reviews, rate=0.1)
    other = tmp_path / "other.csv"
    other.write_text(reviews.read_text(encoding="utf-8").replace("praise", "yes").replace("blame", "no"))
    second = run("second", other, first)
    assert "for other labels in the checkpoint, so they start fresh: head.output.weight" in capsys.readouterr().out
    run("third", reviews, first)
    assert "for other labels" not in capsys.readouterr().out
    before, after = (load_model(folder)[0].state_dict() for folder in (first, second))
    assert not torch.equal(before["head.output.weight"], after["head.output.weight"])


def test_a_run_ends_when_validation_gets_no_better(root, data):
    settings = ("optimization.evaluations=12", "optimization.patience=2", "optimization.learning_rate=1e-9")
    folder = tiny_tuning.tune(root, data, "topics", *settings, "optimization.weight_decay=0", to="patient")
    assert read_checkpoint(folder).training.step_count == 3


# Conversations


def _chat(root, template, *, ends=2):
    folder = root / f"chat-{abs(hash(template))}"
    tiny.write_model(folder, "llama")
    tiny.write_tokenizer(folder, frame="$A", chat_template=template)
    return open_folder(folder, "generation").chat_format()


TURNS = [
    {"role": "user", "content": "is it an old fire"},
    {"role": "assistant", "content": "no it is rain"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "it is so"},
]


def test_the_assistants_tokens_are_those_that_a_template_marks(root):
    marked, grown = _chat(root, tiny_tuning.MARKED_CHAT), _chat(root, tiny_tuning.CHAT)
    assert marked.encode(TURNS) == grown.encode(TURNS)
    ids, mask = grown.encode(TURNS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(grown._path)
    expected_ids, expected_mask = [], []
    for turn in TURNS:
        content = tokenizer(turn["content"], add_special_tokens=False).input_ids
        own = turn["role"] == "assistant"
        expected_ids += [3 if own else 1, *content, 2]
        expected_mask += [False, *([own] * (len(content) + 1))]
    assert ids == expected_ids
    assert mask == expected_mask


def test_what_a_template_writes_after_the_end_token_is_not_the_assistants(root):
    line_end = tiny_tuning.CHAT.replace("m.content + '</s>'", "m.content + '</s>' + 'e'")
    ids, mask = _chat(root, line_end).encode(TURNS[:2])
    assert ids[-2] == 2
    assert mask[-2:] == [True, False]


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_it_marks(root):
    forgets = tiny_tuning.CHAT.replace("m.content +", "(m.content if loop.last or m.role == 'user' else '') +")
    chat = _chat(root, forgets)
    with pytest.raises(DataError, match=r"writes turns differently once others follow.*mark it with"):
        chat.encode(TURNS)
    chat.encode(TURNS[:2])


def test_conversations_that_cannot_be_learnt_from_are_refused(root, tmp_path):
    chat = _chat(root, tiny_tuning.CHAT)
    with pytest.raises(DataError, match=r"holds the special token '</s>'"):
        chat.encode([{"role": "user", "content": "so </s>"}, TURNS[1]])
    with pytest.raises(DataError, match="refuses a conversation: only users"):
        _chat(root, "{{ raise_exception('only users') }}").encode(TURNS)
    with pytest.raises(CheckpointError, match="has no chat template"):
        open_folder(root / "gpt2", "generation").chat_format()


# What is refused


def _fail(*words):
    result = CliRunner().invoke(app, ["run", *words], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    assert len(result.output.strip().splitlines()) == 1, result.output
    return result.output


def _words(recipe, data, folder, to, *settings):
    words = [recipe, "--train", str(data), "--valid", str(data), "--init", str(folder), "--output", str(to)]
    for setting in ("tracker=none", *settings):
        words += ["--set", setting]
    return words


def test_what_cannot_be_fine_tuned_is_told_in_one_line(root, data, tmp_path):
    run, short = tmp_path / "run", "model.max_length=24"
    assert "holds ViTForImageClassification (vit), and a recipe for text_classification needs a text model" in _fail(
        *_words("ag-news", data["topics"], root / "vit", run, short)
    )
    assert "holds BertForSequenceClassification (bert), and a recipe for generation needs a decoder" in _fail(
        *_words("tiny-shakespeare", data["story"], root / "bert", run, short)
    )
    assert "translation needs 'recurrent' or 'transformer'" in _fail(
        *_words("multi30k-en-de", data["story"], root / "bert", run)
    )
    assert f"model.max_length is 128, and the model in {root / 'bert'} takes at most 48 tokens" in _fail(
        *_words("ag-news", data["topics"], root / "bert", run)
    )
    assert "lora.target_modules: the model has no linear layer 'querie'; did you mean 'query'?" in _fail(
        *_words("ag-news", data["topics"], root / "bert", run, short, 'lora.target_modules=["querie"]')
    )
    assert "lora: is for a model folder of transformers" in _fail(
        "ag-news", "--train", str(data["topics"]), "--valid", str(data["topics"]), "--set", "lora.rank=2"
    )
    assert "each give the model; leave one out" in _fail(
        *_words("ag-news", data["topics"], root / "bert", run, short), "--model", "bert-base"
    )
    assert "unknown key 'model.d_model'" in _fail(
        *_words("ag-news", data["topics"], root / "bert", run, short, "model.d_model=8")
    )
    assert "has no chat template" in _fail(
        *_words("tiny-shakespeare", data["chats"], root / "gpt2", run, short, *ON_CHATS)
    )
    assert "preprocessing: prepares images otherwise than" in _fail(
        *_words("cifar10", data["pictures"], root / "vit", run)
    )
    assert not (run / "run.json").exists()


def test_a_folder_that_is_incomplete_is_told_in_one_line(root, data, tmp_path):
    broken, run, short = tmp_path / "broken", tmp_path / "run", "model.max_length=24"
    words = _words("ag-news", data["topics"], broken, run, short)
    shutil.copytree(root / "bert", broken)
    (broken / "model.safetensors").unlink()
    assert "has no weights" in _fail(*words)
    (broken / "model.safetensors").write_bytes((root / "bert" / "model.safetensors").read_bytes()[:-1])
    assert "model.safetensors: cannot be read as safetensors (it has " in _fail(*words)
    shutil.copy(root / "gpt2" / "model.safetensors", broken)
    assert "are not the weights of a model for text_classification" in _fail(*words)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    assert "the tokenizer has a token of id 79, and the model's vocabulary ends at 19" in _fail(*words)
    (broken / "config.json").write_text(json.dumps({"model_type": "tomorrow"}))
    assert "model type tomorrow is not one that transformers" in _fail(*words)
    (broken / "config.json").write_text("{")
    assert "config.json: cannot be read (" in _fail(*words)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not JSON"),
        ('{"text": "so"}', "line 2: is no conversation"),
        ('{"messages": [{"role": "user"}]}', "line 2: is no conversation"),
        ('{"messages": [{"role": "user", "content": "so"}]}', "line 2: the assistant says nothing"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(root, data, tmp_path, line, message):
    file = tmp_path / "chats.jsonl"
    file.write_text(data["chats"].read_text().splitlines()[0] + "\n" + line + "\n")
    words = _words("tiny-shakespeare", file, root / "llama", tmp_path / "run", "model.max_length=24", *ON_CHATS)
    assert message in _fail(*words)
