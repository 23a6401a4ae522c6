"""Local steps by PyTorch's own averager and optimizer, over gloo.

`python -m benchmarks.local_torch` is the process of one worker, which `local_steps` starts.
"""

import itertools
from collections.abc import Callable

import numpy as np

from benchmarks import local_problem
from benchmarks.local_problem import MOMENTUM, RATE, WORKERS, H, Job, Worker


def model_of(job: Job):
    """A perceptron with the common start."""
    import torch

    torch.set_num_threads(1)
    layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(job.widths)]
    start = local_problem.start(job.widths)
    for layer, w, b in zip(layers, start[::2], start[1::2], strict=True):
        layer.weight.data, layer.bias.data = torch.tensor(w.T.copy()), torch.tensor(b)
    inner = [part for layer in layers for part in (layer, torch.nn.Tanh())]
    return torch.nn.Sequential(*inner[:-1])


def optimizer_of(model):
    import torch

    # `fused` is not the default on CPUs, and saves a tenth of the step.
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, fused=True)


def differentiate(model, optimizer, given) -> None:
    import torch

    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(given[0]), given[1]).backward()


def worker_of(job: Job, model, optimizer, update: Callable) -> Worker:
    """A worker whose `update(last)` applies the gradients, and syncs after a round's last step."""
    import torch

    other = model_of(job)
    plain = optimizer_of(other)

    def plain_step(given):
        differentiate(other, plain, given)
        plain.step()

    def params():
        arrays = [p.detach().numpy() for p in model.parameters()]
        return [np.ascontiguousarray(x.T) for x in arrays]

    return Worker(
        place=lambda x, y: (torch.from_numpy(x[0].copy()), torch.from_numpy(y[0].copy())),
        plain=plain_step,
        step=lambda given: differentiate(model, optimizer, given),
        rest=update,
        wait=lambda: None,
        params=params,
    )


def averager_of(job: Job):
    """PyTorch's averager, after `H` steps for the first time."""
    import torch.distributed as dist
    from torch.distributed.algorithms.model_averaging import averagers

    address = f"tcp://127.0.0.1:{job.port}"
    dist.init_process_group("gloo", init_method=address, rank=job.rank, world_size=WORKERS)
    return averagers.PeriodicModelAverager(period=H, warmup_steps=H - 1)


def periodic(job: Job) -> Worker:
    model = model_of(job)
    optimizer, averager = optimizer_of(model), averager_of(job)

    def update(last):
        optimizer.step()
        averager.average_parameters(model.parameters())

    return worker_of(job, model, optimizer, update)


def post_local(job: Job) -> Worker:
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = model_of(job)
    optimizer = PostLocalSGDOptimizer(optimizer_of(model), averager_of(job))
    return worker_of(job, model, optimizer, lambda last: optimizer.step())


WAYS = {"torch PeriodicModelAverager": periodic, "torch PostLocalSGDOptimizer": post_local}


if __name__ == "__main__":
    local_problem.work(WAYS)
