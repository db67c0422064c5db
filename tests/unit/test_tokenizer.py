"""Tokenizer: text to tokens and back."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.tokenizer import BYTES, EOD, beside, bpe_size, load, parse, train
from hpctrain.data.tokens import Description
from hpctrain.errors import ConfigError, DataError

TEXTS = ["the cat sat on the mat\n", "the dog sat on the log\n", "naïve café 東京 🙂\n"] * 20
TRAINED = train(TEXTS, 280)


def word_json(*words: str, **more: object) -> str:
    """A tokenizer of whole words, as JSON."""
    known = {word: i for i, word in enumerate(words)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token=words[0]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return json.dumps(json.loads(model.to_str()) | more)


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
@given(texts=st.lists(st.text(), max_size=4))
def test_every_text_comes_back(tokenizer, texts):
    found = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(tokens) for tokens in found] == texts
    assert all(0 <= token < tokenizer.vocabulary and token != tokenizer.eod for tokens in found for token in tokens)


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
def test_the_end_of_a_document_leaves_no_text(tokenizer):
    (tokens,) = tokenizer.encode_batch(["mat"])
    assert tokenizer.decode([*tokens, tokenizer.eod]) == "mat"


def test_bytes_are_256_tokens_and_an_end():
    assert (BYTES.vocabulary, BYTES.eod, BYTES.identity) == (257, 256, "bytes")
    assert BYTES.encode_batch(["aé"])[0].tolist() == [97, 0xC3, 0xA9]
    assert BYTES.decode([97, 0xC3]) == "a\ufffd"


def test_training_gives_the_same_tokenizer_for_the_same_text():
    assert train(iter(TEXTS), 280) == TRAINED
    assert train(TEXTS, 279).json != TRAINED.json


def test_a_trained_tokenizer_has_the_size_that_was_asked_for_and_joins_what_is_frequent():
    assert TRAINED.vocabulary == 280
    assert len(TRAINED.encode_batch(["the cat sat on the mat"])[0]) < 12


def test_a_text_that_names_the_end_of_a_document_does_not_end_there():
    (tokens,) = TRAINED.encode_batch([f"a {EOD} b"])
    assert TRAINED.eod not in tokens
    assert TRAINED.decode(tokens) == f"a {EOD} b"


def test_a_document_is_neither_cut_nor_filled_up_nor_given_a_beginning():
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    begins = {"type": "BertProcessing", "sep": ["</s>", 3], "cls": ["a", 0]}
    text = word_json("a", "b", "c", "</s>", truncation=truncation, padding=padding | {"pad_to_multiple_of": None})
    tokenizer = parse(json.dumps(json.loads(text) | {"post_processor": begins}))
    assert [found.tolist() for found in tokenizer.encode_batch(["a b c b", "c"])] == [[0, 1, 2, 1], [2]]


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "[EOS]"])
def test_the_end_of_a_document_is_found_by_its_usual_names(name):
    assert parse(word_json("a", "b", name)).eod == 2


def test_the_end_of_a_document_may_be_named():
    assert parse(word_json("a", "</s>", "[SEP]"), "[SEP]").eod == 2


def test_the_vocabulary_counts_up_to_the_highest_token():
    model = json.loads(word_json("a", "</s>"))
    model["model"]["vocab"]["far"] = 999
    assert parse(json.dumps(model)).vocabulary == 1000


def test_a_tokenizer_is_found_again_beside_its_tokens(tmp_path):
    text = word_json("a", "b", "</s>")
    (tmp_path / "pair.tokenizer.json").write_text(text)
    described = Description(3, 1, parse(text).identity, 1, 1, 1, 1, 0, 0)
    assert beside(tmp_path / "pair", described).json == text
    assert beside(tmp_path / "pair", described).eod == 1
    assert beside(tmp_path / "other", Description(257, 256, "bytes", 1, 1, 1, 1, 0, 0)) == BYTES


def test_names_are_told_apart():
    assert (bpe_size("bpe:8192"), bpe_size("bytes"), bpe_size("dir/tokenizer.json")) == (8192, None, None)
    assert load("bytes") is BYTES


@pytest.mark.parametrize("name", ["bpe:", "bpe:x", "bpe:256", "bpe:-1", "bpe:1e4"])
def test_a_bpe_without_a_size_that_can_be_is_refused(name):
    with pytest.raises(ConfigError, match=f"data.tokenizer = '{name}' cannot be\n.*at least 257.*\n.*bpe:8192"):
        bpe_size(name)


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="none.json cannot be read\n.*No such file.*\n.*bytes, bpe:N or the path"):
        load(str(tmp_path / "none.json"))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"layers": 3}')
    with pytest.raises(DataError, match="config.json is not a Hugging Face tokenizer\n"):
        load(str(tmp_path / "config.json"))


@pytest.mark.parametrize(("eod", "told"), [(None, "<.endoftext.> or .*</s>"), ("<stop>", "it has no token <stop>")])
def test_a_tokenizer_without_an_end_of_document_is_refused(eod, told):
    with pytest.raises(DataError, match=f"no token ends a document\n.*{told}.*\n.*--eod"):
        parse(word_json("a", "b"), eod)
