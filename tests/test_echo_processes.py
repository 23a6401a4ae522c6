"""The measured policy in several processes: one of them is slow, and all load in the same steps."""

import pytest

from tests.two_processes import start_two

PROCESS = """
import sys, time, jax
address, count, rank = (argument.split("=")[1] for argument in sys.argv[1:])
rank = int(rank)
jax.distributed.initialize(address, num_processes=int(count), process_id=rank)
import numpy as np
import local_opt, ordering

def slow():
    while True:
        time.sleep(0.03 * rank)  # the input of process 0 is always ready
        yield np.ones(2)

policy = ordering.echo.measured(total_steps=60, max_factor=50)
fresh = []
with ordering.input.load_ahead(slow()) as loader:
    for use in ordering.echo.echo_batches(loader, policy):
        fresh.append(use.fresh)
        time.sleep(0.005)
plan = ordering.echo.EchoPlan(fresh, "measured")
local_opt.check_same_plan(plan)
with open(f"loads{rank}", "w") as file:
    file.write(f"{plan.loads} {plan.digest()}")
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_load_in_the_same_steps(tmp_path):
    (tmp_path / "child.py").write_text(PROCESS)
    assert start_two("child", folder=tmp_path) == 0
    first, second = ((tmp_path / f"loads{rank}").read_text() for rank in (0, 1))
    assert first == second
    # Process 0 alone would have loaded in every step.
    assert 1 < int(first.split()[0]) < 60
