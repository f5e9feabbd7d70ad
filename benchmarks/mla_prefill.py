"""The two forms of `mla_prefill` beside each other: from how many new tokens on the projected one is faster.

    python benchmarks/mla_prefill.py                    # a table, forms.csv, and its picture, forms.svg; needs a GPU
    python benchmarks/mla_prefill.py --draw forms.csv   # the picture alone, anywhere

A form is timed in a loop inside one program. Where the two differ by more than rounding there is no figure.
"""

import argparse
import csv
import functools
import math
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from progress import shown

from pallas_attn import mla_prefill
from pallas_attn.ops.mla_prefill.api import Form

FORMS: tuple[Form, Form] = ("absorbed", "projected")
NOPE, VALUE, ROPE, RANK = 128, 128, 64, 512
APART = 2e-2  # of a row's norm: each form rounds to bf16 where the other has float32


class Sizes(NamedTuple):
    heads: int = 128
    page_size: int = 64
    new: tuple[int, ...] = (1, 16, 32, 64, 83, 128, 256, 1024)
    contexts: tuple[int, ...] = (4096, 32768)
    calls: int = 5


TINY = Sizes(heads=4, new=(1, 8), contexts=(128,), calls=2)


def made(sizes: Sizes, new: int, context: int) -> tuple[jax.Array, ...]:
    """One sequence, whose pages lie back to front: (query, cache, table, length, bounds, both up-projections)."""
    keys = jax.random.split(jax.random.key(new + context), 4)
    pages = math.ceil((context + new) / sizes.page_size)
    query = jax.random.normal(keys[0], (new, sizes.heads, NOPE + ROPE), jnp.bfloat16)
    cache = jax.random.normal(keys[1], (pages, sizes.page_size, 1, RANK + ROPE), jnp.bfloat16)
    key_up, value_up = (
        jax.random.normal(key, (sizes.heads, width, RANK), jnp.bfloat16) * RANK**-0.5
        for key, width in zip(keys[2:], (NOPE, VALUE), strict=True)
    )
    table = jnp.arange(pages, dtype=jnp.int32)[::-1][None]
    lengths, bounds = jnp.array([context + new], jnp.int32), jnp.array([0, new], jnp.int32)
    return query, cache, table, lengths, bounds, key_up, value_up


@functools.partial(jax.jit, static_argnums=(0, 1))
def repeated(form: Form, calls: int, query: jax.Array, *rest: jax.Array) -> jax.Array:
    """`calls` of them, each fed by the one before, so that none is left out."""
    *paged, key_up, value_up = rest

    def body(_, query):
        out = mla_prefill(query, *paged, key_up=key_up, value_up=value_up, form=form)
        return query.at[:, :, :VALUE].add(out * 1e-8)

    return jax.lax.fori_loop(0, calls, body, query)


def measured(sizes: Sizes, new: int, context: int) -> list[dict]:
    arrays = made(sizes, new, context)
    *paged, key_up, value_up = arrays
    absorbed, projected = (
        mla_prefill(*paged, key_up=key_up, value_up=value_up, form=form).astype(jnp.float32) for form in FORMS
    )
    norms = jnp.linalg.norm(absorbed - projected, axis=-1) / jnp.linalg.norm(projected, axis=-1)
    apart, samples = float(norms.max()), {form: [] for form in FORMS}
    for turn in range(8 if apart < APART else 0):
        for form in FORMS:
            start = time.perf_counter()
            repeated(form, sizes.calls, *arrays).block_until_ready()
            if turn > 0:  # the first compiles
                samples[form].append((time.perf_counter() - start) / sizes.calls * 1e6)
    device = jax.devices()[0].device_kind
    return [
        dict(device=device, jax=jax.__version__, heads=sizes.heads, new_tokens=new, context=context, form=form,
             us=f"{statistics.median(found):.1f}" if found else "", apart=f"{apart:.1e}")
        for form, found in samples.items()
    ]  # fmt: skip


def save(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def load(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw(path: Path, rows: list[dict]) -> None:
    """A panel a context: microseconds over new tokens, a line a form."""
    from matplotlib import ticker
    from matplotlib.figure import Figure

    contexts = list(dict.fromkeys(int(row["context"]) for row in rows))
    size = (4.5 * len(contexts) + 1, 3.6)
    figure = Figure(figsize=size, layout="constrained")
    for panel, context in zip(figure.subplots(1, len(contexts), squeeze=False)[0], contexts, strict=True):
        for form, color, marker in zip(FORMS, ("#ef8a62", "#b2182b"), "so", strict=True):
            points = [
                (int(row["new_tokens"]), float(row["us"]))
                for row in rows
                if (int(row["context"]), row["form"]) == (context, form) and row["us"]
            ]
            panel.loglog(*zip(*points, strict=True), color=color, marker=marker, label=form)
        panel.set(title=f"on a context of {context:,} tokens", xlabel="new tokens", ylabel="µs a call")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(ticker.NullFormatter())
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"mla_prefill, {rows[0]['heads']} heads, bf16, {rows[0]['device']}")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("forms.csv"), help="default: %(default)s")
    parser.add_argument("--draw", type=Path, metavar="CSV", help="only the picture of a table that was saved")
    parser.add_argument("--tiny", action="store_true", help="a size that a CPU does, to try it out")
    options = parser.parse_args(arguments)
    if options.draw:
        return draw(options.draw.with_suffix(".svg"), load(options.draw))
    sizes, rows = TINY if options.tiny else Sizes(), []
    cells = [(new, context) for context in sizes.contexts for new in sizes.new]
    with shown(len(cells)) as (advance, _):
        for new, context in cells:
            found = measured(sizes, new, context)
            rows += found
            times = ", ".join(f"{row['form']} {row['us'] or 'wrong'} us" for row in found)
            advance(f"{new:5d} new on {context:6d}: {times}, apart {found[0]['apart']}")
            save(options.out, rows)
    draw(options.out.with_suffix(".svg"), rows)


if __name__ == "__main__":
    main()
