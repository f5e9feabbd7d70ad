"""One sentence instead of a traceback when a package of an optional extra is missing."""

import contextlib
from collections.abc import Iterator


class MissingExtraError(ImportError):
    """A package that only an optional extra of pallas-attn brings is not installed."""


@contextlib.contextmanager
def needs_extra(extra: str, *, user: str) -> Iterator[None]:
    """Turns a failed import inside the block into a one-line hint that names the extra.

    Args:
        extra: the extra of `pyproject.toml` that brings the package, e.g. ``"models"``.
        user: what needs it, for the message, e.g. ``"pallas_attn.models"``.

    Raises:
        MissingExtraError: an import inside the block found no such package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "pallas_attn":
            raise  # our own mistake, not a missing package
        raise MissingExtraError(
            f"{user} needs the package {error.name!r}: pip install 'pallas-attn[{extra}]'"
        ) from error
