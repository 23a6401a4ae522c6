r"""What do blocks of sorted files lose against a full shuffle, and what does balancing give back?

    python -m experiments.blocks                                  # digits by class, a minute
    python -m experiments.blocks --data_root=DIR --schedules=constant,cosine \
        --tasks=digits,hmda_county,hmda_denied,sst2               # docs/results/blocks.md
    python -m experiments.blocks --data_root=DIR --schedules=constant,cosine \
        --tasks=shakespeare --windows=1                           # in the same folder

Files are sorted, as files are: by class, county or length, or in the sequence of a text. Each of
four workers reads blocks of S records, K at once, whose records are shuffled together. A full
shuffle of single records is compared with the file as it lies, with a shuffle buffer, and with
blocks in a random and in a balanced order (CD-GraB, dealt to all workers), each at its own best
learning rate. A request reads a block: the pages of 4 KiB that its records touch. The same command
resumes.
"""

import itertools
import os
from collections.abc import Sequence

import numpy as np
from absl import flags

import models
from experiments import block_report, block_tasks
from experiments.block_runs import Run, trained
from experiments.block_tasks import SETTINGS, Setting, arms_of, costs, label_of
from experiments.cluster import entry, files, lock, progress
from experiments.results import archive, records, report
from experiments.results.statistics import ABOVE, AVERAGED, LOSS
from experiments.study import flags as dialect
from experiments.tasks import ranges


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
            spent = costs(own, arm, setting, data.record_bytes)
            train = trained(arm, setting, data, after_epoch=bar.update)
            at_once = len(runs) if setting.convex else 1
            for part in (runs[i : i + at_once] for i in range(0, len(runs), at_once)):
                for run, found in zip(part, train(part), strict=True):
                    found = [loss - (optimum or 0.0) for loss in found]
                    write(
                        {"study": "blocks", "task": name, "arm": own, **arm._asdict(), **spent}
                        | {"speed": None, "phase": "run", **run._asdict()}
                        | {"epoch": setting.recipe.epochs, "step": steps_of(setting)}
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


def file_of(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


def define_flags(values: flags.FlagValues) -> None:
    define = dialect.definer(values)
    define(flags.DEFINE_list, "tasks", ["digits"], f"which files, of {', '.join(SETTINGS)}")
    define(flags.DEFINE_string, "data_root", None, "holds a folder for the data of each set")
    define([ranges.COUNT], "sizes", None, "records of a block, S; the task's own if unset")
    define([ranges.COUNT], "windows", [1, 4], "blocks of a worker that are read at once, K")
    schedules = list(dict.fromkeys(schedule for schedule, _ in block_report.MEASURES.values()))
    define([schedules], "schedules", ["constant"], "of the learning rate")
    define([ranges.RATE], "learning_rates", None, "peak rates; the task's own if unset")
    define(ranges.COUNT, "epochs", None, "of a run; the task's own if unset")
    define(ranges.COUNT, "seeds", 5, "runs at every rate")
    dialect.define(values, "output", output_dir="results/blocks")


def main(values: flags.FlagValues) -> None:
    asked, folder = dialect.names_of(values, "tasks", SETTINGS), values.output_dir
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
    texts = {}
    pictures = {f"blocks_{file_of(each)}.png": each for each in block_report.shown(found)}
    for name, text in block_report.tables_of(found).items():
        texts[f"table_{file_of(name)}.md"] = text
        files.write_whole(os.path.join(folder, f"table_{file_of(name)}.md"), text + "\n")
        print(f"\n{name}\n\n{text}")
    for picture, measured in pictures.items():
        block_report.picture(found, measured, os.path.join(folder, picture))
    files.write_whole(os.path.join(folder, archive.METRICS), archive.pack(found))  # to be kept
    archive.note_command(folder, report.command_line())
    report.write_page(folder, "Blocks of sorted files", pictures=pictures, texts=texts)
    print(f"\nWritten to {folder}")


if __name__ == "__main__":
    entry.main(define_flags, main)
