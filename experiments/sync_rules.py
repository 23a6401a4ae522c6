"""The table of synchronisation rules that experiments compare: a new rule is one row."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import local_opt
from plans import evaluate_schedule


class Setting(NamedTuple):
    """What a rule may need to know about a run."""

    rates: np.ndarray  # float64[T], learning rates; in any unit that alpha shares
    warmup_steps: int
    h_base: int
    alpha: float  # of QSR
    h_max: int | None = None  # of the rules that follow the rate
    post_local_until: float = 0.5  # share of T
    swap_until: float = 0.8  # share of T

    @classmethod
    def of(cls, lr: Callable, *, total_steps: int, **fields) -> "Setting":
        """From a schedule, which is evaluated once for all rules."""
        return cls(evaluate_schedule(lr, total_steps, "lr"), **fields)

    @property
    def total_steps(self) -> int:
        return len(self.rates)


class Rule(NamedTuple):
    label: str
    plan: Callable[[Setting], local_opt.SyncPlan]
    rounds: Callable = local_opt.local_rounds  # (inner optimizer, axis_name=) -> Rounds


def _power(s: Setting, power: float, alpha: float) -> local_opt.SyncPlan:
    return local_opt.power_rule(
        s.rates,
        total_steps=s.total_steps,
        alpha=alpha,
        h_base=s.h_base,
        power=power,
        warmup_steps=s.warmup_steps,
        h_max=s.h_max,
    )


def _qsr(s: Setting) -> local_opt.SyncPlan:
    return _power(s, 2, s.alpha)


def _at_volume_of_qsr(s: Setting, power: float) -> local_opt.SyncPlan:
    """Another power, with the least alpha at which it takes no more rounds than QSR.

    Rounds get fewer as alpha grows, so it is found by bisection on its logarithm.
    """
    wanted = _qsr(s).rounds
    low, high = 1e-3 * s.rates.max(), 1e3 * s.rates.max()
    for _ in range(30):
        middle = (low * high) ** 0.5
        if _power(s, power, middle).rounds > wanted:
            low = middle
        else:
            high = middle
    return _power(s, power, high)


def _every_step(s: Setting) -> local_opt.SyncPlan:
    return local_opt.every_step(s.total_steps)


def _constant(s: Setting) -> local_opt.SyncPlan:
    return local_opt.constant(s.h_base, total_steps=s.total_steps)


def _switching(s: Setting, rule: Callable, share: float) -> local_opt.SyncPlan:
    return rule(s.h_base, switch_step=int(share * s.total_steps), total_steps=s.total_steps)


RULES = {
    "parallel": Rule("parallel", _every_step, local_opt.accumulated_rounds),
    "accumulate": Rule("gradient accumulation", _constant, local_opt.accumulated_rounds),
    "constant": Rule("constant H", _constant),
    "post_local": Rule(
        "post-local", lambda s: _switching(s, local_opt.post_local, s.post_local_until)
    ),
    "swap": Rule("SWAP", lambda s: _switching(s, local_opt.swap, s.swap_until)),
    "inverse": Rule("H ~ 1/η", lambda s: _at_volume_of_qsr(s, 1)),
    "qsr": Rule("QSR", _qsr),
    "cubic": Rule("H ~ 1/η³", lambda s: _at_volume_of_qsr(s, 3)),
}
