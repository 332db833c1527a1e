"""Filling the second tier behind the training.

One thread of the agent, with the tier's lock, touches the tier; nobody else does, and nobody waits
for it: every call on a hung file system may block for ever. It copies one checkpoint at a time, and
only the newest waits; older ones are passed over, and counted. What fails is tried again, later and
later, for as long as there is no newer one. When nothing newer waits, pinned ones that it lacks are
copied. What always holds: the checkpoint in copy is spared by
the first tier's retention as long as the copy makes progress, and by nothing after that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from pathlib import Path

from gockpt.agent.protocol import Hello, TierState
from gockpt.errors import ConfigError, CorruptError, GockptError, LockedError, StorageError
from gockpt.storage import fs
from gockpt.storage.catalog import Found, examine, newest, next_sequence
from gockpt.storage.lock import Lock
from gockpt.storage.marks import mark
from gockpt.storage.names import PINNED, parse_name
from gockpt.storage.replica import replicate
from gockpt.storage.retention import collect_leftovers, prune
from gockpt.storage.tier import Tier, check_owner, claim

log = logging.getLogger("gockpt.agent")

RETRY_FIRST, RETRY_MOST = 1.0, 30.0
"""Seconds before a failed copy is tried again, doubled each time."""

FIRST_ANSWER, RESTART_ANSWER = 60.0, 10.0
"""Seconds that a tier may take to answer at start: where only it can tell the next sequence number,
and where the directory of checkpoints can."""

STOP_WAIT = 1.0
"""Seconds given to the copy in hand, to clean up behind it, when the agent leaves."""

REFRESH = 2.0
"""Seconds after which the same state is told again (to whoever has come in the meantime)."""


class Stopped(Exception):
    """The agent leaves."""


class Copier:
    """Copies checkpoints of ``root`` to its tier, on a thread of its own."""

    def __init__(
        self,
        root: Path,
        tier: Tier,
        *,
        rank: int,
        payload: dict[str, object],
        protect: Collection[Path],
    ) -> None:
        """Start the thread.

        Args:
            payload: of the tier's lock.
            protect: checkpoints that are never deleted, in either tier; may change later.
        """
        self._root, self._tier, self._target = root, tier, Path(tier.path)
        self._rank, self._payload, self._protect = rank, payload, protect
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._lock: Lock | None = None
        self._answer: int | GockptError | None = None
        self._waiting: Path | None = None
        self._copying: Path | None = None
        self._moved = time.monotonic()
        self._held, self._held_step = 0, 0
        self._bytes = 0
        self._superseded = 0
        self._failure: GockptError | None = None
        self._told: tuple[float, TierState] | None = None
        self._thread = threading.Thread(target=self._run, name="gockpt-tier", daemon=True)
        self._thread.start()

    # -- for the agent's other threads; none of these waits for the tier ---------------------------

    def offer(self, path: Path) -> None:
        """This checkpoint was committed; it is now the newest."""
        with self._changed:
            self._superseded += self._waiting is not None
            self._waiting = path
            self._changed.notify_all()

    def spared(self) -> set[Path]:
        """The checkpoint in copy, unless the tier is stuck."""
        with self._changed:
            moving = time.monotonic() - self._moved < self._tier.patience
            return {self._copying} if self._copying is not None and moving else set()

    def news(self) -> TierState | None:
        """How far it has come, if the trainer does not know yet."""
        with self._changed:
            state = self._state()
        now = time.monotonic()
        if self._told is not None and self._told[1] == state and now - self._told[0] < REFRESH:
            return None
        self._told = (now, state)
        return state

    def stop(self) -> None:
        """End it. A thread that hangs in a call is left behind, with the tier's lock."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(STOP_WAIT)

    def next_sequence(self, timeout: float, *, needed: bool) -> int:
        """A sequence number above all of the tier.

        Args:
            timeout: seconds to wait for its answer.
            needed: whether nothing else can tell: then no answer is an error.

        Raises:
            ConfigError: the tier is that of another directory.
            LockedError: another run uses it.
            StorageError: it cannot be used, or did not answer, and was needed.
        """
        deadline = time.monotonic() + timeout

        def decided() -> bool:
            if isinstance(self._answer, StorageError) and needed:
                return False  # it is tried again meanwhile
            return self._answer is not None

        with self._changed:
            self._changed.wait_for(decided, max(0.0, deadline - time.monotonic()))
            answer = self._answer
        if isinstance(answer, int):
            return answer
        if isinstance(answer, ConfigError | LockedError):
            raise answer
        reason = f"did not answer within {timeout:.0f} s" if answer is None else str(answer)
        if needed:
            raise StorageError(
                f"the tier {self._target} cannot be used ({reason}), and {self._root} has no "
                "checkpoints to go on from; repair it, or start without it",
                path=self._target,
            )
        log.warning("the tier %s: %s; going on without it for now", self._target, reason)
        return 1

    def _state(self) -> TierState:
        failure = self._failure
        return TierState(
            sequence=self._held,
            step=self._held_step,
            lacking=self._lock is None or self._newer(self._waiting) or self._newer(self._copying),
            copied=self._bytes,
            superseded=self._superseded,
            kind=None if failure is None else type(failure).__name__,
            reason=None if failure is None else str(failure),
        )

    def _newer(self, path: Path | None) -> bool:
        """Whether this is a checkpoint newer than all that the tier holds."""
        name = None if path is None else parse_name(path.name)
        return name is not None and name.sequence > self._held

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = RETRY_FIRST
        try:
            while not self._stop.is_set():
                try:
                    self._turn()
                    pause = RETRY_FIRST
                except GockptError as error:
                    self._failed(error)
                except Exception as error:
                    log.exception("a defect")
                    self._failed(StorageError(f"copying to {self._target} failed: {error!r}"))
                else:
                    continue
                self._stop.wait(pause)
                pause = min(2 * pause, RETRY_MOST)
        except Stopped:
            pass
        finally:
            if self._lock is not None:
                self._lock.release()

    def _turn(self) -> None:
        """One thing to do, waited for if need be."""
        if self._lock is None:
            self._open()
            self._tidy()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._stop.is_set())
            if self._stop.is_set():
                return
            path, self._waiting = self._waiting, None
            self._copying, self._moved = path, time.monotonic()
        if path is not None:
            self._copy(path)
            self._tidy()
        with self._changed:
            self._failure = None

    def _open(self) -> None:
        """Take the tier over, and find out what it lacks."""
        known = check_owner(self._root, self._target)
        try:
            lock = Lock.acquire(self._target, self._rank, self._payload)
        except LockedError as error:
            if not known:
                raise
            # Our own: an agent that is still ending, or died with a host whose lock lives on.
            raise StorageError(str(error), path=self._target) from error
        try:
            claim(self._root, self._target)
            for path in collect_leftovers(self._target, ""):
                log.info("deleted %s, left behind by an earlier copy", path)
            held, latest = newest(self._target), newest(self._root)
            sequence = next_sequence(self._target)
        except BaseException:
            lock.release()
            raise
        with self._changed:
            self._lock = lock
            self._note_held(held)
            if latest is not None and latest.sequence > self._held and self._waiting is None:
                self._waiting = latest.path
            self._answer = sequence
            self._changed.notify_all()

    def _copy(self, path: Path) -> None:
        found = examine(self._target / path.name)
        if found.problem is not None and fs.is_own_dir(path):
            found = examine(path)
            if found.problem is not None:
                raise CorruptError(f"{path}: {found.problem}; it cannot be copied", path=path)
            replicate(
                found,
                self._target,
                still_ours=self._still_ours,
                progress=self._progress,
                keep_every=self._tier.keep_every,
            )
        with self._changed:
            self._copying = None
            if found.problem is None:
                self._note_held(found)
            else:
                self._superseded += 1  # retention was faster: the tier had been stuck

    def _tidy(self) -> None:
        """The tier's own retention; pins of the first tier hold in it too."""
        collect_leftovers(self._target, "")  # of attempts that could not even be undone
        pinned = [
            self._root / name
            for name in fs.listdir(self._root)
            if parse_name(name) is not None and fs.file_size(self._root / name / PINNED) is not None
        ]
        for path in pinned:
            if fs.is_own_dir(self._target / path.name):
                mark(self._target / path.name, PINNED)
        if self._tier.keep is not None:
            prune(self._target, self._tier.keep, set(self._protect))
        missing = [path for path in pinned if not fs.is_own_dir(self._target / path.name)]
        with self._changed:
            if missing and self._waiting is None:
                self._waiting = missing[0]

    def _note_held(self, found: Found | None) -> None:
        if found is not None and found.sequence > self._held:
            self._held, self._held_step = found.sequence, found.step

    def _progress(self, nbytes: int) -> None:
        if self._stop.is_set():
            raise Stopped
        with self._changed:
            self._bytes += nbytes
            self._moved = time.monotonic()

    def _failed(self, error: GockptError) -> None:
        if str(error) != str(self._failure):
            log.warning("the tier: %s", error)
        if isinstance(error, LockedError) and self._lock is not None:
            self._lock.release()  # the lock file was replaced: take the new one
            self._lock = None
        with self._changed:
            self._failure = error
            if self._lock is None:
                self._answer = error
            copying, self._copying = self._copying, None
            # A damaged one is tried again only if it is the newest: its trouble must be heard.
            if copying is not None and (
                self._newer(copying) or not isinstance(error, CorruptError)
            ):
                self._superseded += self._waiting is not None
                self._waiting = self._waiting or copying
            self._changed.notify_all()

    def _still_ours(self) -> bool:
        return self._lock is not None and self._lock.still_ours()


def start(hello: Hello, payload: dict[str, object], protect: Collection[Path]) -> Copier | None:
    """Begin to fill the tier behind, if there is one."""
    if hello.tier is None:
        return None
    root = Path(hello.directory)
    return Copier(root, hello.tier, rank=hello.rank, payload=payload, protect=protect)


def first_sequence(hello: Hello, copier: Copier | None) -> int:
    """The next sequence number, above all that either tier has.

    Raises:
        ConfigError, LockedError, StorageError: the tier cannot be used (see
            :meth:`Copier.next_sequence`).
    """
    sequence = next_sequence(Path(hello.directory))
    if copier is None or hello.sequence:
        return max(sequence, hello.sequence)
    needed = sequence == 1
    timeout = FIRST_ANSWER if needed else RESTART_ANSWER
    return max(sequence, copier.next_sequence(timeout, needed=needed))
