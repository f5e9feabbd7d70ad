"""One sentence instead of a traceback when a package of an optional extra is missing."""

import contextlib
import importlib.metadata
import re
import shlex
from collections.abc import Iterator


class MissingExtraError(ImportError):
    """A package that only an optional extra of pallas-attn brings is not installed."""


@contextlib.contextmanager
def needs_extra(extra: str, *, user: str) -> Iterator[None]:
    """Turns a failed import inside the block into a one-line hint of what to install.

    Args:
        extra: the extra of `pyproject.toml` that brings the package, e.g. ``"models"``.
        user: what needs it, for the message, e.g. ``"pallas_attn.models"``.

    Raises:
        MissingExtraError: an import inside the block found no such package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "pallas_attn"):
            raise  # our own mistake, not a missing package
        brought = requirements(extra) or [package]
        raise MissingExtraError(f"{user} needs the package {error.name!r}: {pip_install(brought)}") from error


def pip_install(requirements: list[str]) -> str:
    return " ".join(["pip install", *map(shlex.quote, requirements)])


def requirements(extra: str) -> list[str]:
    """What an extra brings, such as "flax>=0.12": names that any index has, whether this package came from an index, a
    wheel or a checkout. None without the metadata of an installation."""
    try:
        declared = importlib.metadata.requires("pallas-attn") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    wanted = re.compile(rf"""extra == ["']{extra}["']""")
    brought = [entry.split(";")[0].strip() for entry in declared if wanted.search(entry)]
    found: list[str] = []
    for entry in brought:
        own = re.fullmatch(r"pallas-attn\[(\w+)\]", entry)
        found += requirements(own[1]) if own else [entry]
    return found
