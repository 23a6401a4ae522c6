r"""Does another order lower the validation loss where few tokens are trained on for many epochs?

    python -m experiments.slowrun --data_dir=DIR  # WikiText-2: an hour
    python -m experiments.slowrun --data_dir=DIR --arms=rr+documents,cd_grab --seeds=2
    python -m experiments.slowrun --flagfile=experiments/presets/slowrun_fineweb.flags --dry_run

After the tiny track of NanoGPT Slowrun (https://github.com/qlabs-eng/slowrun): many epochs over
little text; Muon for matrices and AdamW for the rest, with a heavy weight decay that falls and
rises; a rate that is constant, falls over the last 40 % of the steps and makes a cosine of each of
the last four epochs; and the mean of the weights at these epochs' ends, weighed by 1, 2, 3, 4,
which is what is compared: its validation loss after equal steps, every order at the rate that is
its best on half of the validation windows. The other half is reported.

The first arm is the loader of Slowrun: in every epoch documents are permuted and joined, windows
cut anew, and shuffled over all workers. No window is one of another epoch, so that nothing can be
balanced there; `shifted` cuts the text anew too, but a window keeps most of its words. The others
train on windows that are cut once.
"""

from experiments.compare import study
from experiments.compare.arms import arm_of
from experiments.compare.study import Study
from experiments.report import tables
from experiments.report.plots import Panel
from experiments.report.statistics import Criterion
from experiments.report.tables import Column

AVERAGED = "test/loss/averaged"
ORDERS = (
    "rr+documents",
    "rr+dealt",
    "rr",
    "rr+shifted",
    "blocks",
    "id_pair",
    "cd_grab",
    "cd_grab+shifted",
    "cd_grab+sketch1024+shifted",
    "cd_grab+sketch1024",
    "cd_grab+scaled",
    "cd_grab+sketch1024+scaled",
)


COLUMNS = (
    tables.arm("order"),
    tables.rate("best lr"),
    tables.SEEDS,
    Column("validation loss, averaged", "{:.4f}", AVERAGED),
    Column("less {base}", "{:+.4f}", AVERAGED, than="difference"),
    Column("{train_loss}, averaged", "{:.4f}", "train/loss/averaged"),
    Column("validation loss, last", "{:.4f}", lambda runs: runs["test/loss"]),
)
STUDY = Study(
    "slowrun",
    {name: arm_of(name) for name in ORDERS},
    recipe="slowrun",
    criterion=Criterion(AVERAGED.replace("test", "valid"), lower=True, when="last"),
    finalists=1,
    columns=COLUMNS,
    panels=(Panel(AVERAGED, ("epoch",)), Panel("train/loss/averaged", ("epoch",))),
    sections=(tables.diverged_rates,),
    question=__doc__,
)


if __name__ == "__main__":
    study.main(STUDY)
