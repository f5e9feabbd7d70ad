"""How large an output's error may be for its time to count."""

import jax
import numpy as np

from pallas_attn.testing.compare import row_errors

# Worst row's ||out - reference|| / ||reference||; a right bf16 kernel scores 2.6e-3, a lost page at least 9e-3.
LARGEST_ERROR = {"bfloat16": 8e-3, "float16": 8e-3, "float32": 1e-4}

# For gradients, over the whole array.
LARGEST_GRADIENT_ERROR = {"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-4}


def worst_error(out: jax.Array, reference: jax.Array) -> float:
    """The largest relative error of a row (the last axis); NaN if a row has one."""
    return float(row_errors(np.asarray(out), np.asarray(reference)).max())
