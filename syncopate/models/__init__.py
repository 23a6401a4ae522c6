"""What is trained: models as records of pure functions."""

from syncopate.models.base import Model
from syncopate.models.gpt2 import gpt2
from syncopate.models.lenet import lenet
from syncopate.models.linear import logistic_regression, optimum, softmax_regression
from syncopate.models.lstm import lstm
from syncopate.models.mlp import forecaster, mlp
from syncopate.models.mobilenet import mobilenet_v2
from syncopate.models.mobilenet_v3 import mobilenet_v3
from syncopate.models.resnet import resnet
from syncopate.models.small_resnet import small_resnet
from syncopate.models.text_head import text_head
from syncopate.models.vit import vit

__all__ = [
    "Model",
    "forecaster",
    "gpt2",
    "lenet",
    "logistic_regression",
    "lstm",
    "mlp",
    "mobilenet_v2",
    "mobilenet_v3",
    "optimum",
    "resnet",
    "small_resnet",
    "softmax_regression",
    "text_head",
    "vit",
]
