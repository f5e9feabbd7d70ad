"""Which checkout's pallas_attn is measured: this one's, or another's (`run.py --source DIR`).

The cells, the reference and the clock are always this checkout's, so that two commits are measured alike.
"""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax  # noqa: F401  what the checkouts share is imported before either

PACKAGE = "pallas_attn"


def load(directory: Path | None) -> Any:
    """The package, to call its public functions.

    A directory's package replaces this checkout's in `sys.modules`: modules that the benchmarks have imported keep
    what they hold, and everything imported later, from inside the other package too, is the other's.
    """
    if directory is None:
        return importlib.import_module(PACKAGE)
    if not (directory / PACKAGE / "__init__.py").is_file():
        raise ValueError(f"--source: expected a checkout that holds {PACKAGE}/, got {str(directory)!r}")
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    sys.path.insert(0, str(directory.resolve()))
    importlib.invalidate_caches()
    return importlib.import_module(PACKAGE)


def commit(directory: Path) -> str | None:
    """Of a checkout, "+" and a digest of what differs from it behind; None where git knows of none."""
    try:
        if Path(_git(directory, "rev-parse", "--show-toplevel")) != directory.resolve():
            return None  # a plain folder inside another checkout
        head = _git(directory, "rev-parse", "--short", "HEAD")
        changed = _git(directory, "diff", "HEAD", "--", PACKAGE, "csrc", "xla_ffi")
    except (OSError, subprocess.CalledProcessError):
        return None
    if not changed:
        return head
    digest = subprocess.run(
        ["git", "hash-object", "--stdin"], input=changed, capture_output=True, text=True, check=True
    )
    return f"{head}+{digest.stdout[:6]}"


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
