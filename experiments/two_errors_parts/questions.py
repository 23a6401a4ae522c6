"""What `two_errors` asks: runs of the family, a record each."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

import local_opt
from experiments.tasks import digits
from experiments.two_errors_parts import family as families
from experiments.two_errors_parts import orders, sign
from experiments.two_errors_parts.family import NEVER, Drift


class Setting(NamedTuple):
    workers: int  # W
    units_per_step: int  # B
    num_units: int = 0  # M; 1536 / W if unset
    rate: float = 0.25  # eta, the peak of a cosine
    cosine: bool = False  # to 1e-3 of the peak, and measured at its end alone
    between: float = 0.0  # as of `family.draw`, and the next four
    correlation: float = 0.0
    spread: float = 1.0
    cubic: float = 1.0
    least: float = 0.02
    epochs: int = 40  # K; the second half is measured, of a cosine the end

    @property
    def units(self) -> int:
        return self.num_units or 1536 // self.workers

    @property
    def steps(self) -> int:
        """n, of an epoch."""
        return self.units // self.units_per_step

    @property
    def label(self) -> str:
        return f"{self.workers} x {self.units_per_step}"


# The two of digits: 64 units in a step of all workers, 24 steps in an epoch.
SMALL, LARGE = Setting(32, 2), Setting(4, 16)
SETTINGS = (Setting(64, 1), SMALL, Setting(16, 4), LARGE)
PERIODS = (2, 4, 8, 12, 24, 48, 96)


@functools.lru_cache(2)
def _family(setting: Setting, seed: int):
    return families.draw(
        setting.workers * setting.units, setting.workers, least=setting.least,
        spread=setting.spread, cubic=setting.cubic, between=setting.between,
        correlation=setting.correlation, seed=seed,
    )  # fmt: skip


@functools.lru_cache(2)
def _start(setting: Setting, order: str, seed: int):
    """(family, rates, orders, the paths of parallel SGD)."""
    family, total = _family(setting, seed), setting.epochs * setting.steps
    factor = 0.5 + 0.5 * np.cos(np.pi * np.arange(total) / total) if setting.cosine else 1.0
    rates = np.broadcast_to(setting.rate * np.maximum(factor, 1e-3), total)
    made = orders.epochs_of(order, family.noise, setting.workers, setting.epochs, seed)
    every = np.ones(total, bool)
    b = setting.units_per_step
    return family, rates, made, families.paths(family, made, every, rates, units_per_step=b)


def run(setting: Setting, order: str, plan, seed: int, drift: Drift = NEVER) -> dict:
    """A record of both errors; `plan` is H, or from n and T to a SyncPlan."""
    family, rates, made, plain = _start(setting, order, seed)
    if not callable(plan):
        plan = functools.partial(_constant, plan)
    syncs = plan(setting.steps, len(rates)).syncs_after(np.arange(len(rates)))
    own = families.paths(
        family, made, syncs, rates, units_per_step=setting.units_per_step, drift=drift
    )
    last = 1 if setting.cosine else setting.epochs // 2
    found = families.errors(family, plain, own, steps=setting.steps, epochs=last)
    known = {"setting": setting.label, "order_name": order, "seed": seed, "rate": setting.rate}
    return known | {"syncs": int(syncs.sum())} | found._asdict()


def _constant(period, steps, total):
    del steps
    return local_opt.constant(period, total_steps=total)


def _cases(rows, seeds) -> Iterator[dict]:
    """Records of (question, row, column, what `run` takes), an order's runs one after the other."""
    rows = list(rows)
    for seed in range(seeds):
        for question, row, column, setting, order, plan, drift in rows:
            found = run(setting, order, plan, seed, drift)
            yield {"question": question, "row": row, "column": column} | found


def errors(seeds: int) -> Iterator[dict]:
    """Both errors of every order at every period."""
    yield from _cases(
        [
            ("errors", f"{s.label}, {orders.ORDERS[order][0]}", f"H = {h}", s, order, h, NEVER)
            for s in (SMALL, LARGE) for order in orders.ORDERS for h in PERIODS
        ], seeds,
    )  # fmt: skip


def cosine(seeds: int) -> Iterator[dict]:
    """What is left where the rate has decayed."""
    yield from _cases(
        [
            ("cosine", f"{s.label}, {orders.ORDERS[order][0]}", f"H = {h}",
             s._replace(rate=0.5, cosine=True, epochs=100), order, h, NEVER)
            for s in (SMALL, LARGE) for order in ("rr", "cd_grab", "id_pair", "dealt")
            for h in (1, 4, 24)
        ], seeds,
    )  # fmt: skip


POWER = Setting(8, 2, 48, rate=0.03, spread=0.0, least=0.3, epochs=200)
DOUBLED = {  # (what is changed of POWER, H, the factor, exponents of the two errors)
    "rate": (dict(rate=0.06), 6, 2.0, (3, 4)),
    "H - 1": ({}, 12, 11 / 5, (0, 2)),
    "units per step, B": (dict(units_per_step=4, num_units=96), 6, 2.0, (-1, -2)),
    "workers, W": (dict(workers=16), 6, 2.0, (-1, 0)),
    "steps of an epoch, n": (dict(num_units=96), 6, 2.0, (2, 0)),
    "third derivative, k": (dict(cubic=2.0), 6, 2.0, (0, 2)),
}


def powers(seeds: int) -> Iterator[dict]:
    """Exponents: D-RR's error and the bias of local steps, where one thing is doubled."""
    for seed in range(seeds):
        before = run(POWER, "dealt", 6, seed)
        for name, (changed, period, factor, expected) in DOUBLED.items():
            after = run(POWER._replace(**changed), "dealt", period, seed)
            powers = [np.log(after[e] / before[e]) / np.log(factor) for e in ("order", "bias")]
            yield {
                "question": "powers", "row": name, "seed": seed, "order": powers[0],
                "bias": powers[1], "expected": expected,
            }  # fmt: skip


def borders(seeds: int) -> Iterator[dict]:
    """The longest period at which local steps add less than D-RR's error: formula and runs."""
    for seed in range(seeds):
        for shape in SETTINGS:
            for rate in (0.5, 0.25, 0.1):
                setting = shape._replace(rate=rate)
                given = dict(
                    rate=rate, workers=setting.workers, units_per_step=setting.units_per_step,
                    steps=setting.steps,
                )  # fmt: skip
                formula = families.border(_family(setting, seed), **given)
                most = 1
                for period in PERIODS:
                    found = run(setting, "dealt", period, seed)
                    if found["local"] >= found["order"]:
                        break
                    most = period
                yield {
                    "question": "borders", "row": setting.label, "column": f"rate {rate:g}",
                    "seed": seed, "formula": formula, "run": most,
                }  # fmt: skip


def _to(every, steps, total):
    plan = local_opt.constant(10, total_steps=total)
    return local_opt.aligned(plan, every=every * steps) if every else plan


def _apart(steps, total):
    """Rounds of an epoch that end in its middle."""
    return local_opt.constant(steps, total_steps=total, offset=steps // 2)


def plans(seeds: int) -> Iterator[dict]:
    """Plans that know the order against plans that do not."""
    made = {
        "H = 10": functools.partial(_to, 0),
        "to the half epoch": functools.partial(_to, 0.5),
        "H = 24, to the epoch": functools.partial(_to, 1),
        "H = 24, ends in the middle": _apart,
    }
    yield from _cases(
        [
            ("plans", f"{s.label}, {orders.ORDERS[order][0]}", name, s, order, plan, NEVER)
            for s in (SMALL, LARGE) for order in ("rr", "cd_grab", "id_pair", "round_robin")
            for name, plan in made.items()
        ], seeds,
    )  # fmt: skip


CORRECTIONS = {
    "none": NEVER,
    "control variates": Drift(gain=1.0),
    "control variates, gain 1/4": Drift(gain=0.25),
    "proximal 0.1": Drift(pull=0.1),
    "proximal 1": Drift(pull=1.0),
}


KINDS = {
    "": {},
    "unlike workers, ": {"between": 1.0},
    "curvature with gradient, ": {"correlation": -1.0},
}


def corrections(seeds: int) -> Iterator[dict]:
    """Both errors together under corrections of local drift, for units of three kinds."""
    yield from _cases(
        [
            ("corrections", f"{s.label}, {kind}{orders.ORDERS[order][0]}, H = {h}", name,
             s._replace(**changed), order, h, drift)
            for s in (SMALL, LARGE) for kind, changed in KINDS.items()
            for order in ("rr", "cd_grab") for h in (4, 24) for name, drift in CORRECTIONS.items()
        ], seeds,
    )  # fmt: skip


def signs(seeds: int) -> Iterator[dict]:
    """Of which kind digits are: the family's correlation of g with z has the cosine's sign."""
    task = digits.load()
    for seed in range(seeds):
        found = sign.sign(task.model, task.train, seed=seed)
        yield {"question": "signs", "row": task.name, "seed": seed} | found._asdict()


QUESTIONS = {
    "errors": errors, "cosine": cosine, "powers": powers, "borders": borders, "plans": plans,
    "corrections": corrections, "signs": signs,
}  # fmt: skip
