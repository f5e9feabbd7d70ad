"""Which checkout's pallas_attn is measured: this one's, or another's (`run.py --source DIR`).

The cells and the clock are always this checkout's, so that two commits are measured alike. But two packages of one
name cannot both be imported. So the clock's file, which imports nothing of the package, is loaded by its path, and
another checkout's cells are asked of a second process.
"""

import dataclasses
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "pallas_attn"
# Of a case: what costs, inputs, reference and workloads look at.
SIZES = ("num_seqs", "num_heads", "num_kv_heads", "head_dim", "page_size", "q_len", "max_pages")
OPTIONS = (
    "cache_dtype",
    "causal",
    "sliding_window",
    "block_sparse",
    "tokens",
    "num_layers",
    "topk",
    "q_lens",
)
DENSE = ("batch", "kv_len", "value_dim", "layout", "q_offset", "documents")  # flash attention's
SPARSE = ("lens", "pattern", "block_size", "q_block_size", "group", "max_len")  # block-sparse attention's
ATTRIBUTES = ("op", "id", "dtype", "seq_lens", *SIZES, *OPTIONS, *DENSE, *SPARSE)


def _from_file(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / PACKAGE / "tuning" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"no file for {name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


timing: Any = _from_file("timing")


def load(directory: Path | None) -> Any:
    """The package of a checkout, this one's unless told otherwise, to call its public functions."""
    directory = directory or ROOT
    if not (directory / PACKAGE / "__init__.py").is_file():
        raise ValueError(f"--source: expected a checkout that holds {PACKAGE}/, got {str(directory)!r}")
    if PACKAGE not in sys.modules:
        sys.path.insert(0, str(directory.resolve()))
        # Where the package is installed to be edited, a finder of its own would answer before the path is asked.
        sys.meta_path.insert(0, PathFinder)
    package = importlib.import_module(PACKAGE)
    if not Path(package.__file__ or "").is_relative_to(directory.resolve()):
        raise ValueError(f"--source: {PACKAGE} was imported from {package.__file__} before")
    return package


def told(cases: Sequence[Any]) -> str:
    """Cases as JSON."""
    return json.dumps(
        [{name: _plain(getattr(c, name)) for name in ATTRIBUTES if hasattr(c, name)} for c in cases]
    )


def _plain(value: Any) -> Any:
    return dict(vars(value)) if dataclasses.is_dataclass(value) else value


class Heard:
    """A case of another process. Hashable, as those of this one are."""

    def __init__(self, **attributes: Any):
        vars(self).update(attributes)


def heard(text: str, library: Any) -> list[Any]:
    """The cases that `told` was given, with patterns of the library's own type."""
    cases: list[Any] = [Heard(**case) for case in json.loads(text)]
    for case in cases:
        for name in ("block_sparse", "pattern"):
            if isinstance(pattern := getattr(case, name, None), dict):
                setattr(case, name, library.LocalStride(**pattern))
    return cases


def cases_of_this_checkout(command_line: Sequence[str], library: Any) -> list[Any]:
    """What run.py would measure here; ValueError with what it says if that is nothing."""
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *command_line, "--tell-cases"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("run.py: error: ") or "the cells could not be told")
    return heard(done.stdout.splitlines()[-1], library)


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
