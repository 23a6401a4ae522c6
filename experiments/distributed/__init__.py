"""Runs in several processes: connecting them, comparing their settings, ending them together.

JAX connects processes and hears whether they live, orbax writes checkpoints of all. Here is what
these leave open: one comparison before the first collective, and deadlines of waits.
"""

PROCESSES = ("coordinator_address", "num_processes", "process_id")  # flags
AUTO = "auto"  # an address: what SLURM or a TPU pod tells
TIMEOUT = 1800.0  # seconds; must also cover a slow compilation in another process
