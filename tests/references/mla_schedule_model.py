"""The tile scheduler dealt out part by part, in plain Python: what `tile_schedule` must equal."""

BLOCK, OVERHEAD = 64, 5


def plain_schedule(
    seq_lens: list[int], num_parts: int, overhead: int = OVERHEAD
) -> tuple[list[list[int]], list[int], int]:
    """(metadata rows of 8, cumulative splits, payload)."""
    blocks = [-(-n // BLOCK) for n in seq_lens]
    total = sum(n + overhead for n in blocks)
    payload = max(-(-total // num_parts) + overhead, 2 * overhead)
    rows, splits = [], [0] * len(seq_lens)
    seq = done = 0  # the sequence in turn, and how many of its blocks are dealt
    for _ in range(num_parts):
        row = [seq, done * BLOCK, 0, 0, splits[seq] if seq < len(seq_lens) else 0, 0, 0, 0]
        budget = payload
        while seq < len(seq_lens):
            if blocks[seq] - done + overhead <= budget:  # the rest of this sequence fits
                budget -= blocks[seq] - done + overhead
                splits[seq] += 1
                seq, done = seq + 1, 0
                continue
            if budget > overhead:  # some of it does
                done += budget - overhead
                splits[seq] += 1
            break
        row[2], row[3] = (seq, done * BLOCK) if done else (seq - 1, seq_lens[seq - 1])
        rows.append(row)
    assert (seq, done) == (len(seq_lens), 0)
    cumulative = [0]
    for n in splits:
        cumulative.append(cumulative[-1] + n)
    return rows, cumulative, payload
