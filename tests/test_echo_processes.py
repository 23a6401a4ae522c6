"""The measured policy in several processes: one of them is slow, and all load in the same steps."""

import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROCESS = """
import sys, time, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, rank = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
import numpy as np
import local_opt, ordering

def slow():
    while True:
        time.sleep(0.03 * rank)  # the input of process 0 is always ready
        yield np.ones(2)

policy = ordering.measured(total_steps=60, max_factor=50)
fresh = []
with ordering.load_ahead(slow()) as loader:
    for use in ordering.echoed(loader, policy):
        fresh.append(use.fresh)
        time.sleep(0.005)
plan = ordering.EchoPlan(fresh, "measured")
local_opt.check_same_plan(plan)
print("loads", plan.loads, plan.digest())
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_load_in_the_same_steps():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", PROCESS, str(port)]
    processes = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=ROOT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0, 0], outputs
    lines = [[x for x in out.splitlines() if x.startswith("loads")] for out, _ in outputs]
    assert lines[0] == lines[1]
    # Process 0 alone would have loaded in every step.
    assert 1 < int(lines[0][0].split()[1]) < 60
