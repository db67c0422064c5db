"""What a configuration may say, and what is answered to one that is wrong."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from hpctrain.config import Config, ModelConfig, Section, defaults, fields, knobs, load, parse
from hpctrain.errors import ConfigError
from hpctrain.plan.plan import decide
from hpctrain.plan.topology import Topology
from hpctrain.plan.units import REPLICA, SHARD, STAGES

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs").glob("*.toml"))


def refused(table: dict[str, Any], *overrides: str) -> list[str]:
    """The lines of the message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        parse(table, overrides)
    return str(caught.value).split("\n  ")


# ---- files and overrides


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_in_configs_loads_and_decides(path: Path) -> None:
    config = load(path)
    model = config.parallel.pp * config.parallel.tp
    plan = decide(config, Topology(tuple(f"node{rank // 8}" for rank in range(16 * model))), 2048)
    assert (plan.mesh.size(REPLICA, SHARD), plan.mesh.ranks_total) == (16, 16 * model)


def test_there_are_files_for_all_parallelisms_at_once() -> None:
    parallel = [load(path).parallel for path in FILES]
    assert any(one.pp > 1 and one.tp > 1 and one.zero for one in parallel)


def test_there_is_a_file_for_each_stage_and_for_copies() -> None:
    parallel = [load(path).parallel for path in FILES]
    assert {(one.zero, one.shard is not None) for one in parallel} == {*product(STAGES, [False]), (3, True)}


def test_there_are_files_in_configs() -> None:
    assert {"tiny.toml", "bench-34m.toml"} <= {path.name for path in FILES}


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert load(tmp_path / "empty.toml") == Config()


def test_the_last_override_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nsteps = 7\nbatch = 8\n")
    config = load(tmp_path / "a.toml", ("train.steps=8", "train.steps=9"))
    assert (config.train.steps, config.train.batch) == (9, 8)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.steps=100", 100),
        ("train.steps = 1_000", 1000),
        ("optim.rate=1e-4", 1e-4),
        ("optim.rate=1", 1.0),
        ("checkpoint.sync=false", False),
        ("run.name=first-try", "first-try"),
        ('run.name="42"', "42"),
        ("run.name=", ""),
        ("run.dir=/scratch/a=b", "/scratch/a=b"),
        ("model.vocabulary=auto", "auto"),
        ("model.vocabulary=300", 300),
        ("model.kv_heads=2", 2),
        ("data.text=['a', 'b']", ("a", "b")),
        ("parallel.dp=auto", "auto"),
        ("checkpoint.hints.cb_nodes=8", 8),
        ("run.stop_signals=['USR1']", ("USR1",)),
    ],
)
def test_an_override_is_typed_and_a_bare_word_is_text(override: str, value: object) -> None:
    found: Any = parse({}, (override,))
    for part in override.partition("=")[0].strip().split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value and type(found) is type(value)


@given(st.integers(0, 10**6), st.floats(1e-9, 1e3, allow_nan=False), st.booleans())
def test_numbers_and_booleans_come_through_an_override_as_they_are(steps: int, rate: float, sync: bool) -> None:
    overrides = (f"train.steps={steps}", f"optim.rate={rate!r}", f"checkpoint.sync={str(sync).lower()}")
    config = parse({}, overrides)
    assert (config.train.steps, config.optim.rate, config.checkpoint.sync) == (steps, rate, sync)


def test_tables_of_a_list_come_through_an_override() -> None:
    config = parse({}, ('data.sources=[{path="a", weight=2}, {path="b"}]',))
    assert [(source.path, source.weight) for source in config.data.sources] == [("a", 2.0), ("b", 1.0)]


@pytest.mark.parametrize("key", [key for key, field in fields() if get_origin(field.annotation) is tuple])
def test_every_list_can_be_written_as_one(key: str) -> None:
    assert parse({}, (f"{key}=[]",))


def test_the_table_that_was_given_is_left_alone() -> None:
    table: dict[str, Any] = {"train": {"steps": 1}}
    parse(table, ("train.steps=2", "optim.rate=1e-3"))
    assert table == {"train": {"steps": 1}}


def test_the_folder_of_a_run_bears_its_name() -> None:
    assert parse({"run": {"name": "b", "dir": "/a/{name}/c"}}).run.folder == Path("/a/b/c")


# ---- knobs


def sections() -> list[type[Section]]:
    own = [one for one in Section.__subclasses__() if one.__module__.startswith("hpctrain.config")]
    return [Section, *own]  # others, such as those of machine files, are no part of a run's configuration


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_section_and_every_knob_has_a_docstring(section: type[Section]) -> None:
    assert section.__doc__ and section.__doc__ != BaseModel.__doc__
    plain = {name: field for name, field in section.model_fields.items() if section is not Config}
    assert [name for name, field in plain.items() if not field.description] == []


def test_every_field_of_every_section_is_a_knob() -> None:
    listed = {key.rpartition(".")[2] for key in knobs()}
    runs = [section for section in sections() if section.__module__.startswith("hpctrain.config.")]
    fields = {name for section in runs if section is not Config for name in section.model_fields}
    assert listed == fields
    assert all(knobs().values())


def test_knobs_have_a_default_each() -> None:
    assert list(knobs()) == list(defaults())
    assert defaults()["train.steps"] == Config().train.steps
    assert defaults()["data.sources"] == [] and defaults()["data.sources[].weight"] == 1.0


def test_a_configuration_cannot_be_changed() -> None:
    config = parse({"data": {"sources": [{"path": "a"}]}})
    for section in (config, config.train, config.data.sources[0]):
        name = next(iter(type(section).model_fields))
        with pytest.raises(ValidationError):
            setattr(section, name, getattr(section, name))


# ---- unknown keys


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("trian", "did you mean train?"),
        ("train.step", "did you mean train.steps?"),
        ("model.widht", "did you mean model.width?"),
        ("steps", "did you mean train.steps?"),
        ("train.rate", "did you mean optim.rate?"),
        ("optim.lr", "known in optim: kind, rate, beta1,"),
        ("nonsense", "known sections: run, model, data, train,"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(key: str, answer: str) -> None:
    what, mend = refused({}, f"{key}=1")
    assert what == f"configuration: {key} is not a known key"
    assert mend.startswith(answer)


def test_an_unknown_key_in_a_table_of_a_list_names_the_nearest_known_one() -> None:
    what, mend = refused({"data": {"sources": [{"path": "a"}, {"path": "b", "wieght": 2}]}})
    assert what == "configuration: data.sources[1].wieght is not a known key"
    assert mend == "did you mean data.sources[].weight?"


def test_a_message_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nstep = 7\n")
    with pytest.raises(ConfigError, match=r"a\.toml: train\.step is not a known key"):
        load(tmp_path / "a.toml")


# ---- values that cannot be


@pytest.mark.parametrize(
    ("override", "value", "why"),
    [
        ("train.steps=many", "'many'", "it should be a valid integer"),
        ("train.steps=1.5", "1.5", "it should be a valid integer"),
        ("train.steps=true", "True", "it should be a valid integer"),
        ("train.steps='5'", "'5'", "it should be a valid integer"),
        ("train.batch=0", "0", "it should be greater than or equal to 1"),
        ("optim.rate=0", "0", "it should be greater than 0"),
        ("optim.rate=inf", "inf", "it should be a finite number"),
        ("optim.rate=nan", "nan", "it should be a finite number"),
        ("optim.shape=cosin", "'cosin'", "it should be 'constant', 'linear', 'cosine' or 'wsd'"),
        ("model.vocabulary=all", "'all'", "it should be a valid integer; or it should be 'auto'"),
        ("log.peak_tflops=fast", "'fast'", "it should be a valid number; or it should be 'auto'"),
        ("checkpoint.sync=1", "1", "it should be true or false"),
        ("run.name=42", "42", "it should be text, in quotes (in a shell, with quotes around them)"),
        ("data.text=books", "'books'", "it should be a list, in brackets"),
        ("train=5", "5", "it is a section, not a value"),
    ],
)
def test_a_value_that_cannot_be_is_told_with_key_value_reason_and_meaning(override: str, value: str, why: str) -> None:
    key = override.partition("=")[0]
    what, reason, *meaning = refused({}, override)
    assert what == f"configuration: {key} = {value} cannot be"
    assert reason == why
    assert meaning == ([knobs()[key]] if key in knobs() else [])


def test_further_wrong_keys_are_counted() -> None:
    assert refused({}, "train.steps=a", "train.batch=0", "x=1")[0].endswith("train.steps = 'a' cannot be (and 2 more)")


def test_a_missing_key_is_told() -> None:
    what, meaning = refused({"data": {"sources": [{"weight": 2}]}})
    assert what == "configuration: data.sources[0].path is missing"
    assert meaning == knobs()["data.sources[].path"]


def test_heads_must_divide_the_width() -> None:
    assert refused({"model": {"width": 96, "heads": 5}}) == [
        "model.heads = 5 does not divide model.width = 96",
        "each head gets width / heads dimensions",
        "set model.heads to 4 or 6, or change model.width",
    ]


def test_heads_of_dimensions_of_their_own_need_not_divide_the_width() -> None:
    assert parse({"model": {"width": 96, "heads": 5, "head_dim": 20}}).model.head_dim == 20


def test_key_value_heads_must_divide_the_heads() -> None:
    assert refused({"model": {"width": 96, "heads": 6, "kv_heads": 12}}) == [
        "model.kv_heads = 12 does not divide model.heads = 6",
        "each key-value head serves equally many heads",
        "set model.kv_heads to 6, or change model.heads",
    ]


@pytest.mark.parametrize(
    ("override", "zero", "mend"),
    [
        ("parallel.near=2", 2, "set parallel.zero to 3, or leave parallel.near out"),
        ("parallel.gather_in=int8", 1, "set parallel.zero to 3, or leave parallel.gather_in out"),
        ("parallel.reduce_in=fp8", 0, "set parallel.zero to 1 or 2 or 3, or leave parallel.reduce_in out"),
    ],
)
def test_what_travels_must_be_shared(override: str, zero: int, mend: str) -> None:
    key, _, value = override.partition("=")
    what, why, told = refused({"parallel": {"zero": zero}}, override)
    assert what.removeprefix("configuration: ").startswith(f"{key} = ") and value in what and why
    assert what.endswith(f"with parallel.zero = {zero}") and told == mend
    assert parse({"parallel": {"zero": 3}}, (override,))


def test_gradients_are_not_summed_in_fp16() -> None:
    what, why, mend = refused({"precision": {"compute": "fp16", "gradients": "compute"}})
    assert 'precision.gradients = "compute" does not go with precision.compute = "fp16"' in what
    assert "small gradients vanish" in why and "bf16" in mend


@given(st.integers(1, 64), st.integers(1, 64))
def test_what_is_proposed_for_heads_that_do_not_divide_is_accepted(width: int, heads: int) -> None:
    try:
        ModelConfig(width=width, heads=heads)
    except ConfigError as error:
        proposed = error.mend.removeprefix("set model.heads to ").partition(",")[0].split(" or ")
        assert width % heads and proposed
        assert all(ModelConfig(width=width, heads=int(number)) for number in proposed)
    else:
        assert width % heads == 0


# ---- forms that cannot be


@pytest.mark.parametrize("override", ["train.steps", "=5", "train.=5", ".steps=5", ""])
def test_an_override_that_is_no_assignment_is_refused(override: str) -> None:
    what, mend = refused({}, override)
    assert what == f"--set {override}: not section.key=value"
    assert mend == "write e.g. --set train.steps=100"


def test_an_override_below_a_value_is_refused() -> None:
    what, mend = refused({"train": {"steps": 3}}, "train.steps.x=1")
    assert (what, mend) == ("--set train.steps.x=1: steps is a value, not a section", "name an existing section")


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "no.toml")
    lines = str(caught.value).split("\n  ")
    assert lines == [f"{tmp_path}/no.toml cannot be read", "No such file or directory", "give the path of a TOML file"]


@pytest.mark.parametrize("content", [b"[train\n", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_a_file_that_is_not_toml_is_told_with_the_place(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "bad.toml")
    what, why, mend = str(caught.value).split("\n  ")
    assert what == f"{tmp_path}/bad.toml is not TOML"
    assert ("line" in why or "position" in why) and mend == "mend that line"
