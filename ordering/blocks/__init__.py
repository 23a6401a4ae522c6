"""Orders over blocks of consecutive records, for data that are too large to shuffle."""

from ordering.blocks.files import files, tokens
from ordering.blocks.position import resize
from ordering.blocks.reads import mixture, read_blocks, shares
from ordering.blocks.split import split
from ordering.blocks.sums import add, observe, sums
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
