"""Times dattri's random projections of the gradients of examples beside `ordering.sketched_grads`.

    pip install torch dattri
    python -m benchmarks.dattri_projections --models=lenet,vit

dattri's way: gradients of examples by `torch.func`, projected to 1,024 numbers by `random_project`.
On a CPU it draws the whole matrix anew in every call, in blocks of 100 columns. The mean gradient,
which a step needs too, is computed from the gradients of examples. benchmarks/torch_models.py says
how the ways are compared, and what the columns are.
"""

import functools
from collections.abc import Callable

from benchmarks.torch_models import EXAMPLES, SIZE, losses_of, main

KINDS = ("normal", "rademacher")


def ways_of(module) -> dict[str, Callable]:
    from dattri.func.projection import random_project
    from torch.func import functional_call, grad, vmap

    params = {name: p.detach() for name, p in module.named_parameters()}

    def loss(params, x, y):
        run = functools.partial(functional_call, module, params)
        return losses_of(run, x[None], y[None])[0]

    single = vmap(grad(loss), in_dims=(None, 0, 0))
    shapes = {name: p.expand(EXAMPLES, *p.shape) for name, p in params.items()}

    def run(x, y, project):
        grads = single(params, x, y)
        return {name: g.mean(0) for name, g in grads.items()}, project(grads)

    return {
        f"dattri, {kind}": functools.partial(
            run, project=random_project(shapes, EXAMPLES, SIZE, EXAMPLES, proj_type=kind)
        )
        for kind in KINDS
    }


if __name__ == "__main__":
    main("dattri", ways_of, repeats=7)
