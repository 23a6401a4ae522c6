"""What is trained: models as records of pure functions."""

from models.base import Model
from models.lenet import lenet
from models.linear import logistic_regression, optimum, softmax_regression

__all__ = ["Model", "lenet", "logistic_regression", "optimum", "softmax_regression"]
