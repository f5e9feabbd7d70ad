"""Compiled kernels on disk, by a hash of what they were compiled from.

Files are written under a temporary name and renamed, so processes and machines may share a folder: one that a machine
has filled serves another without Triton. PALLAS_ATTN_KERNELS names the folder; the default is pallas_attn/kernels in
the user's cache. If it cannot be written, or the user has no home, nothing is cached, which costs only time.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

FORMAT = 1
FOLDER = "PALLAS_ATTN_KERNELS"
READABLE = 0o644


@dataclasses.dataclass(frozen=True)
class Request:
    """What a kernel is compiled from, apart from the compiler. `max_registers` of a thread; 0: no limit."""

    text: str
    capability: int
    num_warps: int
    num_stages: int
    ptx_version: int
    max_registers: int = 0

    @property
    def digest(self) -> str:
        key = json.dumps([FORMAT, *dataclasses.astuple(self)])
        return hashlib.sha256(key.encode()).hexdigest()[:40]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """`num_warps` may exceed what was asked for: the compiler may add warps that only load."""

    name: str
    ptx: str
    shared_bytes: int
    num_warps: int
    triton: str


def directory() -> Path:
    if named := os.environ.get(FOLDER):
        return Path(named)
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a path that cannot exist, for a user without a home
        caches = os.devnull
    return Path(caches) / "pallas_attn" / "kernels"


def holds_any() -> bool:
    with contextlib.suppress(OSError):
        return next(directory().glob("*.json"), None) is not None
    return False


def find(request: Request, version: str | None) -> Compiled | None:
    """The kernel as compiled by this version of Triton or, without a version, by the newest one cached."""
    named = directory() / f"{request.digest}-{version}.json"
    with contextlib.suppress(OSError):
        paths = [named] if version else sorted(directory().glob(f"{request.digest}-*.json"), key=_age)
        for path in reversed(paths):
            # A foreign, unreadable or truncated file counts as missing.
            with contextlib.suppress(OSError, ValueError, TypeError):
                return Compiled(**json.loads(path.read_text()))
    return None


def _age(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.stem.partition("-")[2])]


def keep(request: Request, compiled: Compiled) -> None:
    with contextlib.suppress(OSError):
        folder = directory()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete_on_close=False) as file:
            json.dump(dataclasses.asdict(compiled), file)
            file.close()
            # Temporary files are readable by their owner only, but others may share the folder.
            os.chmod(file.name, READABLE)
            os.replace(file.name, folder / f"{request.digest}-{compiled.triton}.json")
