"""The CUDA library behind `implementation="cuda"`."""


def is_available() -> tuple[bool, str | None]:
    """(True, None), or (False, the reason the CUDA library cannot be used)."""
    return False, "this build of pallas_attn has no CUDA library"
