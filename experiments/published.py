"""The bytes of published recipes of local steps, beside what their papers say of them.

`python -m experiments.forecast --task=presets` prints the table. Bytes are `sync_bytes`: exact for
this library's collectives, which need not be those of a paper.
"""

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from experiments.results.tables import markdown
from local_opt import WIRES, Wire, sync_bytes

ARXIV = "https://arxiv.org/abs/"


class Published(NamedTuple):
    """A recipe as published, and what its source says of its bytes."""

    label: str
    params: int
    workers: int
    periods: Mapping[str, int]  # {part: H}, each part of the size of the parameters
    source: str
    steps: int | None = None  # of the run; None where no source was found
    wire: Wire | None = None
    claim: str = "-"  # how many times less than data-parallel training, as "500" or "> 146"
    baseline: int = 4  # bytes of a number in the source's data-parallel training
    counts_period: bool = True  # or one sync alone
    why: str = ""


MULOCO = Published(
    "MuLoCo", 3_100_000_000, 16, {"params": 30}, "https://github.com/facebookresearch/MuLoCo",
    14_640, why="the settings of 3.1B in the authors' jobs",
)  # fmt: skip
ROWS = (
    Published(
        "DiLoCo", 150_000_000, 8, {"params": 500}, ARXIV + "2311.08105", 64_000, claim="500",
        why="128 rounds that follow 24,000 data-parallel steps, which are not counted",
    ),
    Published(
        "Streaming DiLoCo, 4 bits", 1_000_000_000, 2, {"params": 100}, ARXIV + "2501.18512",
        wire=WIRES["int4"], claim="400", baseline=2,
        why="table 1 has 441 TB and 1.10 TB: numbers of 16 bits, and of 4 bits every 100 steps "
        "without scales (second-hand). Here 128 numbers share a scale of two bytes, 3 % more",
    ),
    MULOCO,
    MULOCO._replace(
        label="MuLoCo, 4 bits", wire=WIRES["int4"], source=ARXIV + "2505.23725",
        why="lossless, as the authors say; a ratio of theirs was not found. The paper's first "
        "version has 8 for 2 bits; no wire here sends every number in 2",
    ),
    Published(
        "SparseLoCo", 512_000_000, 8, {"params": 30}, ARXIV + "2508.15706",
        wire=WIRES["top_k_2bit"], claim="> 97", counts_period=False,
        why="97 is the authors' own summary (https://news.ycombinator.com/item?id=45095763), "
        "second-hand; one worker's message against a copy in float32",
    ),
    Published(
        "Covenant-72B", 72_700_000_000, 20, {"params": 30}, ARXIV + "2603.08163", 140_000,
        WIRES["top_k_2bit"], claim="> 146", counts_period=False,
        why="one worker's message against a copy in float32: 112 bytes for 16,384 are 146.29 times "
        "less, and the means of 64 blocks cost 0.16. The steps are those of the cosine "
        "schedule in https://github.com/one-covenant/templar; size and workers are second-hand",
    ),
    Published(
        "DES-LOC", 1_700_000_000, 4, {"params": 256, "mu": 768, "nu": 1536}, ARXIV + "2505.22549",
        claim="170",
        why="the moments meet at 3 and 6 times the period of the parameters, as published; that "
        "this is 256 is what 170 implies, and 4 workers are an assumption without effect on it",
    ),
    Published(
        "SNOO", 1_000_000_000, 1, {"params": 28}, ARXIV + "2510.15830",
        why="one worker of any size; 28 is the period of the authors' record in modded-nanogpt",
    ),
    Published(
        "GPA", 1_000_000_000, 1, {}, ARXIV + "2512.17131", why="one worker of any size, no rounds",
    ),
)  # fmt: skip


class Bytes(NamedTuple):
    """What one worker sends."""

    sync: float  # of one part
    run: float | None
    parallel: float | None  # in the run, with float32 gradients every step
    times: float | None  # less, with this library's collectives
    as_claimed: float | None  # less, as the source counts


def syncs_of(row: Published) -> int | None:
    """Syncs of all parts in the run."""
    return row.steps and sum(row.steps // h for h in row.periods.values())


def bytes_of(row: Published) -> Bytes:
    sync, step = (
        sync_bytes(row.params, num_workers=row.workers, wire=wire) for wire in (row.wire, None)
    )
    per_step = sum(1 / h for h in row.periods.values())
    counted = None
    if row.claim != "-":
        copy = sync_bytes(row.params, num_workers=2, wire=row.wire)  # each of two sends one copy
        counted = row.baseline * row.params / copy / (per_step if row.counts_period else 1)
    return Bytes(
        sync,
        row.steps and syncs_of(row) * sync,
        row.steps and row.steps * step,
        step / (per_step * sync) if sync else None,
        counted,
    )


def agrees(row: Published) -> bool | None:
    """Whether what is counted as in the source is what the source says; None without a claim."""
    counted = bytes_of(row).as_claimed
    if counted is None:
        return None
    least = float(row.claim.removeprefix("> "))
    return least <= counted + 1e-9 and (row.claim.startswith(">") or counted < least + 1)


def row_of(row: Published) -> dict:
    found = bytes_of(row)
    sync, run, parallel, times, counted = found
    shown = lambda value, form: "-" if value is None else form(value)  # noqa: E731
    in_terabytes = lambda value: f"{value / 1e12:,.2f}"  # noqa: E731
    return {
        "method": row.label,
        "parameters": f"{row.params / 1e9:g}B" if row.workers > 1 else "any",
        "workers": row.workers,
        "H": ", ".join(map(str, row.periods.values())) or "-",
        "steps": shown(row.steps, "{:,}".format),
        "syncs": shown(syncs_of(row), "{:,}".format),
        "bytes in a sync": f"{sync:,.0f}",
        "TB in the run": shown(run, in_terabytes),
        "TB, data-parallel": shown(parallel, in_terabytes),
        "times less": shown(times, "{:.1f}".format),
        "paper": row.claim,
        "as it counts": shown(counted, "{:.2f}".format),
        "agrees": {None: "-", True: "yes", False: "no"}[agrees(row)],
    }


def text() -> str:
    """The table and, for every row, its source and why it agrees or not."""
    lines = [f"- {row.label} ({row.source}): {row.why}." for row in ROWS]
    notes = "\n".join(textwrap.fill(line, 118, subsequent_indent="  ") for line in lines)
    return f"{markdown([row_of(row) for row in ROWS])}\n\n{notes}\n"
