"""nanodo's training loop and evaluation, plain or changed by a diff of this folder.

    python examples/nanodo/run.py --nanodo=DIR --data_dir=DIR --learning_rates=1e-2,3e-2 --seeds=3

An arm is `plain` or the name of a diff, which is applied to a copy of nanodo's train.py.

This script replaces four things. Text comes from two files, and sentencepiece makes a small
vocabulary of the first. The seed of the shuffle is fixed. A mask of float32 becomes bool, which JAX
needs by now. There is no profiler of the first steps, which takes longer than they do.
Sizes are set in nanodo's config. Packing, shuffling, model, optimizer, schedule, loop and
evaluation are nanodo's.
"""

import contextlib
import functools
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import measure  # noqa: E402

from syncopate import local_opt  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_string("nanodo", None, "checkout of github.com/google-deepmind/nanodo")
flags.DEFINE_string("data_dir", None, "where the two text files are")
flags.DEFINE_list("text", ["train.txt", "valid.txt"], "to train on and to evaluate on")
flags.DEFINE_string("workdir", "results/nanodo", "for nanodo's logs and the vocabulary")
flags.DEFINE_list("arm", ["plain", "constant", "qsr"], "plain, or the names of diffs")
flags.DEFINE_integer("steps", 300, "of every run", lower_bound=2)
flags.DEFINE_integer("vocabulary", 512, "pieces of the tokenizer", lower_bound=300)

ADDRESS = "https://github.com/google-deepmind/nanodo"


def folder_of(path: str | None, names, *, flag: str, how: str) -> pathlib.Path:
    """The folder that a flag gives; raises ValueError unless it holds these files."""
    folder = pathlib.Path(path or "").expanduser().resolve()
    absent = [name for name in names if not path or not (folder / name).is_file()]
    if absent:
        raise ValueError(f"{flag} is {path!r}, which holds no {' and no '.join(absent)}: {how}.")
    return folder


def sized(c, *, learning_rate, steps, seed, vocabulary, workdir):
    """nanodo's default config, a few thousand times smaller."""
    c.seed, c.batch_size, c.vocab_path, c.workdir = seed, 32, str(vocabulary), str(workdir)
    c.model.update(D=64, H=4, L=64, N=2, F=256, dtype="float32", fsdp_enabled=False)
    c.opt.update(num_train_steps=steps, warmup_steps=steps // 10, peak_learning_rate=learning_rate)
    c.opt.update(init_learning_rate=learning_rate / 10, final_learning_rate=learning_rate / 10)
    c.update(checkpoint=False, eval_every_steps=steps, eval_steps=20, eval_max_target_length=64)
    c.update(write_train_metrics_every_steps=steps, log_internal_metrics=False)
    c.update(pygrain_worker_count=0, write_perf_metrics_every_steps=steps)
    return c


def made_vocabulary(text: pathlib.Path, size: int, folder: pathlib.Path) -> pathlib.Path:
    """A tokenizer of `size` pieces, trained on the text when first asked for."""
    import sentencepiece

    path = folder / f"{text.stem}_{size}.model"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=str(folder / "unfinished"),
            vocab_size=size,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            minloglevel=1,
            num_threads=1,
        )
        (folder / "unfinished.model").rename(path)
    return path


def records(path: pathlib.Path) -> list[dict]:
    """What tensorflow-datasets gives of a text: one record per line that is not empty."""
    return [{"text": line.strip()} for line in path.read_text().splitlines() if line.strip()]


def trainer(checkout: pathlib.Path, arm: str):
    """nanodo's module `train`, changed by the arm's diff."""
    diffs = {path.stem: path for path in sorted(pathlib.Path(__file__).parent.glob("*.diff"))}
    if arm not in ("plain", *diffs):
        raise ValueError(f"--arm has {arm!r}: pass some of {','.join(['plain', *diffs])}.")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "nanodo" / "train.py"
        path.parent.mkdir()
        path.write_text((checkout / "nanodo" / "train.py").read_text())
        if arm != "plain":
            apply = ["git", "apply", "--unidiff-zero", str(diffs[arm])]
            subprocess.run(apply, cwd=folder, check=True)
        spec = importlib.util.spec_from_file_location(f"nanodo_train_{arm}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def evaluated(texts, c, train) -> dict:
    """nanodo's `train_and_evaluate`: its last evaluation, and the syncs of the run."""
    from nanodo import data, evaluate, metrics

    losses, rounds = [], [c.opt.num_train_steps]

    class Heard(evaluate.Evaluator):
        def eval(self, params):
            losses.append(super().eval(params))
            return losses[-1]

    def planned(inner, plan, **options):
        rounds.append(plan.rounds)
        return of_plan(inner, plan, **options)

    def from_array(x, mask):
        return of_array(x, mask=mask.astype(bool))

    of_array, of_plan = metrics.Average.from_array, local_opt.local_steps
    sources = dict(zip(("train", c.eval_split), texts, strict=True))
    shims = [
        mock.patch.object(data.tfds, "data_source", lambda name, split: sources[split]),
        mock.patch.object(
            data, "py_batched_tfds", functools.partial(data.py_batched_tfds, seed=c.seed)
        ),
        mock.patch.object(metrics.Average, "from_array", from_array),
        mock.patch.object(train.periodic_actions, "Profile", lambda **_: lambda step: None),
        mock.patch.object(evaluate, "Evaluator", Heard),
        mock.patch.object(local_opt, "local_steps", planned),
    ]
    with contextlib.ExitStack() as stack:
        for shim in shims:
            stack.enter_context(shim)
        train.train_and_evaluate(c)
    return {"valid": float(losses[-1]["eval_loss"]), "syncs": rounds[-1]}


def main(_) -> None:
    how = f"`git clone {ADDRESS} DIR` and pass --nanodo=DIR"
    nanodo = folder_of(FLAGS.nanodo, ["nanodo/train.py"], flag="--nanodo", how=how)
    sys.path.insert(0, str(nanodo))
    how = "pass the folder that holds it"
    folder = folder_of(FLAGS.data_dir, FLAGS.text, flag="--data_dir", how=how)
    paths, folder = [folder / name for name in FLAGS.text], pathlib.Path(FLAGS.workdir)
    texts = [records(path) for path in paths]
    vocabulary = made_vocabulary(paths[0], FLAGS.vocabulary, folder)
    from nanodo.configs import default

    def run(arm, *, learning_rate, seed):
        chosen = dict(learning_rate=learning_rate, steps=FLAGS.steps, seed=seed)
        workdir = folder / arm / f"{learning_rate:g}" / str(seed)
        c = sized(default.get_config(), vocabulary=vocabulary, workdir=workdir, **chosen)
        return evaluated(texts, c, trainer(nanodo, arm))

    chosen = measure.report({arm: functools.partial(run, arm) for arm in FLAGS.arm})
    first, *others = chosen
    for arm in others:  # seed by seed: the same start and the same batches
        pairs = zip(chosen[first][1], chosen[arm][1], strict=True)
        more, spread = measure.interval(b["valid"] - a["valid"] for a, b in pairs)
        print(f"{arm} - {first}: {more:+.4f} ± {spread:.4f}")


if __name__ == "__main__":
    app.run(main)
