"""Studies small enough for a test."""

from absl import flags as absl_flags

from experiments.study import study

# What every command says.
SMALL = [
    "--num_train=96", "--num_test=200", "--workers=2", "--units_per_step=4", "--unit_size=1",
    "--seeds=2", "--learning_rates=0.1,0.4", "--checkpoint_every=0",
]  # fmt: skip
RUN = ["--total_steps=24", "--evaluations=4", "--warmup_steps=2", "--h_base=2"]


def parsed(module, *arguments):
    """The flags of a study's command."""
    values = absl_flags.FlagValues()
    study.define_flags(module.STUDY, values)
    rest = values([module.__name__, *arguments])
    assert len(rest) == 1, "every argument is a flag"
    return values


def start(module, arguments, folder):
    """What `study.main` does, in flags of its own."""
    study.run(module.STUDY, parsed(module, *arguments, f"--output_dir={folder}"))
