"""Times opacus' norms of the gradients of examples beside `ordering.sketched_grads`.

    pip install torch opacus
    python -m benchmarks.opacus_norms --models=lenet,vit

Every way returns the mean gradient of 16 examples. opacus also returns the norms of their
gradients, which are not enough for an order: with ghost clipping, which forms no gradients of
examples in linear layers, and from formed gradients. benchmarks/torch_models.py says how the ways
are compared, and what the columns are.
"""

import copy
from collections.abc import Callable

from benchmarks.torch_models import losses_of, main


def ways_of(module) -> dict[str, Callable]:
    import torch
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

    ghost = GradSampleModuleFastGradientClipping(copy.deepcopy(module), use_ghost_clipping=True)
    formed = GradSampleModule(module)

    def gradient(wrapped, x, y):
        wrapped.zero_grad(set_to_none=True)
        losses_of(wrapped, x, y).mean().backward()
        return {name: p.grad for name, p in wrapped._module.named_parameters()}

    def of_ghost(x, y):
        return gradient(ghost, x, y), ghost.get_norm_sample()

    def of_formed(x, y):
        mean = gradient(formed, x, y)
        squares = [p.grad_sample.flatten(1).square().sum(1) for p in formed.parameters()]
        return mean, torch.stack(squares).sum(0).sqrt()

    return {"opacus, ghost norms": of_ghost, "opacus, gradients of examples": of_formed}


if __name__ == "__main__":
    main("opacus", ways_of, repeats=21)
