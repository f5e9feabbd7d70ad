"""ALiBi's slopes."""

from pallas_attn._call.checks import check_int


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes that models with ALiBi are trained with, one a query head, for `PagedAttention(alibi_slopes=...)`.

    For a power of two, n, they are 2 ** (-8 * k / n), k = 1 ... n. Any other number of heads takes those of the power
    of two below, then every second one of the power of two above.

    Raises:
        TypeError, ValueError: `num_heads` is no int of at least 1.

    Source: Press et al., "Train Short, Test Long" (2022), and the models published with it.
    """
    check_int("alibi_slopes", "num_heads", num_heads, least=1)
    below = 1 << (int(num_heads).bit_length() - 1)
    slopes = [2 ** (-8 * k / below) for k in range(1, below + 1)]
    between = [2 ** (-4 * k / below) for k in range(1, 2 * below, 2)]
    return (*slopes, *between)[:num_heads]
