"""The table of orders, with the further words that change a row."""

import functools

import ordering
from experiments.study.words import Choice, Order, Table, Word
from experiments.training.config import EXAMPLES, UNITS, OrderSetting
from syncopate.refusals import UserError


def _coordinated(s: OrderSetting, sketched=False, **options):
    gathers = s.gathers if sketched else None
    return ordering.cd_grab(
        s.num_units, units_per_step=s.units_per_step, gathers=gathers, **options
    )


def _sketch(size: int) -> Word:
    def change(row: Order) -> Order:
        make = functools.partial(row.make, sketched=True) if row.coordinated else row.make
        return row._replace(make=make, sketch=size)

    return Word(f"{size} numbers", change)


def _team(size: int) -> Word:
    def change(row: Order) -> Order:
        if row.sketch is None:
            raise UserError(
                f"--order is team{size} without a sketch: put one before it, as sketch1024."
            )
        return row._replace(make=functools.partial(row.make, team_size=size))

    return Word(f"teams of {size}", change)


def _walk(row: Order) -> Order:
    rule = ordering.self_balancing_walk()
    return row._replace(make=functools.partial(row.make, rule=rule))


def _deal(label: str, how: str) -> Word:
    """Units given anew to all workers in every epoch; of pairs, in one order of all units."""

    def change(row: Order) -> Order:
        if not row.observes:  # nothing holds its units together: examples are dealt
            make = lambda s: ordering.dealt_reshuffling(s.num_units, total=s.total)  # noqa: E731
            return row._replace(make=make, deals=EXAMPLES)
        make = lambda s: ordering.dealt(row.make(s), s.num_units, how=how, total=s.total)  # noqa: E731
        return row._replace(make=make, deals=UNITS)

    return Word(label, change)


def _documents(row: Order) -> Order:
    """Examples dealt, as no window is one of another epoch."""
    return _deal("", "").change(row)._replace(recut="documents")


ORDERS = Table(
    "order", "which unit comes next",
    {
        "rr": Order(
            "D-RR", lambda s: ordering.random_reshuffling(s.num_units), observes=False,
            takes=("dealt", "cut"),
        ),
        "blocks": Order(
            "block reshuffling",
            lambda s: ordering.block_reshuffling(s.num_units, block_size=min(8, s.num_units)),
            observes=False,
        ),
        "unzip": Order("unzip control", lambda s: ordering.unzip(s.num_units), observes=False),
        "id_mean": Order(
            "independent mean",
            lambda s: ordering.grab(s.num_units, units_per_step=s.units_per_step),
        ),
        "id_pair": Order(
            "independent pair",
            lambda s: ordering.pair_balance(s.num_units, units_per_step=s.units_per_step),
            takes=("sketch", "scale", "deal", "shifted"),
        ),
        "cd_grab": Order(
            "CD-GraB", _coordinated, coordinated=True,
            takes=("sketch", "team", "scale", "signs", "deal", "shifted"),
        ),
        "so": Order("shuffle once", lambda s: ordering.shuffle_once(s.num_units), observes=False),
        "herding": Order(
            "greedy herding",
            lambda s: ordering.greedy_herding(s.num_units, units_per_step=s.units_per_step),
        ),
    },
    {
        "sketch": Choice("numbers that stand for a gradient", _sketch),
        "team": Choice("workers that sign together, of a sketched order", _team),
        "scale": Choice("what the optimizer's second moment makes of a gradient", {
            "scaled": Word("scaled", lambda row: row._replace(scaled=0.5)),
            "root": Word("scaled by the root", lambda row: row._replace(scaled=0.25)),
        }),
        "signs": Choice("who gives signs instead of the greedy rule", {
            "walk": Word("walk", _walk)
        }),
        "deal": Choice("how units are given anew to all workers in every epoch", {
            "dealt": _deal("dealt", "round_robin"),
            "chunks": _deal("chunks", "chunks"),
        }),
        "cut": Choice("how a text is cut into windows anew in every epoch", {
            "documents": Word("documents permuted", _documents),
            "shifted": Word("shifted", lambda row: row._replace(recut="shifted")),
        }),
    },
)  # fmt: skip
