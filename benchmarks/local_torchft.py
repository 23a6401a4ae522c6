"""Local steps by torchft's LocalSGD and DiLoCo over gloo; each worker is one replica group.

`python -m benchmarks.local_torchft` is the process of one worker, which `local_steps` starts.
"""

import datetime

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

from benchmarks import local_problem
from benchmarks.local_problem import OUTER_MOMENTUM, OUTER_RATE, WORKERS, H, Job, Worker
from benchmarks.local_torch import model_of, optimizer_of, worker_of

TIMEOUT = datetime.timedelta(seconds=60)


def manager_of(job: Job, model) -> tuple:
    """A manager, and what must stay alive beside it: the first worker has the lighthouse."""
    address, beside = f"127.0.0.1:{job.port}", []
    if job.rank == 0:
        beside.append(LighthouseServer(bind=address, min_replicas=WORKERS))
    beside.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=WORKERS,
        use_async_quorum=False,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        init_sync=False,
        replica_id=f"worker_{job.rank}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=beside[-1].port,
        lighthouse_addr=f"http://{address}",
        hostname="127.0.0.1",
        timeout=TIMEOUT,
    )
    return manager, beside


def local_sgd(job: Job) -> Worker:
    model = model_of(job)
    optimizer, (manager, beside) = optimizer_of(model), manager_of(job, model)
    entered = LocalSGD(manager, model, optimizer, sync_every=H).__enter__()
    return _worker(job, model, optimizer, (manager, beside, entered))


def diloco(job: Job) -> Worker:
    model = model_of(job)
    optimizer, (manager, beside) = optimizer_of(model), manager_of(job, model)
    outer = torch.optim.SGD(
        model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True
    )
    entered = DiLoCo(manager, [model], optimizer, outer, sync_every=H).__enter__()
    return _worker(job, model, optimizer, (manager, beside, entered))


def _worker(job, model, optimizer, alive):
    def update(last, alive=alive):
        optimizer.step()  # its hooks sync

    return worker_of(job, model, optimizer, update)


WAYS = {"torchft LocalSGD": local_sgd, "torchft DiLoCo": diloco}


if __name__ == "__main__":
    local_problem.work(WAYS)
