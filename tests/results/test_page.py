"""The content of report.html, and its escaping."""

import html
import json
import sys
import types

from PIL import Image

from experiments.results import report

EVIL = "<script>alert(1)</script>&"


def test_the_report_escapes_and_embeds_its_content(tmp_path, monkeypatch):
    (tmp_path / "table.md").write_text(f"{EVIL}\n\n| a | b |\n| - | - |\n| {EVIL} | `{EVIL}` |\n")
    (tmp_path / "settings.json").write_text(json.dumps({"x": EVIL}))
    Image.new("RGB", (3, 2)).save(tmp_path / "comparison R2.png")
    main = types.SimpleNamespace(__spec__=types.SimpleNamespace(name="experiments.qsr"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/some/where/qsr.py", "--data_dir=my dir", f"--x={EVIL}"])
    (tmp_path / "table_old.md").write_text("of an earlier call")
    Image.new("RGB", (3, 2)).save(tmp_path / "old.png")
    texts = {f"table{EVIL}.md": (tmp_path / "table.md").read_text()}
    report.write_page(str(tmp_path), EVIL, pictures=["comparison R2.png"], texts=texts)
    text = (tmp_path / "report.html").read_text()
    # Title and heading, the table's four, settings and command.
    assert text.count(html.escape(EVIL)) == 8 and "<script" not in text
    assert "of an earlier call" not in text and "old.png" not in text
    assert html.escape("python -m experiments.qsr '--data_dir=my dir' '--x=") in text
    assert text.count("<td>") == 2 and text.count('src="data:image/png;base64,') == 1
    assert "http" not in text.replace("http-equiv", "")  # nothing is loaded
