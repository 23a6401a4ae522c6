"""Runs every program that times other packages beside ours, one after another.

    python -m benchmarks.bench --part=peers --repositories=DIR --data_dir=DATA

Each program can be called alone: its docstring says what it compares and what to install. It
compares results before it times anything, prints rows as they are measured, and says which packages
are not installed. DIR has clones of what PyPI lacks (CD-GraB, init2winit), and DATA has the folders
hmda and tfds. The last program writes 24 GB into the current folder, and removes them.
"""

import subprocess
import sys
from collections.abc import Mapping

PEERS = (
    "published_cd_grab",
    "grab_sampler",
    "single_examples",
    "opacus_norms",
    "dattri_projections",
    "local_steps",
    "input_peers",
    "input_kills",
    "echo_peers",
    "block_costs",
)


def run(flags: Mapping) -> None:
    """Runs all with the flags that are given; a program ignores those that it does not know."""
    words = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    for name in PEERS:
        command = ["-m", f"benchmarks.{name}", f"--undefok={','.join(flags)}", *words]
        print(f"\n{name}", flush=True)
        done = subprocess.run([sys.executable, *command])
        if done.returncode:
            print(f"{name} ended with {done.returncode}: its rows are incomplete.", flush=True)
