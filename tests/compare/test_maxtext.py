"""Configs of MaxText: networks as `tc` writes them, and periods."""

import pytest

from experiments import forecast, maxtext
from syncopate.refusals import UserError
from tests.commands import parsed, rows_of

RATES = {  # of `man tc`, in Gb/s
    "10gbit": 10,
    "28Gbit": 28,
    "500 mbit": 0.5,
    "1tbit": 1000,
    "2000000kbit": 2,
    "1gibit": 2**30 / 1e9,
    "1gbps": 8,
    "250mbps": 2,
    "1000000000": 1,
    "1.5gbit": 1.5,
}


@pytest.mark.parametrize("rate", RATES)
def test_rates_are_those_of_tc(rate):
    assert maxtext.gigabits_of("base.yml", rate) == pytest.approx(RATES[rate], rel=1e-12)


@pytest.mark.parametrize("rate", ["fast", "10 gb", "-1gbit", "0gbit", "1.2.3gbit", "1e400", [1]])
def test_other_rates_are_refused_by_name(rate):
    with pytest.raises(UserError, match="dcn_bandwidth_limit is .* Pass --gigabits"):
        maxtext.gigabits_of("base.yml", rate)


@pytest.mark.parametrize(
    "text,match",
    [
        ("diloco_sync_period: 0", "diloco_sync_period is 0"),
        ("diloco_sync_period: true", "diloco_sync_period is True"),
        ("steps: 3", "diloco_sync_period is None"),
        ("- a list", "diloco_sync_period is None"),
        ("a: [", "cannot be read"),
    ],
)
def test_files_without_a_period_are_refused(tmp_path, text, match):
    path = tmp_path / "base.yml"
    path.write_text(text)
    with pytest.raises(UserError, match=match):
        maxtext.read(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        maxtext.read(str(tmp_path / "none.yml"))


def test_a_forecast_takes_both_unless_its_own_flags_are_given(tmp_path, capsys):
    path = tmp_path / "base.yml"
    path.write_text("dcn_bandwidth_limit: 10gbit\ndiloco_sync_period: 36\n")
    given = ("--task=imagenet_vit_b", "--arms=constant", f"--maxtext={path}")
    for more, period, speed in (((), "36", "10"), (("--h_base=4", "--gigabits=25"), "4", "25")):
        forecast.main(parsed(forecast, *given, *more, f"--output_dir={tmp_path / period}"))
        (row,) = rows_of(capsys.readouterr().out)
        assert row["H"] == period and f"h at {speed} Gb/s" in row
    path.write_text("dcn_bandwidth_limit: ''\ndiloco_sync_period: 36\n")
    forecast.main(parsed(forecast, *given, f"--output_dir={tmp_path / 'none'}"))
    (row,) = rows_of(capsys.readouterr().out)
    assert row["H"] == "36" and "h at 400 Gb/s" in row


def test_efficiency_and_latency_are_in_the_hours():
    given = ("--step_seconds=1", "--arms=parallel", "--gigabits=1", "--task=digits", "--epochs=3")
    _, text, (rates, _) = forecast.forecast_of("digits", parsed(forecast, *given))
    slow = parsed(forecast, *given, "--efficiency=0.5", "--latency=36")
    _, slower, _ = forecast.forecast_of("digits", slow)
    (one,), (two,) = rows_of(text), rows_of(slower)
    hours = [float(row["h at 1 Gb/s"]) for row in (one, two)]
    assert hours[1] - hours[0] == pytest.approx(len(rates) * 36 / 3600, abs=0.011)
