"""The training data of NanoGPT Slowrun in balanced orders: CD-GraB over all ranks, on sketches.

Put this file beside tiny/train.py, which cd_grab.diff changes to use it. Every epoch cuts the text
into sequences at places that are shifted by less than a sequence. So sequences keep most of their
words from epoch to epoch, and their gradients stay similar, which permuted documents prevent.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # orders are made on the host

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist

from syncopate import local_opt, ordering


class BalancedLoader:
    """Yields (x, y, epoch) of this rank for ever, like the DataLoader of tiny/train.py.

    A unit of the order is a microbatch of B sequences. After each backward pass, and before the
    next microbatch is asked for, call `observe`.

    Args:
      filepath: what prepare_data.py writes.
      B, T: sequences of a microbatch, and tokens of a sequence.
      units_per_step: microbatches between optimizer steps.
      size: k, the numbers of a sketch.
      seed: of cuts, microbatches and orders.
    """

    def __init__(
        self, filepath, B, T, device="cuda", *, rank, world_size, units_per_step, size=1024, seed=0
    ):
        self.text = torch.load(filepath, weights_only=True)["tokens"].long()
        self.rank, self.world_size, self.device, self.size = rank, world_size, device, size
        self.seed, self.units_per_step = seed, units_per_step
        self.length = T + 1
        members = np.random.default_rng(seed).permutation(len(self.text) // self.length)
        steps = len(members) // (world_size * units_per_step * B)
        if not steps:
            raise ValueError(
                f"{len(members)} sequences of {T + 1} tokens are fewer than the {world_size} ranks "
                f"x {units_per_step} units x {B} of one step: pass shorter or fewer ones."
            )
        units = steps * units_per_step
        self.units = members[: world_size * units * B].reshape(world_size, units, B)
        self.total_tokens = self.units.size * T

        order = ordering.cd_grab(units, units_per_step=units_per_step)
        specs = {"in_specs": "worker", "out_specs": "worker"}
        self._observe = jax.jit(local_opt.map_workers(order.observe, world_size, **specs))
        self._next_epoch = jax.jit(jax.vmap(order.next_epoch))
        specs = {"in_specs": ("key", "replicated"), "out_specs": "worker"}
        init = local_opt.map_workers(order.init, world_size, **specs)
        self.orders = init(jax.random.key(seed), jnp.zeros(size))  # of all ranks, equal on all

        self.epoch, self.signs, self.rows, self.before = 0, None, [], 0.0
        self._begin_epoch()

    def _begin_epoch(self):
        self.epoch, self.place = self.epoch + 1, 0
        shift = np.random.default_rng((self.seed, self.epoch)).integers(self.length)
        cut = self.text.roll(-int(shift))
        self.sequences = cut[: len(cut) // self.length * self.length].view(-1, self.length)
        self.current = self.units[self.rank][np.asarray(self.orders.current[self.rank])]

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(self.current):
            self.orders = self._next_epoch(self.orders)
            self._begin_epoch()
        chosen = torch.from_numpy(self.current[self.place])
        batch = self.sequences[chosen].to(self.device, non_blocking=True)
        self.place += 1
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), self.epoch

    @torch.no_grad()
    def observe(self, parameters):
        """Sketches what the last microbatch has added to the gradients of this rank."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.signs is None:
            draw = torch.Generator().manual_seed(self.seed)  # equal on all ranks
            coins = (torch.randint(2, g.shape, generator=draw, dtype=torch.int8) for g in gradients)
            self.signs = [(2 * c - 1).to(g.device) for c, g in zip(coins, gradients, strict=True)]
        both = zip(gradients, self.signs, strict=True)
        total = sum(_sketch(gradient, signs, self.size) for gradient, signs in both)
        self.rows.append(total - self.before)
        self.before = total
        if len(self.rows) == self.units_per_step:
            rows = torch.stack(self.rows)
            of_all = [rows]
            if self.world_size > 1:
                of_all = [torch.empty_like(rows) for _ in range(self.world_size)]
                dist.all_gather(of_all, rows)
            self.orders = self._observe(self.orders, torch.stack(of_all).cpu().numpy())
            self.rows, self.before = [], 0.0


def _sketch(gradient, signs, size):
    """k sums of entries with random signs: E <s(a), s(b)> = <a, b>."""
    flat = (gradient.float() * signs).flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size).sum(dim=0)
