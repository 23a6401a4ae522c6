"""What is trained: models as records of pure functions."""

from models.base import Model
from models.gpt2 import gpt2
from models.lenet import lenet
from models.linear import logistic_regression, optimum, softmax_regression
from models.mlp import mlp
from models.mobilenet import mobilenet_v2
from models.resnet import small_resnet
from models.vit import vit

__all__ = [
    "Model",
    "gpt2",
    "lenet",
    "logistic_regression",
    "mlp",
    "mobilenet_v2",
    "optimum",
    "small_resnet",
    "softmax_regression",
    "vit",
]
