"""Faults of other libraries, as docs/contributing/upstream.md tells them, until they are mended."""

import re

import pytest

from tests.installed import ROOT

PAGE = (ROOT / "docs" / "contributing" / "upstream.md").read_text()
REPORTS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
PROGRAM = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.S)
MENDED = {
    "Grain": "nothing of ours rests on it",
    "JAX": "ordering/gradients/convolution.py may go once the oldest JAX of setup.cfg is mended",
}


@pytest.mark.parametrize("name", MENDED)
def test_the_fault_is_still_there(name, capsys):
    """The second program takes two of the tests' eight devices."""
    pytest.importorskip(name.lower(), reason=f"{name} is not installed")
    program, shown = PROGRAM.search(REPORTS[name]).groups()
    exec(program.replace('jax.config.update("jax_num_cpu_devices", 2)\n', ""), {})
    printed = capsys.readouterr().out
    assert printed == shown, f"if {name} is mended, delete its report and this; {MENDED[name]}"


def test_every_report_has_its_test():
    assert {*REPORTS} == {*MENDED}
