"""Shell: values as bash and batch systems read them back, and lines as a person would break them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

INDENT = "    "
WIDTH = 100
_NAME = re.compile(r"\$(\{)?[A-Za-z_]\w*(?(1)\})")
_PLAIN = re.compile(r"[\w@%+=:,./-]*")
_BARE = re.compile(r"""[^\s"'\\#]+""")


def word(text: str) -> str:
    """A word that bash takes as it is, in quotes where it needs them."""
    return shlex.quote(text)


def export(name: str, value: str, stays: bool = False) -> str:
    """A line that exports a variable; with ``stays`` one that is there already is left as it is.

    In the value bash fills in ``$NAME`` and ``${NAME}``, and nothing else.
    """
    if stays and "'" in value:  # which bash takes for the begin of a quotation there
        return f"[[ -v {name} ]] || {export(name, value)}"
    text = _filled(value, r'(["\\$`}])' if stays else r'(["\\$`])')
    text = f"${{{name}-{text}}}" if stays else text
    return f"export {name}={text}" if _PLAIN.fullmatch(_NAME.sub("", value)) else f'export {name}="{text}"'


def value(text: str) -> str:
    """A value on a line for sbatch, qsub or flux: bare, or in quotes, with a backslash before those inside."""
    return text if _BARE.fullmatch(text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def command(words: Iterable[str], end: str = "") -> str:
    """A command of words that are quoted already, over several lines where it is long."""
    lines, line = [], ""
    for part in words:
        if line and len(line) + len(part) > WIDTH:
            lines.append(line)
            line = INDENT + part
        else:
            line = f"{line} {part}" if line else part
    return " \\\n".join((*lines, line + end))


def joined(launcher: str, program: str) -> str:
    """A launcher and what it starts, on one line where they fit."""
    line = f"{launcher} {program}"
    return line if len(line) <= WIDTH and "\n" not in line else f"{launcher} \\\n{INDENT}{program}"


def paragraph(comment: str, *lines: str) -> str:
    """Lines under a comment; nothing where there are none."""
    return "\n".join((*(f"# {line}" for line in comment.splitlines()), *lines)) + "\n" if lines else ""


def _filled(text: str, special: str) -> str:
    """The inside of double quotes, where only ``$NAME`` means something."""
    parts, at = [], 0
    for match in _NAME.finditer(text):
        parts += [re.sub(special, r"\\\1", text[at : match.start()]), match[0]]
        at = match.end()
    return "".join((*parts, re.sub(special, r"\\\1", text[at:])))
