"""Whether a schedule was made for the given lengths: with any other, kernels silently leave tokens out."""

import jax
import numpy as np

from pallas_attn._call.checks import is_traced
from pallas_attn.ops.mla_decode.schedule import MLASchedule


def known_not_to_fit(schedule: MLASchedule, seq_lens: jax.Array) -> bool:
    """Whether schedule and lengths, known outside jit, do not fit; False inside jit. Reads a few kilobytes from the
    device."""
    arrays = (*schedule, seq_lens)
    if any(map(is_traced, arrays)):
        return False
    metadata, num_splits, lengths = (np.asarray(x, np.int64) for x in jax.device_get(arrays))
    return not fits(metadata, num_splits, lengths)


def fits(metadata: np.ndarray, num_splits: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether the parts together serve every token of every sequence exactly once.

    Sequences that a part serves whole fit any length: only where parts meet, and in the numbers of splits, does a
    schedule depend on lengths.
    """
    num_seqs = len(lengths)
    begin_seq, begin, end_seq, end, split = metadata[metadata[:, 0] < num_seqs, :5].T
    if len(begin_seq) == 0 or begin_seq[0] != 0 or begin[0] != 0 or end_seq[-1] != num_seqs - 1:
        return False
    if (begin_seq < 0).any() or (end_seq < begin_seq).any() or (end_seq >= num_seqs).any():
        return False
    # The last part must end where the work ends.
    next_seq, next_begin = np.append(begin_seq[1:], num_seqs), np.append(begin[1:], 0)
    cut = next_begin > 0
    meets = (next_seq == np.where(cut, end_seq, end_seq + 1)) & (next_begin >= 0)
    ends = np.where(cut, (end == next_begin) & (end < lengths[end_seq]), end == lengths[end_seq])

    cuts = np.bincount(end_seq[cut], minlength=num_seqs)
    splits = np.append(0, np.cumsum(1 + cuts))
    # A part that begins inside a sequence serves the split after that of the part before.
    before = np.where(end_seq[:-1] == begin_seq[:-1], split[:-1], 0)
    numbered = np.append(0, np.where(begin[1:] > 0, before + 1, 0))
    return bool((meets & ends & (split == numbered)).all() and (num_splits == splits).all())
