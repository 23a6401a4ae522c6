"""Runs of `order_losses`: orders of static vectors under plans, in settings of the size of digits.

Shape letters as there. Signs are PairBalance's; a dealt order goes over the units of all workers
and is handed out anew in every epoch.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np

import local_opt
from experiments import order_losses as losses
from experiments.order_losses import NEVER, Drift


class Order(NamedTuple):
    label: str
    shards: bool  # whether every worker keeps its own units
    sums: str = ""  # "all": one running sum; "own": one per worker; "": units are only shuffled
    robin: bool = False  # dealt: the n-th unit to worker n mod W, else in chunks


ORDERS = {
    "rr": Order("D-RR", True),
    "cd_grab": Order("CD-GraB", True, "all"),
    "id_pair": Order("independent pair", True, "own"),
    "dealt": Order("D-RR, dealt", False),
    "round_robin": Order("CD-GraB, dealt round robin", False, "all", robin=True),
    "chunks": Order("CD-GraB, dealt in chunks", False, "all"),
}


def epochs_of(name: str, vectors: np.ndarray, workers: int, epochs: int, seed: int) -> np.ndarray:
    """int[K, W, M], after eight epochs in which the order has found itself."""
    rng, own, count = np.random.default_rng([seed, 2]), ORDERS[name], len(vectors)

    def shuffled():
        if own.shards:
            return rng.permuted(np.arange(count).reshape(workers, -1), axis=1)
        return rng.permutation(count).reshape(workers, -1)

    def following(order):
        if not own.sums:
            return shuffled()
        if own.sums == "own":
            return np.stack([placed(signed(vectors, one.reshape(-1, 2))) for one in order])
        pairs = order.reshape(workers, -1, 2).swapaxes(0, 1).reshape(-1, 2)
        first = signed(vectors, pairs)
        if own.shards:
            return np.stack([placed(one) for one in first.reshape(-1, workers, 2).swapaxes(0, 1)])
        return (
            placed(first).reshape(-1, workers).T
            if own.robin
            else placed(first).reshape(workers, -1)
        )

    made = itertools.accumulate(
        range(8 + epochs - 1), lambda o, _: following(o), initial=shuffled()
    )
    return np.stack([*made][8:])


def signed(vectors, pairs) -> np.ndarray:
    """The pairs, each with the unit first that goes to the front; signs one after the other."""
    differences = vectors[pairs[:, 0]] - vectors[pairs[:, 1]]
    total, minus = np.zeros(vectors.shape[1]), np.zeros(len(pairs), bool)
    for p, difference in enumerate(differences):
        minus[p] = total @ difference > 0
        total += -difference if minus[p] else difference
    return np.where(minus[:, None], pairs[:, ::-1], pairs)


def placed(pairs) -> np.ndarray:
    """Firsts from the front, seconds from the back."""
    return np.concatenate([pairs[:, 0], pairs[::-1, 1]])


class Setting(NamedTuple):
    workers: int  # W
    units_per_step: int  # B
    num_units: int = 0  # M; 1536 / W if unset
    rate: float = 0.25  # eta, the peak of a cosine
    cosine: bool = False  # to 1e-3 of the peak, and measured at its end alone
    between: float = 0.0  # as of `order_losses.draw`, and the next four
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
def family_of(setting: Setting, seed: int):
    return losses.draw(
        setting.workers * setting.units, setting.workers, least=setting.least,
        spread=setting.spread, cubic=setting.cubic, between=setting.between,
        correlation=setting.correlation, seed=seed,
    )  # fmt: skip


@functools.lru_cache(2)
def _start(setting: Setting, order: str, seed: int):
    """(family, rates, orders, the paths of parallel SGD)."""
    family, total = family_of(setting, seed), setting.epochs * setting.steps
    factor = 0.5 + 0.5 * np.cos(np.pi * np.arange(total) / total) if setting.cosine else 1.0
    rates = np.broadcast_to(setting.rate * np.maximum(factor, 1e-3), total)
    made = epochs_of(order, family.noise, setting.workers, setting.epochs, seed)
    every = np.ones(total, bool)
    b = setting.units_per_step
    return family, rates, made, losses.paths(family, made, every, rates, units_per_step=b)


def run(setting: Setting, order: str, plan, seed: int, drift: Drift = NEVER) -> dict:
    """A record of both errors; `plan` is H, or from n and T to a SyncPlan."""
    family, rates, made, plain = _start(setting, order, seed)
    made_for = plan if callable(plan) else lambda n, t: local_opt.constant(plan, total_steps=t)
    syncs = made_for(setting.steps, len(rates)).syncs_after(np.arange(len(rates)))
    own = losses.paths(
        family, made, syncs, rates, units_per_step=setting.units_per_step, drift=drift
    )
    last = 1 if setting.cosine else setting.epochs // 2
    found = losses.errors(family, plain, own, steps=setting.steps, epochs=last)
    known = {"setting": setting.label, "order_name": order, "seed": seed, "rate": setting.rate}
    return known | {"syncs": int(syncs.sum())} | found._asdict()
