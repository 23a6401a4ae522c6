r"""How do the error of an order and that of local steps add up? On losses where both are exact.

    python -m experiments.order_error                            # four minutes on two slow cores
    python -m experiments.order_error --questions=plans --seeds=2
    python -m experiments.order_error --questions=trained        # digits, embedded, two minutes

The losses (order_losses.py) tell the two errors apart, and x is followed by linear recursions:
nothing is trained. Each question is a table: `errors` (both, of every order and period, at the
sizes of digits), `cosine` (what is left after a decay), `powers` (what scales how), `borders` (the
longest period that leaves D-RR's error the larger one: a formula, and runs), `plans` (rounds that
end with half and whole epochs), `corrections` (of local drift), `signs` (what of digits' units says
whether corrections help). `trained` asks it of a task, as a study with the flags of one: every
order of --orders under every rule of --rules, at rates that the mean over seeds of the last train
loss chooses; the target is the highest of all last train losses. The tables stand in
docs/orders_and_local_steps.md.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from absl import app
from absl import flags as absl_flags
from tqdm import tqdm

import local_opt
from experiments import order_losses as losses
from experiments.cluster import files
from experiments.order_losses import NEVER, Drift
from experiments.order_runs import LARGE, ORDERS, PERIODS, SETTINGS, SMALL, Setting, family_of, run
from experiments.results import columns, plots, records, report, tables
from experiments.results.statistics import Criterion
from experiments.study import flags, study
from experiments.study.study import Arm, Study, arm_of
from experiments.study.tables import ORDERS as TRAINED
from experiments.study.tables import SYNC_RULES
from experiments.tasks import TASKS


# Questions of cases (row, column, what `run` takes).
def errors() -> list[tuple]:
    """Both errors of every order at every period."""
    return [
        (f"{s.label}, {ORDERS[order].label}", f"H = {h}", s, order, h, NEVER)
        for s in (SMALL, LARGE) for order in ORDERS for h in PERIODS
    ]  # fmt: skip


def cosine() -> list[tuple]:
    """What is left where the rate has decayed."""
    return [
        (f"{s.label}, {ORDERS[order].label}", f"H = {h}",
         s._replace(rate=0.5, cosine=True, epochs=100), order, h, NEVER)
        for s in (SMALL, LARGE) for order in ("rr", "cd_grab", "id_pair", "dealt")
        for h in (1, 4, 24)
    ]  # fmt: skip


def plans() -> list[tuple]:
    """Plans that know the order against plans that do not."""

    def ten(n, t):
        return local_opt.constant(10, total_steps=t)

    made = {
        "H = 10": ten,
        "to the half epoch": lambda n, t: local_opt.aligned(ten(n, t), every=0.5 * n),
        "H = 24, to the epoch": lambda n, t: local_opt.aligned(ten(n, t), every=n),
        "H = 24, ends in the middle": (
            lambda n, t: local_opt.constant(n, total_steps=t, offset=n // 2)
        ),
    }
    return [
        (f"{s.label}, {ORDERS[order].label}", name, s, order, plan, NEVER)
        for s in (SMALL, LARGE) for order in ("rr", "cd_grab", "id_pair", "round_robin")
        for name, plan in made.items()
    ]  # fmt: skip


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


def corrections() -> list[tuple]:
    """Both errors together under corrections of local drift, for units of three kinds."""
    return [
        (f"{s.label}, {kind}{ORDERS[order].label}, H = {h}", name, s._replace(**changed), order,
         h, drift)
        for s in (SMALL, LARGE) for kind, changed in KINDS.items()
        for order in ("rr", "cd_grab") for h in (4, 24) for name, drift in CORRECTIONS.items()
    ]  # fmt: skip


# Other questions: the records of a seed.
POWER = Setting(8, 2, 48, rate=0.03, spread=0.0, least=0.3, epochs=200)
DOUBLED = {  # (what is changed of POWER, H, the factor, exponents of the two errors)
    "rate": (dict(rate=0.06), 6, 2.0, (3, 4)),
    "H - 1": ({}, 12, 11 / 5, (0, 2)),
    "units per step, B": (dict(units_per_step=4, num_units=96), 6, 2.0, (-1, -2)),
    "workers, W": (dict(workers=16), 6, 2.0, (-1, 0)),
    "steps of an epoch, n": (dict(num_units=96), 6, 2.0, (2, 0)),
    "third derivative, k": (dict(cubic=2.0), 6, 2.0, (0, 2)),
}


def powers(seed: int) -> Iterator[dict]:
    """Exponents: D-RR's error and the bias of local steps, where one thing is doubled."""
    before = run(POWER, "dealt", 6, seed)
    for name, (changed, period, factor, _) in DOUBLED.items():
        after = run(POWER._replace(**changed), "dealt", period, seed)
        found = {e: np.log(after[e] / before[e]) / np.log(factor) for e in ("order", "bias")}
        yield {"row": name} | found


def borders(seed: int) -> Iterator[dict]:
    """The longest period at which local steps add less than D-RR's error: formula and runs."""
    for shape, rate in itertools.product(SETTINGS, (0.5, 0.25, 0.1)):
        setting, most = shape._replace(rate=rate), 1
        formula = losses.border(
            family_of(setting, seed), rate=rate, workers=setting.workers,
            units_per_step=setting.units_per_step, steps=setting.steps,
        )  # fmt: skip
        for period in PERIODS:
            found = run(setting, "dealt", period, seed)
            if found["local"] >= found["order"]:
                break
            most = period
        column = f"rate {rate:g}"
        yield {"row": setting.label, "column": column, "formula": formula, "run": most}


def signs(seed: int) -> Iterator[dict]:
    """Of which kind digits are: the family's correlation of g with z has the cosine's sign."""
    task = TASKS["digits"]()
    yield {"row": task.name} | losses.sign(task.model, task.train, seed=seed)._asdict()


# Tables of records.
def _grid(found: Sequence[dict], field="total", form="{:.1e}", head="{}") -> list[dict]:
    """Rows and columns of the records, mean and interval over seeds."""
    cells = {}
    for r in found:
        own = cells.setdefault(r["row"], {}).setdefault(head.format(r.get("column", field)), [])
        own.append(r[field])
    return [
        {"": row} | {name: tables.show(v, form) for name, v in own.items()}
        for row, own in cells.items()
    ]


def _errors(found):
    """The order's error, and local steps' and both together at two periods."""
    shown = [r for r in found if r["column"] in ("H = 4", "H = 24")]
    first = _grid([r | {"column": "order's"} for r in shown if r["column"] == "H = 4"], "order")
    parts = (_grid(shown, field, head=field + ", {}") for field in ("local", "total"))
    return [a | b | c for a, b, c in zip(first, *parts, strict=True)]


def _powers(found):
    rows = []
    for name, (*_, (order, bias)) in DOUBLED.items():
        own = [r for r in found if r["row"] == name]
        rows.append({
            "the exponent of": name,
            "D-RR's error": tables.show([r["order"] for r in own], "{:+.2f}"), "expected": order,
            "bias of local steps": tables.show([r["bias"] for r in own], "{:+.2f}"),
            "expected ": bias,
        })  # fmt: skip
    return rows


def _borders(found):
    """Medians over seeds; "any" where no period is too long, or none of those that were run."""
    rows = {}
    for r in found:
        own = rows.setdefault(r["row"], {"workers x units": r["row"]})
        same = [o for o in found if (o["row"], o["column"]) == (r["row"], r["column"])]
        for field, most in (("formula", 4096), ("run", PERIODS[-1])):
            middle = int(np.median([o[field] for o in same]))
            own[f"{r['column']}, {field}"] = "any" if middle >= most else middle
    return [*rows.values()]


def _signs(found):
    both = (_grid(found, field, "{:.2f}") for field in ("cosine", "noise"))
    return [a | b for a, b in zip(*both, strict=True)]


def _of_cases(cases: Callable[[], list[tuple]], seed: int) -> Iterator[dict]:
    """An order's runs come one after the other."""
    for row, column, *given, drift in cases():
        yield {"row": row, "column": column} | run(*given, seed, drift)


QUESTIONS = {  # (seed -> records, records -> rows of the table)
    "errors": (functools.partial(_of_cases, errors), _errors),
    "cosine": (functools.partial(_of_cases, cosine), _grid),
    "powers": (powers, _powers),
    "borders": (borders, _borders),
    "plans": (functools.partial(_of_cases, plans), _grid),
    "corrections": (functools.partial(_of_cases, corrections), _grid),
    "signs": (signs, _signs),
}


def picture(found: Sequence[dict], path: str) -> None:
    """Writes a PNG: both errors against H, a panel per setting."""
    figure, (axes,) = plots.panes(1, 2, (12, 5), sharey=True)
    for axis, setting in zip(axes, (SMALL, LARGE), strict=True):
        for i, name in enumerate(("rr", "cd_grab", "id_pair", "round_robin", "chunks")):
            own = [r for r in found if (r["setting"], r["order_name"]) == (setting.label, name)]
            style, label = {"color": plots.look(i)["color"]}, ORDERS[name].label
            at = [np.mean([r["local"] for r in own if r["column"] == f"H = {h}"]) for h in PERIODS]
            axis.plot(PERIODS, at, marker="o", ms=4, **style, label=f"{label}, local")
            level = np.mean([r["order"] for r in own])
            axis.axhline(level, linestyle="--", label=f"{label}, order's", **style)
        axis.set(xscale="log", yscale="log", xlabel="H, steps between two syncs")
        axis.set_title(f"{setting.workers} workers, {setting.units_per_step} units a step")
        axis.set_xticks(PERIODS, [str(h) for h in PERIODS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("expected loss above the minimum")
    plots.legend(figure)
    plots.save(
        figure, path, "Two errors of local steps under an order: rate 0.25, 24 steps an epoch"
    )


# The question of a task.
ASKED = ("rr", "cd_grab"), ("parallel", "constant")


def arms_of(orders, rules) -> dict[str, Arm]:
    """Every order under every rule."""
    return {f"{o}+{r}": arm_of(f"{o}+{r}") for r, o in itertools.product(rules, orders)}


STUDY = Study(
    "order_error",
    arms_of(*ASKED),
    recipe="digits_cosine",
    criterion=Criterion("train/loss"),
    columns=columns.COMBINED_COLUMNS,
    panels=plots.COMBINED_PANELS,
    sections=(columns.target_line,),
)


def define_flags(values: absl_flags.FlagValues) -> None:
    define, names = flags.definer(values), absl_flags.DEFINE_list
    define(names, "questions", [*QUESTIONS], f"of {', '.join(QUESTIONS)}; or trained")
    define(names, "orders", [*ASKED[0]], f"trained: of {', '.join(TRAINED)}")
    define(names, "rules", [*ASKED[1]], f"trained: of {', '.join(SYNC_RULES)}")


def fit(study, task, recipe, values):
    """The arms are those of the flags."""
    del task, recipe
    orders = flags.names_of(values, "orders", TRAINED)
    return study._replace(arms=arms_of(orders, flags.names_of(values, "rules", SYNC_RULES)))


def main(argv: Sequence[str], values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    del argv
    if values.questions == ["trained"]:
        return study.run(STUDY, values, fit=fit)
    folder, found = values.output_dir or "results/order_error", []
    asked = flags.names_of(values, "questions", QUESTIONS)
    records.open_folder(folder, {"seeds": values.seeds, "questions": asked}, overwrite=True)
    for name in asked:
        of_seed, rows = QUESTIONS[name]
        made = ({"question": name, "seed": s} | r for s in range(values.seeds) for r in of_seed(s))
        own = list(tqdm(made, desc=name, unit="run"))
        found += own
        records.write_lines(os.path.join(folder, records.METRICS), found)
        text = tables.markdown(rows(own))
        files.write_whole(os.path.join(folder, f"table_{name}.md"), text + "\n")
        print(f"\n{name}\n\n{text}")
        if name == "errors":
            picture(own, os.path.join(folder, "order_error.png"))
    report.write_page(folder, "Two errors")
    print(f"\nWritten to {folder}")


if __name__ == "__main__":
    study.define_flags(STUDY, absl_flags.FLAGS)
    define_flags(absl_flags.FLAGS)
    app.run(main)
