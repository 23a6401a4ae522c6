"""The page of a report, and what it does to a folder in which something lies already."""

import html
import json
import os
import re
import sys
import types

import pytest
from PIL import Image

from experiments import forecast, herding, lock, slow_sde
from experiments.report import page, records
from experiments.report.tables import markdown
from tests.commands import parsed

FEW = ["--num_vectors=40", "--rounds=2", "--workers=2", "--arms=rr"]
REPORTS = {
    "herding": (herding.main, herding, FEW),
    "slow_sde": (slow_sde.main, slow_sde, []),
    "forecast": (forecast.main, forecast, ["--arms=parallel"]),
}


def content(folder):
    """{path: bytes} of all files but the lock."""
    results = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {path: text for path, text in results.items() if path.name != lock.NAME}


@pytest.mark.parametrize("name,linked", [*zip(REPORTS, (True, False, False), strict=True)])
def test_a_report_refuses_the_folder_of_another_command(name, linked, finished, tmp_path):
    """Before it has computed anything, and whether the folder is given by its name or by a link."""
    main, module, arguments = REPORTS[name]
    before = content(finished)
    assert any("checkpoints" in str(path) for path in before)
    folder = tmp_path / "link" if linked else finished
    if linked:
        folder.symlink_to(finished)
    with pytest.raises(ValueError, match=r"other settings \(.*command.* or pass --overwrite"):
        main(parsed(module, *arguments, f"--output_dir={folder}"))
    assert content(finished) == before


def test_a_report_refuses_what_other_flags_have_made_and_repeats_what_its_own_have(tmp_path):
    given = [*FEW, f"--output_dir={tmp_path}"]
    herding.main(parsed(herding, *given))
    before = content(tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(rounds: 2 there, 3 here\)"):
        herding.main(parsed(herding, *given, "--rounds=3"))
    assert content(tmp_path) == before
    (tmp_path / "notes.md").write_text("mine")
    herding.main(parsed(herding, *given))
    names = {path.name for path in before}
    assert {path.name for path in content(tmp_path)} == names | {"notes.md"}
    assert (tmp_path / "metrics.jsonl").read_bytes() == before[tmp_path / "metrics.jsonl"]
    herding.main(parsed(herding, *given, "--rounds=3", "--overwrite"))
    assert json.loads((tmp_path / "settings.json").read_text())["rounds"] == 3


def test_a_report_refuses_records_without_settings_and_a_folder_in_use(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="holds metrics.jsonl and no settings.json"):
        herding.main(parsed(herding, *FEW, f"--output_dir={tmp_path}"))
    busy = tmp_path / "busy"
    with lock.held(str(busy)), pytest.raises(SystemExit) as code:
        herding.main(parsed(herding, *FEW, f"--output_dir={busy}"))
    assert code.value.code == lock.BUSY and "is taken by another run" in capsys.readouterr().err
    assert not (busy / "metrics.jsonl").exists()


def test_overwriting_forgets_the_checkpoints_of_the_folder_and_those_of_no_other(tmp_path):
    kept = tmp_path / "elsewhere" / "7"
    kept.mkdir(parents=True)
    (kept / "state").write_text("mine")
    for folder, linked in ((tmp_path / "own", False), (tmp_path / "linked", True)):
        records.open_folder(str(folder), {"seed": 0})
        if linked:
            (folder / "checkpoints").symlink_to(kept.parent)
        else:
            (folder / "checkpoints" / "7").mkdir(parents=True)
        records.open_folder(str(folder), {"seed": 1}, overwrite=True)
        assert not os.path.lexists(folder / "checkpoints")
    assert (kept / "state").read_text() == "mine"


EVIL = "<script>alert(1)</script>&"


def typed(monkeypatch, *flags):
    main = types.SimpleNamespace(__spec__=types.SimpleNamespace(name="experiments.qsr"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "experiments.qsr"])
    monkeypatch.setattr(sys, "argv", ["/some/where/qsr.py", *flags])


def test_a_folder_and_its_page_keep_every_command_until_one_overwrites(tmp_path, monkeypatch):
    lines, starts = [], [["--seeds=2"], ["--seeds=5"], ["--seeds=5"], ["--seeds=3", "--overwrite"]]
    for flags in starts:
        typed(monkeypatch, *flags)
        records.open_folder(str(tmp_path), {}, overwrite="--overwrite" in flags)
        page.write_all(str(tmp_path), "title", {})
        lines.append((tmp_path / "command.txt").read_text())
        assert f"<pre>{lines[-1]}</pre>" in (tmp_path / "report.html").read_text()
    start = "python -m experiments.qsr --seeds="
    both = f"{start}2\n{start}5\n"
    assert lines == [f"{start}2\n", both, both, f"{start}3 --overwrite\n"]


def test_the_report_escapes_and_embeds_its_content(tmp_path, monkeypatch):
    typed(monkeypatch, "--data_dir=my dir", f"--x={EVIL}")
    records.open_folder(str(tmp_path), {"x": EVIL})
    (tmp_path / "table_old.md").write_text("of an earlier call")
    Image.new("RGB", (3, 2)).save(tmp_path / "old.png")
    parts = {f"table{EVIL.replace('/', '')}.md": f"{EVIL}\n\n| a |\n| - |\n| {EVIL} |\n"}
    parts |= {"comparison R2.png": lambda path, title: Image.new("RGB", (3, 2)).save(path)}
    page.write_all(str(tmp_path), EVIL, parts)
    text = (tmp_path / "report.html").read_text()
    # Title and heading, text and cell, settings and command.
    assert text.count(html.escape(EVIL)) == 6 and "<script" not in text
    assert "of an earlier call" not in text and "old.png" not in text
    assert html.escape("python -m experiments.qsr '--data_dir=my dir' '--x=") in text
    assert text.count("<td>") == 1 and text.count('src="data:image/png;base64,') == 1
    assert "http" not in text.replace("http-equiv", "")  # nothing is loaded


LABELS = [
    "<img src=x onerror=alert(1)>",
    "![x](http://evil.example/x.png)",
    "[x](http://evil.example)",
    "<http://evil.example>",
    "![x](data:image/png;base64,AAAA)",
    "`code`",
    "a & b",
    "&lt;b&gt;",
    "a | b",
    "two\nlines",
    "",
]


def test_markup_in_labels_stands_as_it_is(tmp_path):
    """Nothing in a cell, a text or a name becomes a picture, a link or a tag."""
    rows = [{"arm": label, label: 1} for label in LABELS[:1]] + [{"arm": x, "": 1} for x in LABELS]
    texts = {
        f"table_{label.replace('/', '')}.md": f"{label}\n\n{markdown([row])}"
        for label, row in zip([*LABELS, "last"], rows, strict=True)
    }
    page.write_all(str(tmp_path), LABELS[0], texts)
    whole = (tmp_path / "report.html").read_text()
    body = whole.split("<body>")[1]
    results = set(re.findall(r"<(\w+)", body))
    assert results == {"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert all(body.count(html.escape(label, quote=False)) >= 2 for label in LABELS[1:5])
    assert body.count("<td>a | b</td>") == body.count("<td>two lines</td>") == 1
