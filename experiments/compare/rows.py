"""The three tables of decisions: a new order, synchronisation rule or echo policy is one row.

A row is an Order, a SyncRule or an EchoPolicy, or a function of options that returns one. Options
are the keywords of that function and of its rule: `sketch` of "cd_grab" is the flag --sketch=256,
and the word "cd_grab+sketch256" of an arm. The library, and with it JAX, is imported where
`syncopate.ordering` or `syncopate.local_opt` is first asked for.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from absl import flags

import syncopate
from experiments.data.base import COUNT, PART, POSITIVE, check
from experiments.trainer.config import EXAMPLES, UNITS, OrderSetting, RunConfig
from syncopate.refusals import UserError


class Option(NamedTuple):
    """What an option decides: the annotation of a row's keyword."""

    text: str  # for --help
    words: Mapping[str, Any] = {}  # what a row is given for each; {}: numbers, as "sketch256"
    label: str = "{}"  # of a value, for people
    names: Mapping[str, str] = {}  # words that a label says otherwise
    number: flags.ArgumentParser = COUNT  # of options without words

    @property
    def parser(self) -> flags.ArgumentParser:
        """What parses the flag."""
        return flags.EnumParser([*self.words]) if self.words else self.number

    def value(self, flag: str, word: str) -> Any:
        """What a row is given for a word; None for what is no word of this option."""
        if self.words:
            return self.words.get(word)
        number = re.fullmatch(rf"{flag}(-?[\d.]+(e-?\d+)?)", word)
        return None if number is None else check(flag, number[1], self.number)


# Orders.


class Order(NamedTuple):
    """Which unit comes next."""

    label: str  # for people
    make: Callable  # of an OrderSetting
    observes: bool = True  # False: it looks at no gradient, and is made beside the steps
    coordinated: bool = False  # its running sum is of all workers
    sketch: int | None = None  # numbers of the sketches that it looks at; None: at gradients
    scaled: float | None = None  # power of the second moment that divides what it looks at
    deals: str | None = None  # EXAMPLES or UNITS of the whole set; None: units of the worker's own
    recut: str | None = None  # how a text is cut anew in every epoch, of `text.CUTS`; None: never


SKETCH = Option("numbers that stand for a gradient", label="{} numbers")
TEAM = Option("workers that sign together, of a sketched order", label="teams of {}")
SCALE = Option("what the optimizer's second moment makes of a gradient", {"scaled": 0.5})
SIGNS = Option(
    "who gives signs instead of the greedy rule",
    {
        "walk": lambda: syncopate.ordering.baselines.self_balancing_walk(),
    },
)
DEAL = Option("how units are given anew to all workers in every epoch", {"dealt": True})
SHIFTED = Option("how a text is cut into windows anew in every epoch", {"shifted": "shifted"})
CUT = SHIFTED._replace(
    words={"documents": "documents", **SHIFTED.words}, names={"documents": "documents permuted"}
)
PATTERN = Option(
    "what it makes of sorted scores",
    {name: name for name in ("folded", "zigzag", "segments", "stairs", "saw")},
)
FIRST = Option("the end at which scores begin", {"hard": -1}, "{} first")


def random_reshuffling(*, deal: DEAL = False, cut: CUT = None) -> Order:
    if deal or cut == "documents":  # nothing holds its units together: examples are dealt
        return Order(
            "D-RR",
            lambda s: syncopate.ordering.global_reshuffling(s.num_units, total=s.total),
            observes=False,
            deals=EXAMPLES,
            recut=cut,
        )
    make = lambda s: syncopate.ordering.random_reshuffling(s.num_units)  # noqa: E731
    return Order("D-RR", make, observes=False, recut=cut)


def _balanced(label: str, make: Callable, deal: bool, **fields) -> Order:
    """An order of pairs, whose units may be given anew to all workers, in one order of all."""
    if not deal:
        return Order(label, make, **fields)

    def over_all(s: OrderSetting):
        return syncopate.ordering.global_order(make(s), s.num_units, total=s.total)

    return Order(label, over_all, deals=UNITS, **fields)


def pair_balance(
    *, sketch: SKETCH = None, scale: SCALE = None, deal: DEAL = False, cut: SHIFTED = None
) -> Order:
    def make(s: OrderSetting):
        return syncopate.ordering.pair_balance(s.num_units, units_per_step=s.units_per_step)

    return _balanced("independent pair", make, deal, sketch=sketch, scaled=scale, recut=cut)


def cd_grab(
    *,
    sketch: SKETCH = None,
    team: TEAM = None,
    scale: SCALE = None,
    signs: SIGNS = None,
    deal: DEAL = False,
    cut: SHIFTED = None,
) -> Order:
    if team and not sketch:  # here, as the library is asked only once there are data
        raise UserError(f"--team is {team} without a sketch: pass --sketch too, as 1024.")

    def make(s: OrderSetting):
        return syncopate.ordering.cd_grab(
            s.num_units,
            units_per_step=s.units_per_step,
            rule=signs and signs(),
            gathers=s.gathers if sketch else None,
            team_size=team,
        )

    fields = {"coordinated": True, "sketch": sketch, "scaled": scale, "recut": cut}
    return _balanced("CD-GraB", make, deal, **fields)


def scored(*, pattern: PATTERN = None, first: FIRST = 1) -> Order:
    options = {"pattern": pattern} if pattern else {}

    def make(s: OrderSetting):
        if s.scores is None:
            raise UserError(
                "an order is scored, and there are no data here to score: leave it out."
            )
        return syncopate.ordering.scored(
            first * s.scores(), workers=s.workers, units_per_step=s.units_per_step, **options
        )

    return Order("by scores", make, observes=False, deals=UNITS)


ORDERS: dict[str, Order | Callable[..., Order]] = {
    "rr": random_reshuffling,
    "blocks": Order(
        "block reshuffling",
        lambda s: syncopate.ordering.baselines.block_reshuffling(
            s.num_units, block_size=min(8, s.num_units)
        ),
        observes=False,
    ),
    "unzip": Order(
        "unzip control", lambda s: syncopate.ordering.baselines.unzip(s.num_units), observes=False
    ),
    "id_mean": Order(
        "independent mean",
        lambda s: syncopate.ordering.grab(s.num_units, units_per_step=s.units_per_step),
    ),
    "id_pair": pair_balance,
    "cd_grab": cd_grab,
    "so": Order(
        "shuffle once",
        lambda s: syncopate.ordering.baselines.shuffle_once(s.num_units),
        observes=False,
    ),
    "scored": scored,
    "herding": Order(
        "greedy herding",
        lambda s: syncopate.ordering.baselines.greedy_herding(
            s.num_units, units_per_step=s.units_per_step
        ),
    ),
}

# Synchronisation rules.


class SyncRule(NamedTuple):
    """When workers meet, and what a step and a sync do."""

    label: str
    plan: Callable  # RunConfig -> SyncPlan; None where loads decide that are not known before
    rounds: Callable  # (inner optimizer, axis_name=) -> Rounds
    compressor: Callable | None = None  # makes that with which `rounds` sends changes


@functools.cache  # equal rounds are one object, and rules of such share their programs
def rounds_of(function: str, **options) -> Callable:
    """`(inner optimizer, axis_name=) -> Rounds`, by a function of the library with its options."""

    def rounds(inner, *, axis_name):
        made = {name: make() if callable(make) else make for name, make in options.items()}
        return getattr(syncopate.local_opt, function)(inner, axis_name=axis_name, **made)

    return rounds


COMPRESSORS: dict[str, Callable] = {  # what makes the compressor of each name
    "bfloat16": lambda: syncopate.local_opt.quantize("bfloat16"),
    "float16": lambda: syncopate.local_opt.quantize("float16"),
    "int8": lambda: syncopate.local_opt.quantize("int8"),
    "int4": lambda: syncopate.local_opt.quantize("int4"),
    "top_k": lambda: syncopate.local_opt.top_k(1 / 64),
    "top_k_2bit": lambda: syncopate.local_opt.top_k(1 / 64, bits=2),
}
CORRECTIONS: dict[str, Callable] = {
    "control": lambda: syncopate.local_opt.corrections.scaffold(),
    "proximal": lambda: syncopate.local_opt.corrections.fedprox(0.1),
    "proximal1": lambda: syncopate.local_opt.corrections.fedprox(1.0),
}


def _nesterov(rate: float, momentum: float):
    import optax

    return optax.sgd(rate, momentum, nesterov=True)


def _normalized(rate: float, momentum: float):
    """Of changes that are divided by the period; the rule is linear, so any h_base is the same."""
    return syncopate.local_opt.presets.normalize_by_period(_nesterov(rate, momentum), h_base=1)


OUTER: dict[str, Callable] = {  # by rate and momentum; the first are those of DiLoCo
    f"{kind}{rate:g}_{momentum:g}": functools.partial(make, rate, momentum)
    for rate, momentum in ((0.7, 0.9), (0.3, 0.9), (0.7, 0.5), (1.0, 0.5))
    for kind, make in {"nesterov": _nesterov, "normalized": _normalized}.items()
}
COMPRESS = Option("in which workers send their changes", COMPRESSORS)
CORRECTION = Option(
    "of the drift between two syncs",
    CORRECTIONS,
    names={"control": "control variates", "proximal": "proximal 0.1", "proximal1": "proximal 1"},
)
NESTEROV = {"nesterov": "Nesterov ", "normalized": "normalized Nesterov ", "_": ", "}
OUTER_OPTIMIZER = Option(
    "outer optimizer: rate and momentum",
    OUTER,
    names={w: re.sub("|".join(NESTEROV), lambda m: NESTEROV[m[0]], w) for w in OUTER},
)
SWITCH = Option(
    "the share of the steps after which the rule changes", label="switch at {:g}", number=PART
)
ALPHA = Option("times the alpha of --growth", label="{:g} x alpha", number=POSITIVE)
ALIGN = Option(
    "where rounds end besides", {"half": 0.5, "epoch": 1}, "to the {}", {"half": "half epoch"}
)


def local_rounds(
    label: str,
    rule: Callable,
    *,
    compress: COMPRESS = None,
    correction: CORRECTION = None,
    outer: OUTER_OPTIMIZER = None,
    align: ALIGN = None,
    **of_rule,
) -> SyncRule:
    """A rule of local steps, which know their drift; `of_rule` are options of the rule."""

    def plan(run: RunConfig):
        made = rule(run, **of_rule)
        if align is None or made is None:
            return made
        if run.loads_per_epoch is None:
            raise UserError(f"--align to {align:g} epochs needs an epoch's loads: use a study.")
        return made.aligned(every=max(1, align * run.loads_per_epoch), fresh=run.fresh)

    options = {"compress": compress, "correction": correction, "outer": outer}
    options = {name: make for name, make in options.items() if make}
    return SyncRule(label, plan, rounds_of("local_rounds", drift=True, **options), compress)


def constant(run: RunConfig):
    return syncopate.local_opt.constant(run.recipe.h_base, total_steps=run.total_steps)


def qsr(run: RunConfig, *, alpha: ALPHA = 1.0):
    return _of_power(2, run, alpha * run.recipe.growth)


def _of_power(power: float, run: RunConfig, alpha: float):
    return syncopate.local_opt.qsr(
        run.rates,
        total_steps=run.total_steps,
        alpha=alpha,
        h_base=run.recipe.h_base,
        power=power,
        warmup_steps=run.recipe.warmup_steps,
    )


def matched(run: RunConfig, *, alpha: ALPHA = 1.0):
    """The least constant H of no more rounds than QSR."""
    period = -(-run.total_steps // qsr(run, alpha=alpha).rounds)
    return syncopate.local_opt.constant(period, total_steps=run.total_steps)


def at_volume_of_qsr(power: float, run: RunConfig, *, alpha: ALPHA = 1.0):
    """Another power, with the least alpha, found by bisection, of no more rounds than QSR."""
    wanted = qsr(run, alpha=alpha).rounds
    low, high = 1e-3 * run.rates.max(), 1e3 * run.rates.max()
    for _ in range(30):
        middle = (low * high) ** 0.5
        if _of_power(power, run, middle).rounds > wanted:
            low = middle
        else:
            high = middle
    return _of_power(power, run, high)


def _switched(run: RunConfig, name: str, switch: float, before: int, after: int):
    """Rounds of length `before` for a share of the run, then of length `after`."""
    steps, until = run.total_steps, int(switch * run.total_steps)
    rule = f"{name}, H = {before} to step {until}, then {after if after < steps else 'one round'}"
    return syncopate.local_opt.from_function(
        lambda t: before if t < until else after, total_steps=steps, rule=rule
    )


def post_local(run: RunConfig, *, switch: SWITCH = 0.5):
    return _switched(run, "post-local", switch, 1, run.recipe.h_base)


def swap(run: RunConfig, *, switch: SWITCH = 0.8):
    return _switched(run, "SWAP", switch, run.recipe.h_base, run.total_steps)


def every_load(run: RunConfig):
    if run.fresh is None:  # loads are not known before the run
        return None
    return syncopate.local_opt.SyncPlan(run.fresh.nonzero()[0], len(run.fresh), "once a load")


def every_factor(run: RunConfig):
    return syncopate.local_opt.constant(run.recipe.echo_factor, total_steps=run.total_steps)


def coins(run: RunConfig):
    import jax

    key = jax.random.fold_in(run.key, 1)
    return syncopate.local_opt.bernoulli(one_in_e(run), total_steps=run.total_steps, key=key)


SYNC_RULES: dict[str, SyncRule | Callable[..., SyncRule]] = {
    "parallel": SyncRule(
        "parallel",
        lambda run: syncopate.local_opt.constant(1, total_steps=run.total_steps),
        rounds_of("parallel_rounds"),
    ),
    "accumulate": SyncRule("gradient accumulation", constant, rounds_of("accumulated_rounds")),
    "constant": functools.partial(local_rounds, "constant H", constant),
    "matched": functools.partial(local_rounds, "constant H, as many syncs as QSR", matched),
    "post_local": functools.partial(local_rounds, "post-local", post_local),
    "swap": functools.partial(local_rounds, "SWAP", swap),
    "inverse": functools.partial(local_rounds, "H ~ 1/η", functools.partial(at_volume_of_qsr, 1)),
    "qsr": functools.partial(local_rounds, "QSR", qsr),
    "cubic": functools.partial(local_rounds, "H ~ 1/η³", functools.partial(at_volume_of_qsr, 3)),
    # What slow input asks for: e is the echo factor.
    "every_load": functools.partial(local_rounds, "once per load", every_load),
    "every_factor": functools.partial(local_rounds, "every e steps", every_factor),
    "accumulate_factor": SyncRule(
        "gradient accumulation over e steps", every_factor, rounds_of("accumulated_rounds")
    ),
    "coins": functools.partial(local_rounds, "coins of 1 / e", coins),
}

# Echo policies.


class EchoPolicy(NamedTuple):
    """When a batch is used again; an `online` one decides while the run goes on."""

    label: str
    plan: Callable  # RunConfig -> EchoPlan, or what decides online
    online: bool = False


def one_in_e(run: RunConfig):
    return 1 / run.recipe.echo_factor


def falling(how: str, run: RunConfig):
    import optax

    least, horizon = one_in_e(run), run.recipe.horizon
    if how == "linear":
        return optax.linear_schedule(1.0, least, horizon)
    if how == "cosine":
        return optax.cosine_decay_schedule(1.0, horizon, alpha=least)
    drops = {horizon // 3: least**0.5, 2 * horizon // 3: least**0.5}
    return optax.piecewise_constant_schedule(1.0, drops)


P = Option(
    "how the share of fresh batches falls from 1",
    {how: functools.partial(falling, how) for how in ("linear", "multistep", "cosine")},
    "{} p",
    {"multistep": "multi-step"},
)


def by_share(label: str, rule: Callable, *, p: P = one_in_e) -> EchoPolicy:
    """A policy of a share of fresh batches, or of its schedule, which p gives."""
    return EchoPolicy(label, lambda run: rule(run, p(run)))


def bernoulli(run: RunConfig, p):
    import jax

    key = jax.random.fold_in(run.key, 0)
    return syncopate.ordering.echo.bernoulli(p, total_steps=run.total_steps, key=key)


def diffusion(run: RunConfig, p):
    return syncopate.ordering.echo.error_diffusion(p, total_steps=run.total_steps)


def fixed(run: RunConfig):
    return syncopate.ordering.echo.fixed(run.recipe.echo_factor, total_steps=run.total_steps)


def measured(run: RunConfig):
    most = 4 * run.recipe.echo_factor
    return syncopate.ordering.echo.adaptive(total_steps=run.total_steps, max_factor=most)


ECHO_POLICIES: dict[str, EchoPolicy | Callable[..., EchoPolicy]] = {
    "none": EchoPolicy(
        "no echo", lambda run: syncopate.ordering.echo.fixed(1, total_steps=run.total_steps)
    ),
    "fixed": EchoPolicy("fixed factor", fixed),
    "bernoulli": functools.partial(by_share, "Bernoulli", bernoulli),
    "diffusion": functools.partial(by_share, "error diffusion", diffusion),
    "measured": EchoPolicy("measured", measured, online=True),
}

TABLES: dict[str, dict] = {"order": ORDERS, "sync": SYNC_RULES, "echo": ECHO_POLICIES}
