"""What a run shows: a line for each row, and how far it is."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def shown(total: int) -> Iterator[Callable[[str], None]]:
    """advance(line): prints it, and the time left; on a terminal with rich as a bar under the lines.

    Drawn between measurements only: a thread that draws beside them would disturb them.
    """
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield _Lines(total)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, auto_refresh=False) as bar:
        task = bar.add_task("", total=total)
        bar.refresh()

        def advance(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            bar.update(task, advance=1, refresh=True)

        yield advance


class _Lines:
    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.monotonic()

    def __call__(self, line: str) -> None:
        self.done += 1
        left = (time.monotonic() - self.start) / self.done * (self.total - self.done)
        print(f"[{self.done}/{self.total}, {duration(left)} left] {line}", flush=True)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
