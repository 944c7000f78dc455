"""Folders of Hugging Face `transformers` that cannot be exported: one sentence, exit code 2, and nothing written."""

import json

import onnx_ir as ir
import onnxruntime
import pytest
import tiny_embedders
import tiny_families
import tiny_huggingface as tiny
import tiny_vision
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.huggingface import FolderOptions, from_folder
from headway_export.source import check_chat_template
from headway_export.tracing import trace
from headway_server.bundles import Task
from headway_server.preprocessing import ChatTurn
from headway_training.models.parts.attention import causal_attention


@pytest.fixture
def llama(tmp_path):
    """A folder that can be exported."""
    folder = tiny.write_model(tmp_path / "Tiny-Llama", "llama")
    tiny.write_tokenizer(folder, frame="<s> $A")
    return folder


def change(folder, **values):
    """Changes `config.json`; None takes an entry out."""
    file = folder / "config.json"
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def refusal(folder, *flags):
    """Returns the sentence that a folder is refused with."""
    store = folder.parent / "store"
    result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store), *flags])
    assert result.exit_code == 2, result.output
    assert not store.exists() or not any(store.iterdir())
    message = result.output.strip()
    assert "Traceback" not in message
    assert len(message.splitlines()) == 1, message
    return message


def test_a_folder_without_weights_is_refused(llama):
    (llama / "model.safetensors").unlink()
    assert "has no weights" in refusal(llama)


def test_a_shard_that_is_missing_is_named(llama):
    (llama / "model.safetensors").rename(llama / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "names model-00002-of-00002.safetensors, which is not there" in refusal(llama)


def test_weights_that_lack_some_of_the_models_are_refused(llama):
    change(llama, num_hidden_layers=3)
    assert "weights of LlamaForCausalLM are not there (model.layers.2." in refusal(llama)


def test_weights_of_another_size_are_refused(llama):
    change(llama, intermediate_size=56)
    assert "weights of LlamaForCausalLM are of another shape (model.layers.0.mlp." in refusal(llama)


def test_a_file_that_is_no_safetensors_is_refused(llama):
    (llama / "model.safetensors").write_bytes(b"not weights")
    assert "model.safetensors: cannot be read as safetensors" in refusal(llama)


def test_a_model_that_is_too_large_for_the_machine_is_refused_before_it_is_loaded(llama, monkeypatch):
    monkeypatch.setattr("headway_export.space.available_bytes", lambda _: 10_000)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert "is too large for this machine: its 20,640 weights take 0.1 MiB in fp32" in refusal(llama)


def test_pickled_weights_need_a_flag_that_says_what_it_risks(llama):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    torch.save(model.state_dict(), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    message = refusal(llama)
    assert "give --allow-pickle to export it if you trust where it comes from, or convert it to safetensors" in message
    assert "its weights are pickled (pytorch_model.bin), and a pickle may run any code when it is read" in message
    source, _ = from_folder(llama, FolderOptions(allow_pickle=True))
    assert (source.task, source.name) == (Task.GENERATION, "tiny-llama")


def test_a_family_that_transformers_does_not_know_is_refused(llama):
    change(llama, model_type="llama9000")
    assert "model type llama9000 is not one that transformers" in refusal(llama)


def test_a_configuration_of_a_newer_version_is_noted(llama):
    change(llama, transformers_version="99.1.0")
    assert "config.json was written by transformers 99.1.0, and " in from_folder(llama, FolderOptions())[1][-1]
    change(llama, transformers_version="new")
    assert from_folder(llama, FolderOptions())[1] == ()


def test_code_in_a_folder_is_never_run(llama):
    change(llama, model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (llama / "modeling_own.py").write_text("raise SystemExit(99)")
    assert "no code of a folder is ever run" in refusal(llama)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(llama):
    tiny.write_tokenizer(llama, extra_words=5)
    assert "the tokenizer has a token of id 84, and the model's vocabulary ends at 79" in refusal(llama)


def test_a_folder_without_a_tokenizer_is_refused(llama):
    for file in llama.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refusal(llama)


@pytest.mark.parametrize(
    "architectures", [None, [], ["LlamaModel"], ["LlamaForCausalLM", "BertForTokenClassification"]]
)
def test_a_task_that_cannot_be_told_is_asked_for(llama, architectures):
    change(llama, architectures=architectures)
    assert "the task cannot be told from architectures" in refusal(llama)
    assert from_folder(llama, FolderOptions(task="generation"))[0].task is Task.GENERATION


def test_a_task_that_is_not_exported_is_refused(llama):
    assert "--task poetry: this command exports generation" in refusal(llama, "--task", "poetry")


def test_a_folder_that_is_none_is_refused(tmp_path):
    assert "is no folder, and no id of the hub" in refusal(tmp_path / "org" / "model")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(tmp_path / "empty")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"is_encoder_decoder": True}, "is an encoder-decoder (llama), and is not exported for generation"),
    ],
)
def test_what_a_configuration_asks_for_and_no_graph_computes_is_refused(llama, values, message):
    change(llama, **values)
    assert message in refusal(llama)


@pytest.mark.parametrize(
    ("head", "values", "message"),
    [
        ("ForSequenceClassification", {"problem_type": "regression"}, "is a regression to 3 numbers"),
        (
            "ForSequenceClassification",
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.Tanh"},
            "its score is made by torch.nn.Tanh",
        ),
    ],
)
def test_answers_that_no_call_gives_are_refused(tmp_path, head, values, message):
    folder = tiny.write_model(tmp_path / "model", "bert", head, **values)
    tiny.write_tokenizer(folder)
    assert message in refusal(folder)


def test_sampling_defaults_and_end_tokens_come_from_the_generation_config(llama):
    draws = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    others = {"no_repeat_ngram_size": 3, "stop_strings": ["x"], "min_new_tokens": 2, "num_beams": 4}
    tiny.write_generation_config(llama, eos_token_id=[7, 2], pad_token_id=0, **draws, **others)
    source, notes = from_folder(llama, FolderOptions())
    assert (source.special_tokens.eos, source.special_tokens.more_eos) == (2, (7,))
    defaults = source.sampling_defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 50, 0.9)
    assert notes == (
        "generation_config: num_beams, no_repeat_ngram_size: not applied by the server",
        "generation_config: min_new_tokens 2, stop_strings ['x']: give these with a call, whose defaults are others",
    )
    assert source.prompt_prefix == (1,)


def test_what_a_generation_config_says_of_tokens_that_the_model_lacks_is_left_out(llama):
    tiny.write_generation_config(llama, eos_token_id=[999, 2], bos_token_id=999, do_sample=True, top_k=9999)
    source, notes = from_folder(llama, FolderOptions())
    assert (source.special_tokens.eos, source.special_tokens.more_eos, source.special_tokens.bos) == (2, (), 1)
    assert source.sampling_defaults.top_k == tiny.WORDS
    assert notes == (f"generation_config: eos_token_id 999: left out, since the model has {tiny.WORDS} tokens",)


@pytest.mark.parametrize("scaling", ["llama3", "yarn", "linear"])
def test_rotary_positions_may_be_scaled_by_a_fixed_factor(tmp_path, scaling):
    rope = {"rope_type": scaling, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 24}
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = tiny.write_model(tmp_path / "model", "llama", rope_parameters=rope)
    tiny.write_tokenizer(folder)
    assert from_folder(folder, FolderOptions())[0].limits.max_total_tokens == tiny.LENGTH


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_the_length_bound_it(tmp_path, kind):
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    if kind == "longrope":
        rope |= {"short_factor": [1.5] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 24}
    bound = rope.get("original_max_position_embeddings", tiny.LENGTH)
    family = "phi3" if kind == "longrope" else "llama"
    changes = {} if kind == "dynamic" else {"original_max_position_embeddings": 24}
    folder = tiny.write_model(tmp_path / "model", family, rope_parameters=rope, **changes)
    tiny.write_tokenizer(folder)
    source, notes = from_folder(folder, FolderOptions())
    assert source.limits.max_total_tokens == bound
    if kind == "longrope":
        assert notes[0].startswith(
            "texts of at most 24 tokens: for more than 24 tokens its rotary positions are others"
        )
        assert "--max-length 40: for more than 24 tokens" in refusal(folder, "--max-length", "40")
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.arange(3, 3 + bound)[None]
    with torch.inference_mode():
        expected = own(ids, use_cache=False).logits
        found = source.module.logits(source.module.hidden_states(ids, torch.arange(bound)[None], causal_attention()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_chat_template_of_parts_is_given_parts(tmp_path):
    """As SmolVLM's, which leaves a text out that is none, and lies in the file of a processor."""
    template = "{% for m in messages %}<s>{% for part in m.content %}{{ part.text }}{% endfor %}</s>{% endfor %}"
    folder = tiny.write_model(tmp_path / "model", "smolvlm")
    tiny.write_tokenizer(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    source, notes = from_folder(folder, FolderOptions())
    chat = check_chat_template(source.chat_template, source.tokenizer, source.special_tokens)
    turns = (ChatTurn(role="user", content="the rain"), ChatTurn(role="assistant", content="so"))
    assert chat.prompt(turns, "conversation", ()).text == "<s>the rain</s><s>so</s>"
    without, reason = notes
    assert without == "images: not served; the bundle is the language model inside, for texts"
    assert reason.startswith("images: their processor cannot be followed")


def test_images_are_named_of_a_family_whose_language_model_the_library_takes_out_itself(tmp_path):
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    _, text = tiny.STATEFUL["qwen3_5_text"]
    config = transformers.Qwen3_5Config(text_config=text, vision_config=eyes, image_token_id=3)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    tiny.write_tokenizer(tmp_path / "model", frame="$A")
    source, notes = from_folder(tmp_path / "model", FolderOptions())
    assert notes == ("images: not served; the bundle is the language model inside, for texts",)
    assert source.media_tokens == (3,)


GENERIC = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"


@pytest.mark.parametrize("template", [None, GENERIC, GENERIC.replace("['content']", "['content'] | upper")])
def test_a_reranker_whose_template_has_no_place_for_a_pair_is_asked_what_its_family_was(tmp_path, template):
    folder = tiny.write_model(tmp_path / "model", "qwen3")
    tiny.write_tokenizer(folder, frame="$A", chat_template=template)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for word, letter in {"yes": "x", "no": "z"}.items():
        vocabulary[word] = vocabulary.pop(f"Ġ{letter}")
        merges.remove(["Ġ", letter])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "README.md").write_text("---\npipeline_tag: text-ranking\n---\n")
    source, notes = from_folder(folder, FolderOptions())
    assert "Judge whether the Document meets the requirements" in source.scoring.template
    assert len(notes) == 1
    assert "asks about a pair in the words of Qwen3-Reranker" in notes[0]


@pytest.mark.parametrize("family", tiny.FURTHER_DECODERS)
def test_further_decoders_follow_injected_attention(tmp_path, family):
    """`from_folder` holds them against their own attention; tests/integration exports those of the table."""
    folder = tiny.write_model(tmp_path / "model", family)
    tiny.write_tokenizer(folder)
    source, _ = from_folder(folder, FolderOptions(max_length=tiny.LENGTH))
    assert (source.task, source.limits.max_total_tokens) == (Task.GENERATION, tiny.LENGTH)


def test_several_labels_may_apply_to_a_text(tmp_path):
    folder = tiny.write_model(
        tmp_path / "model", "bert", "ForSequenceClassification", problem_type="multi_label_classification"
    )
    tiny.write_tokenizer(folder)
    scheme = from_folder(folder, FolderOptions())[0].classification
    assert (scheme.kind, scheme.thresholds) == ("multi_label", (0.5, 0.5, 0.5))


@pytest.mark.parametrize("family", tiny.ENCODER_DECODERS)
def test_classifiers_with_a_decoder_answer_as_in_transformers(tmp_path, family):
    folder = tiny.write_model(tmp_path / "model", family, "ForSequenceClassification")
    tiny.write_tokenizer(folder)
    source, _ = from_folder(folder, FolderOptions())
    own = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for pair in ("the old fire",), ("an answer", "is not in the rain"):
        ids = torch.tensor([source.tokenizer.encode(*pair).ids])
        padded = torch.nn.functional.pad(ids, (0, 3))
        with torch.no_grad():
            expected = own(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            found = source.module(padded, (torch.arange(padded.shape[1]) < ids.shape[1]).long()[None])
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", tiny_families.OF_OWN_FORMS)
def test_a_text_in_a_batch_of_a_graph_is_answered_as_alone_in_transformers(tmp_path, family):
    """Of families whose own code reads padding, or chooses by what no graph knows."""
    folder = tiny_families.write_family(tmp_path / "model", family, spread=0.2)
    source, _ = from_folder(folder, FolderOptions(max_length=40))
    (graph,) = trace(source.module, source.task).graphs
    session = onnxruntime.InferenceSession(ir.to_proto(graph.model).SerializeToString())
    own = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = torch.randint(10, 70, (2, 40), generator=torch.Generator().manual_seed(0))
    for count, total in ((3, 3), (7, 18), (21, 40)):
        rows, mask = ids[:, :total].clone(), torch.ones(2, total, dtype=torch.int64)
        rows[0, count:], mask[0, count:] = source.special_tokens.pad, 0
        (found,) = session.run(["logits"], {"input_ids": rows.numpy(), "attention_mask": mask.numpy()})
        for row, length in ((0, count), (1, total)):
            with torch.no_grad():
                expected = own(rows[row : row + 1, :length], attention_mask=mask[row : row + 1, :length]).logits
            torch.testing.assert_close(torch.from_numpy(found[row : row + 1]), expected, rtol=1e-4, atol=1e-5)


def test_a_model_whose_answers_depend_on_padding_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("headway_training.folders.keep_padding_out", lambda _: None)
    folder = tiny_families.write_family(tmp_path / "convbert", "convbert", spread=0.2)
    assert "padded to 48, so its answer would depend on the other texts of a batch" in refusal(folder)


# Embeddings


def test_an_encoder_is_asked_for_its_pooling(tmp_path):
    folder = tiny_embedders.write_encoder(tmp_path / "model", "bert")
    assert "the task cannot be told" in refusal(folder)
    assert "give --pooling, one of cls, max, mean" in refusal(folder, "--task", "text_embedding")
    assert "--pooling median: is none of" in refusal(folder, "--pooling", "median")
    assert "--prompt query: give it as NAME=TEXT" in refusal(folder, "--pooling", "mean", "--prompt", "query")
    assert "--pooling is for text_embedding" in refusal(folder, "--pooling", "mean", "--task", "generation")
    source, _ = from_folder(folder, FolderOptions(pooling="mean"))
    assert (source.task, source.module.pooling) == (Task.TEXT_EMBEDDING, "mean")


@pytest.mark.parametrize("says_so", ["modules", "readme", "no", "but not the pooling"])
def test_a_folder_of_instructor_does_not_pool_the_prompt(tmp_path, says_so):
    folder = tiny_embedders.write_sentence_transformer(tmp_path / "model", "t5", pools_prompt=None)
    file = folder / "modules.json"
    if says_so == "modules":
        kinds = (
            file.read_text().replace("Transformer", "INSTRUCTORTransformer").replace('Pooling"', 'INSTRUCTORPooling"')
        )
        file.write_text(kinds.replace("1_INSTRUCTORPooling", "1_Pooling"))
    elif says_so != "no":
        (folder / "README.md").write_text("```python\nfrom InstructorEmbedding import INSTRUCTOR\n```\n")
    if says_so == "but not the pooling":
        pooling = folder / "1_Pooling" / "config.json"
        pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": True}))
    source, notes = from_folder(folder, FolderOptions())
    is_instructor = says_so in {"modules", "readme"}
    assert source.pools_prompt != is_instructor
    assert any("give instructions with --prompt" in note for note in notes) == is_instructor


def test_modules_that_are_not_supported_are_named(tmp_path):
    folder = tiny_embedders.write_sentence_transformer(tmp_path / "model", "bert")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "own.Router", "path": "3"}]))
    assert "has Router; a folder is exported that has Transformer and Pooling" in refusal(folder)
    (folder / "modules.json").write_text(json.dumps(modules[1:]))
    assert "has Pooling, Normalize; a folder" in refusal(folder)
    for elsewhere in ("../other", "/tmp"):
        (folder / "modules.json").write_text(json.dumps([{**modules[0], "path": elsewhere}, *modules[1:]]))
        assert "lies outside of the folder" in refusal(folder)
    (folder / "modules.json").write_text("[1]")
    assert "modules.json: cannot be read as a list of modules" in refusal(folder)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode": "lasttoken", "include_prompt": False})
    )
    assert "include_prompt" in refusal(folder)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "splendid"}))
    assert "pooling splendid is none of" in refusal(folder)
    (folder / "1_Pooling" / "config.json").unlink()
    assert "says how token vectors become one; fetch the folder again" in refusal(folder)


def test_a_pickled_module_needs_the_flag_too(tmp_path):
    folder = tiny_embedders.write_sentence_transformer(tmp_path / "model", "bert", width=8)
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    torch.save(weights, folder / "2_Dense" / "pytorch_model.bin")
    (folder / "2_Dense" / "model.safetensors").unlink()
    assert "2_Dense: give --allow-pickle to export it" in refusal(folder)
    source, _ = from_folder(folder, FolderOptions(allow_pickle=True))
    torch.testing.assert_close(source.module.head[0].linear.weight, weights["linear.weight"])


def test_text_in_small_letters_is_read_as_the_folder_asks(tmp_path):
    folder = tiny_embedders.write_sentence_transformer(tmp_path / "model", "bert")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20, "do_lower_case": True}))
    source, _ = from_folder(folder, FolderOptions())
    assert source.tokenizer.encode("The RAIN").ids == source.tokenizer.encode("the rain").ids
    assert source.limits.max_input_tokens == 20
    assert from_folder(folder, FolderOptions(max_length=30))[0].limits.max_input_tokens == 30


@pytest.mark.parametrize("family", ["t5", "gemma3_text"])
def test_encoders_of_other_families_embed_as_in_transformers(tmp_path, family):
    folder = tiny_embedders.write_sentence_transformer(tmp_path / "model", family)
    source, _ = from_folder(folder, FolderOptions())
    own = (transformers.T5EncoderModel if family == "t5" else transformers.AutoModel).from_pretrained(folder).eval()
    for text in ("the old fire", "an answer is not in the rain"):
        ids = torch.tensor([source.tokenizer.encode(text).ids])
        padded = torch.nn.functional.pad(ids, (0, 3))
        with torch.no_grad():
            states = own(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
            found = source.module(padded, (torch.arange(padded.shape[1]) < ids.shape[1]).long()[None])["embedding"][0]
        torch.testing.assert_close(found, torch.nn.functional.normalize(states.mean(dim=0), dim=-1))


def test_a_folder_of_colberts_authors_has_the_vectors_of_its_own_projection(tmp_path):
    folder = tiny_embedders.write_colbert(tmp_path / "colbert", is_of_authors=True)
    source, notes = from_folder(folder, FolderOptions())
    late = source.scoring.late_interaction
    assert (source.task, notes, source.limits.max_input_tokens) == (Task.TEXT_SCORING, (), 30)
    assert (late.dimension, late.max_query_tokens, late.attends_to_filler) == (8, 20, False)
    assert (late.query_filler, late.query_marker, late.text_marker) == (77, 78, 79)
    weights = load_file(folder / "model.safetensors")
    own = transformers.BertModel(transformers.AutoConfig.from_pretrained(folder), add_pooling_layer=False).eval()
    own.load_state_dict(
        {name[5:]: value for name, value in weights.items() if "pooler" not in name and name[:5] == "bert."}
    )
    ids = torch.tensor([source.tokenizer.encode("the old fire").ids])
    with torch.no_grad():
        states = own(input_ids=ids).last_hidden_state @ weights["linear.weight"].T
        found = source.module(ids, torch.ones_like(ids))["token_vectors"]
    torch.testing.assert_close(found, torch.nn.functional.normalize(states, dim=-1))


def test_a_colbert_whose_marker_is_no_token_is_refused(tmp_path):
    folder = tiny_embedders.write_colbert(tmp_path / "colbert", query_prefix="[Query]")
    assert "query_prefix is '[Query]', which is no token of its tokenizer" in refusal(folder)


@pytest.mark.parametrize(("pooling", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_sparse_vectors_are_weights_of_the_vocabulary(tmp_path, pooling, activation):
    folder = tiny_embedders.write_sparse_encoder(tmp_path / "splade", pooling=pooling, activation=activation)
    source, notes = from_folder(folder, FolderOptions())
    assert (source.task, source.has_sparse_vectors, notes) == (Task.TEXT_EMBEDDING, True, ())
    own = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    ids = torch.tensor([source.tokenizer.encode("the old fire").ids])
    padded = torch.nn.functional.pad(ids, (0, 3))
    with torch.no_grad():
        logits = own(input_ids=ids).logits[0]
        found = source.module(padded, (torch.arange(padded.shape[1]) < ids.shape[1]).long()[None])["embedding"][0]
    weights = torch.log1p(torch.relu(logits))
    weights = torch.log1p(weights) if activation == "log1p_relu" else weights
    torch.testing.assert_close(found, weights.amax(dim=0) if pooling == "max" else weights.sum(dim=0))
    (folder / "modules.json").unlink()
    (folder / "config_sentence_transformers.json").unlink()
    bare, _ = from_folder(folder, FolderOptions(pooling="splade"))
    assert (bare.module.pooling, bare.module.activation) == ("max", "relu")


@pytest.mark.parametrize("is_model2vec", [False, True])
def test_static_embeddings_are_means_of_tokens(tmp_path, is_model2vec):
    folder, vectors, shared = tmp_path / "static", torch.randn(20, 6), torch.arange(tiny.WORDS) % 20
    tiny.write_tokenizer(folder)
    weights = torch.rand(tiny.WORDS)
    stored = {"embeddings": vectors, "mapping": shared, "weights": weights} if is_model2vec else {}
    save_file(stored or {"embedding.weight": vectors[shared]}, folder / "model.safetensors")
    kinds = ["StaticEmbedding", "Normalize"] if is_model2vec else ["StaticEmbedding"]
    modules = [{"idx": index, "name": "", "path": "", "type": f"a.{kind}"} for index, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    source, (note,) = from_folder(folder, FolderOptions(prompts=(("query", "the "),)))
    assert (source.task, source.name, dict(source.prompts)) == (Task.TEXT_EMBEDDING, "static", {"query": "the "})
    assert "--max-length" in note
    ids = source.tokenizer.encode("the old fire").ids
    assert not {1, 2} & set(ids)
    rows = vectors[shared[ids]] * (weights[ids, None] if is_model2vec else 1)
    expected = torch.nn.functional.normalize(rows.mean(dim=0), dim=-1) if is_model2vec else rows.mean(dim=0)
    found = source.module(torch.tensor([[*ids, 0]]), torch.tensor([[1] * len(ids) + [0]]))["embedding"][0]
    torch.testing.assert_close(found, expected)
    assert "not for generation" in refusal(folder, "--task", "generation")
    save_file({"embedding.weight": vectors}, folder / "model.safetensors")
    assert "has 20 vectors, and the tokenizer 80 tokens" in refusal(folder)


# Images


def test_preprocessing_that_a_bundle_cannot_say_is_refused(tmp_path):
    folder = tiny_vision.write_vision_model(tmp_path / "model", "vit")
    given = json.loads((folder / "preprocessor_config.json").read_text())
    for changes, message in (
        ({"do_resize": False}, "images are not resized"),
        ({"resample": 6}, "images are resized by "),
        ({"size": {"shortest_edge": 32}}, "keep their proportions and are not cropped"),
        ({"size": {"height": 40, "width": 40}}, "does not read images of 40 x 40"),
        (
            {"size": {"height": 16, "width": 16}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
            "resize_size is 16",
        ),
    ):
        tiny_vision.write_preprocessing(folder, **given | changes)
        assert message in refusal(folder)
    (folder / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json" in refusal(folder)


def test_pixels_that_are_not_rescaled_are_the_same(tmp_path):
    """`from_folder` compares them."""
    folder = tiny_vision.write_vision_model(tmp_path / "model", "vit")
    given = json.loads((folder / "preprocessor_config.json").read_text())
    tiny_vision.write_preprocessing(
        folder, **given | {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3}
    )
    assert from_folder(folder, FolderOptions())[0].image_preprocessing.std == (0.5, 0.5, 0.5)
    tiny_vision.write_preprocessing(folder, **given | {"do_normalize": False})
    assert from_folder(folder, FolderOptions())[0].image_preprocessing.std == (1.0, 1.0, 1.0)


def test_a_block_sparse_model_is_exported_up_to_where_it_attends_to_all(tmp_path):
    """Past that its answer depends on whether it has read a shorter text before, which turns it to full attention."""
    folder = tiny.write_model(tmp_path / "big-bird", "big_bird", "ForSequenceClassification")
    tiny.write_tokenizer(folder)
    source, notes = from_folder(folder, FolderOptions())
    assert source.limits.max_input_tokens == (5 + 2 * 1) * 16
    assert notes == (
        "texts of at most 112 tokens: for more than 112 tokens its attention is block-sparse, and the bundle's is not",
    )
    assert "--max-length 200: for more than 112 tokens its attention is block-sparse" in refusal(
        folder, "--max-length", "200"
    )
