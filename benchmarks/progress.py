"""What a run shows: a line for each row, and how far it is."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def shown(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """advance(line) and say(line): both print a line, the first counts it and shows the time left.

    On a terminal with rich that is a bar under the lines. It is drawn between measurements only: a thread that draws
    beside them would disturb them.
    """
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        lines = _Lines(total)
        yield lines.advance, lines.say
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

        def say(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

        def advance(line: str) -> None:
            say(line)
            bar.update(task, advance=1, refresh=True)

        yield advance, say


class _Lines:
    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.monotonic()

    def say(self, line: str) -> None:
        print(line, flush=True)

    def advance(self, line: str) -> None:
        self.done += 1
        left = (time.monotonic() - self.start) / self.done * (self.total - self.done)
        self.say(f"[{self.done}/{self.total}, {duration(left)} left] {line}")


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
