"""The three tables of decisions: a new order, synchronisation rule or echo policy is one row.

Which unit comes next, when workers meet, and when a batch is used again. Every study and `train`
know them by these names alone.
"""

from collections.abc import Callable

import jax
import optax

import local_opt
import ordering
import ordering.echo
from experiments.studies import host_orders
from experiments.training import config as kinds
from experiments.training.config import EchoPolicy, Order, OrderSetting, RunConfig, SyncRule

POST_LOCAL_UNTIL = 0.5  # of T: where post-local training begins its local steps
SKETCHES = (16, 64, 256, 1024)  # numbers that stand for a gradient
SWAP_UNTIL = 0.8  # of T: where SWAP begins its last round


def _random(s: OrderSetting) -> ordering.Ordering:
    return ordering.random_reshuffling(s.num_units)


def _coordinated(s: OrderSetting, rule: ordering.SignRule | None = None) -> ordering.Ordering:
    return ordering.cd_grab(
        s.num_units, units_per_step=s.units_per_step, block_size=s.block_size, rule=rule
    )


def _sketched(size: int) -> Order:
    return Order(
        f"CD-GraB, {size} numbers",
        lambda s: ordering.cd_grab(s.num_units, units_per_step=s.units_per_step, gathers=s.gathers),
        coordinated=True,
        sketch=size,
    )


def _halving(s: OrderSetting) -> ordering.SignRule:
    num_pairs = max(1, s.num_units // 2 * s.workers)
    return ordering.kernel_halving(num_epochs=s.epochs, num_pairs=num_pairs)


ORDERS = {
    "rr": Order("D-RR", _random, observes=False, on_host=host_orders.reshuffled),
    "dealt": Order(
        "D-RR, dealt", _random, observes=False, on_host=host_orders.dealt, deals=kinds.EXAMPLES
    ),
    "unzip": Order("unzip control", lambda s: ordering.unzip(s.num_units), observes=False),
    "id_mean": Order(
        "independent mean",
        lambda s: ordering.grab(s.num_units, units_per_step=s.units_per_step),
    ),
    "id_pair": Order(
        "independent pair",
        lambda s: ordering.pair_balance(s.num_units, units_per_step=s.units_per_step),
    ),
    "cd_grab": Order("CD-GraB", _coordinated, coordinated=True),
    **{f"sketch{size}": _sketched(size) for size in SKETCHES},
    "id_sketch": Order(
        "independent pair, sketched",
        lambda s: ordering.pair_balance(s.num_units, units_per_step=s.units_per_step),
        sketch=SKETCHES[-1],
    ),
    "so": Order("shuffle once", lambda s: ordering.shuffle_once(s.num_units), observes=False),
    "flipflop": Order("flip-flop", lambda s: ordering.flip_flop(s.num_units), observes=False),
    "block": Order(
        "block reshuffling",
        lambda s: ordering.block_reshuffling(s.num_units, block_size=min(8, s.num_units)),
        observes=False,
    ),
    "herding": Order(
        "greedy herding",
        lambda s: ordering.greedy_herding(s.num_units, units_per_step=s.units_per_step),
    ),
    "cd_walk": Order(
        "CD-GraB, walk",
        lambda s: _coordinated(s, ordering.self_balancing_walk()),
        coordinated=True,
    ),
    "kh": Order("KH-SGD", lambda s: _coordinated(s, _halving(s)), coordinated=True),
}


def _dealt(row: Order, how: str) -> Order:
    """The same pairs, placed in one order of all units, which is dealt anew in every epoch."""

    def make(s: OrderSetting) -> ordering.Ordering:
        return ordering.dealt(row.make(s), s.num_units, how=how)

    label = f"{row.label}, {'dealt' if how == 'round_robin' else 'chunks'}"
    return row._replace(label=label, make=make, deals=kinds.UNITS)


ORDERS |= {
    f"{name}_{short}": _dealt(ORDERS[name], how)
    for name in ("id_pair", "cd_grab", *(f"sketch{size}" for size in SKETCHES))
    for short, how in (("dealt", "round_robin"), ("chunks", "chunks"))
}


def _every_step(config: RunConfig) -> local_opt.SyncPlan:
    return local_opt.every_step(config.total_steps)


def _constant(config: RunConfig) -> local_opt.SyncPlan:
    return local_opt.constant(config.h_base, total_steps=config.total_steps)


def _every_factor(config: RunConfig) -> local_opt.SyncPlan:
    return local_opt.constant(config.echo_factor, total_steps=config.total_steps)


def _every_load(config: RunConfig) -> local_opt.SyncPlan | None:
    """None where loads are not known before the run."""
    return None if config.fresh is None else local_opt.sync_every_load(config.fresh)


def _coins(config: RunConfig) -> local_opt.SyncPlan:
    key = jax.random.fold_in(config.key, 1)
    return local_opt.bernoulli(1 / config.echo_factor, total_steps=config.total_steps, key=key)


def _switching(rule: Callable, share: float) -> Callable:
    return lambda config: rule(
        config.h_base, switch_step=int(share * config.total_steps), total_steps=config.total_steps
    )


def _power(config: RunConfig, power: float, alpha: float) -> local_opt.SyncPlan:
    return local_opt.power_rule(
        config.rates,
        total_steps=config.total_steps,
        alpha=alpha,
        h_base=config.h_base,
        power=power,
        warmup_steps=config.warmup_steps,
        h_max=config.h_max,
    )


def _qsr(config: RunConfig) -> local_opt.SyncPlan:
    return _power(config, 2, config.growth)


def _at_volume_of_qsr(power: float) -> Callable:
    """Another power, with the least alpha at which it takes no more rounds than QSR.

    Rounds get fewer as alpha grows, so it is found by bisection on its logarithm.
    """

    def plan(config: RunConfig) -> local_opt.SyncPlan:
        wanted = _qsr(config).rounds
        low, high = 1e-3 * config.rates.max(), 1e3 * config.rates.max()
        for _ in range(30):
            middle = (low * high) ** 0.5
            if _power(config, power, middle).rounds > wanted:
                low = middle
            else:
                high = middle
        return _power(config, power, high)

    return plan


SYNC_RULES = {
    "parallel": SyncRule("parallel", _every_step, local_opt.parallel_rounds),
    "accumulate": SyncRule("gradient accumulation", _constant, local_opt.accumulated_rounds),
    "constant": SyncRule("constant H", _constant),
    "post_local": SyncRule("post-local", _switching(local_opt.post_local, POST_LOCAL_UNTIL)),
    "swap": SyncRule("SWAP", _switching(local_opt.swap, SWAP_UNTIL)),
    "inverse": SyncRule("H ~ 1/η", _at_volume_of_qsr(1)),
    "qsr": SyncRule("QSR", _qsr),
    "cubic": SyncRule("H ~ 1/η³", _at_volume_of_qsr(3)),
    # What slow input asks for: e is the echo factor.
    "every_load": SyncRule("once per load", _every_load),
    "every_factor": SyncRule("every e steps", _every_factor),
    "accumulate_factor": SyncRule(
        "gradient accumulation over e steps", _every_factor, local_opt.accumulated_rounds
    ),
    "coins": SyncRule("coins of 1 / e", _coins),
}


def _with(rule: SyncRule, name: str, **options) -> SyncRule:
    """The same plan, with options of `local_rounds`."""

    def rounds(inner, *, axis_name):
        return local_opt.local_rounds(inner, axis_name=axis_name, **options)

    rounds.__name__ = f"{name.replace(' ', '_')}_rounds"
    return rule._replace(label=f"{rule.label}, {name}", rounds=rounds, wire=options.get("wire"))


def _aligned(rule: SyncRule, part: str, share: float) -> SyncRule:
    """The same rule, with rounds that end where a share of an epoch's loads is whole."""

    def plan(config: RunConfig) -> local_opt.SyncPlan:
        if config.loads_per_epoch is None:
            raise ValueError(f"{rule.label} to the {part} needs an epoch's loads: use a study.")
        every = max(1, share * config.loads_per_epoch)
        return local_opt.aligned(rule.plan(config), every=every, fresh=config.fresh)

    return rule._replace(label=f"{rule.label}, to the {part}", plan=plan)


SYNC_RULES |= {
    f"{rule}_{name}": _aligned(SYNC_RULES[rule], part, share)
    for rule in ("constant", "qsr")
    for name, part, share in (("half", "half epoch", 0.5), ("epoch", "epoch", 1))
}
# What else rounds can do: name of the row -> (label, options of `local_rounds`).
OPTIONS = {name: (name, {"wire": wire}) for name, wire in local_opt.WIRES.items()} | {
    "control": ("control variates", {"correction": local_opt.control_variates()}),
    "proximal": ("proximal 0.1", {"correction": local_opt.proximal(0.1)}),
}
SYNC_RULES |= {
    f"{rule}_{name}": _with(SYNC_RULES[rule], label, **options)
    for rule in ("constant", "qsr")
    for name, (label, options) in OPTIONS.items()
}

# p from 1 to 1 / e over the horizon; the first of them is at its end from the start.
_P = {
    "constant": lambda least, horizon: least,
    "linear": lambda least, horizon: optax.linear_schedule(1.0, least, horizon),
    "multi-step": lambda least, horizon: optax.piecewise_constant_schedule(
        1.0, {horizon // 3: least**0.5, 2 * horizon // 3: least**0.5}
    ),
    "cosine": lambda least, horizon: optax.cosine_decay_schedule(1.0, horizon, alpha=least),
}


def _fixed(config: RunConfig, factor: int) -> ordering.echo.EchoPlan:
    return ordering.echo.fixed(factor, total_steps=config.total_steps)


def _bernoulli(shape: str) -> Callable:
    return lambda config: ordering.echo.bernoulli(
        _P[shape](1 / config.echo_factor, config.horizon),
        total_steps=config.total_steps,
        key=jax.random.fold_in(config.key, 0),
    )


def _error_diffusion(shape: str) -> Callable:
    return lambda config: ordering.echo.error_diffusion(
        _P[shape](1 / config.echo_factor, config.horizon), total_steps=config.total_steps
    )


def _measured(config: RunConfig):
    return ordering.echo.measured(total_steps=config.total_steps, max_factor=4 * config.echo_factor)


ECHO_POLICIES = {
    "none": EchoPolicy("no echo", lambda config: _fixed(config, 1)),
    "fixed": EchoPolicy("fixed factor", lambda config: _fixed(config, config.echo_factor)),
    "bernoulli": EchoPolicy("Bernoulli", _bernoulli("constant")),
    "bernoulli_linear": EchoPolicy("Bernoulli, linear p", _bernoulli("linear")),
    "bernoulli_multistep": EchoPolicy("Bernoulli, multi-step p", _bernoulli("multi-step")),
    "bernoulli_cosine": EchoPolicy("Bernoulli, cosine p", _bernoulli("cosine")),
    "diffusion": EchoPolicy("error diffusion", _error_diffusion("constant")),
    "diffusion_linear": EchoPolicy("error diffusion, linear p", _error_diffusion("linear")),
    "diffusion_multistep": EchoPolicy(
        "error diffusion, multi-step p", _error_diffusion("multi-step")
    ),
    "diffusion_cosine": EchoPolicy("error diffusion, cosine p", _error_diffusion("cosine")),
    "measured": EchoPolicy("measured", _measured, online=True),
}
