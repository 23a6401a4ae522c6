"""The three tables of decisions: a new order, synchronisation rule or echo policy is one row.

What else a row may do is said by further words, one row each too:
`ORDERS["cd_grab+sketch256+dealt"]`, which flags say as --order=cd_grab --sketch=256 --deal=dealt.
"""

import functools
from collections.abc import Callable

import jax
import optax
from absl.flags import FlagValues

import local_opt
import ordering
import ordering.echo
from experiments.study import fragments
from experiments.study.orders import ORDERS
from experiments.study.words import Choice, EchoPolicy, Order, SyncRule, Table, Word
from experiments.training.config import RunConfig
from syncopate.refusals import UserError

POST_LOCAL_UNTIL, SWAP_UNTIL = 0.5, 0.8  # of T: where local steps, and SWAP's last round, begin


def _constant(config: RunConfig, **options) -> local_opt.SyncPlan:
    return local_opt.constant(config.h_base, total_steps=config.total_steps, **options)


def _matched(config: RunConfig, **options) -> local_opt.SyncPlan:
    """The least constant H of no more rounds than QSR."""
    period = -(-config.total_steps // _qsr(config).rounds)
    return local_opt.constant(period, total_steps=config.total_steps, **options)


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


def _power(config: RunConfig, power: float, alpha: float, **options) -> local_opt.SyncPlan:
    return local_opt.power_rule(
        config.rates, total_steps=config.total_steps, alpha=alpha, h_base=config.h_base,
        power=power, warmup_steps=config.warmup_steps, **options,
    )  # fmt: skip


def _qsr(config: RunConfig, **options) -> local_opt.SyncPlan:
    return _power(config, 2, config.growth, **options)


def _at_volume_of_qsr(power: float) -> Callable:
    """Another power, with the least alpha, found by bisection, of no more rounds than QSR."""

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


def _rounds(label: str, **options) -> Word:
    """The same plan, with another option of `local_rounds`."""

    def change(rule: SyncRule) -> SyncRule:
        rounds = functools.partial(rule.rounds, **options)
        return rule._replace(rounds=rounds, wire=options.get("wire", rule.wire))

    return Word(label, change)


def _outer() -> dict[str, Word]:
    """Nesterov outside, by rate and momentum: as it is, and with changes divided by the period."""
    found = {}
    for rate, momentum in OUTER:
        name, label = f"{rate:g}_{momentum:g}", f"{rate:g}, {momentum:g}"
        outer = optax.sgd(rate, momentum, nesterov=True)
        # It is linear, so that any h_base gives the same.
        same = local_opt.normalize_by_period(outer, h_base=1)
        found[f"nesterov{name}"] = _rounds(f"Nesterov {label}", outer=outer)
        found[f"normalized{name}"] = _rounds(f"normalized Nesterov {label}", outer=same)
    return found


def _at_most(period: int) -> Word:
    def change(rule: SyncRule) -> SyncRule:
        return rule._replace(plan=functools.partial(rule.plan, h_max=period))

    return Word(f"H at most {period}", change)


def _fragments(count: int) -> Word:
    """The same rule for each of several fragments, which take turns."""

    def change(rule: SyncRule) -> SyncRule:
        def plan(config: RunConfig, **options) -> local_opt.SyncPlan:
            own = functools.partial(rule.plan, **options)
            return fragments.union(fragments.plans_in_turn(own, config, count))

        kept = {k: v for k, v in rule.rounds.keywords.items() if k != "drift"}
        rounds = functools.partial(fragments.in_turn, fragments=count, **kept)
        return rule._replace(plan=plan, rounds=rounds, fragments=count)

    return Word(f"{count} fragments", change)


def _align(part: str, share: float) -> Word:
    """The same rule, with rounds that end where a share of an epoch's loads is whole."""

    def change(rule: SyncRule) -> SyncRule:
        def plan(config: RunConfig, **options) -> local_opt.SyncPlan:
            if config.loads_per_epoch is None:
                raise UserError(f"{rule.label} to the {part} needs an epoch's loads: use a study.")
            every = max(1, share * config.loads_per_epoch)
            return local_opt.aligned(rule.plan(config, **options), every=every, fresh=config.fresh)

        return rule._replace(plan=plan)

    return Word(f"to the {part}", change)


# Rate and momentum of the outer optimizer; the first are those of DiLoCo.
OUTER = (0.7, 0.9), (0.3, 0.9), (0.7, 0.5), (1.0, 0.5)
ROUNDS = ("wire", "correction", "outer")  # of local steps
LOCAL = (*ROUNDS, "align")
SYNC_RULES = Table(
    "sync", "when workers meet",
    {
        "parallel": SyncRule(
            "parallel", lambda config: local_opt.every_step(config.total_steps),
            local_opt.parallel_rounds,
        ),
        "accumulate": SyncRule("gradient accumulation", _constant, local_opt.accumulated_rounds),
        "constant": SyncRule("constant H", _constant, takes=(*LOCAL, "fragments")),
        "matched": SyncRule(
            "constant H, as many syncs as QSR", _matched, takes=(*LOCAL, "fragments")
        ),
        "post_local": SyncRule(
            "post-local", _switching(local_opt.post_local, POST_LOCAL_UNTIL), takes=LOCAL
        ),
        "swap": SyncRule("SWAP", _switching(local_opt.swap, SWAP_UNTIL), takes=LOCAL),
        "inverse": SyncRule("H ~ 1/η", _at_volume_of_qsr(1), takes=LOCAL),
        "qsr": SyncRule("QSR", _qsr, takes=(*LOCAL, "h_max", "fragments")),
        "cubic": SyncRule("H ~ 1/η³", _at_volume_of_qsr(3), takes=LOCAL),
        # What slow input asks for: e is the echo factor.
        "every_load": SyncRule("once per load", _every_load, takes=ROUNDS),
        "every_factor": SyncRule("every e steps", _every_factor, takes=ROUNDS),
        "accumulate_factor": SyncRule(
            "gradient accumulation over e steps", _every_factor, local_opt.accumulated_rounds
        ),
        "coins": SyncRule("coins of 1 / e", _coins, takes=ROUNDS),
    },
    {
        "wire": Choice("in which workers send their changes", {
            name: _rounds(name, wire=wire) for name, wire in local_opt.WIRES.items()
        }),
        "correction": Choice("of the drift between two syncs", {
            "control": _rounds("control variates", correction=local_opt.control_variates()),
            "proximal": _rounds("proximal 0.1", correction=local_opt.proximal(0.1)),
            "proximal1": _rounds("proximal 1", correction=local_opt.proximal(1.0)),
        }),
        "outer": Choice("outer optimizer: rate and momentum", _outer()),
        "h_max": Choice("longest round", _at_most),
        "fragments": Choice("of the parameters, which take turns", {
            "fragments2": _fragments(2),
        }),
        "align": Choice("where rounds end besides", {
            "half": _align("half epoch", 0.5), "epoch": _align("epoch", 1)
        }),
    },
)  # fmt: skip


def _multistep(least: float, horizon: int) -> optax.Schedule:
    drops = {horizon // 3: least**0.5, 2 * horizon // 3: least**0.5}
    return optax.piecewise_constant_schedule(1.0, drops)


def _fixed(config: RunConfig, factor: int) -> ordering.echo.EchoPlan:
    return ordering.echo.fixed(factor, total_steps=config.total_steps)


def _share(config: RunConfig, falls: Callable | None):
    """p: 1 / e, or `falls(1 / e, horizon)`."""
    least = 1 / config.echo_factor
    return falls(least, config.horizon) if falls else least


def _bernoulli(config: RunConfig, p: Callable | None = None) -> ordering.echo.EchoPlan:
    key = jax.random.fold_in(config.key, 0)
    return ordering.echo.bernoulli(_share(config, p), total_steps=config.total_steps, key=key)


def _diffusion(config: RunConfig, p: Callable | None = None) -> ordering.echo.EchoPlan:
    return ordering.echo.error_diffusion(_share(config, p), total_steps=config.total_steps)


def _measured(config: RunConfig):
    return ordering.echo.measured(total_steps=config.total_steps, max_factor=4 * config.echo_factor)


def _falling(label: str, p: Callable) -> Word:
    return Word(label, lambda row: row._replace(make=functools.partial(row.make, p=p)))


ECHO_POLICIES = Table(
    "echo", "when a batch is used again",
    {
        "none": EchoPolicy("no echo", lambda config: _fixed(config, 1)),
        "fixed": EchoPolicy("fixed factor", lambda config: _fixed(config, config.echo_factor)),
        "bernoulli": EchoPolicy("Bernoulli", _bernoulli, takes=("p",)),
        "diffusion": EchoPolicy("error diffusion", _diffusion, takes=("p",)),
        "measured": EchoPolicy("measured", _measured, online=True),
    },
    {
        "p": Choice("how the share of fresh batches falls from 1", {
            "linear": _falling("linear p", lambda least, n: optax.linear_schedule(1.0, least, n)),
            "multistep": _falling("multi-step p", _multistep),
            "cosine": _falling(
                "cosine p", lambda least, n: optax.cosine_decay_schedule(1.0, n, alpha=least)
            ),
        }),
    },
)  # fmt: skip

TABLES = {table.flag: table for table in (ORDERS, SYNC_RULES, ECHO_POLICIES)}


def define_flags(define: Callable, **defaults: str) -> None:
    """Defines --order, --sync and --echo, and flags of further words, as of `flags.definer`."""
    for flag, table in TABLES.items():
        table.define_flags(define, defaults[flag])


def decisions(values: FlagValues) -> dict[str, str]:
    """{"order": words, "sync": words, "echo": words} of flags; ValueError where they do not fit."""
    return {flag: table.words_of(values) for flag, table in TABLES.items()}


def decisions_of(text: str) -> dict[str, str]:
    """The decisions that a string of words names, such as "cd_grab+sketch64+qsr"."""
    found = {}
    for word in text.split("+"):
        flag = next((k for k, t in TABLES.items() if word in t or t.find(word)), None)
        if flag is None:
            known = "; ".join(table.known() for table in TABLES.values())
            raise UserError(f"{word!r} is no word: choose of {known}.")
        found[flag] = f"{found[flag]}+{word}" if flag in found else word
    for flag, words in found.items():
        TABLES[flag][words]  # refuses what does not fit together
    return found


def rows_of(arm) -> tuple[Order, SyncRule, EchoPolicy]:
    """The rows that an arm names."""
    return ORDERS[arm.order], SYNC_RULES[arm.sync], ECHO_POLICIES[arm.echo]
