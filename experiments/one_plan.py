r"""Compares three uses of one synchronisation plan, at equal steps and equal syncs.

    python -m experiments.one_plan --task=digits_mlp  # digits, which are bundled: minutes
    python -m experiments.one_plan --task=shakespeare_cosine --data_dir=DIR --workers=4 \
        --total_steps=1000 --warmup_steps=50 --num_test=1024
    python -m experiments.one_plan --task=cifar10_vit --data_dir=DIR --num_train=8000 \
        --num_test=4000 --units_per_step=16 --total_steps=800 --warmup_steps=80

A plan says where rounds end. A round averages parameters (QSR), or accumulates gradients for one
step (Seesaw, whose batch grows as the rate falls by the root), or makes an outer step. Every arm
trains at all rates with all seeds, all runs of an arm in one program. The mean over seeds on one
half of the test set chooses the rate, and the other half is reported. Under one seed all arms see
the same examples in the same steps.
"""

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

from absl import flags

from experiments import entry
from experiments.compare import flags as dialect
from experiments.data.base import COUNT

OUTER = 0.7, 0.9  # rate and momentum of the outer Nesterov steps of DiLoCo
RESTART = 4  # syncs between two restarts of the outer momentum


class Use(NamedTuple):
    """What a round of a plan does."""

    label: str
    plan: str  # the rule of `arms` that says where rounds end
    rounds: str  # of `local_opt`
    outer: int | None = None  # syncs between restarts of an outer momentum; 0: none; None: no outer
    root: bool = False  # the rate falls as the root of the schedule
    moments: tuple[int, int] | None = None  # rounds after which mu and nu of Adam are averaged too


USES = {
    "parallel": Use("parallel", "parallel", "parallel_rounds"),
    "qsr": Use("QSR's H, parameters averaged", "qsr", "local_rounds"),
    "qsr_gradients": Use("QSR's H, gradients accumulated", "qsr", "accumulated_rounds"),
    "qsr_gradients_root": Use(
        "QSR's H, gradients accumulated, root of the rate", "qsr", "accumulated_rounds", root=True
    ),
    "qsr_outer": Use("QSR's H, outer Nesterov 0.7, 0.9", "qsr", "local_rounds", outer=0),
    "qsr_restart": Use(
        "QSR's H, outer Nesterov 0.7, 0.9, restarted every 4 syncs", "qsr", "local_rounds", RESTART
    ),
    "root": Use("H ~ 1/η, parameters averaged", "inverse", "local_rounds"),
    "seesaw": Use(
        "H ~ 1/η, gradients accumulated, root of the rate (Seesaw)",
        "inverse",
        "accumulated_rounds",
        root=True,
    ),
    "constant": Use("constant H, parameters averaged", "matched", "local_rounds"),
    "constant_gradients": Use("constant H, gradients accumulated", "matched", "accumulated_rounds"),
    "constant_restart": Use(
        "constant H, outer Nesterov 0.7, 0.9, restarted every 4 syncs",
        "matched",
        "local_rounds",
        RESTART,
    ),
    "desloc": Use(
        "QSR's H, parameters averaged, mu in every 3rd sync, nu in every 6th (DES-LOC)",
        "qsr",
        "local_steps",
        moments=(3, 6),
    ),
}


def use_of(name: str) -> Use:
    """A use by its name, or the average of parameters by the words of a synchronisation rule."""
    from experiments.compare.arms import row_of

    return USES.get(name) or Use(row_of("sync", name).label, name, "local_rounds")


def restarted(optimizer, every: int):
    """The optimizer, whose state begins anew after every so many updates; 0: never."""
    import jax
    import jax.numpy as jnp
    import optax

    if not every:
        return optimizer

    def init(params):
        return jnp.zeros((), jnp.int32), optimizer.init(params)

    def update(updates, state, params=None):
        count, inner = state
        new = optimizer.init(updates)
        inner = jax.tree.map(lambda a, b: jnp.where(count % every == 0, a, b), new, inner)
        updates, inner = optimizer.update(updates, inner, params)
        return updates, (count + 1, inner)

    return optax.GradientTransformation(init, update)


def rounds_of(use: Use, task, recipe):
    import optax

    import local_opt
    from experiments.data import optimizers

    if use.moments:  # its steps synchronise by themselves
        plan, _ = plan_of(use, task, recipe)
        of = [local_opt.SyncPlan(plan.starts[::n], recipe.total_steps) for n in use.moments]
        fields = dict(zip(("mu", "nu"), of, strict=True))
        steps = local_opt.local_steps(optimizers.inner(recipe), plan, sync_opt_state=fields)
        nothing = lambda params, state, **_: (params, state)  # noqa: E731
        return local_opt.Rounds(steps.init, steps.update, nothing)
    options = {}
    if use.outer is not None:
        nesterov = optax.sgd(OUTER[0], OUTER[1], nesterov=True)
        options["outer"] = restarted(nesterov, use.outer)
    return getattr(local_opt, use.rounds)(optimizers.inner(recipe), **options)


def plan_of(use: Use, task, recipe):
    """The plan, and the rates as factors of their peak: those of a round if it makes one step."""
    import numpy as np

    from experiments.compare.arms import arm_of
    from experiments.trainer.config import plans_of

    plan, _, rates = plans_of(task, recipe, arm_of(use.plan))
    rates = np.sqrt(rates) if use.root else rates
    if use.rounds == "accumulated_rounds":  # the step of a round has the rate of its first batch
        rates = np.repeat(rates[plan.starts], plan.periods)
    return plan, rates


def order_of(task, recipe, seed: int):
    """int32[T, W, B]: the examples of all steps, of all examples reshuffled in every epoch."""
    import jax
    import numpy as np

    total = len(jax.tree.leaves(task.train)[0])
    batch = recipe.units_per_step * recipe.unit_size
    step, draws = recipe.workers * batch, np.random.default_rng(seed)
    epochs = -(-recipe.total_steps * step // (total // step * step))
    order = [draws.permutation(total)[: total // step * step] for _ in range(epochs)]
    order = np.concatenate(order)[: recipe.total_steps * step].astype(np.int32)
    return order.reshape(recipe.total_steps, recipe.workers, batch)


def trainer(task, recipe, use: Use) -> Callable:
    """`(keys, peaks, orders, rates, ends) -> params` of N runs: a mean over each run's workers.

    keys[N], peaks float32[N], orders int32[T, N, W, B], rates float32[T], ends bool[T].
    """
    import jax
    import jax.numpy as jnp
    import optax

    rounds, loss, total = rounds_of(use, task, recipe), task.model.loss, recipe.total_steps
    workers = functools.partial(jax.vmap, axis_name="worker")

    def start(key):
        params = task.model.init(key)
        copies = jax.tree.map(lambda p: jnp.broadcast_to(p, (recipe.workers, *p.shape)), params)
        return copies, jax.vmap(rounds.init)(copies)

    def step(params, state, units, rate, t, key):
        place = {"at": t / total} | ({"step": t} if use.moments else {})
        batch = jax.tree.map(lambda x: x[units], jax.tree.map(jnp.asarray, task.train))
        mean = lambda p: jnp.mean(loss(p, batch, key))  # noqa: E731
        grads = jax.grad(mean)(params)
        updates, state = rounds.update(grads, state, params, rate=rate, **place)
        return optax.apply_updates(params, updates), state

    def sync(params, state, rate, at):
        return rounds.sync(params, state, rate=rate, at=at)

    all_steps = jax.vmap(workers(step, in_axes=(0, 0, 0, None, None, None)), (0, 0, 0, 0, None, 0))
    all_syncs = jax.vmap(workers(sync, in_axes=(0, 0, None, None)), (0, 0, 0, None))

    @jax.jit
    def train(keys, peaks, orders, rates, ends):
        def body(state, given):
            t, units, rate, end = given
            steps_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, t)
            state = all_steps(*state, units, rate * peaks, t, steps_keys)
            state = jax.lax.cond(
                end, lambda s: all_syncs(*s, rate * peaks, t / total), lambda s: s, state
            )
            return state, None

        state = jax.vmap(start)(keys)
        state, _ = jax.lax.scan(body, state, (jnp.arange(total), orders, rates, ends))
        return jax.tree.map(lambda p: jnp.mean(p, axis=1), state[0])

    return train


def measures_of(task) -> dict[str, Callable]:
    """{scalar: params of N runs -> float32[N]}; the first half of the test set is `valid`."""
    import jax
    import jax.numpy as jnp

    from experiments.data.metrics import METRICS

    middle = len(jax.tree.leaves(task.test)[0]) // 2
    sets = {
        "train/loss": ("loss", task.train),
        f"valid/{task.metric}": (task.metric, jax.tree.map(lambda x: x[:middle], task.test)),
        f"test/{task.metric}": (task.metric, jax.tree.map(lambda x: x[middle:], task.test)),
    }
    measures = {}
    for scalar, (metric, part) in sets.items():
        of = METRICS[metric].measure(task.model)
        batch = jax.tree.map(jnp.asarray, part)
        over = functools.partial(jax.lax.map, lambda p, of=of, b=batch: of(p, None, b))
        measures[scalar] = jax.jit(over)
    return measures


def rows_of(task, recipe, name: str, seeds: int, train: Callable, measures: dict) -> list[dict]:
    """The records of an arm: of its last step, at all rates with all seeds."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    plan, rates = plan_of(use_of(name), task, recipe)
    ends = np.zeros(recipe.total_steps, bool)
    ends[plan.starts + plan.periods - 1] = True
    runs = [(rate, seed) for rate in recipe.learning_rates for seed in range(seeds)]
    peaks = jnp.array([rate for rate, _ in runs], jnp.float32)
    keys = jnp.stack([jax.random.key(seed) for _, seed in runs])
    orders = np.stack([order_of(task, recipe, seed) for seed in range(seeds)], 1)
    orders = jnp.asarray(np.tile(orders, (1, len(recipe.learning_rates), 1, 1)))
    params = train(keys, peaks, orders, jnp.asarray(rates, jnp.float32), jnp.asarray(ends))
    values = {scalar: np.asarray(of(params), np.float64) for scalar, of in measures.items()}
    rows = []
    for k, (rate, seed) in enumerate(runs):
        scalars = {scalar: float(of[k]) for scalar, of in values.items()}
        finite = np.isfinite([*scalars.values()]).all()
        rows.append(
            {
                "study": "one_plan",
                "arm": name,
                "speed": None,
                "learning_rate": rate,
                "seed": seed,
                "phase": "run",
                "step": recipe.total_steps,
                "loads": recipe.total_steps,
                "rounds": plan.rounds,
                **scalars,
                "ended": True,
                "diverged": None if finite else "not finite",
            }
        )
    return rows


def define_flags(values: flags.FlagValues) -> None:
    dialect.define(values, "task", "setting", "output", task="digits_mlp")
    with dialect.shown(values):
        text = f"of {', '.join(USES)}, and of --sync of `train`, whose parameters are averaged"
        flags.DEFINE_list("arms", [name for name in USES if name != "desloc"], text, values)
        dialect.define_value(values, COUNT, "seeds", 6, "runs per arm and rate")


def compared(task, recipe, rows: list[dict]):
    """The comparison of these records, at every arm's own best rate."""
    from experiments.data.metrics import METRICS
    from experiments.report import statistics

    names = dict.fromkeys(row["arm"] for row in rows)
    criterion = statistics.Criterion(f"valid/{task.metric}", METRICS[task.metric].lower)
    plans = {name: plan_of(use_of(name), task, recipe)[0] for name in names}
    labels = {name: use_of(name).label for name in names}
    return statistics.compare(statistics.data_of(rows), labels, criterion, plans)


def table(comparison) -> str:
    """Markdown: every arm at its best rate, and its test metric less that of the first."""
    from experiments.report import tables
    from experiments.report.tables import Column

    columns = (
        tables.arm("rule"),
        tables.rate("peak lr"),
        tables.SEEDS,
        Column("syncs", "{:.0f}", "rounds", distinct=True),
        Column("{metric}", "{:.4f}", "metric"),
        Column("{train_loss}", "{:.4f}", "train/loss"),
    )
    return tables.table(comparison, columns) + "\n\n" + tables.baseline_differences(comparison)


def main(values: flags.FlagValues) -> None:
    from experiments import files, progress
    from experiments.report import archive, page, records

    dialect.check_shards(values.shards)
    task, recipe = dialect.setting_from_flags(values)
    with page.opened("one_plan", values) as folder:
        rows, programs = [], {}
        measures = measures_of(task)
        for name in progress.bar(values.arms):
            use = use_of(name)
            kind = use.rounds, use.outer, use.moments  # arms of one kind share a program
            train = programs.setdefault(kind, trainer(task, recipe, use))
            rows += rows_of(task, recipe, name, values.seeds, train, measures)
            records.rewrite(folder, rows)
        comparison = compared(task, recipe, rows)
        described = archive.describe(comparison)
        files.write_json(os.path.join(folder, archive.COMPARISON), described)
        print(page.write_all(folder, values.task, {"table.md": table(comparison)}))
        print(f"\nWritten to {folder}")


if __name__ == "__main__":
    entry.main(define_flags, main)
