"""Ctrl-C ends the command line at once and quietly, unless it has asked to handle the first one.

Python handles an interrupt only between two of its own instructions. A program that waits for XLA to compile or run may
be minutes away from its next one, and one that is importing an extension module gets a traceback from inside it. So a
thread waits for the signal beside the program and ends the process. It starts when this module is imported, which the
package's own `__init__` does before anything slow; in any process but the command line's that does nothing.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED = 130  # what shells say of a program that SIGINT ended
_SHOW_CURSOR = b"\x1b[?25h\n"  # a progress bar hides it


_first_to: threading.Event | None = None
_left_to_python = False


@contextlib.contextmanager
def heard() -> Iterator[threading.Event]:
    """While the body runs, the first Ctrl-C sets the event, and only a second one ends the program.

    In a process that is not the command line's the event is never set: there it is a KeyboardInterrupt, as ever.
    """
    global _first_to
    event = _first_to = threading.Event()
    try:
        yield event
    finally:
        _first_to = None


@contextlib.contextmanager
def raised(handler: Callable[..., Any] = signal.default_int_handler) -> Iterator[None]:
    """While the body runs, Ctrl-C is a KeyboardInterrupt: for reading a line, which leaves the terminal as it was only
    if it ends by itself. Or it is what another `handler` makes of it: a server has more to end than itself."""
    global _left_to_python
    before = signal.getsignal(signal.SIGINT)
    _left_to_python = True
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _left_to_python = False


def _end_quietly() -> None:
    """From now on SIGINT ends this process."""
    pipe, signalled = os.pipe()
    os.set_blocking(signalled, False)
    # The thread alone decides: two that hear of the same interrupt would take it for two.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)

    def wait() -> None:
        while True:
            # Other signals that Python handles come this way too.
            if os.read(pipe, 1)[0] == signal.SIGINT and not _left_to_python:
                first = _first_to
                if first is None or first.is_set():
                    _end()
                else:
                    first.set()

    threading.Thread(target=wait, name="interrupt", daemon=True).start()


def _is_command_line() -> bool:
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m":  # until the module that is to run has been found
        return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["pallas_attn"]
    return os.path.basename(program) == "pallas-attn"


def _end() -> None:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)
    os._exit(INTERRUPTED)


# Who started the program in the background has SIGINT ignored, and whoever handles it already shall go on doing so.
if _is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    _end_quietly()
