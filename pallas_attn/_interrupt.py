"""Ctrl-C ends the command line at once and quietly, whatever it is doing.

Python hears of an interrupt only between two of its own instructions. A program that waits for XLA to compile or run
may be minutes away from its next one, and one that is importing an extension module gets a traceback from inside it.
So a thread waits for the signal beside the program and ends the process. It starts when this module is imported, which
the package's own `__init__` does before anything slow; in any process but the command line's that does nothing.
"""

import os
import signal
import sys
import threading

INTERRUPTED = 130  # what shells say of a program that SIGINT ended
_SHOW_CURSOR = b"\x1b[?25h\n"  # a progress bar hides it


def _end_quietly() -> None:
    """From now on SIGINT ends this process."""
    heard, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.signal(signal.SIGINT, lambda *_: _end())
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)

    def wait() -> None:
        # Other signals that Python handles come this way too.
        while os.read(heard, 1)[0] != signal.SIGINT:
            pass
        _end()

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
