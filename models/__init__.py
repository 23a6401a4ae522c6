"""What is trained: models as records of pure functions."""

from models.base import Model
from models.gpt2 import gpt2
from models.lenet import lenet
from models.linear import logistic_regression, optimum, softmax_regression
from models.lstm import lstm
from models.mlp import forecaster, mlp
from models.mobilenet import mobilenet_v2
from models.mobilenet_v3 import mobilenet_v3
from models.resnet import resnet
from models.small_resnet import small_resnet
from models.text_head import text_head
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
    "mobilenet_v3",
    "optimum",
    "resnet",
    "small_resnet",
    "softmax_regression",
    "text_head",
    "vit",
]
