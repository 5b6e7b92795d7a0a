"""Sentences: where texts are split, and that nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtcli.core.data.sentences import split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It rained. We left.", ["It rained.", " We left."]),
        ('"Why?" she asked. He knew!', ['"Why?" she asked.', " He knew!"]),
        ("Dr. Grey met J. Smith in the U.S. He left.", None),
        ("It costs 3.50 e.g. in London.", ["It costs 3.50 e.g. in London."]),
        ("a title\n\nThe text", ["a title\n\n", "The text"]),
        ("the end . The next", ["the end .", " The next"]),
        ("\u4eca\u65e5\u306f\u3002\u660e\u65e5\u306f\u3002", None),
        ("wait... what? Yes.", ["wait... what?", " Yes."]),
        ("", []),
        (" \n ", []),
    ],
)
def test_a_text_is_split_after_what_ends_a_sentence(text, sentences):
    found = split_sentences(text)
    if sentences is None:
        sentences = {"D": ["Dr. Grey met J. Smith in the U.S. He left."]}.get(
            text[:1], ["\u4eca\u65e5\u306f\u3002", "\u660e\u65e5\u306f\u3002"]
        )
    assert found == sentences


@given(st.text(alphabet="aA.!? \n\"'\u3002)", max_size=60))
def test_sentences_joined_are_the_text_and_none_is_blank(text):
    found = split_sentences(text)
    assert "".join(found) == (text if text.strip() else "")
    assert all(sentence.strip() for sentence in found)
