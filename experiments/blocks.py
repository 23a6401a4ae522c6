r"""What do blocks of sorted files lose against a full shuffle, and what does balancing give back?

    python -m experiments.blocks                                  # digits by class, a minute
    python -m experiments.blocks --data_root=DIR --schedules=constant,cosine \
        --tasks=digits,hmda_county,hmda_denied,sst2,shakespeare   # docs/results/blocks.md

Files are sorted, as files are: by class, county or length, or in the sequence of a text. Each of
four workers reads blocks of S records, K at once, whose records are shuffled together. A full
shuffle of single records is compared with the file as it lies, with a shuffle buffer, and with
blocks in a random and in a balanced order (CD-GraB, dealt to all workers), each at its own best
learning rate. A request reads a block: the pages of 4 KiB that its records touch. The same command
resumes.
"""

import itertools
import math
import os
import time
from collections.abc import Sequence

import numpy as np
from absl import flags

import models
from experiments import block_tasks
from experiments.block_runs import ORDERS, Run, trained
from experiments.block_tasks import BUFFER, SETTINGS, Arm, Setting, arms_of, costs, label_of
from experiments.cluster import entry, files, lock, progress
from experiments.results import archive, plots, records, report, statistics, tables
from experiments.results.statistics import ABOVE, AVERAGED, LOSS, Comparison, Criterion
from experiments.study.flags import definer, names_of
from experiments.tasks import ranges
from experiments.training.optimizers import SCHEDULES

MEASURES = {  # of the tables: (schedule, whether weights are averaged)
    "constant rate": ("constant", ""),
    "constant rate, averaged": ("constant", AVERAGED),
    "cosine": ("cosine", ""),
}
FAMILIES = {  # order and whether several blocks are read at once: place of the look, marker
    ("shuffled", False): ("blocks shuffled", 1, "o"),
    ("shuffled", True): ("blocks shuffled, {} at once", 2, "s"),
    ("balanced", False): ("blocks balanced", 4, "o"),
    ("balanced", True): ("blocks balanced, {} at once", 6, "s"),
}


def measure(name: str, values: flags.FlagValues, done: Sequence[dict], write) -> None:
    """Trains the runs of a task that are not among the records."""
    setting = fitted(name, values)
    known = {tuple(r[k] for k in ("arm", *Run._fields)) for r in done if r["task"] == name}
    lanes = itertools.product(values.schedules, setting.recipe.learning_rates, range(values.seeds))
    asked, missing = [Run(*lane) for lane in lanes], {}
    arms = arms_of(setting, values.sizes or setting.sizes, values.windows)
    for own in arms:
        missing[own] = [run for run in asked if (own, *run) not in known]
    total = sum(map(len, missing.values())) * setting.recipe.epochs
    if not total:
        return
    data, optimum = block_tasks.load(name, values.data_root), None
    if setting.convex:
        optimum = models.optimum(data.model, data.train)
    scalar = LOSS if optimum is None else ABOVE
    with progress.bar(total=total, unit="epoch") as bar:
        for own, arm in arms.items():
            if not (runs := missing[own]):
                continue
            bar.set_description(f"{name}, {label_of(own, arm)}")
            start, known = time.perf_counter(), costs(own, arm, setting, data.record_bytes)
            train = trained(arm, setting, data, after_epoch=bar.update)
            at_once = len(runs) if setting.convex else 1
            for part in (runs[i : i + at_once] for i in range(0, len(runs), at_once)):
                for run, found in zip(part, train(part), strict=True):
                    found = [loss - (optimum or 0.0) for loss in found]
                    write(
                        {"study": "blocks", "task": name, "arm": own, **arm._asdict(), **known}
                        | {"speed": None, "phase": "run", **run._asdict()}
                        | {"epoch": setting.recipe.epochs, "step": steps_of(setting)}
                        | {"seconds": (time.perf_counter() - start) / len(runs)}
                        | {scalar: found[0], scalar + AVERAGED: found[1], "ended": True}
                        | {"diverged": None if np.isfinite(found).all() else "not finite"}
                    )


def steps_of(setting: Setting) -> int:
    """Steps of a run."""
    recipe = setting.recipe
    return recipe.epochs * setting.num_records // recipe.workers // recipe.units_per_step


def fitted(name: str, values: flags.FlagValues) -> Setting:
    """The setting of a task with the flags that are set."""
    setting = SETTINGS[name]
    own = {"epochs": values.epochs, "learning_rates": values.learning_rates}
    own = {field: value for field, value in own.items() if value is not None}
    return setting._replace(recipe=setting.recipe._replace(**own))


def compared(found: Sequence[dict], measured: str) -> Comparison:
    """The arms of a task by one of MEASURES."""
    schedule, averaged = MEASURES[measured]
    own = [r for r in found if r["schedule"] == schedule]
    arms = {r["arm"]: label_of(r["arm"], arm_in(r)) for r in found}
    scalar = (ABOVE if any(ABOVE in r for r in own) else LOSS) + averaged
    return statistics.compare(own, arms, Criterion(scalar))


def arm_in(record: dict) -> Arm:
    return Arm(*(record[field] for field in Arm._fields))


def ends(comparison: Comparison, arm: str) -> dict[int, float]:
    """{seed: what the arm ends with at its own best rate}; {} where all rates diverge."""
    own = comparison.chosen.get((arm, None))
    scalar = comparison.criterion.scalar
    return {seed: run[-1][scalar] for seed, run in own.runs.items()} if own else {}


def shown(found: Sequence[dict]) -> list[str]:
    """The measures of which there are records."""
    schedules = {r["schedule"] for r in found}
    return [name for name, (schedule, _) in MEASURES.items() if schedule in schedules]


def table(found: Sequence[dict]) -> str:
    """Markdown of a task: a row per arm."""
    rows, first = {}, ("full", "file", "buffer")

    def place(r):
        where = first.index(r["arm"]) if r["arm"] in first else len(first)
        return where, [*ORDERS].index(r["order"]), block_tasks.are_several(arm_in(r)), r["size"]

    for r in sorted(found, key=place):
        rows[r["arm"]] = {
            "records in the order of": label_of(r["arm"], arm_in(r)),
            "held at once": f"{r['held']:,}",
            "requests": f"{r['requests']:,}",
            "read": tables.show_bytes(r["bytes"]),
        }
    rate = tables.rate("").cell
    for name in shown(found):
        comparison = compared(found, name)
        form = "{:.1e}" if ABOVE in comparison.criterion.scalar else "{:.4f}"
        for arm, row in rows.items():
            own = comparison.chosen.get((arm, None))
            value = tables.show(ends(comparison, arm).values(), form)
            row[name] = f"{value}, lr {rate(comparison, own)}" if own else "-"
    return tables.markdown([*rows.values()])


def families(found: Sequence[dict]) -> dict[tuple, list[dict]]:
    """{key of FAMILIES: one record per arm, the smallest blocks first}."""
    arms = {r["arm"]: r for r in found if r["arm"] not in ("full", "file", "buffer")}
    grouped = {key: [] for key in FAMILIES}
    for r in sorted(arms.values(), key=lambda r: r["size"]):
        grouped[r["order"], block_tasks.are_several(arm_in(r))].append(r)
    return {key: own for key, own in grouped.items() if own}


def borders(found: Sequence[dict], name: str) -> list[dict]:
    """The largest blocks up to which no loss is shown to be above that of a full shuffle."""
    rows = []
    for key, own in families(found).items():
        row = {"task": SETTINGS[name].label, "blocks": family_label(key, own)}
        for measured in shown(found):
            comparison, best = compared(found, measured), None
            full = ends(comparison, "full")
            for r in own:
                logs = statistics.log_ratios(full, ends(comparison, r["arm"]))  # of full over own
                mean, half = statistics.interval(logs)
                if not mean + np.nan_to_num(half) >= 0:  # worse, or diverged
                    break
                best = r
            row[measured] = "none" if best is None else f"{best['size']:,}"
        rows.append(row)
    return rows


def family_label(key: tuple, own: Sequence[dict]) -> str:
    return FAMILIES[key][0].format(max(r["window"] for r in own))


def picture(found: Sequence[dict], measured: str, path: str) -> None:
    """Writes a PNG: the loss over the requests of an epoch, a panel per task."""
    tasks = {r["task"]: [] for r in found}
    for r in found:
        tasks[r["task"]].append(r)
    columns = min(3, len(tasks))
    lines = math.ceil(len(tasks) / columns)
    figure, axes = plots.panes(lines, columns, (max(7, 4.6 * columns), 3.9 * lines + 1))
    for axis, (name, own) in zip(axes.flat, tasks.items(), strict=False):
        comparison = compared(own, measured)
        panel(axis, own, comparison)
        of_x = "requests of an epoch × records of a block"
        axis.set(title=SETTINGS[name].label, xscale="log", xlabel=of_x)
        axis.set_ylabel(tables.name_of(comparison.criterion.scalar))
        sizes = {r["requests"]: r["size"] for of in families(own).values() for r in of}
        axis.set_xticks([*sizes], [f"{n:,}\n× {size:,}" for n, size in sizes.items()])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    plots.legend(figure)
    each = "each at its own best rate, mean and 95 % interval"
    plots.save(figure, path, f"Blocks of sorted files, {measured}\n{each}")


def panel(axis, found: Sequence[dict], comparison: Comparison) -> None:
    for arm, label, colour in (
        ("full", "full shuffle", "#000000"), ("file", "file order", "#999999"),
        ("buffer", f"file order, buffer of 1/{BUFFER}", "#CC79A7"),
    ):  # fmt: skip
        if values := [*ends(comparison, arm).values()]:
            mean, below, above = spread(values)
            axis.axhline(mean, color=colour, linestyle="--", linewidth=1.3, label=label)
            axis.axhspan(mean - below, mean + above, color=colour, alpha=0.12, linewidth=0)
    for key, own in families(found).items():
        _, place, marker = FAMILIES[key]
        beside = 1.06 if key[1] else 1.0
        points = [(beside * r["requests"], [*ends(comparison, r["arm"]).values()]) for r in own]
        x, values = zip(*(point for point in points if point[1]), strict=True)
        mean, *spreads = np.array([spread(v) for v in values]).T
        axis.errorbar(
            x, mean, yerr=spreads, marker=marker, ms=5, capsize=3,
            color=plots.COLOURS[place], label=family_label(key, own),
        )  # fmt: skip
    if ABOVE in comparison.criterion.scalar:
        axis.set_yscale("log")


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and how far its interval reaches down and up; down to half the least value."""
    mean, half = statistics.interval(values)
    half = float(np.nan_to_num(half))
    return mean, min(half, mean - min(values) / 2), half


def define_flags(values: flags.FlagValues) -> None:
    define = definer(values)
    define(flags.DEFINE_list, "tasks", ["digits"], f"which files, of {', '.join(SETTINGS)}")
    define(flags.DEFINE_string, "data_root", None, "holds a folder for the data of each set")
    define([ranges.COUNT], "sizes", None, "records of a block, S; the task's own if unset")
    define([ranges.COUNT], "windows", [1, 4], "blocks of a worker that are read at once, K")
    define([list(SCHEDULES)], "schedules", ["constant"], "of the learning rate")
    define([ranges.RATE], "learning_rates", None, "peak rates; the task's own if unset")
    define(ranges.COUNT, "epochs", None, "of a run; the task's own if unset")
    define(ranges.COUNT, "seeds", 5, "runs at every rate")
    define(flags.DEFINE_string, "output_dir", "results/blocks", "folder for the output")
    define(flags.DEFINE_bool, "overwrite", False, "forget another run in the output folder")


def main(values: flags.FlagValues) -> None:
    asked, folder = names_of(values, "tasks", SETTINGS), values.output_dir
    with lock.held(folder):
        done = [] if values.overwrite else records.found(folder)
        records.open_folder(folder, {"epochs": values.epochs}, overwrite=values.overwrite)
        with records.writing(folder, keep=done) as write:
            found = list(done)

            def on_record(record):
                found.append(record)
                write(record)

            for name in asked:
                measure(name, values, done, on_record)
    report_of(found, folder)


def report_of(found: Sequence[dict], folder: str) -> None:
    """Writes and prints the tables, pictures and page of the records."""
    names, made = list(dict.fromkeys(r["task"] for r in found)), {}
    own = {name: [r for r in found if r["task"] == name] for name in names}
    for name in names:
        made[name] = table(own[name])
    made["borders"] = tables.markdown([row for name in names for row in borders(own[name], name)])
    for name, text in made.items():
        files.write_whole(os.path.join(folder, f"table_{name}.md"), text + "\n")
        print(f"\n{name}\n\n{text}")
    for measured in shown(found):
        path = os.path.join(folder, f"blocks_{measured.replace(', ', '_').replace(' ', '_')}.png")
        picture(found, measured, path)
    files.write_whole(os.path.join(folder, archive.METRICS), archive.pack(found))  # to be kept
    archive.note_command(folder, report.command_line())
    report.write_page(folder, "Blocks of sorted files")
    print(f"\nWritten to {folder}")


if __name__ == "__main__":
    entry.main(define_flags, main)
