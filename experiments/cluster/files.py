"""Atomic writes of files, and differences between the settings in two of them."""

import json
import os
from collections.abc import Mapping

from experiments.cluster import processes


def write_whole(path: str, text: str) -> None:
    """Writes a file atomically: under a temporary name, which is then renamed."""
    if not processes.is_first():
        return
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def write_json(path: str, value) -> None:
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: str, default=None):
    """The content of a JSON file; `default` if it does not exist."""
    if not os.path.exists(path):
        return default
    with open(path, "rb") as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise ValueError(
                f"{path!r} is broken ({error}): restore it from a copy, choose another "
                "--output_dir, or pass --overwrite to begin again."
            ) from error


def differences(before: Mapping, now: Mapping) -> list[str]:
    """One line per setting that differs between two runs."""
    lines, none = [], object()
    for name in sorted(before | now):
        one, other = before.get(name, none), json.loads(json.dumps(now.get(name)))
        if one is not none and name in now and one != other:
            lines.append(f"{name}: {one!r} there, {other!r} here")
        elif one is none or name not in now:
            lines.append(f"{name}: only {'here' if one is none else 'there'}")
    return lines
