"""How much texts may take, before they are tokenized."""

from headway_server.tasks.text.model import TextInputs


def test_a_short_text_has_no_more_tokens_than_bytes_and_special_ones():
    assert TextInputs(texts=["a fox"] * 256).most_tokens(8192) == 256 * 9
    assert TextInputs(texts=["é" * 100, "a"], text_pairs=["b" * 10, "c"]).most_tokens(50) == 50 + 6
    assert TextInputs(texts=["a"], prompt="find: ").most_tokens(50) == 11
