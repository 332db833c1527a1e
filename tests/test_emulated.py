"""The emulated device: its time by a clock of our own, its profiles, its model of the work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gockpt.devices import (
    EmulatedDevice,
    ModelledWork,
    accounting,
    emulated,
    link,
    load_profile,
    model_work,
    open_device,
    profile_names,
)
from gockpt.devices.link import LinkClock
from gockpt.errors import DeviceError


class FakeTime:
    """Stands in for the clock and for sleeping; waking up takes ``wake`` seconds too long."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wake = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep_until(self, when: float) -> None:
        if when > self.now:
            self.slept.append(when)
            self.now = when + self.wake

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    for module in (accounting, emulated, link):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=fake.monotonic))
    for module in (emulated, link):
        monkeypatch.setattr(module, "sleep_until", fake.sleep_until)
    return fake


WORK = ModelledWork(forward_s=1.0, backward_s=2.0, update_s=0.5, shrink=4, resident_bytes=10**9)


@pytest.fixture
def modelled(fake: FakeTime) -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(load_profile("a100-pcie4"), WORK)
    yield device
    device.close()


def test_a_phase_takes_its_modelled_time(fake: FakeTime, modelled: EmulatedDevice) -> None:
    for name in ("forward", "backward", "update"):
        with modelled.phase(name, 1):
            fake.pass_(0.1)
    assert fake.now == pytest.approx(103.5)
    assert modelled.overruns == 0


def test_a_hold_is_never_absorbed_by_stretching(fake: FakeTime, modelled: EmulatedDevice) -> None:
    with modelled.phase("forward", 1):
        fake.pass_(0.2)
        with modelled.hold("capture", 1):
            fake.pass_(0.3)
    assert fake.now == pytest.approx(101.3)
    assert modelled.blocked_seconds() == pytest.approx(0.3)


def test_a_hold_before_the_phase_does_not_move_its_end(
    fake: FakeTime, modelled: EmulatedDevice
) -> None:
    with modelled.hold("capture", 1):
        fake.pass_(0.3)
    with modelled.phase("forward", 1):
        pass
    assert fake.now == pytest.approx(101.3)


class Late:
    """Something to wait for that takes fake time."""

    seconds = None

    def __init__(self, fake: FakeTime, takes: float) -> None:
        self._fake, self._takes = fake, takes

    def done(self) -> bool:
        return False

    def wait(self, timeout: float) -> bool:
        self._fake.pass_(self._takes)
        return True

    def withdraw(self) -> int:
        return 0


def test_a_gate_inside_a_hold_counts_once(fake: FakeTime, modelled: EmulatedDevice) -> None:
    with modelled.phase("update", 6), modelled.hold("pre-hook", 6):
        fake.pass_(0.1)
        modelled.gate(Late(fake, 0.4), name="state", step=6)
        with modelled.hold("inner", 6):
            fake.pass_(0.2)
    assert modelled.blocked_seconds() == pytest.approx(0.7)
    assert fake.now == pytest.approx(101.2)
    stalls = [span for span in modelled.recorder.drain() if span.lane == "stall"]
    assert sum(span.end - span.start for span in stalls) == pytest.approx(0.7)
    assert {span.name for span in stalls} == {"pre-hook", "state", "inner"}
    assert all(before.end <= after.start for before, after in itertools.pairwise(stalls))


def test_overruns_are_counted_and_not_hidden(fake: FakeTime, modelled: EmulatedDevice) -> None:
    for takes in (1.25, 1.5, 0.5):
        with modelled.phase("forward", 1):
            fake.pass_(takes)
    assert modelled.overruns == 2
    assert modelled.overrun_s == pytest.approx(0.75)
    assert modelled.worst_overrun_s == pytest.approx(0.5)
    assert fake.now == pytest.approx(100 + 1.25 + 1.5 + 1.0)


def test_late_wake_ups_do_not_add_up(fake: FakeTime, modelled: EmulatedDevice) -> None:
    fake.wake = 0.001
    for step in range(50):
        with modelled.phase("forward", step):
            pass
    assert fake.now == pytest.approx(150 + fake.wake)
    fake.wake = 0.5  # This is no wake-up any more: it stays visible.
    for step in range(2):
        with modelled.phase("forward", step):
            pass
    assert fake.now > 152.9


def test_a_phase_that_raises_leaves_the_device_usable(modelled: EmulatedDevice) -> None:
    with pytest.raises(ValueError, match="loss"), modelled.phase("forward", 1):
        raise ValueError("loss is nan")
    with modelled.phase("forward", 2):
        pass


def test_phases_are_known_and_not_nested(modelled: EmulatedDevice) -> None:
    with pytest.raises(DeviceError, match="forward, backward, update"), modelled.phase("fwd", 1):
        pass
    with (
        pytest.raises(DeviceError, match="inside 'forward'"),
        modelled.phase("forward", 1),
        modelled.phase("backward", 1),
    ):
        pass


def test_the_link_slows_down_while_the_device_computes(modelled: EmulatedDevice) -> None:
    alone = modelled.profile.link_alone / WORK.shrink
    assert modelled.rate_now() == alone
    with modelled.phase("forward", 1):
        assert modelled.rate_now() == pytest.approx(0.83 * alone)
        with modelled.hold("capture", 1):
            assert modelled.rate_now() == alone
        assert modelled.rate_now() == pytest.approx(0.83 * alone)
    assert modelled.rate_now() == alone
    assert modelled.link_rate(computing=False) == alone
    assert modelled.link_rate() == pytest.approx(0.83 * alone)


def test_headroom_is_what_the_modelled_training_leaves(modelled: EmulatedDevice) -> None:
    assert modelled.headroom() == (80 * 10**9 - 10**9) // 4


def clock_of(rate: float) -> LinkClock:
    return LinkClock(rate=lambda: rate, alone=1e6, device_rate=2e6)


def test_the_link_gets_to_each_slice_in_its_time(fake: FakeTime) -> None:
    clock = clock_of(1e6)
    assert clock.slice_bytes == 960  # A millisecond, in whole cache lines.
    clock.begin(100.0)
    begun = []
    for _ in range(5):
        clock.turn(960, 1.0)
        begun.append(fake.now)
    clock.finish()
    assert begun == pytest.approx([100 + 0.00096 * turn for turn in range(5)])
    assert fake.now == pytest.approx(100.0048)


def test_a_late_link_catches_up_and_says_how_late_it_was(fake: FakeTime) -> None:
    clock = clock_of(1e6)
    clock.begin(100.0)
    fake.wake = 0.0003
    for _ in range(100):
        clock.turn(960, 1.0)
        fake.pass_(0.0001)
    clock.finish()
    assert fake.now == pytest.approx(100.096 + fake.wake)
    assert clock.lag_s < 0.0001
    clock.begin(100.0)
    fake.pass_(0.02)
    clock.turn(960, 1.0)
    assert clock.lag_s == pytest.approx(0.0203)


def test_a_job_starts_when_queued_or_behind_the_one_before(fake: FakeTime) -> None:
    clock = clock_of(1e6)
    clock.begin(100.0)
    clock.turn(960, 1.0)
    clock.begin(100.0001)
    clock.turn(960, 1.0)
    assert fake.now == pytest.approx(100.00096)
    clock.begin(105.0)  # Unused time is not saved up.
    clock.turn(960, 1.0)
    clock.finish()
    assert fake.now == pytest.approx(105.00096)


def test_small_pairs_share_a_slice(fake: FakeTime) -> None:
    clock = clock_of(1e6)
    clock.begin(100.0)
    for _ in range(100):
        clock.turn(96, 1.0)
    clock.finish()
    assert len(fake.slept) == 10
    assert fake.now == pytest.approx(100.0096)


def test_pieces_and_device_reads_have_their_own_rates(fake: FakeTime) -> None:
    clock = clock_of(0.5e6)
    clock.begin(100.0)
    clock.turn(960, 0.8)
    clock.device(2000)
    clock.finish()
    assert fake.now == pytest.approx(100 + 960 / 0.4e6 + 0.001)


# ---- profiles and names -------------------------------------------------------------------------


def test_the_shipped_profiles_are_complete() -> None:
    assert profile_names() == ["a100-pcie4", "h100-pcie5", "h200-pcie5", "v100s-pcie3"]
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert 0 < profile.link_computing_factor <= 1
        assert all(profile.sources.values())


def test_shrinking_divides_rates_and_leaves_times() -> None:
    profile = load_profile("v100s-pcie3")
    small = profile.shrunk(64)
    assert small.link_alone == profile.link_alone / 64
    assert small.host_replay == profile.host_replay / 64
    assert small.link_computing_factor == profile.link_computing_factor
    assert small.models == profile.models


def test_the_default_job_is_the_one_of_the_plan() -> None:
    work = model_work(
        load_profile("a100-pcie4"),
        params=1_316_000_000,
        tokens=4096,
        layers=24,
        d_model=2048,
        context=2048,
        shrink=64,
    )
    assert work.forward_s + work.backward_s == pytest.approx(0.25, rel=0.03)
    assert work.backward_s == pytest.approx(2 * work.forward_s)
    assert work.update_s == pytest.approx(0.03, rel=0.15)
    assert work.shrink == 64


def test_the_papers_machine_is_calibrated() -> None:
    profile = load_profile("v100s-pcie3")
    params = 1_235_814_400
    work = model_work(
        profile, params=params, tokens=512, layers=16, d_model=2048, context=2048,
        model="llama-3.2-1b",
    )  # fmt: skip
    assert (work.forward_s, work.backward_s, work.update_s) == (0.14, 0.28, 0.026)
    alone = 14 * params / profile.link_alone
    assert alone == pytest.approx(1.311, abs=0.002)
    hidden = profile.link_computing_factor * (work.forward_s + work.backward_s)
    assert alone - hidden == pytest.approx(0.962, abs=0.002)


def write_profile(path: Path, **changes: str) -> Path:
    figures = dict.fromkeys(load_profile("a100-pcie4").sources, 'value = 2.0\nsource = "assumed"')
    figures.update(changes)
    text = "".join(f"[{name}]\n{body}\n" for name, body in figures.items() if body)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "mine.toml")
    device = open_device("emulated:mine", work=WORK, profile_path=path)
    assert device.name == "emulated:mine"
    assert device.link_rate(computing=False) == 2.0 / WORK.shrink
    device.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"link_alone": 'value = 0\nsource = "assumed"'}, "link_alone is 0"),
        ({"link_alone": 'value = "fast"\nsource = "assumed"'}, "link_alone is 'fast'"),
        ({"link_alone": 'value = true\nsource = "assumed"'}, "link_alone is True"),
        ({"link_alone": 'value = inf\nsource = "assumed"'}, "link_alone is inf"),
        ({"link_alone": "value = 1.0"}, "link_alone has no source"),
        ({"link_alone": ""}, "link_alone is missing"),
        ({"link_speed": 'value = 1.0\nsource = "assumed"'}, "link_speed is unknown"),
        ({"link_alone": "value ="}, "not valid TOML"),
        ({'models."m"': 'forward_s = 1.0\nsource = "assumed"'}, "backward_s is missing"),
    ],
)
def test_a_wrong_profile_is_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        load_profile(write_profile(tmp_path / "mine.toml", **changes))


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot read the profile"):
        load_profile(tmp_path / "none.toml")


@pytest.mark.parametrize("name", profile_names())
def test_the_page_on_emulation_shows_the_profiles_figures(name: str) -> None:
    page = (Path(__file__).parents[1] / "docs" / "emulation.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    column = next(row.index(name) for row in rows if name in row)
    shown = {row[0].strip("`"): row[column] for row in rows if len(row) == 5}
    profile = load_profile(name)
    for figure in profile.sources:
        assert float(shown[figure]) == getattr(profile, figure)
