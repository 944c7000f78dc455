"""ModelInfer by the real Triton client: every task, every datatype, what is refused and how."""

import json

import numpy as np
import pytest
from open_inference import CHAT, GENERATION, TRANSLATION, picture, text
from tiny_bundles import COLOUR_PREPROCESSING, TOPICS
from tiny_engine import TOKENIZER, VOCAB_SIZE
from triton_client import TritonError

from headway_server.preprocessing import ImageLimits, ImagePreprocessor

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def refusal(triton, *args, **options) -> TritonError:
    with pytest.raises(TritonError) as caught:
        triton("infer", *args, **options)
    return caught.value


def ids_of(words: str) -> list[int]:
    vocabulary = ["[PAD]", "[CLS]", "[UNK]", *(word for topic in TOPICS.values() for word in topic)]
    return [1, *(vocabulary.index(word) for word in words.split())]


def test_texts_are_classified_with_labels_probabilities_and_vectors_of_one_run(triton):
    answer = triton("infer", "topics", {"text": text("goal match team", "atom")}, request_id="mine")
    assert answer.model == ("topics", "1")
    assert answer.request_id == "mine"
    arrays = answer.arrays
    assert arrays["label"][:, 0].tolist() == [b"sports", b"science"]
    assert arrays["label"].shape == arrays["probability"].shape == arrays["selected"].shape == (2, 3)
    assert arrays["probability"].dtype == np.float32
    np.testing.assert_allclose(arrays["probability"].sum(axis=1), 1, rtol=1e-6)
    assert arrays["selected"].tolist() == [[True, False, False]] * 2
    assert arrays["token_count"].tolist() == [4, 2]
    assert arrays["truncated"].tolist() == [False, False]
    np.testing.assert_allclose(np.linalg.norm(arrays["embedding"], axis=1), 1, rtol=1e-6)


def test_outputs_parameters_and_shapes_are_those_that_are_asked_for(triton):
    answer = triton(
        "infer", "topics", {"text": text("goal", "atom").reshape(2, 1)}, outputs=["label"], parameters={"top_k": 1}
    )
    assert {name: array.tolist() for name, array in answer.arrays.items()} == {"label": [[b"sports"], [b"science"]]}
    vectors = triton(
        "infer", "topics", {"text": text("goal goal")}, outputs=["embedding"], parameters={"normalize": False}
    )
    np.testing.assert_allclose(vectors.arrays["embedding"], [[4 / 3, 0, 0]], rtol=1e-6)
    cut = triton("infer", "topics", {"text": text("goal " * 99)}, parameters={"truncate": True})
    assert cut.arrays["truncated"].tolist() == [True]


def test_vectors_and_scores_come_from_models_without_labels(triton):
    request = {"text": text("goal")}
    plain = triton("infer", "vectors", {"text": text("goal goal")}, parameters={"normalize": False})
    prompted = triton("infer", "vectors", request, parameters={"normalize": False, "prompt_name": "query"})
    np.testing.assert_array_equal(prompted.arrays["embedding"], plain.arrays["embedding"])
    assert prompted.arrays["token_count"].tolist() == [3]
    assert "model vectors has the prompts query" in str(
        refusal(triton, "vectors", request, parameters={"prompt_name": "x"})
    )
    scores = triton("infer", "scorer", {"text": text("goal"), "text_pair": text("goal")}).arrays["score"]
    logit = (4 / 4) * 1.1 + 0  # the mean of two tokens of 2 and two of 0, mixed
    assert scores.shape == (1,)
    assert 0 < scores[0] < 1
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logit)), rtol=1e-5)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_token_ids_of_every_integer_type_answer_as_their_text(triton, dtype):
    rows = [ids_of("goal match"), [*ids_of("atom"), 0]]
    mask = [[1, 1, 1], [1, 1, 0]]
    by_ids = triton(
        "infer", "topics", {"input_ids": np.array(rows, dtype), "attention_mask": np.array(mask, dtype)}
    ).arrays
    by_text = triton("infer", "topics", {"text": text("goal match", "atom")}).arrays
    assert by_ids.keys() == by_text.keys()
    for name, array in by_text.items():
        np.testing.assert_array_equal(by_ids[name], array)


def test_pairs_are_read_as_texts_and_as_tokens(triton):
    by_text = triton("infer", "pairs", {"text": text("goal"), "text_pair": text("atom star")}).arrays
    ids = np.array([[*ids_of("goal"), *ids_of("atom star")]])
    types = np.array([[0, 0, 1, 1, 1]])
    by_ids = triton("infer", "pairs", {"input_ids": ids, "token_type_ids": types}).arrays
    for name, array in by_text.items():
        np.testing.assert_array_equal(by_ids[name], array)
    assert by_text["label"][0, 0] == b"science"


def test_spans_are_flat_and_name_their_text(triton):
    arrays = triton("infer", "tagger", {"text": text("the in", "Ada Lovelace saw Köln")}).arrays
    assert arrays["text_index"].tolist() == [1, 1]
    assert arrays["label"].tolist() == [b"person", b"place"]
    assert [arrays["start"].tolist(), arrays["end"].tolist()] == [[0, 17], [12, 21]]
    assert arrays["embedding"].shape == (2, 4)
    assert arrays["token_count"].tolist() == [3, 5]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_images_are_read_from_files_and_from_pixels_of_every_float_type(triton, dtype):
    files = [picture((200, 60, 60)), picture((60, 60, 200))]
    by_file = triton("infer", "colours", {"image": np.array(files, object)}).arrays
    assert by_file["label"][:, 0].tolist() == [b"red", b"blue"]
    preprocessor = ImagePreprocessor(COLOUR_PREPROCESSING, ImageLimits(max_bytes=2**20, max_pixels=10**6))
    pixels = np.stack([preprocessor.prepare(file).pixel_values for file in files]).astype(dtype)
    by_pixels = triton("infer", "colours", {"pixel_values": pixels}).arrays
    assert by_pixels["label"].tolist() == by_file["label"].tolist()
    np.testing.assert_allclose(by_pixels["probability"], by_file["probability"], rtol=2e-3)
    np.testing.assert_allclose(by_pixels["embedding"], by_file["embedding"], rtol=2e-3)


def test_text_is_generated_from_texts_tokens_and_conversations(triton):
    drawn = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "max_new_tokens": 5}
    by_text = triton("infer", GENERATION, {"text": text("the cat", "the dog")}, parameters=drawn).arrays
    assert by_text["new_token_count"].tolist() == [5, 5]
    assert by_text["finish_reason"].tolist() == [b"length"] * 2
    assert by_text["seed"].tolist() == [7, 7]
    ids = TOKENIZER.encode("the cat", add_special_tokens=False).ids
    by_ids = triton("infer", GENERATION, {"input_ids": np.array([ids])}, parameters=drawn).arrays
    assert by_ids["generated_text"][0] == by_text["generated_text"][0]
    assert by_ids["prompt_token_count"].tolist() == [len(ids)]
    echoed = triton("infer", GENERATION, {"input_ids": np.array([ids])}, parameters=drawn | {"echo": True}).arrays
    assert echoed["generated_text"][0] == b"the cat" + by_ids["generated_text"][0]


def test_conversations_are_json_arrays_of_turns(triton):
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    arrays = triton("infer", CHAT, {"conversation": text(json.dumps(turns))}, parameters={"max_new_tokens": 3}).arrays
    assert arrays["new_token_count"].tolist() == [3]
    for wrong in ("no JSON", "{}", "[1]", '[{"role": "user"}]', '[{"role": "boss", "content": "a"}]', "[" * 9999):
        error = refusal(triton, CHAT, {"conversation": text(wrong)})
        assert error.message.startswith("conversation[0]: must be a JSON array of turns")
    assert refusal(triton, CHAT, {"conversation": text("[]")}).message.startswith("conversation[0].messages: is empty")
    both = {"conversation": text(json.dumps(turns)), "text": text("a")}
    assert refusal(triton, CHAT, both).message.startswith("inputs: have text together with conversation")


def test_lists_among_the_parameters_are_json(triton):
    free = triton("infer", GENERATION, {"text": text("the cat")}, parameters={"max_new_tokens": 4}).arrays
    whole = free["generated_text"][0].decode()
    assert len(whole) > 2
    stops = {"max_new_tokens": 4, "stop_strings": json.dumps([whole[1:3]])}
    stopped = triton("infer", GENERATION, {"text": text("the cat")}, parameters=stops).arrays
    assert stopped["generated_text"][0].decode() == whole[:1]
    assert stopped["finish_reason"].tolist() == [b"stop"]
    chosen = {"choices": '["yes", "no"]', "logit_biases": "[[3, -1.5]]"}
    assert triton("infer", GENERATION, {"text": text("a")}, parameters=chosen).arrays["generated_text"][0] in (
        b"yes",
        b"no",
    )


def test_samples_follow_each_other_as_in_the_own_protocol(triton):
    parameters = {"temperature": 1.0, "sample_count": 3, "max_new_tokens": 4, "seed": 2**63 - 1}
    arrays = triton("infer", GENERATION, {"text": text("the cat", "a")}, parameters=parameters).arrays
    assert arrays["generated_text"].shape == (6,)


def test_texts_are_translated_with_hypotheses(triton):
    arrays = triton("infer", TRANSLATION, {"text": text("the cat", "the dog")}).arrays
    assert arrays["translated_text"].shape == arrays["score"].shape == (2,)
    assert arrays["hypothesis_text"].tolist() == arrays["translated_text"].tolist()
    searched = triton(
        "infer", TRANSLATION, {"text": text("the cat")}, parameters={"beam_size": 3, "hypothesis_count": 2}
    ).arrays
    assert searched["hypothesis_text_index"].tolist() == [0, 0]
    assert searched["hypothesis_text"][0] == searched["translated_text"][0]
    assert searched["hypothesis_score"][0] >= searched["hypothesis_score"][1]
    begun = triton("infer", TRANSLATION, {"text": text("the cat"), "target_prefix": text("the")}).arrays
    assert begun["translated_text"][0].startswith(b"the")


LONG = np.zeros((1, 99), np.int64)
REFUSED = [
    ("topics", {"texts": text("a")}, {}, "inputs[0].name: is 'texts'; the model reads text, input_ids"),
    ("topics", {"text": np.array([1.5], np.float32)}, {}, "inputs[0].datatype: is 'FP32'; text must be BYTES"),
    ("topics", {"text": np.array([True])}, {}, "inputs[0].datatype: is 'BOOL'; text must be BYTES"),
    ("topics", {"input_ids": np.array([[1.0]])}, {}, "inputs[0].datatype: is 'FP64'; input_ids must be INT64 or"),
    ("topics", {"input_ids": text("a").reshape(1, 1)}, {}, "inputs[0].datatype: is 'BYTES'"),
    ("topics", {"text": text("a", "b").reshape(1, 2)}, {}, "inputs[0].shape: is [1, 2]; text must be [-1]"),
    ("topics", {"text": text()}, {}, "inputs[0].shape: is [0]; the first axis must be from 1 to 256"),
    ("topics", {"text": text(*["a"] * 257)}, {}, "inputs[0].shape: is [257]; the first axis must be from 1 to 256"),
    ("topics", {"text": text("a", b"\xff")}, {}, "text[1]: is not UTF-8 at byte 0"),
    ("topics", {"text": text("a", "")}, {}, "text[1]: is empty"),
    ("topics", {"text": text("goal " * 99)}, {}, "text[0]: has 100 tokens, the model reads at most 32"),
    ("topics", {"input_ids": LONG}, {}, "input_ids[0]: has 99 elements, the limit is 32"),
    ("topics", {"input_ids": np.array([[1, 12]])}, {}, "input_ids[0][1]: is 12; must be from 0 to 11"),
    ("topics", {"input_ids": np.array([[1, -1]])}, {}, "input_ids[0][1]: is -1; must be from 0 to 11"),
    ("topics", {"input_ids": np.array([[2**63]], np.uint64)}, {}, "inputs[0]: has 9223372036854775808"),
    ("topics", {"input_ids": np.zeros((1, 0), np.int64)}, {}, "input_ids[0]: is empty"),
    ("topics", {"input_ids": LONG, "text": text("a")}, {}, "inputs: have text together with input_ids"),
    ("topics", {"attention_mask": LONG}, {}, "inputs: have attention_mask without input_ids"),
    (
        "topics",
        {"input_ids": np.array([[1, 3]]), "attention_mask": np.array([[1, 2]])},
        {},
        "attention_mask: has values that are neither",
    ),
    (
        "topics",
        {"input_ids": np.array([[1, 3]]), "attention_mask": np.array([[1]])},
        {},
        "attention_mask: has shape [1, 1], and input_ids [1, 2]",
    ),
    (
        "topics",
        {"input_ids": np.array([[1, 3]]), "token_type_ids": np.array([[0, 0]])},
        {},
        "inputs[1].name: is 'token_type_ids'; the model reads text, input_ids, attention_mask",
    ),
    (
        "pairs",
        {"input_ids": np.array([[1, 3]]), "token_type_ids": np.array([[0, 9]])},
        {},
        "token_type_ids[0][1]: is 9; must be from 0 to 1",
    ),
    ("topics", {"text": text("a")}, {"parameters": {"topk": 1}}, "parameters.topk: is unknown; this model's task"),
    ("topics", {"text": text("a")}, {"parameters": {"top_k": 9}}, "parameters.top_k: is 9, the model has 3 labels"),
    ("topics", {"text": text("a")}, {"parameters": {"top_k": "1"}}, "parameters.top_k: must be a whole number"),
    ("topics", {"text": text("a")}, {"parameters": {"top_k": True}}, "parameters.top_k: must be a whole number"),
    ("topics", {"text": text("a")}, {"outputs": ["logits"]}, "outputs[0].name: is 'logits'; the model writes label"),
    ("topics", {"text": text("a")}, {"sequence_id": 3}, "parameters.sequence_"),
    ("colours", {"image": text("no picture")}, {}, "image[0]: is not an image this server can read"),
    (
        "colours",
        {"pixel_values": np.zeros((1, 3, 9, 8), np.float32)},
        {},
        "inputs[0].shape: is [1, 3, 9, 8]; pixel_values must be [-1, 3, 8, 8]",
    ),
    ("colours", {"pixel_values": np.full((1, 3, 8, 8), np.nan, np.float32)}, {}, "pixel_values: has values that"),
    ("colours", {"pixel_values": np.full((1, 3, 8, 8), 1e300)}, {}, "pixel_values: has values that"),
    (GENERATION, {"text": text("a")}, {"parameters": {"temperature": 3.0}}, "parameters.temperature: is 3; must be"),
    (GENERATION, {"text": text("a")}, {"parameters": {"seed": -1}}, "parameters.seed: must be a whole number from 0"),
    (GENERATION, {"text": text("a")}, {"parameters": {"stop_strings": "[1]"}}, "parameters.stop_strings: must be a"),
    (GENERATION, {"text": text("a")}, {"parameters": {"stop_strings": "[" * 9999}}, "parameters.stop_strings: must"),
    (GENERATION, {"text": text("a")}, {"parameters": {"regex": "a", "choices": '["b"]'}}, "parameters.regex: is set"),
    (GENERATION, {"input_ids": np.array([[VOCAB_SIZE]])}, {}, f"input_ids[0][0]: is {VOCAB_SIZE}; must be from"),
    (GENERATION, {"input_ids": np.zeros((1, 0), np.int64)}, {}, "input_ids[0]: is empty"),
    (GENERATION, {"conversation": text("[]")}, {}, "inputs[0].name: is 'conversation'"),
    (
        TRANSLATION,
        {"text": text("a")},
        {"parameters": {"early_stopping": "now"}},
        "parameters.early_stopping: is",
    ),
    (TRANSLATION, {"text": text("a")}, {"parameters": {"beam_size": 99}}, "parameters.beam_size: is 99; must be"),
    (TRANSLATION, {"target_prefix": text("a")}, {}, "inputs: lack text"),
]


@pytest.mark.parametrize(("model", "arrays", "options", "says"), REFUSED)
def test_what_cannot_be_answered_is_refused_by_name(triton, model, arrays, options, says):
    error = refusal(triton, model, arrays, **options)
    assert error.code == "StatusCode.INVALID_ARGUMENT"
    assert error.message.startswith(says), error.message


def test_codes_are_those_of_the_own_protocol(triton):
    assert refusal(triton, "nope", {"text": text("a")}).code == "StatusCode.NOT_FOUND"
    assert refusal(triton, "topics", {"text": text("a")}, model_version="7").code == "StatusCode.NOT_FOUND"
    late = refusal(triton, GENERATION, {"text": text("a")}, client_timeout=0.001, parameters={"max_new_tokens": 60})
    assert late.code == "StatusCode.DEADLINE_EXCEEDED"


@pytest.mark.parametrize(
    ("words", "method", "args"),
    [
        ("send the elements in the request", "register_system_shared_memory", ("mine", "/mine", 64)),
        ("send the elements in the request", "get_system_shared_memory_status", ()),
        ("send the elements in the request", "unregister_system_shared_memory", ()),
        ("send the elements in the request", "register_cuda_shared_memory", ("mine", b"aGk=", 0, 64)),
        ("send the elements in the request", "get_cuda_shared_memory_status", ()),
        ("send the elements in the request", "unregister_cuda_shared_memory", ()),
        ("start the server with --trace-endpoint", "get_trace_settings", ()),
        ("start the server with --trace-endpoint", "update_trace_settings", ("topics", {"trace_rate": "9"})),
        ("start the server with --log-level", "get_log_settings", ()),
        ("start the server with --log-level", "update_log_settings", ({"log_verbose_level": 1},)),
    ],
)
def test_extensions_that_are_not_offered_are_refused_with_what_to_do(triton, words, method, args):
    with pytest.raises(TritonError) as caught:
        triton("ask", method, *args)
    assert caught.value.code == "StatusCode.UNIMPLEMENTED"
    assert words in caught.value.message


@pytest.mark.parametrize("of", ["inputs", "outputs", "one input of two"])
def test_tensors_in_shared_memory_are_refused_with_what_to_do(triton, of):
    error = refusal(triton, "pairs", {"text": text("goal"), "text_pair": text("goal")}, shared_memory=of)
    assert error.code == "StatusCode.INVALID_ARGUMENT"
    assert "s[0].parameters: has 'shared_memory_" in error.message
    assert "send the elements in the request" in error.message


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_compressed_call_is_answered(triton, algorithm):
    answer = triton("infer", "topics", {"text": text("goal " * 9)}, compression_algorithm=algorithm)
    assert answer.arrays["label"][0, 0] == b"sports"


def test_many_small_calls_of_the_asyncio_client_are_each_answered_by_their_own(triton):
    rng = np.random.default_rng(3)
    topics = rng.choice(list(TOPICS), 400)
    texts = [str(rng.choice(TOPICS[topic])) for topic in topics]
    assert triton("infer_many", "topics", texts, at_once=32) == topics.tolist()


def test_calls_with_callbacks_are_answered(triton):
    words = {"goal": "sports", "atom": "science", "bank": "business"}
    assert triton("infer_in_callbacks", "topics", list(words) * 20) == list(words.values()) * 20
