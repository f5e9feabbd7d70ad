"""Where a kernel's tile sizes come from: the caller, otherwise a measured file, otherwise the op's heuristic.

Measured files are `<device>/<op>.json` below the folder that the environment variable PALLAS_ATTN_CONFIGS names and
below `configs/` of this package, read one after the other:

    {"entries": [{"key": {...}, "config": {...}, "measured": {...}}, ...]}

A key holds the few facts that matter (head_dim, page size, dtype, ...), each a value or a range [least, most] whose
upper end may be null. The first entry whose whole key matches wins, so a user's entries hide only the packaged ones for
the same calls. Fields that an entry's config leaves out come from the heuristic.
"""

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pallas_attn._call.architecture import LEAST_SIDE
from pallas_attn._call.checks import brief, check_int, fail
from pallas_attn._call.device import current_device

CONFIGS_VARIABLE = "PALLAS_ATTN_CONFIGS"
# What Triton asks of a tile and of a program, and the least of each.
POWERS_OF_TWO = {"block_q": LEAST_SIDE, "block_kv": LEAST_SIDE, "num_warps": 1}
# What "measured" says of the call.
SIZES = ("num_seqs", "num_kv_heads", "max_len")


def check_sizes(config: Any, powers_of_two: Mapping[str, int], may_be_zero: Sequence[str] = ()) -> None:
    """For a config's `__post_init__`: every field is an int above 0, or 0 where allowed; fields named in
    `powers_of_two` are powers of two, no less than the number given there. TypeError or ValueError."""
    kind = type(config).__name__
    for name, size in vars(config).items():
        least = powers_of_two.get(name)
        check_int(kind, name, size, least=None if least else int(name not in may_be_zero))
        if least and (size < least or size & (size - 1)):
            fail(kind, name, f"a power of two >= {least}", brief(size))


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Tiles of a kernel whose walks over keys may be split; an op's config adds defaults and documents the fields."""

    block_q: int
    block_kv: int
    num_splits: int = 0
    _: dataclasses.KW_ONLY
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        check_sizes(self, POWERS_OF_TWO, may_be_zero=("num_splits", "split_tokens"))


@dataclasses.dataclass(frozen=True)
class SplitKVConfig(TileConfig):
    """With splits that follow from the batch at run time."""

    _: dataclasses.KW_ONLY
    min_split_tokens: int = 256
    target_programs: int = 528


@dataclasses.dataclass(frozen=True)
class FixedSplitConfig(SplitKVConfig):
    """With splits that may have a length of their own instead, for batch-invariant calls."""

    _: dataclasses.KW_ONLY
    split_tokens: int = 0


def check_type(op: str, config_type: type, explicit: Any) -> None:
    if explicit is not None and not isinstance(explicit, config_type):
        fail(op, "config", config_type.__name__, type(explicit).__name__, TypeError)


def resolve[C](
    op: str, config_type: type[C], explicit: C | None, key: dict[str, Any] | None, heuristic: Callable[..., C]
) -> C:
    """`heuristic(**measured)` fills in what the measured entry, if any, leaves out; without a `key` there is none."""
    check_type(op, config_type, explicit)
    if explicit is not None or key is None:
        return explicit or heuristic()
    for path, entry in _measured(current_device().slug, op, os.environ.get(CONFIGS_VARIABLE)):
        try:
            if serves(entry, key):
                check_names(config_type, entry["config"])
                return heuristic(**entry["config"])
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{op}: {path}: not an entry of measured configs: {entry}: {error!r}") from error
    return heuristic()


def check_names(config_type: type, config: Mapping[str, Any]) -> None:
    """A field that the heuristic also takes as a fact of the call would silently change that fact."""
    if unknown := config.keys() - inspect.signature(config_type).parameters.keys():
        raise ValueError(f"no fields of {config_type.__name__}: {', '.join(sorted(unknown))}")


def serves(entry: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    """Whether an entry is for calls of this key; a fact that the entry does not name may be anything."""
    return all(_agrees(expected, key.get(name)) for name, expected in entry["key"].items())


def _agrees(expected: Any, value: Any) -> bool:
    if not isinstance(expected, list):
        return value == expected
    least, most = expected
    return least <= value and (most is None or value <= most)


@functools.cache
def _measured(device: str, op: str, folder: str | None) -> list[tuple[Path, dict[str, Any]]]:
    """Every entry with the file it is from: those of the user's folder, then the packaged ones."""
    roots = ([Path(folder)] if folder else []) + [packaged_configs()]
    paths = [root / device / f"{op}.json" for root in roots]
    return [(path, entry) for path in paths for entry in load(path)]


def load(path: Path) -> list[dict[str, Any]]:
    """The entries of a measured file, none where there is no file; ValueError, naming it, for one that is none."""
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_text())["entries"]
        if not isinstance(entries, list):
            raise TypeError(f"entries of type {type(entries).__name__}")
        # Checked before `tune` measures for hours, not when it merges its results.
        for entry in entries:
            _check_entry(entry)
        return entries
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected measured configs as `pallas-attn tune` writes them, got {error!r}; delete or mend it"
        ) from error


def _check_entry(entry: Any) -> None:
    """TypeError for anything that cannot be an entry."""
    if not isinstance(entry, dict) or not all(
        isinstance(entry.get(part), dict) for part in ("key", "config")
    ):
        raise TypeError(f"no entry with a key and a config: {entry}")
    for name, fact in entry["key"].items():
        if isinstance(fact, list) and not _is_range(fact):
            raise TypeError(f"an entry whose {name} is no range, [least, most or null]: {entry}")
    jnp.dtype(entry["key"].get("dtype", "int8"))  # TypeError for what is none
    if "measured" not in entry:
        return
    about = entry["measured"]
    sizes = [about.get(name) for name in SIZES] if isinstance(about, dict) else [None]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise TypeError(f"an entry whose measured {', '.join(SIZES)} are no sizes: {entry}")


def _is_range(fact: list[Any]) -> bool:
    return len(fact) == 2 and isinstance(fact[0], int) and isinstance(fact[1], int | None)


def packaged_configs() -> Path:
    return Path(str(resources.files("pallas_attn") / "configs"))


def check_writable(path: Path) -> None:
    """OSError where `save` could not write: creates the folder, and a temporary file in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory, expected a file of measured configs")
    new = _beside(path)
    new.touch()
    new.unlink()


def save(path: Path, entries: list[dict[str, Any]], **about: Any) -> None:
    """Writes a measured file, one line an entry, atomically for concurrent readers."""
    lines = ",\n".join("    " + json.dumps(entry) for entry in entries)
    head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in about.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(path)
    new.write_text(f'{{\n{head}  "entries": [\n{lines}\n  ]\n}}\n')
    new.replace(path)
    _measured.cache_clear()


def _beside(path: Path) -> Path:
    # A file of `tempfile` would be readable by its owner only.
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")
