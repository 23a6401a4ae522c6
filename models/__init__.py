"""What is trained: models as records of pure functions."""

from models.base import Model
from models.lenet import lenet
from models.linear import logistic_regression, optimum, softmax_regression
from models.mlp import mlp
from models.resnet import small_resnet
from models.vit import vit

__all__ = [
    "Model",
    "lenet",
    "logistic_regression",
    "mlp",
    "optimum",
    "small_resnet",
    "softmax_regression",
    "vit",
]
