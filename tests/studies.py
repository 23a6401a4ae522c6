"""The flags of commands, and studies small enough for a test."""

from absl import flags as absl_flags

from experiments.study import study

# What every command says.
SMALL = [
    "--num_train=96", "--num_test=200", "--workers=2", "--units_per_step=4", "--unit_size=1",
    "--seeds=2", "--learning_rates=0.1,0.4", "--checkpoint_every=0",
]  # fmt: skip
RUN = ["--total_steps=24", "--evaluations=4", "--warmup_steps=2", "--h_base=2"]


def flags_of(module):
    """All flags of a command, unparsed."""
    values = absl_flags.FlagValues()
    if hasattr(module, "STUDY"):
        study.define_flags(module.STUDY, values)
    else:
        module.define_flags(values)
    return values


def parsed(module, *arguments):
    """The flags of a command."""
    values = flags_of(module)
    rest = values([module.__name__, *arguments])
    assert len(rest) == 1, "every argument is a flag"
    return values


def start(module, arguments, folder):
    """What `study.main` does, in flags of its own."""
    study.run(module.STUDY, parsed(module, *arguments, f"--output_dir={folder}"))
