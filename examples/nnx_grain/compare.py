"""Both files over five seeds and three rates: a line per rate, means and standard deviations."""

import argparse
import contextlib
import io
import json

import numpy as np
import orders
import plain

RATES, MEASURES = (0.1, 0.2, 0.4), (("train", "loss"), ("valid", "loss"), ("valid", "accuracy"))


def compare(seeds: int, epochs: int) -> None:
    for rate in RATES:
        for module in (plain, orders):
            with contextlib.redirect_stdout(io.StringIO()):
                runs = [module.main(seed, rate, epochs) for seed in range(seeds)]
            row = {"file": module.__name__, "rate": rate, "seeds": seeds, "epochs": epochs}
            for part, name in MEASURES:
                values = [run[part][name] for run in runs]
                row[f"{part} {name}"] = f"{np.mean(values):.4f} +- {np.std(values, ddof=1):.4f}"
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=plain.EPOCHS)
    given = parser.parse_args()
    compare(given.seeds, given.epochs)
