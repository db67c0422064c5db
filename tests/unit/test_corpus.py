"""Corpus: documents split and packed into samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data import corpus as packing
from hpctrain.data.corpus import Corpus
from hpctrain.data.tokens import Tokens, write
from hpctrain.errors import DataError

LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=60).filter(lambda lengths: sum(lengths) > 30)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Blocks of 8 documents, so that a few documents make several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK", 8)
        yield


@pytest.fixture(scope="module")
def open_corpus(tmp_path_factory):
    """Opens documents of the given lengths, in which each token is its own place: no two are equal."""

    def open_(lengths, sequence=4, validation=0.0, seed=0):
        prefix = tmp_path_factory.mktemp("corpus") / "pair"
        ends = np.cumsum([0, *lengths])
        write(prefix, [np.arange(a, b) for a, b in zip(ends, ends[1:], strict=False)], "int32")
        return Corpus(Tokens(prefix), sequence, validation, seed)

    return open_


def stream(samples):
    """What overlapping samples make when they are joined: the packed tokens, and the document of each."""
    samples = list(samples)
    for one, other in zip(samples, samples[1:], strict=False):
        assert (one[0][-1], one[1][-1]) == (other[0][0], other[1][0])
    parts = [(tokens[:-1], documents[:-1]) for tokens, documents in samples]
    last = samples[-1]
    return [np.concatenate([*(part[i] for part in parts), last[i][-1:]]) for i in range(2)]


def training(corpus, epoch=0):
    return stream(corpus.sample(i, epoch) for i in range(corpus.samples))


def validating(corpus):
    tokens, documents = stream(corpus.validation_sample(i) for i in range(corpus.validation_samples))
    return tokens[documents >= 0], documents[documents >= 0]


@settings(max_examples=50)
@given(lengths=LENGTHS, epoch=st.integers(0, 3), seed=st.integers(0, 3))
def test_an_epoch_has_every_token_once_but_for_less_than_a_sample_at_its_end(open_corpus, lengths, epoch, seed):
    corpus = open_corpus(lengths, seed=seed)
    tokens, documents = training(corpus, epoch)
    assert len(set(tokens.tolist())) == len(tokens) == 4 * corpus.samples + 1
    assert sum(lengths) - len(tokens) < 4
    owner = np.repeat(np.arange(len(lengths)), lengths)
    assert documents.tolist() == owner[tokens].tolist()


@given(lengths=LENGTHS, epoch=st.integers(0, 3))
def test_documents_stay_whole_and_in_their_own_order(open_corpus, lengths, epoch):
    tokens, documents = training(open_corpus(lengths), epoch)
    within = documents[1:] == documents[:-1]
    assert (np.diff(tokens)[within] == 1).all()
    # at a border one document has ended, and the next is at its beginning
    ends = np.cumsum(lengths)
    assert np.isin(tokens[:-1][~within] + 1, ends).all()
    assert np.isin(tokens[1:][~within], [0, *ends]).all()


@settings(max_examples=50)
@given(lengths=LENGTHS, validation=st.sampled_from([0.01, 0.1, 0.5]), epoch=st.integers(0, 3), seed=st.integers(0, 3))
def test_no_token_is_both_trained_on_and_validated_on(open_corpus, lengths, validation, epoch, seed):
    corpus = open_corpus(lengths, 1, validation, seed)
    trained = set(training(corpus, epoch)[0].tolist())
    kept = int(sum(lengths) * validation)
    assert len(trained) == sum(lengths) - kept
    if kept < 2:
        assert corpus.validation_samples == 0
    else:
        validated = validating(corpus)[0]
        assert set(validated.tolist()) | trained == set(range(sum(lengths)))
        assert validated.tolist() == validating(open_corpus(lengths, 1, validation, seed + 1))[0].tolist()


def test_one_long_document_is_cut_between_the_splits(open_corpus):
    corpus = open_corpus([1000], 10, 0.1)
    assert (corpus.samples, corpus.validation_samples) == (89, 10)
    assert validating(corpus)[0].tolist() == list(range(100))
    assert training(corpus)[0].tolist() == list(range(100, 991))


def test_the_last_validation_sample_is_filled_up_with_tokens_of_no_document(open_corpus):
    corpus = open_corpus([20], 4, 0.5)
    tokens, documents = corpus.validation_sample(2)
    assert (tokens.tolist(), documents.tolist()) == ([8, 9, 0, 0, 0], [0, 0, -1, -1, -1])


def test_epochs_and_seeds_arrange_documents_differently_and_always_alike(open_corpus):
    lengths = [5] * 50
    orders = [training(open_corpus(lengths, seed=seed), epoch)[1].tolist() for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert len(set(map(tuple, orders))) == 3
    assert all(sorted(order) != order for order in orders)
    assert training(open_corpus(lengths, seed=1), 0)[1].tolist() == orders[2]


def test_blocks_are_mixed_too(open_corpus):
    documents = training(open_corpus([5] * 80))[1]
    blocks = documents // 8
    assert (blocks[1:] != blocks[:-1]).sum() == 9
    assert sorted(blocks) != blocks.tolist()


def test_samples_may_be_asked_for_in_any_order(open_corpus):
    lengths = [7, 3, 11, 0, 2] * 10
    corpus = open_corpus(lengths)
    backwards = [corpus.sample(i, 1)[0].tolist() for i in reversed(range(corpus.samples))]
    assert backwards[::-1] == [open_corpus(lengths).sample(i, 1)[0].tolist() for i in range(corpus.samples)]


@pytest.mark.parametrize(("lengths", "held"), [([3], 3), ([], 0), ([0, 0], 0)])
def test_a_corpus_of_less_than_one_sample_is_refused_with_what_is_needed(open_corpus, lengths, held):
    with pytest.raises(DataError, match=f"has {held} tokens to train on, fewer than one.*\n.*takes 5; .*has {held}"):
        open_corpus(lengths, 4, 0.1)
