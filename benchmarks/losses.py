"""Losses of a decoder trained by several attentions and from several seeds: whether they agree, and the picture."""

import csv
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import decoder
import jax
import numpy as np

type Curves = dict[tuple[str, int], np.ndarray]
"""Of (attention, seed) the loss of each step."""

AVERAGED = 20  # steps, the last of which are told


def trained(step: Any, sizes: decoder.Sizes, batches: Sequence[decoder.Batch], seed: int) -> np.ndarray:
    state, found = decoder.start(sizes, seed), []
    for batch in batches:
        state, value = step(state, batch)
        found.append(value[0])
    return np.asarray(jax.block_until_ready(found), np.float64)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """How far apart two are, on average over the second half of the steps."""
    return float(np.mean(np.abs(one - other)[len(one) // 2 :]))


def compared(curves: Curves) -> tuple[float, float]:
    """(largest distance of two attentions from one seed, smallest of two seeds by the first attention)."""
    pairs = list(itertools.combinations(curves, 2))
    same_seed = [distance(curves[a], curves[b]) for a, b in pairs if a[1] == b[1]]
    # Of the first one: what is compared with it may not widen the noise itself.
    first = next(iter(curves))[0]
    same_kind = [distance(curves[a], curves[b]) for a, b in pairs if a[0] == b[0] == first]
    return max(same_seed, default=0.0), min(same_kind, default=0.0)


def save(path: Path, curves: Curves) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["attention", "seed", "step", "loss"])
        for (name, seed), curve in curves.items():
            writer.writerows([name, seed, step, f"{value:.6f}"] for step, value in enumerate(curve))


def load(path: Path) -> Curves:
    found: dict[tuple[str, int], list[float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["attention"], int(row["seed"])), []).append(float(row["loss"]))
    return {key: np.array(curve) for key, curve in found.items()}


def draw(path: Path, curves: Curves, about: str, titled: Callable[[str], str] = str) -> None:
    """The losses, which lie on each other, and below them how far the others are from the first attention's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, apart) = pyplot.subplots(
        2, 1, figsize=(7, 7), layout="constrained", sharex=True, height_ratios=(3, 3)
    )
    first = next(iter(curves))[0]
    colors = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(name for name, _ in curves))}
    seeds = list(dict.fromkeys(seed for _, seed in curves))
    styles = dict(zip(seeds, itertools.cycle(("-", "--", ":", "-."))))
    for (name, seed), curve in curves.items():
        style = dict(color=colors[name], linestyle=styles[seed], linewidth=1.0)
        losses.plot(curve, **style, label=f"{titled(name)}, seed {seed}")
        if name != first and (first, seed) in curves:
            label = f"{titled(name)} and {titled(first)}, seed {seed}"
            apart.plot(np.abs(curve - curves[first, seed]), **style, label=label)
    for seed in seeds[1:]:
        between = np.abs(curves[first, seed] - curves[first, seeds[0]])
        label = f"{titled(first)}, seeds {seed} and {seeds[0]}"
        apart.plot(between, color="0.7", linewidth=1.5, zorder=1, label=label)
    losses.set(ylabel="loss of the next byte, nats", title=f"Training in bf16 on packed documents\n{about}")
    apart.set(xlabel="step", ylabel="how far apart, nats", yscale="log")
    for axes in (losses, apart):
        axes.grid(alpha=0.3)
        if axes.get_lines():
            axes.legend(frameon=False, fontsize=7, ncols=2)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
