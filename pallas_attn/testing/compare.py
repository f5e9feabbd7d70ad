"""The comparison every numerical test goes through.

Error of a row (a token and head) is ||out - ref|| / ||ref||; the worst row counts. The budget is twice the error of
a reference that rounds as the kernel's dtype does, plus one quantum, capped: a right bf16 kernel scores about 2.6e-3
at any length, zeros score 1, a lost page of a long sequence as little as 9e-3.
"""

import numpy as np

CAP = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-5}
# One rounding of the output; for float32, of logits of magnitude 10, which the rounded reference does not model.
QUANTUM = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-19}
LSE_TOLERANCE = {"bfloat16": 1e-4, "float16": 1e-4, "float32": 1e-5}


def row_errors(out: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """[...] of relative errors over the last axis; rows whose reference is 0 count the output's own norm."""
    out, reference = np.asarray(out, np.float64), np.asarray(reference, np.float64)
    norm = np.linalg.norm(reference, axis=-1)
    return np.linalg.norm(out - reference, axis=-1) / np.where(norm == 0, 1.0, norm)


def assert_rows_close(
    out,
    reference,
    *,
    dtype: str,
    case_id: str,
    rounded_reference=None,
    lengths=None,
    page_size: int | None = None,
) -> float:
    """Raises AssertionError unless every row of `out` [num_seqs, ..., dim] is within budget. Returns the worst error.

    NaN and Inf must stand exactly where the reference has them; that is looked at first.
    """
    out, reference = np.asarray(out, np.float64), np.asarray(reference, np.float64)
    assert out.shape == reference.shape, f"{case_id}: shape {out.shape}, expected {reference.shape}"
    for kind, test in (("NaN", np.isnan), ("Inf", np.isinf)):
        wrong = test(out) != test(reference)
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            where = _describe(place[0], lengths, page_size)
            raise AssertionError(
                f"{case_id}: {kind} {'unexpected' if test(out[place]) else 'missing'} at {place}{where}; "
                f"{int(wrong.sum())} such elements"
            )
    finite = np.isfinite(reference).all(axis=-1)

    def errors_of(given) -> np.ndarray:
        return row_errors(*(np.where(finite[..., None], x, 0) for x in (given, reference)))

    errors, budget = errors_of(out), CAP[dtype]
    if rounded_reference is not None:
        budget = min(budget, 2 * float(errors_of(rounded_reference).max(initial=0)) + QUANTUM[dtype])
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(errors), errors.shape))
    assert errors[worst] <= budget, (
        f"{case_id}: row {worst}{_describe(worst[0], lengths, page_size)}: error {errors[worst]:.2e} "
        f"exceeds {budget:.2e}; {int((errors > budget).sum())} of {errors.size} rows do"
    )
    return float(errors[worst])


def assert_lse_close(lse, reference, *, dtype: str, case_id: str) -> None:
    """-inf and NaN must stand where the reference has them; elsewhere the difference is absolute (relative above 1)."""
    lse, reference = np.asarray(lse, np.float64), np.asarray(reference, np.float64)
    assert lse.shape == reference.shape, f"{case_id}: lse shape {lse.shape}, expected {reference.shape}"
    for kind, test in (("NaN", np.isnan), ("-Inf", np.isneginf), ("+Inf", np.isposinf)):
        assert (test(lse) == test(reference)).all(), f"{case_id}: lse has {kind} in the wrong places"
    finite = np.isfinite(reference)
    difference = np.where(finite, np.abs(np.where(finite, lse, 0) - np.where(finite, reference, 0)), 0)
    difference = difference / np.maximum(1.0, np.abs(np.where(finite, reference, 0)))
    tolerance = LSE_TOLERANCE[dtype]
    assert difference.max(initial=0) <= tolerance, (
        f"{case_id}: lse is off by {difference.max():.2e}, more than {tolerance:.0e}"
    )


def _describe(seq: int, lengths, page_size: int | None) -> str:
    if lengths is None:
        return ""
    length = int(np.asarray(lengths)[seq])
    where = f" (sequence {seq}, length {length}"
    if page_size:
        where += f": {length // page_size} full pages + {length % page_size}"
    return where + ")"
