"""A progress bar on a terminal; nothing without one."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """As a context its value is the (done, total, note) callback that moves it."""

    def __init__(self, console: Console, what: str, unit: str):
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
        note = TextColumn("{task.fields[note]}")
        self._bar = Progress(*columns, note, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Callable[..., None]:
        self._bar.start()
        task = self._bar.add_task("", total=None, note="")

        def report(done: int, total: int, note: str = "") -> None:
            self._bar.update(task, completed=done, total=total, note=note)

        return report

    def __exit__(self, *_):
        self._bar.stop()
