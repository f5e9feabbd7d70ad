"""How wrong an output may be before its time does not count."""

import jax
import numpy as np

from pallas_attn.testing.compare import row_errors

# Worst row's ||out - reference|| / ||reference||; a right bf16 kernel scores 2.6e-3, a lost page at least 9e-3.
LARGEST_ERROR = {"bfloat16": 8e-3, "float16": 8e-3, "float32": 1e-4}

# Of a whole array of gradients.
LARGEST_GRADIENT_ERROR = {"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-4}


def worst_error(out: jax.Array, reference: jax.Array) -> float:
    """The largest relative error of a row, which is the last axis; NaN where one holds it."""
    return float(row_errors(np.asarray(out), np.asarray(reference)).max())
