"""Folders of sentence-transformers and rerankers, exported by one command and served, against `transformers` itself."""

import json

import grpc
import httpx2
import numpy as np
import pytest
import tiny_embedders
import tiny_huggingface as tiny
import torch
import transformers
from safetensors.torch import load_file
from tiny_bundles import write_topic_bundle
from torch import nn
from typer.testing import CliRunner

from headway.oip import grpc_predict_v2_pb2
from headway.oip.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from headway_client import Client, FailedPreconditionError, InvalidArgumentError
from headway_client.cli import app as headway
from headway_export.cli import app
from headway_server.bundles import Precision, open_bundle

from .conftest import serve, serve_saying

TEXTS = ["the old fire", "rain", "an answer is not in the rain", "it is so " * 3]
PROMPTS = {"query": "find: ", "document": ""}
FOLDERS = {
    "minilm": {"family": "bert", "max_seq_length": 24},
    "e5": {"family": "xlm-roberta", "prompts": {**PROMPTS, "passage": "so: "}, "default_prompt": "query"},
    "bge": {"family": "bert", "pooling": "cls", "is_new": True},
    "gte": {"family": "modernbert", "pooling": "cls", "inner": "0_Transformer", "normalizes": False},
    "nomic": {"family": "nomic_bert", "is_new": True},
    "dense": {"family": "mpnet", "pooling": "max", "width": 8, "prompts": PROMPTS, "pools_prompt": False},
    "last": {"family": "qwen3", "pooling": "lasttoken"},
}
SCORERS = {
    "reranker": ("roberta", {}, lambda logit: logit.sigmoid()),
    "raw": (
        "bert",
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        lambda logit: logit,
    ),
    "regression": ("electra", {"problem_type": "regression"}, lambda logit: logit),
}
NLI = {"id2label": {0: "contradiction", 1: "neutral", 2: "entailment"}}
QUANTIZED = {"minilm": {"mean_cosine", "least_cosine", "correlation"}, "raw": {"correlation"}}
"""Exported in int8 too, and the figures that it is judged by."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("embedders")
    found = {name: tiny_embedders.write_sentence_transformer(root / name, **values) for name, values in FOLDERS.items()}
    found["plain"] = tiny_embedders.write_encoder(root / "plain", "bert")
    for name, (family, changes, _) in SCORERS.items():
        found[name] = tiny.write_model(root / name, family, "ForSequenceClassification", num_labels=1, **changes)
        tiny.write_tokenizer(found[name], has_types=family != "roberta")
    found["decoder"] = tiny_embedders.write_reranker(root / "decoder")
    found["colbert"] = tiny_embedders.write_colbert(root / "colbert")
    found["nli"] = tiny.write_model(root / "nli", "bert", "ForSequenceClassification", **NLI)
    tiny.write_tokenizer(found["nli"], has_types=True)
    return found


@pytest.fixture(scope="module")
def store(folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    for name, folder in folders.items():
        flags = ["--pooling", "mean", "--prompt", "query=find: "] if name == "plain" else []
        flags += ["--precision", "fp32", "--precision", "int8"] if name in QUANTIZED else []
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(path), *flags])
        assert result.exit_code == 0, f"{name}: {result.output}"
    write_topic_bundle(path, name="topics")
    return path


@pytest.fixture(scope="module")
def client(store, tmp_path_factory):
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def expected_vector(folder, name, text, *, num_unpooled=0):
    """What sentence-transformers computes of one text, written anew: (E,)."""
    values = FOLDERS.get(name, {"family": "bert", "normalizes": False})
    inner = folder / values.get("inner", "")
    ids = transformers.AutoTokenizer.from_pretrained(inner)(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        states = transformers.AutoModel.from_pretrained(inner, attn_implementation="eager").eval()(ids)[0][0]
    states = states[num_unpooled:]
    pooled = {
        "mean": lambda: states.mean(0),
        "cls": lambda: states[0],
        "max": lambda: states.max(0).values,
        "lasttoken": lambda: states[-1],
    }[values.get("pooling", "mean")]()
    if "width" in values:
        layer = nn.Linear(32, values["width"])
        weights = load_file(folder / "2_Dense" / "model.safetensors")
        layer.load_state_dict({key.removeprefix("linear."): value for key, value in weights.items()})
        with torch.inference_mode():
            pooled = layer(pooled).tanh()
    return (pooled / pooled.norm() if values.get("normalizes", True) else pooled).numpy()


@pytest.mark.parametrize("name", [*FOLDERS, "plain"])
def test_vectors_are_those_of_the_folder(folders, client, name):
    prompt = {"e5": "find: "}.get(name, "")
    found = client.embed_text(TEXTS, model=name, normalize=False).to_numpy()
    expected = np.stack([expected_vector(folders[name], name, prompt + text) for text in TEXTS])
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1.0, float(np.abs(expected).max())))
    scaled = client.embed_text(TEXTS, model=name).to_numpy()
    np.testing.assert_allclose(scaled, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5)


def test_a_prompt_comes_before_every_text(folders, client):
    for name, prompt, text in (
        ("e5", "passage", "so: rain"),
        ("e5", "document", "rain"),
        ("plain", "query", "find: rain"),
    ):
        [result] = client.embed_text("rain", model=name, prompt_name=prompt, normalize=False)
        np.testing.assert_allclose(result.values, expected_vector(folders[name], name, text), atol=1e-5)
    with pytest.raises(InvalidArgumentError, match="is 'poem'; model e5 has the prompts query, document, passage"):
        client.embed_text("rain", model="e5", prompt_name="poem")
    with pytest.raises(InvalidArgumentError, match="is empty; give at least one character"):
        client.embed_text("", model="e5")


def test_a_pooling_may_leave_out_the_prompt_that_tokens_attend_to(folders, client):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["dense"])
    count = len(tokenizer(PROMPTS["query"]).input_ids) - 1  # without the token that ends a text
    found = client.embed_text(TEXTS, model="dense", prompt_name="query").to_numpy()
    for vector, text in zip(found, TEXTS, strict=True):
        expected = expected_vector(folders["dense"], "dense", PROMPTS["query"] + text, num_unpooled=count)
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_a_model_for_embeddings_says_what_it_is(client):
    model = client.get_model("e5").model
    assert (model.task, model.embedding_dimension, model.labels) == ("text_embedding", 32, ())
    assert model.prompt_names == ("query", "document", "passage")
    with pytest.raises(FailedPreconditionError, match="cannot classify texts; ask nli, topics"):
        client.classify_text("rain", model="e5")


def test_the_length_is_what_the_folder_states(client, store):
    assert open_bundle(store / "minilm" / "1").manifest.limits.max_input_tokens == 24
    with pytest.raises(InvalidArgumentError, match="24"):
        client.embed_text("rain " * 30, model="minilm")
    assert client.embed_text("rain " * 30, model="minilm", truncate=True)[0].truncated


@pytest.mark.parametrize("name", QUANTIZED)
def test_int8_is_held_against_fp32(store, name):
    variants = open_bundle(store / name / "1").manifest.variants
    agreed = variants[Precision.INT8].agreement
    assert set(agreed.figures) == QUANTIZED[name]
    assert all(agreed.figures[figure] >= agreed.limits[figure] for figure in QUANTIZED[name])


@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_those_of_transformers(folders, client, name):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folders[name]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[name])
    documents = ["rain", "the", "an old answer", "so it is " * 2]

    def expected(first, second):
        with torch.inference_mode():
            return SCORERS[name][2](model(**tokenizer(first, second, return_tensors="pt")).logits[0, 0]).item()

    of_query = [result.score for result in client.score_text("the old fire", text_pairs=documents, model=name)]
    np.testing.assert_allclose(of_query, [expected("the old fire", text) for text in documents], atol=1e-5, rtol=1e-5)
    of_pairs = [result.score for result in client.score_text(TEXTS, text_pairs=documents, model=name)]
    np.testing.assert_allclose(of_pairs, list(map(expected, TEXTS, documents)), atol=1e-5, rtol=1e-5)
    [alone] = client.score_text("the old fire", model=name)
    np.testing.assert_allclose(alone.score, expected("the old fire", None), atol=1e-5, rtol=1e-5)


def test_labels_that_the_caller_gives_are_chosen_by_entailment(folders, client):
    """As the zero-shot pipeline of transformers does, whose formulas are written anew here."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folders["nli"]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["nli"])
    labels = ["fire", "rain", "an answer"]
    for template, options in (("This example is {}.", {}), ("it is {}", {"hypothesis_template": "it is {}"})):
        answer = client.classify_text(TEXTS[:2], model="nli", candidate_labels=labels, **options)
        alone = client.classify_text(
            TEXTS[:2], model="nli", candidate_labels=labels, independent_labels=True, **options
        )
        for text, together, each in zip(TEXTS[:2], answer, alone, strict=True):
            with torch.inference_mode():
                logits = torch.cat(
                    [
                        model(**tokenizer(text, template.replace("{}", label), return_tensors="pt")).logits
                        for label in labels
                    ]
                )
            for result, expected in (
                (together, logits[:, 2].softmax(0)),
                (each, logits[:, [0, 2]].softmax(1)[:, 1]),
            ):
                found = {label.label: label.probability for label in result.labels}
                np.testing.assert_allclose([found[label] for label in labels], expected.numpy(), atol=1e-5)
            assert [label.selected for label in together.labels] == [True, False, False]
            assert [label.selected for label in each.labels] == [label.probability >= 0.5 for label in each.labels]
    own = client.classify_text("rain", text_pairs="the", model="nli")[0].labels
    assert sum(label.probability for label in own) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "topics", "candidate_labels": ["a"]}, "model topics has no label entailment"),
        ({"model": "nli", "candidate_labels": ["a", ""]}, r"candidate_labels\[1\]: is empty"),
        ({"model": "nli", "candidate_labels": ["a"] * 65}, "has 65 elements, the limit is 64"),
        ({"model": "nli", "candidate_labels": ["a"], "hypothesis_template": "x"}, "write {} where the label goes"),
        ({"model": "nli", "hypothesis_template": "x {}"}, "requires candidate_labels"),
        ({"model": "nli", "candidate_labels": ["a"], "text_pairs": ["b"]}, "is set together with candidate_labels"),
        ({"model": "nli", "candidate_labels": ["a"], "top_k": 2}, "top_k"),
        (
            {"model": "nli", "candidate_labels": ["a", "b"]} | {"texts": ["a", "rain " * 60]},
            r"texts\[1\]: has \d+ tokens",
        ),
    ],
)
def test_given_labels_that_cannot_be_chosen_are_refused(client, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        client.classify_text(**{"texts": "rain"} | options)
    with pytest.raises(InvalidArgumentError, match="with 65 texts make 260 pairs; the limit is 256"):
        client.classify_text(["rain"] * 65, model="nli", candidate_labels=["a", "b", "c", "d"])


def test_a_decoder_scores_pairs_by_the_words_that_it_would_answer_with(folders, client):
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["decoder"]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["decoder"])

    def expected(query, text):
        ids = tokenizer(f"<s>the {query} is in {text} is it</s>", return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            yes, no = model(input_ids=ids.input_ids).logits[0, -1, list(tiny_embedders.JUDGE_WORDS)]
        return float((yes - no).sigmoid())

    query, texts = "old fire", ["rain", "an answer", "the old fire is so"]
    found = client.score_text(query, text_pairs=texts, model="decoder").results
    np.testing.assert_allclose([one.score for one in found], [expected(query, text) for text in texts], atol=1e-5)
    ranked = client.rank_texts(texts, query_text=query, model="decoder").results
    assert [one.index for one in ranked] == sorted(range(3), key=lambda index: -expected(query, texts[index]))
    long = "rain " * 60
    with pytest.raises(InvalidArgumentError, match=r"text_pairs\[1\]|texts\[1\]"):
        client.score_text([query, query], text_pairs=["rain", long], model="decoder")
    cut = client.score_text(query, text_pairs=[long], model="decoder", truncate=True).results[0]
    assert cut.truncated
    assert cut.token_count <= tiny.LENGTH
    kept = tokenizer.decode(tokenizer(long, add_special_tokens=False).input_ids[: cut.token_count - len(
        tokenizer(f"<s>the {query} is in  is it</s>", add_special_tokens=False).input_ids
    ) + 1])  # fmt: skip
    assert abs(cut.score - expected(query, kept)) < 1e-5
    rare = client.score_text(query, text_pairs=["é" * 60], model="decoder", truncate=True).results[0]
    assert rare.truncated
    fitting = (
        rare.token_count - len(tokenizer(f"<s>the {query} is in  is it</s>", add_special_tokens=False).input_ids)
    ) // 4
    assert abs(rare.score - expected(query, "é" * (fitting + 1))) < 1e-5
    with pytest.raises(InvalidArgumentError, match="left without the second text: shorten the first"):
        client.score_text(long, text_pairs=["rain"], model="decoder", truncate=True)
    with pytest.raises(InvalidArgumentError, match="reads pairs of texts"):
        client.score_text("rain", model="decoder")


def test_a_model_with_a_vector_of_each_token_scores_and_ranks_pairs(folders, client):
    query, texts = "old fire", ["rain", "an answer", "the old fire is so"]
    expected = [tiny_embedders.colbert_score(folders["colbert"], query, text) for text in texts]
    found = client.score_text(query, text_pairs=texts, model="colbert").results
    np.testing.assert_allclose([one.score for one in found], expected, atol=1e-4)
    ranked = client.rank_texts(texts, query_text=query, model="colbert").results
    assert [one.index for one in ranked] == sorted(range(3), key=lambda index: -expected[index])
    with pytest.raises(InvalidArgumentError, match=r"texts\[0\]: has \d+ tokens, the model reads at most 19"):
        client.score_text("rain " * 20, text_pairs=["rain"], model="colbert")
    with pytest.raises(InvalidArgumentError, match=r"query_text: has \d+ tokens"):
        client.rank_texts(texts, query_text="rain " * 20, model="colbert")
    with pytest.raises(InvalidArgumentError, match=r"text_pairs\[1\]: has \d+ tokens, the model reads at most 39"):
        client.score_text(query, text_pairs=["rain", "rain " * 40], model="colbert")
    assert client.score_text(query, text_pairs=["rain " * 40], model="colbert", truncate=True)[0].truncated
    with pytest.raises(InvalidArgumentError, match="reads pairs of texts"):
        client.score_text("rain", model="colbert")
    with pytest.raises(FailedPreconditionError, match="embed"):
        client.embed_text("rain", model="colbert")


def test_vectors_of_tokens_make_the_score(folders, client):
    query, text = "old fire", "the old fire is so"
    found = {}
    for form, one in (("query", query), ("document", text)):
        answer = client.embed_text([one], model="colbert", multi_vector=True, prompt_name=form)
        [result] = answer
        token_ids, vectors = tiny_embedders.colbert_vectors(folders["colbert"], one, is_query=form == "query")
        assert [each.token_id for each in result.token_vectors] == token_ids
        found[form] = np.array([each.values for each in result.token_vectors])
        np.testing.assert_allclose(found[form], vectors, atol=1e-5)
        assert (result.values, result.token_vectors[1].text) == ((), tiny_embedders.COLBERT_TOKENS[
            "query" if form == "query" else "text"
        ])  # fmt: skip
        with pytest.raises(ValueError, match="the vectors are of tokens"):
            answer.to_numpy()
    score = client.score_text(query, text_pairs=[text], model="colbert")[0].score
    np.testing.assert_allclose((found["query"] @ found["document"].T).max(axis=1).sum(), score, rtol=1e-5)
    assert len(client.embed_text([text] * 40, multi_vector=True).results) == 40  # in two calls
    for words, given in {
        r"texts\[0\]: has \d+ tokens": {"texts": ["rain " * 40]},
        "prompt_name: is 'passage'; model colbert reads a query or a document": {"prompt_name": "passage"},
        "text_pairs: is set": {"text_pairs": [text]},
        "sparse: is set together with multi_vector": {"sparse": True},
        "normalize: is false": {"normalize": False},
    }.items():
        with pytest.raises(InvalidArgumentError, match=words):
            client.embed_text(**{"texts": [text], "model": "colbert", "multi_vector": True, **given})
    assert client.embed_text("rain " * 40, multi_vector=True, truncate=True)[0].truncated


def test_a_model_that_reads_pairs_apart_lists_no_inputs_of_token_ids(client):
    with grpc.insecure_channel(client.server) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for model, has_ids in (("colbert", False), ("reranker", True)):
            metadata = stub.ModelMetadata(grpc_predict_v2_pb2.ModelMetadataRequest(name=model))
            names = [tensor.name for tensor in metadata.inputs]
            assert names[:2] == ["text", "text_pair"]
            assert ("input_ids" in names, "attention_mask" in names) == (has_ids, has_ids)


def test_a_document_that_a_reranker_has_cut_is_counted(folders, tmp_path):
    store = tmp_path / "store"
    assert CliRunner().invoke(app, ["hf", str(folders["decoder"]), "--store", str(store)]).exit_code == 0
    body = {"model": "decoder", "query": "the fire", "documents": ["rain", "rain " * 60], "truncate": True}
    for line in serve_saying(store, tmp_path / "server.log", "--http-port", "0"):
        address = line.split("http=")[1].strip()
        answer = httpx2.post(f"http://{address}/v1/rerank", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-truncated-texts"] == "1"


def test_many_documents_are_scored_with_several_calls(client):
    documents = ["rain"] * 300
    scores = {result.score for result in client.score_text("the old fire", text_pairs=documents, model="reranker")}
    assert max(scores) - min(scores) < 1e-6
    with pytest.raises(ValueError, match="text_pairs has 3 elements for 2 texts"):
        client.score_text(["a", "b"], text_pairs=["a", "b", "c"], model="reranker")
    with pytest.raises(FailedPreconditionError, match="cannot score texts; ask"):
        client.score_text("rain", model="topics")


def test_the_command_prints_scores(client):
    command = ["score-text", "--server", client.server, "--model", "raw", "--query", "the old fire", "rain", "the"]
    lines = CliRunner().invoke(headway, command).output.splitlines()
    expected = client.score_text("the old fire", text_pairs=["rain", "the"], model="raw")
    assert [line.split("\t")[1] for line in lines] == ["rain", "the"]
    for line, result in zip(lines, expected, strict=True):
        assert float(line.split("\t")[0]) == pytest.approx(result.score, rel=1e-4)
    answer = CliRunner().invoke(headway, [*command, "--json"]).output.splitlines()[0]
    assert json.loads(answer)["score"] == pytest.approx(expected[0].score)
