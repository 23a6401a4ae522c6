"""Reads a network and a period of local steps from a config of MaxText."""

import re
from typing import NamedTuple

from experiments.data.base import SPEED
from syncopate.refusals import UserError

# Rates as `tc` writes them, in bits per second; a number alone is in bits.
UNITS = {
    prefix + unit: bits * power
    for unit, bits in (("bit", 1), ("bps", 8))
    for prefix, power in (("", 1), ("k", 1e3), ("m", 1e6), ("g", 1e9), ("t", 1e12))
} | {f"{prefix}ibit": 2.0**power for prefix, power in zip("kmgt", (10, 20, 30, 40), strict=True)}
HINT = "Pass --gigabits and --h_base in place of --maxtext."


class Config(NamedTuple):
    """What a config of MaxText says about local steps."""

    gigabits: float | None  # `dcn_bandwidth_limit`, of one VM; None if it is empty
    period: int  # `diloco_sync_period`, H


def read(path: str) -> Config:
    """The limit of the network and the period of a YAML file such as MaxText's base.yml.

    Raises:
      ValueError: naming the file, the field and the value, if one is missing or no such number.
    """
    import yaml  # a dependency of orbax

    try:
        with open(path, encoding="utf-8") as file:
            fields = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--maxtext={path!r} cannot be read: {error}. {HINT}") from None
    fields = fields if isinstance(fields, dict) else {}
    period = fields.get("diloco_sync_period")
    if not isinstance(period, int) or isinstance(period, bool) or not 0 < period < 2**31:
        raise UserError(
            f"diloco_sync_period is {period!r} in {path}: a whole number >= 1 is wanted. {HINT}"
        )
    return Config(gigabits_of(path, fields.get("dcn_bandwidth_limit")), period)


def gigabits_of(path: str, limit) -> float | None:
    """A rate as "10gbit" in Gb/s; None if it is empty."""
    if limit is None or limit == "":
        return None
    parts = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(limit).lower())
    try:
        bits = float(parts[1]) * UNITS[parts[2] or "bit"] if parts else float("nan")
    except (KeyError, ValueError):
        bits = float("nan")
    if bits / 1e9 not in SPEED:
        raise UserError(
            f"dcn_bandwidth_limit is {limit!r} in {path}: a rate such as 10gbit is wanted, "
            f"{SPEED.syntactic_help} in gbit. {HINT}"
        )
    return bits / 1e9
