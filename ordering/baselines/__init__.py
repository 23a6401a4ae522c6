"""Baselines of the papers: controls for an order, sign rules, and the herding bound."""

from ordering.baselines.herding import greedy_herding, herding_bound
from ordering.baselines.rules import kernel_halving, self_balancing_walk
from ordering.baselines.shuffles import block_reshuffling, shuffle_once, unzip
from ordering.signs import SignRule

__all__ = [
    "SignRule",
    "block_reshuffling",
    "greedy_herding",
    "herding_bound",
    "kernel_halving",
    "self_balancing_walk",
    "shuffle_once",
    "unzip",
]
