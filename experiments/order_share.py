r"""How much of the training loss is the order's doing, and how much of that averaged weights leave.

    python -m experiments.advise --order_share --task=digits

K copies of a run start from the same parameters, and differ in their random permutations alone. If
the loss L is quadratic with Hessian A, and the copies x_i deviate independently from their mean
with covariance S,

    E L(x_i) = L(E x) + tr(A S) / 2,    E L(mean_i x_i) = L(E x) + tr(A S) / 2 K,

and the order's part of the loss, tr(A S) / 2, has the unbiased estimate

    K / (K - 1) (mean_i L(x_i) - L(mean_i x_i)).

What is left without it is the loss of an order that adds no noise, to which balanced orders come
near. It is no bound: where L is not quadratic the noise also shifts the mean of the copies, which
is not counted (docs/results/orders.md has an example). The same is measured for averages of the
weights over the steps. Intervals are jackknifed over the copies.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from experiments.cluster import processes, progress
from experiments.results import tables
from experiments.results.gains import arrival
from experiments.results.statistics import interval
from experiments.study.study import Arm
from experiments.study.tables import rows_of
from experiments.study.trainer import plans_of
from experiments.training import config, loop, measure, program

ARM = Arm("D-RR", order="rr")
SMOOTH = 0.9
WORTH, LEAST = 1.25, 0.01  # times fewer epochs that are worth it; epochs that count as none
TRY = "What noise does to the mean is not counted: --beside=cd_grab trains the order too."
APART = (
    "The mean of the copies has a higher loss than they have: they are too far apart for a loss to "
    "be quadratic, and what an order gains cannot be foretold. --beside=cd_grab trains one, too."
)


class Losses(NamedTuple):
    """Losses of K copies at one or more points of their runs."""

    each: np.ndarray  # float64[..., K], L(x_i)
    of_mean: np.ndarray  # float64[...], L(mean_i x_i)
    without: np.ndarray  # float64[..., K], L of the mean of all but x_i

    def share(self, out: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(mean loss, the order's part of it), [...] each, of all copies or of all but one."""
        each = self.each if out is None else np.delete(self.each, out, axis=-1)
        of_mean = self.of_mean if out is None else self.without[..., out]
        mean, count = each.mean(axis=-1), each.shape[-1]
        return mean, count / (count - 1) * (mean - of_mean)


def losses_of(loss: Callable, copies) -> Losses:
    """The losses of copies and of their means.

    Args:
      loss: parameters -> losses, float[n], both with a leading axis of n models.
      copies: a tree with leaves [K, ...].
    """
    count = len(jax.tree.leaves(copies)[0])

    def models(x):
        total = x.sum(axis=0, dtype=np.float64)
        means = total / count, *((total - own) / (count - 1) for own in x)
        return np.concatenate([x, np.stack(means).astype(x.dtype)])

    found = np.asarray(loss(jax.tree.map(models, copies)), float)
    return Losses(found[:count], found[count], found[count + 1 :])


def jackknife(statistic: Callable[[int | None], float], count: int) -> np.ndarray:
    """[K] pseudo-values, whose mean and interval are those of a statistic of all copies.

    Args:
      statistic: of all copies for None, or of all but the i-th.
    """
    whole, parts = statistic(None), np.array([statistic(i) for i in range(count)])
    if not np.isfinite([whole, *parts]).all():
        return np.full(count, whole if np.isinf(whole) else np.nan)
    return count * whole - (count - 1) * parts


def measured(
    task, recipe, *, copies: int, arm: Arm = ARM
) -> Iterator[tuple[float, dict[str, Losses]]]:
    """Each learning rate with {"last", "averaged": losses after epochs 0, 1, ...}.

    Of several averages it is the one with the lowest last loss. A rate at which a copy diverges is
    left out.
    """
    order, rule, _ = rows_of(arm)
    built = program.build(
        task, recipe, order, rule.rounds, mesh=processes.mesh_of(recipe.run, recipe.workers)
    )
    steps, loss = built.sizes.loads_per_epoch, loss_of(task, recipe)
    epochs = config.total_steps_of(recipe, built.sizes) // steps
    if epochs < 2:
        raise ValueError(
            f"a run has {epochs} whole epochs, and an order shows after two: raise --epochs."
        )
    total = len(recipe.learning_rates) * epochs * copies
    with progress.bar(total=total, desc=arm.label, unit="epoch") as bar:
        for rate in recipe.learning_rates:
            plans, found = plans_of(task, recipe, arm, rate=rate), []
            states = [built.init(0)._replace(orders=built.init(i).orders) for i in range(copies)]
            for end in range(0, (epochs + 1) * steps, steps):
                for i in range(copies if end else 0):
                    states[i] = advance(built, plans, states[i], end - steps, end)
                    bar.update()
                points = [
                    {"last": built.mean_params(x), **built.averaged(x, end, plans.total_steps)}
                    for x in states
                ]
                copies_of = jax.tree.map(lambda *x: np.stack(x), *points)
                found.append({name: losses_of(loss, x) for name, x in copies_of.items()})
                if not np.isfinite(found[-1]["last"].each).all():
                    processes.say(f"{arm.label} at rate {rate:g}: a copy diverges; left out.")
                    bar.update((epochs - end // steps) * copies)
                    break
            else:
                stack = lambda *x: Losses(*map(np.stack, zip(*x, strict=True)))  # noqa: E731
                of = {name: stack(*[f[name] for f in found]) for name in found[0]}
                last, mean_of = of.pop("last"), lambda losses: losses.each[-1].mean()
                yield rate, {"last": last, "averaged": min(of.values(), key=mean_of)}


def advance(built, plans, state, start: int, end: int):
    """The state after the steps from `start` to `end`."""
    stop = lambda at, state: (state, at.step == end)  # noqa: E731
    return loop.run(built, plans, state, loop.resumed(plans, start), stop, stops=[end])[1]


def loss_of(task, recipe) -> Callable:
    """`n models -> float64[n]`, training losses; of a task with a known optimum, above it."""
    size, mean = config.size_of(task.train), measure.mean_loss(task.model)
    examples = recipe.workers * recipe.units_per_step * recipe.unit_size
    moments = measure.moments(task.model, task.train, examples)
    batches = measure.part_of(task.train, 0, size).batches
    least = task.optimum() if task.optimum else 0.0

    @jax.jit
    def each(models, batch):
        return jax.lax.map(lambda params: mean(params, moments(params), batch), models)

    def loss(models) -> np.ndarray:
        models = jax.device_put(models)
        found = [(np.asarray(each(models, b), float), config.size_of(b)) for b in batches()]
        values, sizes = zip(*found, strict=True)
        return np.average(values, axis=0, weights=sizes) - least

    return loss


Found = Mapping[float, Mapping[str, Losses]]  # {rate: {weights: [E + 1]}}
WAYS = {  # {column: (weights, whether the order's part is taken off)}
    "D-RR": ("last", False), "averaged": ("averaged", False),
    "no order noise": ("last", True), "no order noise, averaged": ("averaged", True),
}  # fmt: skip


def joined(found: Found, label: str, more: Found) -> Found:
    """Both: the losses of another arm, of this label, beside those of D-RR."""
    names = {"last": label, "averaged": f"{label}, averaged"}
    own = {rate: {names[k]: losses for k, losses in of.items()} for rate, of in more.items()}
    return {rate: {**found.get(rate, {}), **own.get(rate, {})} for rate in {**found, **more}}


def curves(losses: Losses, out: int | None) -> np.ndarray:
    """[2, E + 1], `losses.share(out)` after epochs t, as means over the epochs 0.9 t to t / 0.9.

    Epochs are compared by their ratios, so that noise is smoothed over ratios too.
    """
    shares = np.stack(losses.share(out))
    t, last = np.arange(shares.shape[1]), shares.shape[1] - 1
    low, high = np.ceil(SMOOTH * t).astype(int), np.minimum(t / SMOOTH, last).astype(int) + 1
    total = np.pad(np.cumsum(shares, axis=1), ((0, 0), (1, 0)))
    return (total[:, high] - total[:, low]) / (high - low)


def curve(of: Mapping[str, Losses], way: str, out: int | None) -> np.ndarray:
    weights, clean = WAYS.get(way, (way, False))
    mean, part = curves(of[weights], out)
    return mean - part if clean else mean


def epochs(found: Found, way: str, base: str, out: int | None) -> float:
    """Epochs to the loss that `base` ends at, each at its own best rate."""

    def of_rates(name):
        weights, _ = WAYS.get(name, (name, False))
        return [curve(of, name, out) for of in found.values() if weights in of]

    target = min(own[-1] for own in of_rates(base))
    return min(arrival(range(len(own)), own, target) for own in of_rates(way))


def saved(losses: Losses, out: int | None) -> float:
    """Epochs by which the loss without the order's part comes earlier to where the loss ends."""
    mean, part = curves(losses, out)
    return max(0.0, len(mean) - 1 - arrival(range(len(mean)), mean - part, mean[-1]))


def report(found: Found, *, above: bool) -> str:
    """Two tables and a recommendation; `above`: the losses are above a known optimum."""
    about, form = ("loss above the optimum", "{:.2e}") if above else ("loss", "{:.5f}")
    count = next(iter(found.values()))["last"].each.shape[-1]

    def show(form, statistic, *given):
        values = jackknife(lambda out: statistic(*given, out), count)
        return "never" if np.isinf(values).any() else tables.show(values, form)

    def row(rate, weights, losses):
        return {
            "lr": f"{rate:g}", "weights": weights,
            about: show(form, lambda out: curves(losses, out)[0, -1]),
            "the order's part": show("{:.1e}", lambda out: curves(losses, out)[1, -1]),
            "epochs that costs": show("{:.1f}", saved, losses),
        }  # fmt: skip

    names = list(dict.fromkeys(name for of in found.values() for name in of))
    columns = [*WAYS, *[name for name in names if name not in ("last", "averaged")]]
    rates = [row(rate, *one) for rate, of in found.items() for one in of.items()]
    ways = [
        {"epochs to the last loss of": base}
        | {way: show("{:.1f}", epochs, found, way, base) for way in columns}
        for base in ("D-RR", "averaged")
    ]
    return f"{tables.markdown(rates)}\n\n{tables.markdown(ways)}\n\n{advice(found, count)}"


def advice(found: Found, count: int) -> str:
    last = len(next(iter(found.values()))["last"].of_mean) - 1

    def fewer(base, way):
        """[K] logarithms: how many times fewer epochs than `base` this way takes."""

        def log(out):
            taken = [epochs(found, name, base, out) for name in (base, way)]
            return -np.diff(np.log(np.clip(taken, LEAST, last)))[0]  # never: at least the run

        return jackknife(log, count)

    def gains(logs):
        mean, half = interval(logs)
        return mean > np.log(WORTH) and mean > half

    averaging = fewer("D-RR", "averaged")
    order = fewer("averaged", "no order noise, averaged")
    words = (
        f"Averaged weights reach D-RR's last loss in {tables.times(averaging)} times fewer epochs."
    )
    if _apart(found, count):
        return f"{words} {APART}"
    words += f" Without the order's part they would reach their own in {tables.times(order)} times"
    words += " fewer."
    if gains(order):
        return f"{words} Try a balanced order, such as cd_grab, with averaged weights."
    if gains(averaging):
        return f"{words} Average the weights, which leaves little of the order's noise. {TRY}"
    return f"{words} Neither has much to gain here. {TRY}"


def _apart(found: Found, count: int) -> bool:
    """Whether the order's part of averaged weights is negative at the best rate."""
    best = min((of["averaged"] for of in found.values()), key=lambda of: curves(of, None)[0, -1])
    mean, half = interval(jackknife(lambda out: curves(best, out)[1, -1], count))
    return mean + half < 0
