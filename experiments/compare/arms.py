"""The three tables of decisions, their options, and the arms that are made of them.

A new order, synchronisation rule or echo policy is one row. An arm is a row of each, with values
of options: `Arm(order="cd_grab", sketch=256, sync="qsr")`, which the words "cd_grab+sketch256+qsr"
name too. Rows import what they are made of, and with it JAX, when they are made:
`syncopate.ordering` and `syncopate.local_opt` are imported where they are first asked for.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from absl import flags

import syncopate
from experiments.data.base import COUNT, Recipe, Task
from experiments.trainer import config
from experiments.trainer.config import EXAMPLES, UNITS, OrderSetting, RunConfig
from syncopate.command import meant
from syncopate.refusals import UserError

POST_LOCAL_UNTIL, SWAP_UNTIL = 0.5, 0.8  # of T: where local steps, and SWAP's last round, begin
COMPRESSORS: dict[str, Callable] = {  # what makes the compressor of each name
    "bfloat16": lambda: syncopate.local_opt.quantize("bfloat16"),
    "float16": lambda: syncopate.local_opt.quantize("float16"),
    "int8": lambda: syncopate.local_opt.quantize("int8"),
    "int4": lambda: syncopate.local_opt.quantize("int4"),
    "top_k": lambda: syncopate.local_opt.top_k(1 / 64),
    "top_k_2bit": lambda: syncopate.local_opt.top_k(1 / 64, bits=2),
}
# Rate and momentum of the outer optimizer; the first are those of DiLoCo.
OUTER = (0.7, 0.9), (0.3, 0.9), (0.7, 0.5), (1.0, 0.5)


class Order(NamedTuple):
    """A row of ORDERS: which unit comes next."""

    label: str  # for people
    make: Callable  # of an OrderSetting, and options of its own
    observes: bool = True  # False: it looks at no gradient, and is made beside the steps
    coordinated: bool = False  # its running sum is of all workers
    sketch: int | None = None  # numbers of the sketches that it looks at; None: at gradients
    scaled: float | None = None  # power of the second moment that divides what it looks at
    deals: str | None = None  # EXAMPLES or UNITS of the whole set; None: units of the worker's own
    recut: str | None = None  # how a text is cut anew in every epoch, of `text.CUTS`; None: never
    takes: tuple[str, ...] = ()  # options, or single words of one


def _rounds(name: str, inner, *, axis_name, **options):
    """Rounds of the library, by name; `options` make its own."""
    made = {option: make() for option, make in options.items()}
    return getattr(syncopate.local_opt, name)(inner, axis_name=axis_name, **made)


# Of local steps, which know their drift, and of gradients that are averaged or added up first.
DRIFTING = functools.partial(_rounds, "local_rounds", drift=lambda: True)
PARALLEL = functools.partial(_rounds, "parallel_rounds")
ACCUMULATED = functools.partial(_rounds, "accumulated_rounds")


class SyncRule(NamedTuple):
    """A row of SYNC_RULES: `plan` gives the SyncPlan, and `rounds` what a step and a sync do."""

    label: str
    plan: Callable  # of a RunConfig
    # (inner optimizer, axis_name=) -> Rounds
    rounds: Callable = DRIFTING
    compressor: Callable | None = None  # makes that with which `rounds` sends changes
    takes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()  # fields of the recipe, of `flags.OF_ROWS`, that it reads


class EchoPolicy(NamedTuple):
    """A row of ECHO_POLICIES; an `online` one decides while the run goes on."""

    label: str
    make: Callable[..., Any]  # of a RunConfig, and p=
    online: bool = False
    takes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


class Option(NamedTuple):
    """What may change rows of a table.

    Fields:
      of: the table; text: what it decides; words: {word: (label, value)}; or, of an option that is
        a whole number, as "sketch256", its label with {}.
    """

    of: str
    text: str
    words: Mapping[str, tuple[str, Any]] | str


# Orders.


def _cd_grab(s: OrderSetting, sketched=False, rule=None, **options):
    gathers = s.gathers if sketched else None
    options |= {} if rule is None else {"rule": rule()}
    return syncopate.ordering.cd_grab(
        s.num_units, units_per_step=s.units_per_step, gathers=gathers, **options
    )


def _by_scores(s: OrderSetting, sign=1, **options):
    if s.scores is None:
        raise UserError("an order is scored, and there are no data here to score: leave it out.")
    return syncopate.ordering.scored(
        sign * s.scores(), workers=s.workers, units_per_step=s.units_per_step, **options
    )


ORDERS = {
    "rr": Order(
        "D-RR",
        lambda s: syncopate.ordering.random_reshuffling(s.num_units),
        observes=False,
        takes=("dealt", "cut"),
    ),
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
    "id_pair": Order(
        "independent pair",
        lambda s: syncopate.ordering.pair_balance(s.num_units, units_per_step=s.units_per_step),
        takes=("sketch", "scale", "deal", "shifted"),
    ),
    "cd_grab": Order(
        "CD-GraB",
        _cd_grab,
        coordinated=True,
        takes=("sketch", "team", "scale", "signs", "deal", "shifted"),
    ),
    "so": Order(
        "shuffle once",
        lambda s: syncopate.ordering.baselines.shuffle_once(s.num_units),
        observes=False,
    ),
    "scored": Order(
        "by scores",
        _by_scores,
        observes=False,
        deals=UNITS,
        takes=("pattern", "first"),
    ),
    "herding": Order(
        "greedy herding",
        lambda s: syncopate.ordering.baselines.greedy_herding(
            s.num_units, units_per_step=s.units_per_step
        ),
    ),
}


def _order(
    row: Order,
    *,
    sketch=None,
    team=None,
    scale=None,
    signs=None,
    deal=None,
    cut=None,
    pattern=None,
    first=None,
):
    """The row with values of its options."""
    options = {"sketched": True} if sketch and row.coordinated else {}
    options |= {} if signs is None else {"rule": signs}
    options |= {} if pattern is None else {"pattern": pattern}
    options |= {} if first is None else {"sign": first}
    if team is not None:
        if sketch is None:
            raise UserError(f"--team is {team} without a sketch: pass --sketch too, as 1024.")
        options["team_size"] = team
    make, deals = functools.partial(row.make, **options) if options else row.make, row.deals
    if deal and row.observes:  # units are given anew to all workers, of pairs in one order of all
        deals, inner = UNITS, make
        make = lambda s: syncopate.ordering.global_order(inner(s), s.num_units, total=s.total)  # noqa: E731
    elif deal or cut == "documents":  # nothing holds its units together: examples are dealt
        deals = EXAMPLES
        make = lambda s: syncopate.ordering.global_reshuffling(s.num_units, total=s.total)  # noqa: E731
    return row._replace(make=make, sketch=sketch, scaled=scale, deals=deals, recut=cut)


# Synchronisation rules.


def _constant(config: RunConfig, **options):
    return syncopate.local_opt.constant(config.h_base, total_steps=config.total_steps, **options)


def _matched(config: RunConfig, **options):
    """The least constant H of no more rounds than QSR."""
    period = -(-config.total_steps // _qsr(config).rounds)
    return syncopate.local_opt.constant(period, total_steps=config.total_steps, **options)


def _every_factor(config: RunConfig):
    return syncopate.local_opt.constant(config.echo_factor, total_steps=config.total_steps)


def _every_load(config: RunConfig):
    if config.fresh is None:  # loads are not known before the run
        return None
    return syncopate.local_opt.SyncPlan(config.fresh.nonzero()[0], len(config.fresh), "once a load")


def _coins(config: RunConfig):
    import jax

    key = jax.random.fold_in(config.key, 1)
    return syncopate.local_opt.bernoulli(
        1 / config.echo_factor, total_steps=config.total_steps, key=key
    )


def _switched(config: RunConfig, name: str, share: float, before: int, after: int):
    """Rounds of length `before` for a share of the run, then of length `after`."""
    steps, until = config.total_steps, int(share * config.total_steps)
    rule = f"{name}, H = {before} to step {until}, then {after if after < steps else 'one round'}"
    return syncopate.local_opt.from_function(
        lambda t: before if t < until else after, total_steps=steps, rule=rule
    )


def _power(config: RunConfig, power: float, alpha: float, **options):
    return syncopate.local_opt.qsr(
        config.rates,
        total_steps=config.total_steps,
        alpha=alpha,
        h_base=config.h_base,
        power=power,
        warmup_steps=config.warmup_steps,
        **options,
    )


def _qsr(config: RunConfig, **options):
    return _power(config, 2, config.growth, **options)


def _at_volume_of_qsr(power: float) -> Callable:
    """Another power, with the least alpha, found by bisection, of no more rounds than QSR."""

    def plan(config: RunConfig):
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


ROUNDS = ("compress", "correction", "outer")  # of local steps
LOCAL = (*ROUNDS, "align")
SYNC_RULES = {
    "parallel": SyncRule(
        "parallel", lambda c: syncopate.local_opt.constant(1, total_steps=c.total_steps), PARALLEL
    ),
    "accumulate": SyncRule("gradient accumulation", _constant, ACCUMULATED, reads=("h_base",)),
    "constant": SyncRule("constant H", _constant, takes=LOCAL, reads=("h_base",)),
    "matched": SyncRule(
        "constant H, as many syncs as QSR",
        _matched,
        takes=LOCAL,
        reads=("h_base", "growth"),
    ),
    "post_local": SyncRule(
        "post-local",
        lambda c: _switched(c, "post-local", POST_LOCAL_UNTIL, 1, c.h_base),
        takes=LOCAL,
        reads=("h_base",),
    ),
    "swap": SyncRule(
        "SWAP",
        lambda c: _switched(c, "SWAP", SWAP_UNTIL, c.h_base, c.total_steps),
        takes=LOCAL,
        reads=("h_base",),
    ),
    "inverse": SyncRule("H ~ 1/η", _at_volume_of_qsr(1), takes=LOCAL, reads=("h_base", "growth")),
    "qsr": SyncRule("QSR", _qsr, takes=LOCAL, reads=("h_base", "growth")),
    "cubic": SyncRule("H ~ 1/η³", _at_volume_of_qsr(3), takes=LOCAL, reads=("h_base", "growth")),
    # What slow input asks for: e is the echo factor.
    "every_load": SyncRule("once per load", _every_load, takes=ROUNDS),
    "every_factor": SyncRule("every e steps", _every_factor, takes=ROUNDS, reads=("echo_factor",)),
    "accumulate_factor": SyncRule(
        "gradient accumulation over e steps", _every_factor, ACCUMULATED, reads=("echo_factor",)
    ),
    "coins": SyncRule("coins of 1 / e", _coins, takes=ROUNDS, reads=("echo_factor",)),
}


def _sync_rule(row: SyncRule, *, align=None, compress=None, **of_rounds):
    """The row with values of its options; those `of_rounds` are correction and outer."""
    of_rounds |= {} if compress is None else {"compress": compress}
    rounds = functools.partial(row.rounds, **of_rounds) if of_rounds else row.rounds
    plan = row.plan if align is None else _aligned(row.plan, align)
    return row._replace(plan=plan, rounds=rounds, compressor=compress or row.compressor)


def _aligned(plan: Callable, share: float) -> Callable:
    """The same rule, with rounds that end where a share of an epoch's loads is whole."""

    def aligned(config: RunConfig):
        if config.loads_per_epoch is None:
            raise UserError(f"--align to {share:g} epochs needs an epoch's loads: use a study.")
        every = max(1, share * config.loads_per_epoch)
        return plan(config).aligned(every=every, fresh=config.fresh)

    return aligned


# Echo policies. p, the share of fresh batches, is 1 / e, or `p(1 / e, horizon)`.


def _falling(how: str, least: float, horizon: int):
    import optax

    if how == "linear":
        return optax.linear_schedule(1.0, least, horizon)
    if how == "cosine":
        return optax.cosine_decay_schedule(1.0, horizon, alpha=least)
    drops = {horizon // 3: least**0.5, 2 * horizon // 3: least**0.5}
    return optax.piecewise_constant_schedule(1.0, drops)


def _share(config: RunConfig, p: Callable | None):
    least = 1 / config.echo_factor
    return p(least, config.horizon) if p else least


def _fixed(config: RunConfig):
    return syncopate.ordering.echo.fixed(config.echo_factor, total_steps=config.total_steps)


def _bernoulli(config: RunConfig, p: Callable | None = None):
    import jax

    key = jax.random.fold_in(config.key, 0)
    return syncopate.ordering.echo.bernoulli(
        _share(config, p), total_steps=config.total_steps, key=key
    )


def _diffusion(config: RunConfig, p: Callable | None = None):
    return syncopate.ordering.echo.error_diffusion(
        _share(config, p), total_steps=config.total_steps
    )


def _measured(config: RunConfig):
    return syncopate.ordering.echo.adaptive(
        total_steps=config.total_steps, max_factor=4 * config.echo_factor
    )


ECHO_POLICIES = {
    "none": EchoPolicy(
        "no echo", lambda config: syncopate.ordering.echo.fixed(1, total_steps=config.total_steps)
    ),
    "fixed": EchoPolicy("fixed factor", _fixed, reads=("echo_factor",)),
    "bernoulli": EchoPolicy("Bernoulli", _bernoulli, takes=("p",), reads=("echo_factor",)),
    "diffusion": EchoPolicy("error diffusion", _diffusion, takes=("p",), reads=("echo_factor",)),
    "measured": EchoPolicy("measured", _measured, online=True, reads=("echo_factor",)),
}


def _echo_policy(row: EchoPolicy, *, p: Callable) -> EchoPolicy:
    return row._replace(make=functools.partial(row.make, p=p), reads=(*row.reads, "horizon"))


# Options.


def _nesterov(rate: float, momentum: float, *, normalized: bool):
    import optax

    outer = optax.sgd(rate, momentum, nesterov=True)
    # It is linear, so that any h_base gives the same.
    return syncopate.local_opt.presets.normalize_by_period(outer, h_base=1) if normalized else outer


def _outer() -> dict[str, tuple[str, Callable]]:
    """Nesterov outside, by rate and momentum: as it is, and with changes divided by the period."""
    rules = {}
    for rate, momentum in OUTER:
        name, label = f"{rate:g}_{momentum:g}", f"{rate:g}, {momentum:g}"
        made = functools.partial(_nesterov, rate, momentum)
        rules[f"nesterov{name}"] = f"Nesterov {label}", functools.partial(made, normalized=False)
        same = functools.partial(made, normalized=True)
        rules[f"normalized{name}"] = f"normalized Nesterov {label}", same
    return rules


OPTIONS = {
    "sketch": Option("order", "numbers that stand for a gradient", "{} numbers"),
    "team": Option("order", "workers that sign together, of a sketched order", "teams of {}"),
    "scale": Option("order", "what the optimizer's second moment makes of a gradient", {
        "scaled": ("scaled", 0.5)
    }),
    "signs": Option("order", "who gives signs instead of the greedy rule", {
        "walk": ("walk", lambda: syncopate.ordering.baselines.self_balancing_walk())
    }),
    "deal": Option("order", "how units are given anew to all workers in every epoch", {
        "dealt": ("dealt", True),
    }),
    "cut": Option("order", "how a text is cut into windows anew in every epoch", {
        "documents": ("documents permuted", "documents"), "shifted": ("shifted", "shifted"),
    }),
    "pattern": Option("order", "what it makes of sorted scores", {
        name: (name, name) for name in ("folded", "zigzag", "segments", "stairs", "saw")
    }),
    "first": Option("order", "the end at which scores begin", {"hard": ("hard first", -1)}),
    "compress": Option("sync", "in which workers send their changes", {
        name: (name, make) for name, make in COMPRESSORS.items()
    }),
    "correction": Option("sync", "of the drift between two syncs", {
        "control": ("control variates", lambda: syncopate.local_opt.corrections.scaffold()),
        "proximal": ("proximal 0.1", lambda: syncopate.local_opt.corrections.fedprox(0.1)),
        "proximal1": ("proximal 1", lambda: syncopate.local_opt.corrections.fedprox(1.0)),
    }),
    "outer": Option("sync", "outer optimizer: rate and momentum", _outer()),
    "align": Option("sync", "where rounds end besides", {
        "half": ("to the half epoch", 0.5), "epoch": ("to the epoch", 1),
    }),
    "p": Option("echo", "how the share of fresh batches falls from 1", {
        "linear": ("linear p", functools.partial(_falling, "linear")),
        "multistep": ("multi-step p", functools.partial(_falling, "multistep")),
        "cosine": ("cosine p", functools.partial(_falling, "cosine")),
    }),
}  # fmt: skip
TABLES = {"order": ORDERS, "sync": SYNC_RULES, "echo": ECHO_POLICIES}
WITH_OPTIONS = {"order": _order, "sync": _sync_rule, "echo": _echo_policy}


def choices_of(kind: str) -> str:
    """All words of a table, for people."""
    further = [
        f"+{word}"
        for flag, option in OPTIONS.items()
        if option.of == kind
        for word in ([f"{flag}N"] if isinstance(option.words, str) else option.words)
    ]
    return f"{', '.join(TABLES[kind])}, and of {', '.join(further)}"


@functools.cache  # programs are shared by rows that are the same
def _decided(kind: str, name: str, given: tuple[tuple[str, Any], ...]) -> tuple[str, Any]:
    """(words, row) of a name of a table and values of its options."""
    values, words, labels = {}, [name], []
    for flag, value in given:
        option = OPTIONS[flag]
        if number := isinstance(option.words, str):
            COUNT.check(flag, value)
        elif value not in option.words:
            raise UserError(f"--{flag} is {value}: choose one of {', '.join(option.words)}.")
        words.append(f"{flag}{value}" if number else value)
        label, values[flag] = (option.words.format(value), value) if number else option.words[value]
        labels.append(label)
    text, table = "+".join(words), TABLES[kind]
    if name not in table:
        raise UserError(f"--{kind} is {text}: {name!r} is not one of {choices_of(kind)}.")
    for flag, word in zip(values, words[1:], strict=True):
        if not {flag, word} & {*table[name].takes}:
            able = [n for n, other in table.items() if {flag, word} & {*other.takes}]
            raise UserError(
                f"--{kind} is {text}: {name} cannot be {word} (--{flag}): choose one of "
                f"{', '.join(able)}, or leave {word} out."
            )
    row = WITH_OPTIONS[kind](table[name], **values) if values else table[name]
    return text, row._replace(label=", ".join([row.label, *labels])) if labels else row


class Arm:
    """One side of a comparison: an order, a synchronisation rule and an echo policy.

    Args:
      label: for people; that of its rows if None.
      order, sync, echo: names of ORDERS, SYNC_RULES and ECHO_POLICIES. If no order is given,
        examples are reshuffled and dealt to all workers.
      rate_factor: of the learning rates that are tried.
      options: of OPTIONS, a word or a number each.

    Example:
      >>> arm = Arm(order="cd_grab", sketch=64, sync="qsr")
      >>> arm.words["order"], arm.label
      ('cd_grab+sketch64', 'CD-GraB, 64 numbers + QSR + no echo')
    """

    def __init__(
        self,
        label: str | None = None,
        order: str | None = None,
        sync: str = "parallel",
        echo: str = "none",
        *,
        rate_factor: Callable[[RunConfig], float] = lambda config: 1,
        **options,
    ):
        if strange := [name for name in options if name not in OPTIONS]:
            raise UserError(f"an arm has no {strange}: its options are {', '.join(OPTIONS)}.")
        if order is None:
            order, options = "rr", {"deal": "dealt"} | options
        decided = []
        for kind, name in {"order": order, "sync": sync, "echo": echo}.items():
            of_kind = {flag: v for flag, v in options.items() if OPTIONS[flag].of == kind}
            decided.append(_decided(kind, name, tuple(of_kind.items())))
        words, self.rows = zip(*decided, strict=True)
        self.words = dict(zip(TABLES, words, strict=True))
        self.label = " + ".join(row.label for row in self.rows) if label is None else label
        self.rate_factor = rate_factor


def arm_of(text: str, **usual: str) -> Arm:
    """Makes an arm from words; `usual` are decisions that they leave open.

    Example:
      >>> arm_of("cd_grab+sketch64+qsr").label
      'CD-GraB, 64 numbers + QSR'
    """
    chosen = parsed(text)
    arm = Arm(**usual | chosen)
    named = [row.label for kind, row in zip(TABLES, arm.rows, strict=True) if kind in chosen]
    arm.label = " + ".join(named)
    return arm


def parsed(text: str, kinds: Iterable[str] = tuple(TABLES)) -> dict[str, Any]:
    """Arguments of an `Arm`: the names and options that words such as "cd_grab+sketch64" say.

    Words of other tables than these kinds are refused.
    """
    options: dict[str, Any] = {}
    for word in text.split("+"):
        flag, value = _named(word, kinds)
        if flag is None:
            choices = "; ".join(f"--{kind}: {choices_of(kind)}" for kind in kinds)
            near = meant(word, [w for kind in kinds for w in re.findall(r"\w+", choices_of(kind))])
            raise UserError(f"{text!r} has {word!r}, which is no word: choose of {choices}.{near}")
        if flag in options:
            raise UserError(
                f"{text!r} says --{flag} twice, {options[flag]} and {value}: leave one."
            )
        options[flag] = value
    for flag in options.keys() & OPTIONS.keys():
        if (kind := OPTIONS[flag].of) not in options:
            names = ", ".join(TABLES[kind])
            raise UserError(f"{text!r} has a --{flag} and no --{kind}: name one of {names} too.")
    return options


def _named(word: str, kinds: Iterable[str]) -> tuple[str | None, Any]:
    """The flag that a word stands for, and its value."""
    for kind in kinds:
        if word in TABLES[kind]:
            return kind, word
    for flag, option in OPTIONS.items():
        if option.of not in kinds:
            continue
        if not isinstance(option.words, str):
            if word in option.words:
                return flag, word
        elif number := re.fullmatch(rf"{flag}([1-9]\d*)", word):
            return flag, int(number[1])
    return None, None


def row_of(kind: str, text: str) -> Any:
    """The row of a table that words name, such as "cd_grab+sketch64" of "order"."""
    given = parsed(text, (kind,))
    return _decided(kind, given.pop(kind), tuple(given.items()))[1]


# Flags.


def define_decisions(define: Callable, **defaults: str) -> None:
    """Defines --order, --sync, --echo and their options; `define` as of `flags.definer`."""
    texts = "which unit comes next", "when workers meet", "when a batch is used again"
    for kind, text in zip(TABLES, texts, strict=True):
        define(flags.DEFINE_string, kind, defaults[kind], f"{text}: {choices_of(kind)}")
    for flag, option in OPTIONS.items():
        text, words = f"of --{option.of}: {option.text}", option.words
        if isinstance(words, str):
            define(COUNT, flag, None, text)
        else:
            define(flags.DEFINE_enum, flag, None, text, [*words])


def arm_from_flags(values: flags.FlagValues, label: str | None = None) -> Arm:
    """The arm that the flags of `define_decisions` say."""
    options: dict[str, Any] = {}
    for kind in TABLES:
        options |= parsed(values[kind].value, (kind,))
    for flag in OPTIONS:
        if values[flag].value is not None:
            if flag in options:
                raise UserError(
                    f"--{flag} is {values[flag].value}, and {options[flag]}: leave one."
                )
            options[flag] = values[flag].value
    return Arm(label, **options)


def rows_from_flag(values: flags.FlagValues, name: str, kind: str) -> dict[str, Any]:
    """{words: row} of a flag that lists words of one table."""
    rows = {}
    for text in values[name].value or [""]:
        try:
            rows[text] = row_of(kind, text)
        except UserError as error:
            raise UserError(f"--{name} has {[text]}: {error}") from error
    return rows


# Plans of arms.


def config_of(task: Task, recipe: Recipe, arm: Arm, **more) -> RunConfig:
    """What plans of an arm's run are made from; `more` as of `training.config.config_of`."""
    sizes = config.sizes_of(task, recipe, deals=arm.rows[0].deals)
    return config.config_of(recipe, sizes, **more)


def plans_of(
    task: Task, recipe: Recipe, arm: Arm, *, rate=1.0, seed=0, speed: float | None = None
) -> config.Plans:
    """The plans of a run of an arm; seed and speed as of `training.config.config_of`."""
    setting = config_of(task, recipe, arm, seed=seed, speed=speed)
    return config.plans_of(setting, *arm.rows[1:], rate=rate)


def left_out(arms: Iterable[Arm], task: Task, recipe: Recipe) -> list[str]:
    """Sentences on the examples that arms leave out of an epoch, without repetition."""
    kinds = dict.fromkeys(arm.rows[0].deals for arm in arms)
    sizes = {kind: config.sizes_of(task, recipe, deals=kind) for kind in kinds}
    texts = (config.left_out(task, sizes[kind], deals=kind) for kind in kinds)
    return [text for text in texts if text]
