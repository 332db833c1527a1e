"""The face of the library: what each call of a Checkpointer does, and what it refuses.

Small runs on the CPU with the agent as a thread. Where a write has to be slow it is held by an
event, so that nothing depends on time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_kit import Bag, assert_same, checkpointer, cpu, one_pass, run, truth
from torch import nn

import gockpt
from gockpt import faults
from gockpt.agent import output
from gockpt.agent.handle import Stage
from gockpt.faults import Fault
from gockpt.storage.lock import Lock
from gockpt.storage.tuning import Tuning
from gockpt.strategies import turns

DEADLINE = 200.0


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


class Gate:
    """Holds all commits until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        real = output.commit

        def commit(*args: Any, **kwargs: Any) -> Any:
            assert self._open.wait(DEADLINE)
            return real(*args, **kwargs)

        monkeypatch.setattr(output, "commit", commit)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open()


def passes(ckpt: gockpt.Checkpointer, training: Bag, first: int, last: int) -> None:
    for step in range(first, last + 1):
        one_pass(ckpt, training, step)
        ckpt.step()


def steps_of(path: Path) -> list[int]:
    return sorted(gockpt.open(one).step for one in path.glob("step-*"))


# -- save and handles ------------------------------------------------------------------------------


def test_save_returns_a_handle_of_the_step_that_it_will_hold(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, windows=3) as ckpt:
        passes(ckpt, training, 1, 3)
        handle = ckpt.save()
        assert handle.step == 6
        assert not handle.done()
        assert handle.path is None
        assert ckpt.save() is handle  # it joins the one on its way
        passes(ckpt, training, 4, 5)
        assert ckpt.save() is handle
        passes(ckpt, training, 6, 6)
        expected = truth(training)
        path = handle.wait(DEADLINE)  # though its last window is still open
        assert handle.done()
        assert handle.error is None
        assert handle.path == path == next(tmp_path.glob("step-*"))
        assert handle.wait() == path
        assert ckpt.save() is not handle
    assert_same(gockpt.open(path).load(), expected, "saved")


def test_save_before_the_first_pass_and_with_one_window(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, windows=1) as ckpt:
        assert ckpt.save().step == 1
        passes(ckpt, training, 1, 1)
        ckpt.wait(DEADLINE)
        assert ckpt.latest == 1


def test_a_save_and_a_regular_one_at_the_same_step_are_one(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=2) as ckpt:
        passes(ckpt, training, 1, 2)
        assert ckpt.save().step == 4
        passes(ckpt, training, 3, 4)
        ckpt.wait(DEADLINE)
    assert steps_of(tmp_path) == [4]


def test_saves_beside_regular_ones(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=5, windows=1) as ckpt:
        passes(ckpt, training, 1, 2)
        handles = [ckpt.save()]
        passes(ckpt, training, 3, 5)
        handles.append(ckpt.save())
        passes(ckpt, training, 6, 7)
        paths = [gockpt.open(handle.wait(DEADLINE)).step for handle in handles]
    assert paths[0] == 3
    assert {3, 5, 10} >= set(steps_of(tmp_path)) >= {3, 5}


def test_waiting_is_bounded(gate: Gate, tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=2, windows=1) as ckpt:
        passes(ckpt, training, 1, 2)
        handle = ckpt.save()
        with pytest.raises(TimeoutError, match="step 2 is not durable yet"):
            handle.wait(0.05)
        with pytest.raises(TimeoutError):
            ckpt.wait(0.05)
        assert handle.stage is Stage.CONSISTENT or handle.stage is Stage.FILLING
        assert ckpt.latest is None  # nothing counts before it is durable
        gate.open()
        ckpt.wait(DEADLINE)
        assert handle.stage is Stage.COMMITTED
        assert ckpt.latest == 2


def test_another_thread_may_wait_for_a_handle(tmp_path: Path) -> None:
    training, found = Bag(), []
    with checkpointer(training, tmp_path, windows=2) as ckpt:
        handle = ckpt.save()
        thread = threading.Thread(target=lambda: found.append(handle.wait(DEADLINE)))
        thread.start()
        passes(ckpt, training, 1, 4)
        thread.join(DEADLINE)
    assert [gockpt.open(path).step for path in found] == [2]


def test_wait_with_nothing_to_wait_for(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=9, windows=3) as ckpt:
        ckpt.wait(1)
        passes(ckpt, training, 1, 7)  # a window of step 9 is open: it is not waited for
        ckpt.wait(10)
        assert ckpt.latest is None


# -- steps -----------------------------------------------------------------------------------------


def test_a_step_without_an_update_is_none(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=2, windows=1) as ckpt:
        ckpt.step()
        training.compute(1)
        ckpt.step()
        assert ckpt.current_step == 0
        passes(ckpt, training, 1, 1)
        ckpt.step()
        assert ckpt.current_step == 1
    assert steps_of(tmp_path) == []


def test_two_updates_in_one_pass_are_refused_before_the_second_is_made(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=2, windows=2) as ckpt:
        one_pass(ckpt, training, 1)
        before = truth(training)
        with pytest.raises(gockpt.ConfigError, match=r"two updates.*ckpt\.step\(\)"):
            training.update(1)
        assert_same(truth(training), before, "refused")


def test_without_a_strategy_steps_are_counted_and_nothing_else(tmp_path: Path) -> None:
    training, device = Bag(), cpu()  # (its threads are there from here on)
    before = set(threading.enumerate())
    with checkpointer(training, tmp_path / "none", every=1, strategy="none", device=device) as ckpt:
        assert set(threading.enumerate()) <= before
        passes(ckpt, training, 1, 3)
        ckpt.wait()
        assert (ckpt.current_step, ckpt.latest, ckpt.engine, ckpt.client) == (3, None, None, None)
        with pytest.raises(gockpt.ConfigError, match="none"):
            ckpt.save()
        assert ckpt.restore() is None
    assert not (tmp_path / "none").exists()
    assert not training.optimizer._optimizer_step_pre_hooks


# -- the end ---------------------------------------------------------------------------------------


def test_closing_drains_and_is_final(gate: Gate, tmp_path: Path) -> None:
    training = Bag()
    ckpt = checkpointer(training, tmp_path, every=2, windows=1)
    passes(ckpt, training, 1, 2)
    gate.open()
    ckpt.close()
    assert steps_of(tmp_path) == [2]
    ckpt.close()
    for call in (ckpt.step, ckpt.save, ckpt.restore):
        with pytest.raises(gockpt.ConfigError, match="closed"):
            call()
    training.compute(3)
    training.update(3)  # training itself is free again
    assert not training.optimizer._optimizer_step_pre_hooks
    assert "zero_grad" not in vars(training.model)


def test_closing_takes_what_an_open_checkpoint_lacks(tmp_path: Path) -> None:
    training = Bag()
    ckpt = checkpointer(training, tmp_path, every=9, windows=4)
    passes(ckpt, training, 1, 7)
    expected = truth(training)
    ckpt.close()
    found = gockpt.open(tmp_path)
    assert found.step == 7
    assert_same(found.load(), expected, "cut short")


@pytest.mark.parametrize("way", ["with", "closing"])
def test_an_exception_in_the_middle_of_a_pass_leaves_no_checkpoint_of_it(
    way: str, tmp_path: Path
) -> None:
    """Its step is that of the last pass, but data and generators have moved on already."""
    training = Bag()

    def loop() -> None:
        ckpt = checkpointer(training, tmp_path, every=4, windows=3)
        with ckpt if way == "with" else contextlib.closing(ckpt):
            passes(ckpt, training, 1, 7)
            assert ckpt.engine is not None
            assert ckpt.engine.open_sequence is not None, "no checkpoint is open"
            training.compute(8)
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        loop()
    assert steps_of(tmp_path) == [4]


def test_a_close_that_takes_too_long_is_an_error(gate: Gate, tmp_path: Path) -> None:
    training = Bag()
    ckpt = checkpointer(training, tmp_path, every=1, windows=1, close_timeout=0.05)
    passes(ckpt, training, 1, 1)
    with pytest.raises(gockpt.AgentError, match="the last checkpoints to be written"):
        ckpt.close()


def test_the_loops_own_exception_is_never_masked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Bag()

    def loop() -> None:
        with checkpointer(training, tmp_path, every=2, windows=1) as ckpt:
            passes(ckpt, training, 1, 1)
            faults.arm([Fault(point="fs.create", action="errno:EIO", times=0)])
            passes(ckpt, training, 2, 2)
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        loop()
    assert "while the loop's own exception passes" in caplog.text


def test_the_interpreters_settings_are_put_back(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    with checkpointer(Bag(), tmp_path):
        assert sys.getswitchinterval() == pytest.approx(turns.SHARED, abs=2e-6)
    assert sys.getswitchinterval() == before


def test_the_engine_keeps_the_interpreter_while_training_waits_for_it(tmp_path: Path) -> None:
    seen = []
    training = Bag()
    with checkpointer(training, tmp_path, every=1, windows=1) as ckpt:
        assert ckpt.engine is not None
        advance = ckpt.engine._advance

        def noting() -> None:
            seen.append(sys.getswitchinterval())
            advance()

        ckpt.engine._advance = noting  # type: ignore[method-assign]
        one_pass(ckpt, training, 1)
        ckpt.step()
        assert seen == [pytest.approx(turns.KEPT, abs=2e-6)]
        assert sys.getswitchinterval() == pytest.approx(turns.SHARED, abs=2e-6)


# -- restore ---------------------------------------------------------------------------------------


def test_an_empty_directory_is_a_fresh_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Bag()
    before = truth(training)
    with (
        caplog.at_level(logging.INFO, "gockpt"),
        checkpointer(training, tmp_path / "new", every=1) as ckpt,
    ):
        assert ckpt.restore() is None
        assert ckpt.current_step == 0
    assert [r.message for r in caplog.records if "fresh start" in r.message]
    assert_same(truth(training), before, "untouched")


def test_a_missing_step_is_an_error_that_names_those_there(tmp_path: Path) -> None:
    run(Bag(), tmp_path, steps=6, every=2, windows=1)
    training = Bag(3)
    before = truth(training)
    with checkpointer(training, tmp_path) as ckpt:
        with pytest.raises(gockpt.NoCheckpointError, match=r"no checkpoint of step 3.*2, 4, 6"):
            ckpt.restore(3)
        assert_same(truth(training), before, "untouched")
        restored = ckpt.restore(4)
        assert restored is not None
        assert (restored.step, ckpt.current_step) == (4, 4)
    with checkpointer(Bag(), tmp_path / "empty") as ckpt, pytest.raises(gockpt.NoCheckpointError):
        ckpt.restore(4)


def damage(path: Path) -> None:
    with (path / "rank-00000.safetensors").open("r+b") as file:
        file.seek(path.joinpath("rank-00000.safetensors").stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_nothing_valid_names_what_is_wrong_with_each(tmp_path: Path) -> None:
    run(Bag(), tmp_path, steps=4, every=2, windows=1)
    first, second = sorted(tmp_path.glob("step-*"))
    damage(first)
    (second / "rank-00000.json").write_text("{}")
    training = Bag(3)
    before = truth(training)
    with checkpointer(training, tmp_path) as ckpt:
        with pytest.raises(gockpt.NoCheckpointError) as raised:
            ckpt.restore()
        assert first.name in str(raised.value)
        assert second.name in str(raised.value)
        assert "\n" not in str(raised.value)
        assert_same(truth(training), before, "untouched")


def test_a_damaged_one_is_told_and_the_next_older_one_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ran = run(Bag(), tmp_path, steps=6, every=2, windows=2)
    newest = max(tmp_path.glob("step-*"))
    damage(newest)
    training = Bag(3)
    with checkpointer(training, tmp_path) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        assert restored.step == ckpt.current_step == 4
        assert len(restored.problems) == 1
        assert newest.name in restored.problems[0]
        assert newest.name in caplog.text
        assert_same(truth(training), ran.moments[4].tensors, "the older one")


def test_what_was_restored_is_told(tmp_path: Path) -> None:
    run(Bag(), tmp_path, steps=4, every=2, windows=2)
    with checkpointer(Bag(3), tmp_path) as ckpt:
        restored = ckpt.restore()
    assert restored is not None
    assert (restored.step, restored.source, restored.proof) == (4, "ssd", "exact")
    assert restored.path == max(tmp_path.glob("step-*"))
    assert restored.problems == ()
    assert restored.seconds > 0


def test_a_restore_while_a_save_is_on_its_way_lets_it_be_written(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=2, windows=2) as ckpt:
        passes(ckpt, training, 1, 4)
        expected = truth(training)
        restored = ckpt.restore()
        assert restored is not None
        assert restored.step == 4
        assert_same(truth(training), expected, "restored")
        handle = ckpt.save()
        passes(ckpt, training, 5, 5)
        ckpt.restore(2)
        with pytest.raises(gockpt.AgentError, match="a checkpoint was restored"):
            handle.wait(1)
        assert ckpt.current_step == 2
        passes(ckpt, training, 3, 4)
    assert gockpt.open(tmp_path).step == 4


def test_the_one_restored_from_is_never_deleted(tmp_path: Path) -> None:
    run(Bag(), tmp_path, steps=4, every=2, windows=1)
    training = Bag(3)
    with checkpointer(training, tmp_path, every=1, windows=1, keep=1) as ckpt:
        ckpt.restore(2)
        passes(ckpt, training, 3, 7)
    assert steps_of(tmp_path) == [2, 7]


def test_keep_counts_from_the_newest(tmp_path: Path) -> None:
    run(Bag(), tmp_path, steps=8, every=1, windows=1, keep=3)
    assert steps_of(tmp_path) == [6, 7, 8]


OTHER = {
    "another shape": ((17, 65), (131,)),
    "one more": ((17, 65), (130,), (2,)),
}


@pytest.mark.parametrize("what", OTHER)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    what: str, tmp_path: Path
) -> None:
    run(Bag(shapes=((17, 65), (130,))), tmp_path, steps=2, every=2, windows=1)
    training = Bag(3, shapes=OTHER[what])
    before = truth(training)
    with checkpointer(training, tmp_path) as ckpt:
        with pytest.raises(gockpt.StateError, match="in the checkpoint"):
            ckpt.restore()
        assert_same(truth(training), before, "untouched")


# -- extras ----------------------------------------------------------------------------------------


class Stateful:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_extras_without_state_are_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(gockpt.ConfigError, match=r"extras\['thing'\].*state_dict"):
        checkpointer(Bag(), tmp_path, extras={"thing": object()})
    assert not list(tmp_path.iterdir())


def test_extras_that_do_not_come_back_are_refused_by_path(tmp_path: Path) -> None:
    extras = {"thing": Stateful({"a": [1, object()]})}
    with pytest.raises(gockpt.ExtrasError, match=r"extras\.?\[?'?thing.*a.*1"):
        checkpointer(Bag(), tmp_path, extras=extras)
    assert not list(tmp_path.iterdir())


def test_extras_are_those_of_the_target_whatever_happens_to_them_then(tmp_path: Path) -> None:
    thing = Stateful({"list": [1, 2], "tensor": torch.zeros(300)})
    training = Bag()
    training.extras = {"thing": thing}
    with checkpointer(training, tmp_path, every=2, windows=2) as ckpt:
        passes(ckpt, training, 1, 2)
        thing.state["list"].append(3)
        thing.state["tensor"].fill_(7)
    other = Stateful(None)
    training.extras = {"thing": other}
    with checkpointer(training, tmp_path) as ckpt:
        other.state = None
        ckpt.restore()
    assert other.state["list"] == [1, 2]
    assert torch.equal(other.state["tensor"], torch.zeros(300))


@pytest.mark.parametrize("windows", [1, 3])
def test_an_extra_that_fails_costs_one_checkpoint_and_no_training(
    windows: int, tmp_path: Path
) -> None:
    thing = Stateful(1)
    training = Bag()
    training.extras = {"thing": thing}
    with checkpointer(training, tmp_path, every=4, windows=windows) as ckpt:
        passes(ckpt, training, 1, 3)
        one_pass(ckpt, training, 4)
        thing.state = ValueError("it has gone wrong")
        with pytest.raises(gockpt.ExtrasError, match="it has gone wrong"):
            ckpt.step()
        thing.state = 2
        passes(ckpt, training, 5, 8)
        assert ckpt.current_step == 8
        expected = truth(training)
    assert steps_of(tmp_path) == [8]
    assert_same(gockpt.open(tmp_path, 8).load(), expected, "the next one")


def test_warn_logs_it_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    thing = Stateful(1)
    training = Bag()
    training.extras = {"thing": thing}
    with checkpointer(training, tmp_path, every=2, windows=1, on_error="warn") as ckpt:
        passes(ckpt, training, 1, 1)
        thing.state = ValueError("it has gone wrong")
        passes(ckpt, training, 2, 3)
        thing.state = 3
        passes(ckpt, training, 4, 4)
    assert "it has gone wrong" in caplog.text
    assert steps_of(tmp_path) == [4]


def test_a_scheduler_that_is_not_given_is_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Bag()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    with checkpointer(training, tmp_path, extras={"scheduler": scheduler}):
        pass
    assert "scheduler" not in caplog.text
    with checkpointer(training, tmp_path):
        pass
    assert "not in extras" in caplog.text


# -- what is refused -------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "every 0": ({"every": 0}, "every must be at least 1"),
    "every negative": ({"every": -3}, "every must be at least 1"),
    "every no number": ({"every": 1.5}, "every must be a whole number"),
    "keep 0": ({"keep": 0}, "keep must be at least 1"),
    "windows 0": ({"windows": 0}, "windows must be at least 1"),
    "windows bool": ({"windows": True}, "windows must be a whole number"),
    "slots 1": ({"slots": 1}, "slots must be at least 2"),
    "share 0": ({"link_share": 0}, "link_share"),
    "share above 1": ({"link_share": 1.1}, "link_share"),
    "strategy": ({"strategy": "gokpt"}, "did you mean 'gockpt'"),
    "volumes one path": ({"volumes": "/tmp"}, "volumes must be a list"),
    "volumes twice": ({"volumes": ["/tmp/a", "/tmp/../tmp/a"]}, "is named twice"),
    "volumes endless": ({"volumes": [f"/tmp/{n}" for n in range(65)]}, "more than 64"),
    "device": ({"device": "cppu"}, "cpu"),
    "when_busy": ({"when_busy": "never"}, "when_busy"),
    "on_error": ({"on_error": "ignore"}, "on_error"),
    "agent": ({"agent": "robot"}, "agent"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_cannot_be_used(what: str, tmp_path: Path) -> None:
    arguments, message = REFUSED[what]
    with pytest.raises((gockpt.ConfigError, gockpt.DeviceError), match=message) as raised:
        checkpointer(Bag(), tmp_path / "new", **arguments)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["", "a.b"])
def test_names_of_optimizers(name: str, tmp_path: Path) -> None:
    training = Bag()
    with pytest.raises(gockpt.ConfigError, match="names without dots"):
        gockpt.Checkpointer(training.model, {name: training.optimizer}, tmp_path)
    with pytest.raises(gockpt.ConfigError, match="names without dots"):
        gockpt.Checkpointer(training.model, {}, tmp_path)


def test_a_second_checkpointer_on_one_optimizer(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path / "one", every=2, windows=2) as ckpt:
        with pytest.raises(gockpt.ConfigError, match="second Checkpointer"):
            checkpointer(training, tmp_path / "two")
        passes(ckpt, training, 1, 2)
    assert steps_of(tmp_path / "one") == [2]
    with checkpointer(training, tmp_path / "two"):
        pass  # the lock of the refused one is free again


@pytest.mark.parametrize("second", ["thread", "process"])
@pytest.mark.parametrize("first", ["thread", "process"])
def test_a_second_checkpointer_on_one_directory(first: str, second: str, tmp_path: Path) -> None:
    training, path = Bag(), tmp_path / "real"
    (tmp_path / "link").symlink_to(path)
    with checkpointer(training, path, every=2, windows=2, agent=first) as ckpt:
        for same in (path, tmp_path / "link"):
            with pytest.raises(gockpt.LockedError, match="another Checkpointer of this process"):
                checkpointer(Bag(2), same, agent=second)
        passes(ckpt, training, 1, 2)
    assert steps_of(path) == [2]
    with checkpointer(Bag(2), path):
        pass  # closed is free


@pytest.mark.parametrize("agent", ["thread", "process"])
def test_a_directory_that_another_process_uses(agent: str, tmp_path: Path) -> None:
    lock = Lock.acquire(tmp_path, 0, {"pid": 4242, "host": "elsewhere"})
    with pytest.raises(gockpt.LockedError, match="in use by process 4242 on elsewhere; stop it"):
        checkpointer(Bag(), tmp_path, agent=agent)
    lock.release()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(gockpt.StorageError, match="file"):
        checkpointer(Bag(), tmp_path / "file")


def test_a_parameter_that_is_not_the_models(tmp_path: Path) -> None:
    model, stray = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), stray], lr=0.1)
    with pytest.raises(gockpt.StateError, match="named parameters"):
        gockpt.Checkpointer(model, optimizer, tmp_path, agent="thread")
    with checkpointer(Bag(), tmp_path):
        pass  # nothing is left locked


def test_several_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(gockpt.ConfigError, match="world size 4"):
        checkpointer(Bag(), tmp_path)


def test_too_little_memory_is_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gockpt.hostmemory.available", lambda: 1000)
    with pytest.raises(gockpt.ConfigError, match=r"need .* GB .* are free"):
        checkpointer(Bag(), tmp_path)


# -- when it is busy -------------------------------------------------------------------------------


def test_skip_leaves_out_what_has_no_slot_and_says_so(
    gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=1, windows=1, when_busy="skip") as ckpt:
        passes(ckpt, training, 1, 2)
        handle = ckpt.save()
        passes(ckpt, training, 3, 5)
        engine = ckpt.engine
        assert engine is not None
        assert engine.events == {"skipped_busy": 3}
        assert "the checkpoint of step 4 is skipped: no slot is free" in caplog.text
        asked = ckpt.save()
        passes(ckpt, training, 6, 6)
        if asked.step == 6:
            with pytest.raises(gockpt.AgentError, match="step 6 is skipped"):
                asked.wait(1)
        gate.open()
        assert gockpt.open(handle.wait(DEADLINE)).step == handle.step
        ckpt.wait(DEADLINE)
        passes(ckpt, training, 7, 7)
    assert steps_of(tmp_path) == [1, 2, 7]


def test_wait_leaves_none_out(gate: Gate, tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=1, windows=1) as ckpt:
        passes(ckpt, training, 1, 2)
        one_pass(ckpt, training, 3)
        opener = threading.Timer(0.2, gate.open)
        opener.start()
        blocked = ckpt.device.blocked_seconds()
        ckpt.step()  # both slots are taken until the gate opens
        assert ckpt.device.blocked_seconds() > blocked
        opener.join()
        engine = ckpt.engine
        assert engine is not None
        assert engine.events == {"waited_for_slot": 1}
        passes(ckpt, training, 4, 6)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_slow_disk_never_mixes_checkpoints(tmp_path: Path) -> None:
    """Slots are reused back to back while earlier ones are still being written."""
    slow = Fault(point="fs.pwrite", action="delay:0.02", times=0)
    ran = run(Bag(), tmp_path, steps=10, every=1, windows=1, faults=[slow])
    for step in range(1, 11):
        found = gockpt.open(tmp_path, step)
        assert found.verify() == []
        assert_same(found.load(), ran.moments[step].tensors, f"step {step}")


# -- a disk that fails -----------------------------------------------------------------------------


def plain(steps: int) -> Bag:
    training = Bag()
    for step in range(1, steps + 1):
        training.compute(step)
        training.update(step)
    return training


def test_what_one_checkpoint_taught_of_the_disk_serves_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Tuning] = []
    real = Tuning.ended

    def ended(self: Tuning, nbytes: int, when: float, *, more: bool) -> int:
        asked.append(self)
        return real(self, nbytes, when, more=more)

    monkeypatch.setattr(Tuning, "ended", ended)
    run(Bag(), tmp_path, steps=4, every=2, windows=1)
    assert len(asked) >= 4  # data and header of each
    assert len(set(map(id, asked))) == 1


@pytest.mark.parametrize("point", ["fs.create", "fs.fallocate", "fs.pwrite", "fs.fdatasync"])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_full_disk_costs_one_checkpoint(on_error: str, point: str, tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=2, windows=2, on_error=on_error) as ckpt:
        passes(ckpt, training, 1, 2)
        ckpt.wait(DEADLINE)
        faults.arm([Fault(point=point, action="errno:ENOSPC", times=0)])
        passes(ckpt, training, 3, 4)
        handle = ckpt.save()
        with pytest.raises(gockpt.SpaceError, match="free some room") as raised:
            handle.wait(DEADLINE)
        assert (raised.value.errno, raised.value.step) == (errno.ENOSPC, 4)
        assert raised.value.path is not None
        assert tmp_path in raised.value.path.parents
        faults.disarm()
        one_pass(ckpt, training, 5)
        if on_error == "raise":
            with pytest.raises(gockpt.SpaceError, match="free some room"):
                ckpt.step()
        else:
            ckpt.step()
        assert ckpt.current_step == 5  # it is told once, and the pass counts
        passes(ckpt, training, 6, 8)
        assert ckpt.engine is not None
        assert ckpt.engine.events == {"failed": 1}
    assert steps_of(tmp_path) == [2, 6, 8]
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".trash")]
    assert_same(truth(training), truth(plain(8)), "training was not disturbed")


def test_a_full_disk_at_the_last_save_is_raised_by_close(tmp_path: Path) -> None:
    training = Bag()
    ckpt = checkpointer(training, tmp_path, every=2, windows=1)
    passes(ckpt, training, 1, 1)
    faults.arm([Fault(point="fs.pwrite", action="errno:ENOSPC", times=0)])
    passes(ckpt, training, 2, 2)
    with pytest.raises(gockpt.SpaceError):
        ckpt.close()
    assert steps_of(tmp_path) == []


def test_a_failed_write_in_the_agents_process_is_the_same_error(tmp_path: Path) -> None:
    training = Bag()
    failing = Fault(point="fs.fdatasync", action="errno:EIO")
    ckpt = checkpointer(training, tmp_path, every=2, windows=1, agent="process", faults=[failing])
    passes(ckpt, training, 1, 2)
    handle = ckpt.save()
    with pytest.raises(gockpt.StorageError) as raised:
        handle.wait(DEADLINE)
    assert raised.value.errno == errno.EIO
    with pytest.raises(gockpt.StorageError, match="cannot sync"):
        ckpt.close()


def named(path: Path) -> list[int]:
    """By the names alone: one may be losing its own just now."""
    return sorted(int(one.name[5:14]) for one in path.glob("step-*"))


def pruned(path: Path, *, steps: list[int], trash: int) -> None:
    """Wait for the retention that follows a commit."""
    deadline = time.monotonic() + DEADLINE
    while (found := (named(path), len(list(path.glob(".trash-*"))))) != (steps, trash):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_old_checkpoints_that_cannot_be_deleted_are_no_failure(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=1, windows=1, keep=1) as ckpt:
        passes(ckpt, training, 1, 2)
        ckpt.wait(DEADLINE)
        pruned(tmp_path, steps=[2], trash=0)
        faults.arm([Fault(point="fs.rmtree", action="errno:EBUSY", times=0)])
        passes(ckpt, training, 3, 4)
        ckpt.wait(DEADLINE)
        pruned(tmp_path, steps=[4], trash=2)
        faults.disarm()
        passes(ckpt, training, 5, 5)
    assert steps_of(tmp_path) == [5]
    assert not list(tmp_path.glob(".trash-*")), "tried again, and not left there for ever"


def test_leftovers_that_cannot_be_deleted_do_not_stop_the_next_launch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = tmp_path / ".trash-step-000000001-s000001-0123abcd"
    left.mkdir()
    faults.arm([Fault(point="fs.rmtree", action="errno:EBUSY")])
    with checkpointer(Bag(), tmp_path, every=1, windows=1) as ckpt:
        assert left.exists()
        assert "left there" in caplog.text
        assert ckpt.latest is None
