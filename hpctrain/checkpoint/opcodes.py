"""Opcodes: what a pickle says, as plain data. Nothing that it names is imported, called or made.

A pickle is a program for a machine with a stack. Here its opcodes are walked through, and where the program asks for a
function or a class to be called, a ``Call`` is put down that only says so. Names that the reader does not expect are
refused, so that what cannot be understood is not passed over. The opcodes are those of protocols 2 to 5 (PEP 307, 3154
and 574; ``pickletools`` describes each).
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import CheckpointError

NOT_RUN = "a pickle may ask for any code to be run: here nothing is, and what is not known is not read"
AGAIN = "copy it again from where it is whole"


@dataclass(frozen=True)
class Name:
    """A function or a class, by its name alone."""

    name: str


@dataclass(eq=False)
class Call:
    """A call that was asked for and not made. Not frozen: a program tells the state after it has used the object."""

    name: str
    args: Any
    state: Any = None

    def __getitem__(self, key: str) -> Any:
        """An attribute that the state tells; None where it tells no such thing."""
        return self.state.get(key) if isinstance(self.state, dict) else None


def read(data: bytes, where: str, known: Collection[str]) -> Any:
    """What a pickle tells, with a ``Name`` or a ``Call`` where it names something, which must be one of ``known``.

    ``where`` is told in errors. Raises CheckpointError for other names and for what is no whole pickle.
    """
    machine = Machine(where, known)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.step(opcode.name, argument)
        return machine.stack[-1]
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be read", f"it is no whole pickle: {error}", AGAIN) from None


class Machine:
    """The stack, the marks on it, and the memory of a program under way."""

    def __init__(self, where: str, known: Collection[str]) -> None:
        self.where, self.known = where, known
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Follow one opcode."""
        if name in CONSTANTS:
            self.stack.append(argument if CONSTANTS[name] is None else CONSTANTS[name]())
        elif name in STEPS:
            STEPS[name](self, argument)
        elif name not in IGNORED:
            raise CheckpointError(f"{self.where} has the opcode {name}", NOT_RUN, _mend())

    def pop(self, count: int) -> list[Any]:
        """The last ``count`` values, in their order."""
        if len(self.stack) < count:
            raise IndexError("it takes more than it has put down")
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found

    def marked(self) -> list[Any]:
        """The values since the last mark."""
        return self.pop(len(self.stack) - self.marks.pop())

    def named(self, name: str) -> Name:
        """A name, if it is one of those that may be there."""
        if name not in self.known:
            raise CheckpointError(f"{self.where} names {name}", NOT_RUN, _mend())
        return Name(name)

    def call(self, what: Any, args: Any) -> None:
        """Put down that ``what`` would be called."""
        if not isinstance(what, Name):
            raise TypeError("it calls what has no name")
        self.stack.append(Call(what.name, args))

    def build(self, state: Any) -> None:
        """Give the last object a state."""
        if not isinstance(self.stack[-1], Call):
            raise TypeError("it gives a state to what takes none")
        self.stack[-1].state = state

    def put(self, pairs: list[Any]) -> None:
        """Fill the last dict."""
        into = self.stack[-1]
        items = dict(zip(pairs[::2], pairs[1::2], strict=True))
        # An OrderedDict is a call, and is filled as a dict is.
        if isinstance(into, Call):
            into.state = (into.state or {}) | items
        else:
            into.update(items)


def _mend() -> str:
    return "take a checkpoint from somebody you trust, and save it anew with the torch that it was saved with"


# Opcodes that put down a value: the one that they carry (None), or a new one of a kind.
CONSTANTS: dict[str, Callable[[], Any] | None] = dict.fromkeys((
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
)) | {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}  # fmt: skip
IGNORED = ("PROTO", "FRAME", "STOP")
STEPS: dict[str, Callable[[Machine, Any], Any]] = {
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "POP": lambda machine, _: machine.pop(1),
    "POP_MARK": lambda machine, _: machine.marked(),
    "MEMOIZE": lambda machine, _: machine.memo.update({len(machine.memo): machine.stack[-1]}),
    "BINPUT": lambda machine, number: machine.memo.update({number: machine.stack[-1]}),
    "LONG_BINPUT": lambda machine, number: machine.memo.update({number: machine.stack[-1]}),
    "BINGET": lambda machine, number: machine.stack.append(machine.memo[number]),
    "LONG_BINGET": lambda machine, number: machine.stack.append(machine.memo[number]),
    "TUPLE1": lambda machine, _: machine.stack.append(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.stack.append(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.stack.append(tuple(machine.pop(3))),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.marked())),
    "FROZENSET": lambda machine, _: machine.stack.append(frozenset(machine.marked())),
    "APPEND": lambda machine, _: _append(machine, machine.pop(1)),
    "APPENDS": lambda machine, _: _append(machine, machine.marked()),
    "ADDITEMS": lambda machine, _: _add(machine, machine.marked()),
    "SETITEM": lambda machine, _: machine.put(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.put(machine.marked()),
    "GLOBAL": lambda machine, name: machine.stack.append(machine.named(name.replace(" ", "."))),
    "STACK_GLOBAL": lambda machine, _: machine.stack.append(machine.named(".".join(machine.pop(2)))),
    "REDUCE": lambda machine, _: machine.call(*machine.pop(2)),
    "NEWOBJ": lambda machine, _: machine.call(*machine.pop(2)),
    "BUILD": lambda machine, _: machine.build(*machine.pop(1)),
    "BINPERSID": lambda machine, _: machine.stack.append(Call("persistent", *machine.pop(1))),
}


def _append(machine: Machine, values: list[Any]) -> None:
    machine.stack[-1].extend(values)


def _add(machine: Machine, values: list[Any]) -> None:
    machine.stack[-1].update(values)
