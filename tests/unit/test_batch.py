"""Batch: the samples of a step, and the part of them that a rank takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config import DataConfig, SourceConfig, TrainConfig
from hpctrain.data.batch import IGNORE, Batches
from hpctrain.data.tokens import Description, write
from hpctrain.errors import ConfigError, DataError, PlanError

SEQUENCE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two token files in which no token occurs twice: 60 documents of 0 to 19 tokens, and 12 of 25."""
    folder = tmp_path_factory.mktemp("batch")
    lengths = {"many": [i * 7 % 20 for i in range(60)], "few": [25] * 12}
    start = 0
    for name, sizes in lengths.items():
        ends = start + np.cumsum([0, *sizes])
        write(folder / name, [np.arange(a, b) for a, b in zip(ends, ends[1:], strict=False)], "int32")
        start = int(ends[-1])
    return folder


@pytest.fixture(scope="module")
def open_batches(folder):
    """Opens batches over both files, three quarters of them from the first."""

    def open_(batch=12, microbatch=4, seed=1, vocabulary=2000, **data):
        sources = (SourceConfig(path=str(folder / "many"), weight=3), SourceConfig(path=str(folder / "few")))
        config = DataConfig(**({"sources": sources, "validation": 0.2} | data))
        return Batches(config, TrainConfig(batch=batch, microbatch=microbatch), SEQUENCE, seed, vocabulary)

    return open_


def rows(micros):
    """The sequences of micro-batches with their targets, as tuples."""
    return [tuple(row) for micro in micros for row in torch.cat([micro.tokens, micro.targets], dim=1).tolist()]


@settings(max_examples=40)
@given(step=st.integers(0, 200), size=st.sampled_from([1, 2, 3, 4, 6, 12]), microbatch=st.integers(1, 13))
def test_ranks_and_micro_batches_of_any_number_take_the_same_samples(open_batches, step, size, microbatch):
    batches = open_batches()
    whole = rows(batches.part(step, microbatch=12))
    parts = [batches.part(step, rank, size, microbatch) for rank in range(size)]
    assert [row for part in parts for row in rows(part)] == whole
    assert len({tuple(len(micro.tokens) for micro in part) for part in parts}) == 1
    assert [number for part in parts for micro in part for number in micro.samples] == list(range(12))
    assert all(len(micro.tokens) <= microbatch for part in parts for micro in part)


def test_each_source_gives_every_sample_once_an_epoch(open_batches):
    batches = open_batches()
    counts = [corpus.samples for corpus in batches.corpora]
    source, epoch, sample = batches.locate(np.arange(8 * sum(counts)))
    for one, count in enumerate(counts):
        mine = sample[source == one][: len(sample[source == one]) // count * count].reshape(-1, count)
        assert len(mine) >= 3
        assert (np.sort(mine, axis=1) == np.arange(count)).all()
        assert (epoch[source == one][:: count][: len(mine)] == np.arange(len(mine))).all()
        assert len(set(map(tuple, mine.tolist()))) == len(mine)


def test_no_token_is_met_twice_in_an_epoch(open_batches, folder):
    batches = open_batches(batch=1, sources=(SourceConfig(path=str(folder / "many")),))
    met = np.concatenate([batches.part(step)[0].targets.numpy().ravel() for step in range(batches.corpora[0].samples)])
    assert len(set(met.tolist())) == len(met) == SEQUENCE * batches.corpora[0].samples


@settings(max_examples=25)
@given(step=st.integers(0, 500))
def test_a_run_goes_on_from_its_step_alone(open_batches, step):
    gone_on, unbroken = open_batches(), open_batches()
    for before in range(max(0, step - 2), step):
        unbroken.part(before)
    assert rows(gone_on.part(step)) == rows(unbroken.part(step))


@settings(max_examples=25)
@given(batch=st.integers(1, 40))
def test_the_row_of_samples_does_not_depend_on_how_many_a_step_takes(open_batches, batch):
    one_by_one, many = open_batches(batch=1), open_batches(batch=batch)
    assert [row for step in range(batch) for row in rows(one_by_one.part(step))] == rows(many.part(0))


def test_another_seed_gives_another_order(open_batches):
    assert rows(open_batches(seed=1).part(0)) != rows(open_batches(seed=2).part(0))


def test_sources_are_blended_by_weight(open_batches):
    source, _, _ = open_batches().locate(np.arange(400))
    assert np.bincount(source).tolist() == [300, 100]


def test_targets_are_the_next_tokens_also_across_documents(open_batches):
    micro = open_batches().part(3)[0]
    assert micro.tokens.dtype == micro.targets.dtype == torch.int64
    assert micro.tokens.shape == micro.targets.shape == (4, SEQUENCE)
    assert torch.equal(micro.tokens[:, 1:], micro.targets[:, :-1])
    assert micro.predicted == 4 * SEQUENCE


def test_a_micro_batch_moves_whole_to_another_device(open_batches):
    for cross in (True, False):
        micro = open_batches(cross_documents=cross).part(0)[0].to("meta")
        assert micro.tokens.is_meta and micro.targets.is_meta
        assert micro.documents is None if cross else micro.documents.is_meta
        assert micro.samples == (0, 1, 2, 3)


def test_documents_are_told_only_where_attention_must_not_cross_them(open_batches):
    crossing, within = open_batches().part(0)[0], open_batches(cross_documents=False).part(0)[0]
    assert crossing.documents is None
    assert torch.equal(crossing.tokens, within.tokens) and torch.equal(crossing.targets, within.targets)
    # in these files a token follows the one before it exactly inside a document
    same = within.documents[:, 1:] == within.documents[:, :-1]
    assert torch.equal(same, within.tokens.diff(dim=1) == 1)


@settings(max_examples=15)
@given(size=st.sampled_from([1, 2, 3, 4]), seed=st.integers(0, 5))
def test_validation_meets_each_of_its_tokens_at_most_once_and_never_one_of_training(open_batches, size, seed):
    batches = open_batches(seed=seed)
    parts = [batches.validation(i, rank, size) for i in range(batches.validation_batches) for rank in range(size)]
    targets = torch.cat([micro.targets for part in parts for micro in part])
    assert len(targets) == 12 * batches.validation_batches
    met = targets[targets != IGNORE].tolist()
    assert len(set(met)) == len(met) > SEQUENCE
    trained = {token for step in range(20) for row in rows(batches.part(step)) for token in row}
    assert not trained & set(met)
    assert rows(batches.validation(0)) == rows(open_batches(seed=99).validation(0))


def test_every_rank_has_as_many_micro_batches_in_the_last_validation_batch(open_batches):
    batches = open_batches(batch=24)
    last = batches.validation_batches - 1
    assert batches.validation_samples % 24
    parts = [batches.validation(last, rank, 4, 3) for rank in range(4)]
    assert {tuple(micro.tokens.shape for micro in part) for part in parts} == {((3, SEQUENCE), (3, SEQUENCE))}
    assert parts[-1][-1].predicted == 0


def test_a_validation_batch_that_is_not_there_is_refused(open_batches):
    none = open_batches(validation=0.0)
    assert none.validation_batches == 0
    with pytest.raises(DataError, match="no validation batch 0\n.*data.validation = 0.0 keeps 0 samples"):
        none.validation(0)


@pytest.mark.parametrize(("size", "mend"), [(5, "set it to 10 or 15"), (8, "set it to 8 or 16"), (24, "set it to 24")])
def test_a_batch_that_does_not_divide_over_the_ranks_is_refused_with_the_nearest_that_do(open_batches, size, mend):
    with pytest.raises(PlanError, match=f"train.batch = 12 does not divide over {size} .*\n.*\n.*{mend}$"):
        open_batches().part(0, 0, size)


def test_a_token_outside_the_vocabulary_is_refused(open_batches, folder):
    with pytest.raises(DataError, match="many holds token [0-9]+\n.*vocabulary has 5 tokens\n.*model.vocabulary"):
        open_batches(vocabulary=5).part(0)


def test_the_vocabulary_is_that_of_the_descriptions(tmp_path):
    for name, vocabulary in (("a", 300), ("b", 300), ("c", 500)):
        write(tmp_path / name, [range(40)], "uint16")
        (tmp_path / f"{name}.json").write_text(Description(vocabulary, 0, "bytes", 1, 1, 1, 40, 0, 0).text())

    def open_(*names):
        data = DataConfig(sources=tuple(SourceConfig(path=str(tmp_path / name)) for name in names))
        return Batches(data, TrainConfig(), 4, 1)

    assert open_("a", "b").vocabulary == 300
    with pytest.raises(DataError, match="different vocabularies\n.*a: 300, .*c: 500\n.*one tokenizer"):
        open_("a", "c")
    (tmp_path / "a.json").unlink()
    assert open_("a", "b").vocabulary == 300
    with pytest.raises(ConfigError, match='vocabulary = "auto" cannot be found out\n.*a.json.*\n.*set model.voc'):
        open_("a")


def test_a_run_without_sources_is_refused(open_batches):
    with pytest.raises(ConfigError, match="data.sources is empty\n"):
        open_batches(sources=())


def test_batches_are_the_same_in_every_release(open_batches):
    """Others would break the resumption of runs."""
    found = [values.tolist() for values in open_batches().locate([0, 1, 2, 3, 1000])]
    assert found == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 13], [32, 45, 47, 20, 27]]
    assert open_batches().part(0)[0].tokens[0].tolist() == [105, 427, 428, 429, 430, 431, 432, 433]
