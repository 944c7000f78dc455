"""What a model thinks: its marks, found in its chat template, and its thoughts, told apart in its answer."""

import pytest
from tiny_chat import byte_level_tokenizer

from headway_server.preprocessing import ReasoningForm, ReasoningReader, Said, Thought

FORM = ReasoningForm(begin="<think>", end="</think>")

SOURCES = {
    "{{ content.split('</think>')[-1] }}": ("<think>", "</think>"),
    "{{ '[THINK]' + a + '[/THINK]' }}": ("[THINK]", "[/THINK]"),
    "{{ '</seed:think>' }}": ("<seed:think>", "</seed:think>"),
    "<thinking>{{ a }}</thinking>": ("<thinking>", "</thinking>"),
    "<|START_THINKING|>{{ a }}<|END_THINKING|>": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "{{ 'think about it' }}</tool_call>": None,
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_marks_are_those_that_the_template_names(source):
    form = ReasoningForm.find(source, byte_level_tokenizer())
    assert (None if form is None else (form.begin, form.end)) == SOURCES[source]


def test_marks_that_are_special_tokens_are_known_by_their_ids():
    tokenizer = byte_level_tokenizer()
    assert ReasoningForm.find("</think>", tokenizer).special_tokens == ()
    tokenizer.add_special_tokens(["<think>", "</think>"])
    ids = tuple((mark, tokenizer.token_to_id(mark)) for mark in ("<think>", "</think>"))
    assert ReasoningForm.find("</think>", tokenizer).special_tokens == ids


def test_a_prompt_is_open_where_it_ends_with_the_first_mark():
    assert FORM.is_open("assistant\n<think>\n")
    assert not FORM.is_open("assistant\n<think>\n\n</think>\n\n")
    assert not FORM.is_open("user: <think> assistant:")


ANSWERS = {
    "<think>\nhm < x </thin\n</think>\n\nhi </think> there ": (Thought("hm < x </thin"), Said("hi </think> there ")),
    " \n<think>hm</think>hi": (Thought("hm"), Said("hi")),
    "<think>\n\n</think>\n\nhi": (Said("hi"),),
    "<think> only\n thoughts </thi": (Thought("only\n thoughts </thi"),),
    " no thoughts <think>a</think>": (Said(" no thoughts <think>a</think>"),),
    "<thinner": (Said("<thinner"),),
    "<thi": (Said("<thi"),),
    "<think>\n": (),
    "<think>a</think> \n": (Thought("a"),),
    "  ": (Said("  "),),
    "": (),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_read_alike_whole_and_in_pieces(answer):
    for size in (1, 2, 7, len(answer) + 1):
        reader = ReasoningReader(FORM)
        parts = [part for n in range(0, len(answer), size) for part in reader.feed(answer[n : n + size])]
        joined = []
        for part in (*parts, *reader.end()):
            if joined and type(part) is type(joined[-1]):
                joined[-1] = type(part)(joined[-1].text + part.text)
            else:
                joined.append(part)
        assert tuple(joined) == ANSWERS[answer], size


def test_thoughts_come_as_they_are_written():
    reader = ReasoningReader(FORM)
    assert list(reader.feed("<think>one")) == [Thought("one")]
    assert list(reader.feed(" two ")) == [Thought(" two")]
    assert list(reader.feed("three</think>")) == [Thought(" three")]
    assert list(reader.feed("\nhi")) == [Said("hi")]
