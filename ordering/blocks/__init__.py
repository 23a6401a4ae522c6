"""Orders over blocks of consecutive records, for data that are too large to shuffle."""

from ordering.blocks.files import files
from ordering.blocks.mixture import mixture, shares
from ordering.blocks.position import resize
from ordering.blocks.reads import read_blocks
from ordering.blocks.split import split
from ordering.blocks.sums import add, observe, sums
from ordering.blocks.text import tokens
from ordering.blocks.windows import batches_of, windows

__all__ = [
    "add",
    "batches_of",
    "files",
    "mixture",
    "observe",
    "read_blocks",
    "resize",
    "shares",
    "split",
    "sums",
    "tokens",
    "windows",
]
