"""Compiled kernels, kept on disk under what they were compiled from.

A file is written beside its place and moved there, so processes may share a folder, and so may machines: a folder that
one machine has filled serves another that has no Triton. PALLAS_ATTN_KERNELS names it; by default it is
pallas_attn/kernels in the user's cache. A folder that cannot be written, or a user without a home, keeps nothing, and
that costs nothing but time.
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
    """What a kernel is compiled from, beside the compiler. `max_registers` of a thread, 0: as many as it takes."""

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
    """`num_warps` may be more than was asked for, where the compiler adds some that only load."""

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
    except RuntimeError:  # nobody's home: below a device there is nothing, and nothing can be made
        caches = os.devnull
    return Path(caches) / "pallas_attn" / "kernels"


def holds_any() -> bool:
    with contextlib.suppress(OSError):
        return next(directory().glob("*.json"), None) is not None
    return False


def find(request: Request, version: str | None) -> Compiled | None:
    """What this version of Triton made of it; what the newest one did, if no version is asked for."""
    named = directory() / f"{request.digest}-{version}.json"
    with contextlib.suppress(OSError):
        paths = [named] if version else sorted(directory().glob(f"{request.digest}-*.json"), key=_age)
        for path in reversed(paths):
            # A file that is not one of ours, or not for us, or cut short on another file system, is as good as none.
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
            # A temporary file is its owner's alone, and others may run what one has filled.
            os.chmod(file.name, READABLE)
            os.replace(file.name, folder / f"{request.digest}-{compiled.triton}.json")
