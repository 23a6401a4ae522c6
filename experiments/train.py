r"""One run: any task, any order, any synchronisation rule and any echo policy together.

    python -m experiments.train  # digits, CD-GraB, QSR, no echo: ten seconds
    python -m experiments.train --order=rr --sync=parallel --echo=diffusion --p=cosine
    python -m experiments.train --order=cd_grab --sketch=256 --deal=dealt --sync=qsr --compress=int8
    python -m experiments.train --task=mnist --model=lenet --data_dir=DIR --workers=4 --run=mesh
    python -m experiments.launch --processes=2 -- experiments.train --run=mesh --workers=2

Writes metrics.jsonl, the plans, settings and versions into --output_dir, checkpoints of the whole
state, and in the end report.html and the model, the mean over the workers. SIGTERM and SIGINT save
and leave; the same command, given again, goes on from the last checkpoint, and ends bitwise as the
run that was never stopped.

T is --total_steps, or --epochs passes over the data without echoing; with echoing the same steps
take fewer loads.
"""

from absl import flags as absl_flags

from experiments import entry
from experiments.compare import flags
from experiments.compare.study import Study
from experiments.data.base import RATE, SEED
from experiments.report.statistics import Criterion

# A study of one arm, which its flags say.
ALONE = Study("train", {}, "digits_cosine", Criterion(), columns=(), panels=())


def define_flags(values: absl_flags.FlagValues) -> None:
    flags.define(values, "task", "setting", "run", "forecast", task=ALONE.recipe, evaluations=10)
    flags.define(values, "decisions", order="cd_grab", sync="qsr", echo="none")
    with flags.shown(values):
        text = "peak; the middle one of --learning_rates if unset"
        flags.define_value(values, RATE, "learning_rate", None, text)
        flags.define_value(values, SEED, "seed", 0, "of parameters, orders, coins")
    for names in (["epochs", "total_steps"], ["learning_rate", "learning_rates"]):
        absl_flags.mark_flags_as_mutual_exclusive(names, flag_values=values)


def run(values: absl_flags.FlagValues) -> None:
    """Trains with parsed flags, as `runs.run_alone` does."""
    from experiments.compare import runs

    runs.run_alone(ALONE, values)


if __name__ == "__main__":
    entry.main(define_flags, run, defaults=flags.defaults)
