"""The command line: `pallas-attn generate`, `chat`, `serve`, `tune`, `show-layout` and `doctor`, also as
`python -m pallas_attn`."""

import os
import sys
from collections.abc import Sequence

from pallas_attn._interrupt import INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, 1 (it could not be done), 2 (wrong usage) or 130 (Ctrl-C).

    User errors print one line on stderr. PALLAS_ATTN_TRACEBACK=1 shows the traceback instead.

    Args:
        arguments: without the program's name; ``None`` takes the process's.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if given == ["doctor"]:  # reports what is missing, so it must not need what the other commands need
            from pallas_attn.cli.doctor import run_doctor

            return run_doctor()
        from pallas_attn.cli import commands

        return commands.run(given)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, TypeError, OverflowError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get("PALLAS_ATTN_TRACEBACK") == "1":
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"pallas-attn: error: {message}", file=sys.stderr)
        return 1
