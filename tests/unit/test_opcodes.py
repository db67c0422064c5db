"""What a pickle says comes back as plain data, and nothing that it names is run."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint import opcodes
from hpctrain.checkpoint.opcodes import Call, Name
from hpctrain.errors import CheckpointError

PROTOCOLS = (2, 3, 4, 5)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.frozensets(
        st.integers()
    ),
    max_leaves=40,
)  # fmt: skip


class Told:
    """An object that asks for a call when it is loaded."""

    def __init__(self, *wanted: Any) -> None:
        self.wanted = wanted

    def __reduce__(self) -> Any:
        return self.wanted


@given(value=PLAIN, protocol=st.sampled_from((4, 5)))
def test_plain_values_come_back_as_pickle_itself_gives_them(value: Any, protocol: int):
    assert opcodes.read(pickle.dumps(value, protocol), "x", ()) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_values_of_every_kind_come_back_in_every_protocol(protocol: int):
    same = [1]
    value = [{"a": (1, -(2**70), 2.5, None), "b": [True, False]}, (), (1,), (1, 2), (1, 2, 3), same, same, "é" * 300]
    back = opcodes.read(pickle.dumps(value, protocol), "x", ())
    assert back == value
    assert back[5] is back[6]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_is_put_down_with_what_it_was_told_and_not_made(protocol: int):
    made = opcodes.read(pickle.dumps(PurePosixPath("/a/b"), protocol), "x", ("pathlib.PurePosixPath",))
    assert (made.name, made.args) == ("pathlib.PurePosixPath", ("/", "a", "b"))
    (ordered,) = [opcodes.read(pickle.dumps(OrderedDict(a=1, b=2), protocol), "x", ("collections.OrderedDict",))]
    assert isinstance(ordered, Call) and (ordered["a"], ordered["b"], ordered["c"]) == (1, 2, None)
    assert opcodes.read(pickle.dumps(OrderedDict, protocol), "x", ("collections.OrderedDict",)) == Name(
        "collections.OrderedDict"
    )


def test_the_state_of_an_object_is_told_and_it_may_be_a_key():
    told = pickle.dumps({CheckpointError("a", "b", "c"): 1}, 4)
    (error,) = opcodes.read(told, "x", ("hpctrain.errors.CheckpointError",))
    assert (error.args, error["what"]) == (("a", "b", "c"), "a")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("known", [(), ("os.getcwd", "builtins.eval")])
def test_what_a_pickle_would_run_is_refused_by_its_name_and_not_run(protocol: int, known: tuple, tmp_path: Path):
    import os

    mark = tmp_path / "mark"
    told = pickle.dumps({"a": Told(os.system, (f"touch {mark}",))}, protocol)
    with pytest.raises(CheckpointError) as error:
        opcodes.read(told, "/data/.metadata", known)
    assert str(error.value) == (
        f"/data/.metadata names {os.system.__module__}.system\n"
        "  a pickle may ask for any code to be run: here nothing is, and what is not known is not read\n"
        "  take a checkpoint from somebody you trust, and save it anew with the torch that it was saved with"
    )
    assert not mark.exists()
    assert pickle.loads(told) and mark.exists()  # it would have been


def test_a_known_name_is_not_run_either(tmp_path: Path):
    import os

    mark = tmp_path / "mark"
    name = f"{os.system.__module__}.system"
    told = opcodes.read(pickle.dumps(Told(os.system, (f"touch {mark}",)), 4), "x", (name,))
    assert (told.name, told.args) == (name, (f"touch {mark}",))
    assert not mark.exists()


@pytest.mark.parametrize("opcode", [b"i__main__\nx\n.", b"\x82\x01.", b"Pname\n.", b"\x97."])
def test_an_opcode_that_no_tensor_needs_is_refused_by_its_name(opcode: bytes):
    with pytest.raises(CheckpointError, match="x has the opcode (INST|EXT1|PERSID|NEXT_BUFFER)"):
        opcodes.read(b"\x80\x04" + opcode, "x", ())


@given(cut=st.integers(0, 10_000))
def test_a_pickle_that_was_cut_off_is_refused(cut: int):
    told = pickle.dumps({"a": [1, 2, (3, "b")], "c": list(range(100))}, 4)
    with pytest.raises(CheckpointError, match="x cannot be read\n  it is no whole pickle"):
        opcodes.read(told[: cut % len(told)], "x", ())


@given(noise=st.binary(max_size=200))
def test_noise_is_refused_or_read_and_never_raises_anything_else(noise: bytes):
    try:
        opcodes.read(b"\x80\x04" + noise + b".", "x", ("collections.OrderedDict",))
    except CheckpointError:
        pass
