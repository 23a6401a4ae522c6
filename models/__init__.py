"""The models that the experiments train, as records of pure functions."""

from models.base import Model
from models.convolutions import lenet
from models.gpt2 import gpt2
from models.linear import (
    forecaster,
    logistic_regression,
    mlp,
    optimum,
    softmax_regression,
)
from models.lstm import lstm
from models.mobilenet import mobilenet_v2
from models.resnet import resnet
from models.vit import vit

__all__ = [
    "Model",
    "forecaster",
    "gpt2",
    "lenet",
    "logistic_regression",
    "lstm",
    "mlp",
    "mobilenet_v2",
    "optimum",
    "resnet",
    "softmax_regression",
    "vit",
]
