"""Models of the Hugging Face hub that lie in its local cache. Nothing is downloaded."""

import re
from pathlib import Path

from pallas_attn._call.checks import fail

# A repository's name, and what cannot be a path.
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_name(model: str | Path) -> bool:
    """Whether this could be ORG/NAME rather than a path."""
    name = str(model)
    no_file = not name.endswith((".gguf", ".safetensors"))
    return not Path(model).exists() and no_file and _NAME.fullmatch(name) is not None


def found(model: str | Path) -> Path:
    """The path itself, or the folder in the cache of the repository ORG/NAME.

    Raises:
        FileNotFoundError: there is no such path and it is no repository's name, or it is none that was downloaded.
    """
    path, name = Path(model), str(model)
    if path.exists():
        return path
    if not is_name(model):
        expected = "an existing GGUF file, an existing folder or ORG/NAME of the hub"
        fail("load", "model", expected, repr(name), FileNotFoundError)
    run = f"hf download {name}"
    try:
        import huggingface_hub
    except ImportError:
        wanted = f"a path, or a model in the hub's cache: pip install huggingface-hub, then run `{run}`"
        fail("load", "model", wanted, repr(name), FileNotFoundError)
    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except Exception as error:  # the exceptions differ between versions, and all mean that it is not there
        wanted = f"a path, or a model in the hub's cache: run `{run}` first"
        raise FileNotFoundError(f"load: argument 'model': expected {wanted}, got {name!r}") from error
