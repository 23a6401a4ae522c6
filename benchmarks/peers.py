"""Runs every program that times other packages beside ours, one after another.

    python -m benchmarks.bench --part=peers --repositories=DIR --data_dir=DATA

Each is a program of its own, which can be called alone: its docstring says what it compares and
installs. It compares results before it times anything, prints rows as they are measured, and leaves
out, in a line, what is not installed. DIR has clones of what PyPI lacks (CD-GraB, init2winit), DATA
the folders hmda and tfds. The last one writes 24 GB into the current folder, and removes them.
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
            print(f"{name} ended with {done.returncode}: what it printed is all.", flush=True)
