"""``hpctrain draw``: a pipeline's schedule as text, picture or CSV, with what it costs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.options import AsJson, three_times
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.schedule.action import Schedule
    from hpctrain.schedule.simulate import Timeline

RANKS, MICROBATCHES = 4, 8  # of what is drawn when nobody said how many
COSTS = "1,1,1"


def draw(
    what: Annotated[
        str, typer.Argument(help="A kind of schedule, or a file: .csv, text, or a .json of log.trace.", metavar="KIND")
    ],
    stages: Annotated[
        int | None,
        typer.Option(help="Stages of the whole pipeline: ranks x chunks.", min=1, show_default="of 4 ranks"),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Micro-batches of a step.", min=1, show_default=str(MICROBATCHES))
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(help="Stages that each rank has.", min=1, show_default="by the kind: 1 or 2")
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(help="Micro-batches through a chunk in a row, if interleaved.", min=1, show_default="ranks"),
    ] = None,
    costs: Annotated[str, typer.Option(help="What F, I and W of a stage take; B is I + W.", metavar="F,I,W")] = COSTS,
    message: Annotated[float, typer.Option(help="How long a message is under way.", min=0)] = 0.0,
    messages: Annotated[bool, typer.Option("--messages", help="Also write down sends and receives.")] = False,
    out: Annotated[Path | None, typer.Option(help="Make a picture: .svg, or .png with matplotlib.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the actions as CSV, which torch's pipelining reads.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the schedule of a pipeline, and say what it costs."""
    from hpctrain.schedule.draw import describe, summary, text
    from hpctrain.schedule.passes import add_messages
    from hpctrain.schedule.picture import save
    from hpctrain.schedule.simulate import Costs, simulate

    shape = {"stages": stages, "microbatches": microbatches, "chunks": chunks, "group": group}
    if Path(what).suffix == ".json":
        _alone(what, shape | {"costs": costs != COSTS, "message": message, "messages": messages})
        title, timeline = _measured(Path(what))
    else:
        title, schedule = _schedule(what, shape)
        schedule = add_messages(schedule) if messages else schedule
        timeline = simulate(schedule, Costs(*three_times(costs), message))
    if csv:
        _write(csv, timeline.schedule)
    if out:
        save(out, timeline, title)
    if as_json:
        print(json.dumps(summary(timeline) | {"schedule": timeline.schedule.to_json()}, indent=2))
    else:
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(text(timeline, shutil.get_terminal_size().columns, colours) + "\n" + describe(timeline))


def _schedule(what: str, shape: dict[str, int | None]) -> tuple[str, Schedule]:
    """A title, and the schedule of a kind or of a file."""
    from hpctrain.schedule.files import read
    from hpctrain.schedule.kinds import SCHEDULES

    path = Path(what)
    if what in SCHEDULES or not (path.suffix or path.is_file()):
        return _of_kind(what, **shape)
    _alone(what, shape)
    return path.name, read(path)


def _measured(path: Path) -> tuple[str, Timeline]:
    """A title, and what a run has recorded of a step."""
    from hpctrain.watch.trace import read

    return path.name, read(path)


def _alone(what: str, options: dict[str, Any]) -> None:
    """Refuse options that say what a file says by itself."""
    given = " ".join(f"--{name}" for name, value in options.items() if value)
    if given:
        why = "a file says by itself how much there is"
        raise UsageError(f"{given} beside the file {what}", why, "leave it out, or name a kind of schedule")


def _of_kind(
    kind: str, stages: int | None, microbatches: int | None, chunks: int | None, group: int | None
) -> tuple[str, Schedule]:
    from hpctrain.schedule.kinds import find, make

    each = chunks or find(kind).usual_chunks
    stages, microbatches = stages or RANKS * each, microbatches or MICROBATCHES
    if stages % each:
        why = "every rank of a pipeline has as many stages as the others"
        raise UsageError(f"{stages} stages, {each} on each rank", why, f"take {stages // each * each or each} stages")
    title = f"{kind}: {stages // each} ranks, {stages} stages, {microbatches} micro-batches"
    title += f" in groups of {group}" if group else ""
    return title, make(kind, stages // each, microbatches, chunks, group)


def _write(path: Path, schedule: Schedule) -> None:
    from hpctrain.schedule.files import to_csv

    try:
        path.write_text(to_csv(schedule))
    except OSError as error:
        what = f"{path} cannot be written: {error}"
        raise UsageError(what, "--csv goes there", "name a file in a folder that is there") from None
