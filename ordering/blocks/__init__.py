"""Orders over blocks of consecutive records, for data that are too large to shuffle."""

from ordering.blocks.formats import files
from ordering.blocks.position import BlockState, resize
from ordering.blocks.reads import BlockEpochs, read_blocks
from ordering.blocks.sums import add_gradients
from ordering.blocks.text import tokens
from ordering.blocks.units import Blocks, split

__all__ = [
    "BlockEpochs",
    "BlockState",
    "Blocks",
    "add_gradients",
    "files",
    "read_blocks",
    "resize",
    "split",
    "tokens",
]
