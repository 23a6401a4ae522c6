"""Records of runs that were never trained, for tests of tables and claims."""

import json

from experiments.results.statistics import Criterion, compare

LABELS = {
    "rr": "D-RR", "cd_grab": "CD-GraB", "unzip": "unzip control", "id_pair": "independent pair",
    "parallel": "parallel", "constant": "constant H", "qsr": "QSR", "none": "no echo",
    "local": "local steps, no echo", "diffusion": "error diffusion",
}  # fmt: skip
LOWEST = Criterion(when="lowest")


def order_records(losses, *, rates=(0.1,), seeds=3, epochs=6, accuracy=0.5):
    """Losses fall from 2 to the order's own; seeds differ much, orders within a seed as given."""
    return [
        {"study": "cd_grab", "arm": order, "speed": None, "learning_rate": rate, "seed": seed,
         "phase": "run", "epoch": epoch, "step": epoch, "seconds": 2.0 * epoch,
         "ended": epoch == epochs,
         "train/loss": (1 + seed) * (2 + (loss * rate / 0.1 - 2) * epoch / epochs)
         * (1 + 1e-3 * ((seed * 7 + epoch + len(order)) % 3)),
         "test/accuracy": accuracy + (1 - loss) / 10}
        for order, loss in losses.items()
        for rate in rates
        for seed in range(seeds)
        for epoch in range(epochs + 1)
    ]  # fmt: skip


def compared(records, criterion=LOWEST):
    arms = {name: LABELS[name] for name in dict.fromkeys(r["arm"] for r in records)}
    return compare(records, arms, criterion)


def finished(folder, rows, command="python -m x"):
    """An output folder as `cd_grab` leaves it."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "command.txt").write_text(f"{command}\n")
    (folder / "settings.json").write_text("{}")
    described = {"criterion": LOWEST._asdict(), "plans": {}}
    described["arms"] = {k: LABELS[k] for k in dict.fromkeys(r["arm"] for r in rows)}
    (folder / "comparison.json").write_text(json.dumps(described))
    versions = {"commit": None, "jax": "0.0.1", "device": "abacus"}
    (folder / "versions.json").write_text(json.dumps(versions))
    return str(folder)


def cells(text):
    """{first cell of a row: {head: cell}} of a Markdown table."""
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines()]
    return {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[2:]}
