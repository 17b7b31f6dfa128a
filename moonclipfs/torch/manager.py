"""The checkpoint manager: save and resume from a training loop, in three lines.

    manager = moonclipfs.CheckpointManager("/data/store", "run1")
    start = manager.resume(model=model, optimizer=optimizer)
    for step in range(start, steps):
        ...
        manager.save(step, model=model, optimizer=optimizer)

Each save is a snapshot `run1/step-000500` of safetensors files and a `state.json`.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from moonclipfs import limits
from moonclipfs.errors import CorruptError, NotFoundError, UsageError
from moonclipfs.store import pins
from moonclipfs.store.forget import retain
from moonclipfs.store.optimize import optimize
from moonclipfs.store.paths import check_path
from moonclipfs.store.retention import Rules, metric_of, step_of
from moonclipfs.torch import parts, runs, saving
from moonclipfs.torch.background import Background
from moonclipfs.torch.casting import CastRules
from moonclipfs.torch.console import tell_stats
from moonclipfs.torch.dtypes import dtype_name
from moonclipfs.torch.extrafiles import contents
from moonclipfs.torch.loading import Loaded, Loading
from moonclipfs.torch.place import Place
from moonclipfs.torch.profile import Profile, wanted
from moonclipfs.torch.ranks import Ranks
from moonclipfs.torch.reading import read_all
from moonclipfs.torch.saved import Saved
from moonclipfs.torch.staging import HostBuffers
from moonclipfs.torch.tidying import Tidying
from moonclipfs.torch.tightening import Tightening
from moonclipfs.torch.topology import topology
from moonclipfs.torch.workers import Workers, thread_count
from moonclipfs.types import Version

log = logging.getLogger(__name__)

StateSource = Any
"""An object with `state_dict()` and `load_state_dict()`, or a dict."""


class CheckpointManager:
    """Saves the state of a training run into a store, and loads it again. A context manager; one thread uses it."""

    def __init__(
        self,
        store: str | os.PathLike[str],
        name: str = "run",
        *,
        retention: Rules | None = None,
        save_dtype: str | torch.dtype | Mapping[str, str | torch.dtype] | None = None,
        async_save: bool = True,
        allow_pickle: bool = False,
        max_shard_bytes: int = limits.SHARD_BYTES,
        world_size: int | str | None = None,
        rank: int | str | None = None,
    ) -> None:
        """Saves go to `name/step-000500` of a store, which the first save makes where there is none.

        `retention` says which snapshots of the run stay, after each save; by default all do. `async_save` encodes in
        the background. `allow_pickle` keeps, and loads, values that nothing but a pickle can hold. A part of more than
        `max_shard_bytes` is split into several files.

        Where `world_size` ranks save into one store ("auto": as many as the launcher says), each makes the same saves
        in the same order, and there is one snapshot of all. Raises UsageError, FormatVersionError for a directory that
        is no store, NotFoundError where none can be made, PermissionDeniedError.
        """
        self.name = check_path(name)
        self._rules = None if retention is None else replace(retention, names=(name,))
        self._cast = CastRules(save_dtype)
        self._async = async_save
        self._allow_pickle = allow_pickle
        self._most_bytes = max_shard_bytes
        size, number = topology(world_size, rank)
        self._place = Place(store, made_elsewhere=number > 0)
        self._ranks = Ranks(self._place, self.name, size, number) if size > 1 else None
        self._topology = (size, number)
        self._workers = Workers(thread_count())
        self._background = Background()
        self._tidying = Tidying(self._place)
        self._tightening = Tightening(self._place, self.name, self._workers, self._tidying)
        self._buffers = HostBuffers()
        self._published: saving.Published | None = None
        self._told: set[str] = set()
        self._pid = os.getpid()
        self._closed = False

    # Saving

    def save(
        self,
        step: int,
        model: StateSource | None = None,
        optimizer: StateSource | None = None,
        scheduler: StateSource | None = None,
        scaler: StateSource | None = None,
        extra: Any = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        extra_files: Mapping[str, str | bytes | os.PathLike[str]] | None = None,
    ) -> str:
        """Save what is given; returns the snapshot's name. What changes after this returns is not in it.

        `extra_files` are kept beside it, by name: bytes, text, or the path of a file. Raises UsageError for what cannot
        be kept, and, when this save is under way, what an earlier one in the background failed with.
        """
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "extra": extra}
        return self._save(step, given, metadata, extra_files, {})

    def save_raw(
        self, step: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any] | None = None
    ) -> str:
        """Save tensors by name, as those of a model. See `save`."""
        return self._save(step, {"model": dict(tensors)}, metadata, None, {})

    def save_best(
        self,
        step: int,
        metric: float,
        model: StateSource | None = None,
        optimizer: StateSource | None = None,
        scheduler: StateSource | None = None,
        scaler: StateSource | None = None,
        extra: Any = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        metric_name: str = "val_loss",
        lower_is_better: bool = True,
        extra_files: Mapping[str, str | bytes | os.PathLike[str]] | None = None,
    ) -> str | None:
        """Save if `metric` is better than that of every snapshot of the run, also of those before a restart.

        Returns the snapshot's name, or None when it is not better. The best stays, whatever other rules say.
        """
        self._wait()
        value = float(metric)
        if not abs(value) < float("inf"):  # nor NaN
            self._raise_failure()
            return None
        before = runs.best(self._place.names(), self.name, metric_name)
        found = None if before is None else metric_of(before)
        if found is not None and (value if lower_is_better else -value) >= found[1]:
            self._raise_failure()
            return None
        about = {"name": metric_name, "value": value, "goal": "min" if lower_is_better else "max"}
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "extra": extra}
        return self._save(step, given, metadata, extra_files, {"metric": about})

    def save_final(
        self,
        step: int,
        model: StateSource | None = None,
        optimizer: StateSource | None = None,
        scheduler: StateSource | None = None,
        scaler: StateSource | None = None,
        extra: Any = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        extra_files: Mapping[str, str | bytes | os.PathLike[str]] | None = None,
    ) -> str:
        """Save, and return when it is durable, and stored so that it is read as fast as can be. Raises whatever failed.
        See `save`.
        """
        path = self.save(step, model, optimizer, scheduler, scaler, extra, metadata, extra_files=extra_files)
        self.flush()
        self._tightening.wait()
        report = optimize(self._place.store(), [path], wait_seconds=0)
        if report.problems:
            raise CorruptError(f"{path} is saved, but what it is stored against is damaged: {report.problems[0]}")
        return path

    def flush(self) -> None:
        """Return when every save is durable on disk, if not yet small. Raises what one of them failed with."""
        self._wait()
        self._raise_failure()

    def last_queue_wait(self) -> float:
        """Seconds that the last save waited for the one before it."""
        return self._background.last_wait

    def _save(
        self,
        step: int,
        given: Mapping[str, Any],
        metadata: Mapping[str, Any] | None,
        extra_files: Mapping[str, str | bytes | os.PathLike[str]] | None,
        about: Mapping[str, Any],
    ) -> str:
        self._check_process()
        if self._closed:
            raise UsageError("this CheckpointManager is closed: make another one to save with")
        with self._tightening.paused(), nullcontext() if self._ranks is None else self._ranks.preparing():
            return self._save_here(step, given, metadata, extra_files, about)

    def _save_here(
        self,
        step: int,
        given: Mapping[str, Any],
        metadata: Mapping[str, Any] | None,
        extra_files: Mapping[str, str | bytes | os.PathLike[str]] | None,
        about: Mapping[str, Any],
    ) -> str:
        step = runs.checked_step(step)
        taken = parts.take(given, allow_pickle=self._allow_pickle)
        files = contents(extra_files or {})
        self._tell_unmatched(taken)
        path = runs.path_of(self.name, step)
        profile = Profile(path)
        with profile.phase("wait"):
            self._background.last_wait = self._background.wait()
        store = self._place.for_saving()
        attempt = {"attempt": secrets.token_hex(8)} if self._ranks is None else self._ranks.about()
        record = {**about, runs.MANAGER: attempt, runs.USER: parts.plain_metadata(metadata or {})}
        # Whatever interrupts the copy: from here on the buffers hold what is in no version, until this one is stored.
        after, self._published = self._published, None
        with profile.phase("copy"):
            staged, shared = saving.capture(taken, self._buffers, self._workers, self._workers.threads)
        job = saving.Job(path, step, taken, staged, shared, files, record, self._cast, profile, after)
        put = saving.store_job if self._ranks is None else partial(self._ranks.store_job, self._ranks.take_up())

        def run() -> None:
            with self._tightening.paused():
                if self._ranks is None:
                    job.effort = self._tightening.effort(job.size)
                self._place.measure(profile)
                published = self._published = put(store, job, self._workers, self._most_bytes)
                self._place.measure(None)
                self._tightening.saved(published.version, job.effort)
            if wanted():
                profile.tell(runs.bytes_of(published.version), published.stored)
            if self._rules is not None and self._topology[1] == 0:
                self._tidying.dropped(len(retain(store, self._rules).drop))

        failure = self._background.failure()
        if self._async:
            self._background.start(run, f"save of {path}")
        else:
            run()
        if failure is not None:
            raise failure
        return path

    def _tell_unmatched(self, taken: Mapping[str, parts.Part]) -> None:
        """Warn, once, of patterns of `save_dtype` that name nothing."""
        names = [(part, name) for part in saving.CAST_PARTS if part in taken for name in taken[part].tensors]
        for pattern in self._cast.without_match(names) if names else ():
            if pattern not in self._told:
                self._told.add(pattern)
                log.warning("save_dtype: the pattern %r matches no tensor; one is called %s", pattern, names[0][1])

    # Loading

    def load(
        self,
        step_or_id: int | str,
        model: StateSource | None = None,
        optimizer: StateSource | None = None,
        scheduler: StateSource | None = None,
        scaler: StateSource | None = None,
        *,
        strict: bool = True,
        map_location: str | torch.device | None = None,
    ) -> Loaded:
        """Load a snapshot, by its step or its name, straight into the objects that are given.

        Without any, `state` of the result holds every state dict, on `map_location` (the host by default). Raises
        NotFoundError, UsageError for what does not fit, before anything is changed, CorruptError.
        """
        self._wait()
        with self._place.reading() as names:
            version = runs.find(names, self.name, step_or_id)
            given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
            return self._load(version, given, strict, map_location)

    def load_latest(
        self,
        model: StateSource | None = None,
        optimizer: StateSource | None = None,
        scheduler: StateSource | None = None,
        scaler: StateSource | None = None,
        *,
        strict: bool = True,
        map_location: str | torch.device | None = None,
    ) -> Loaded:
        """Load the snapshot that was saved last, whatever its step. See `load`."""
        self._wait()
        with self._place.reading() as names:
            saved = runs.saved_versions(names, self.name)
            if not saved:
                raise NotFoundError(f"{self.name} has no snapshot in {self._place.path}")
            given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
            return self._load(saved[-1], given, strict, map_location)

    def resume(
        self,
        model: StateSource | None = None,
        optimizer: StateSource | None = None,
        scheduler: StateSource | None = None,
        scaler: StateSource | None = None,
        *,
        strict: bool = True,
        map_location: str | torch.device | None = None,
    ) -> int:
        """Load the newest snapshot that is intact, and return the step after it; 0 when the run has none.

        One that is damaged, or lacks what is asked for (as a best may, of the model alone), is passed over, and the log
        says so; of several ranks, the one that finds it raises.
        """
        self._wait()
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        with self._place.reading() as names:
            saved = runs.saved_versions(names, self.name)
            damage: CorruptError | None = None
            lacking: NotFoundError | None = None
            for version in reversed(saved):
                try:
                    loaded = self._load(version, given, strict, map_location)
                except (CorruptError, NotFoundError) as error:
                    if self._ranks is not None:
                        raise  # the other ranks may find their parts whole: all have to go on from the same
                    if isinstance(error, NotFoundError):
                        lacking = lacking or error
                        continue
                    log.warning("%s is damaged, so an earlier snapshot is resumed: %s", runs.id_of(version), error)
                    damage = damage or error
                    continue
                if lacking is not None:
                    log.warning("%s is resumed: %s", loaded.id, lacking)
                return loaded.step + 1
        if lacking is not None:
            raise lacking
        if damage is not None:
            raise CorruptError(
                f"none of {len(saved)} snapshots of {self.name} is intact; the newest: {damage}"
            ) from damage
        return 0

    def load_tensors(
        self, step_or_id: int | str, names: Iterable[str], *, map_location: str | torch.device | None = None
    ) -> dict[str, torch.Tensor]:
        """Read the named tensors and nothing else. Where two parts have a name, `optimizer:NAME` says which.

        Raises NotFoundError, UsageError for a name that says too little, CorruptError.
        """
        self._wait()
        with self._place.reading() as all_names:
            saved = Saved(self._place.store(), runs.find(all_names, self.name, step_or_id), self._topology)
            wanted = [(name, saved.find(name)) for name in names]
            device = torch.device(map_location or "cpu")
            made = {name: torch.empty(one.shape, dtype=one.dtype, device=device) for name, one in wanted}
            read_all(((one, made[name]) for name, one in wanted), self._workers)
            return made

    def _load(
        self, version: Version, given: Mapping[str, Any], strict: bool, map_location: str | torch.device | None
    ) -> Loaded:
        saved = Saved(self._place.store(), version, self._topology)
        device = None if map_location is None else torch.device(map_location)
        loading = Loading(saved, device=device, strict=strict, allow_pickle=self._allow_pickle)
        targets = {part: target for part, target in given.items() if target is not None}
        finish: list[Callable[[], object]] = []
        for part, target in targets.items():
            finish.append(loading.plan_into(part, target))
        if targets and "extra" in saved.others:
            log.warning(
                "%s was saved by %s ranks, and what each gave as extra is not loaded here", saved.id, saved.ranks
            )
        wanted = ["extra"] if targets else [*saved.parts, *saved.others]
        state = {part: loading.plan_state(part) for part in wanted if part in saved.parts or not targets}
        loading.read(self._workers)
        for call in finish:
            call()
        return Loaded(saved.id, saved.step, saved.metadata, state)

    # Looking

    def describe(self, step_or_id: int | str) -> dict[str, Any]:
        """What a snapshot holds, without reading any of it: `id`, `step`, `created`, `metadata`, `metric`, `bytes`,
        `pinned`, `thinned`, and of each of its `parts` the dtype and shape of every tensor. Raises NotFoundError.
        """
        self._wait()
        with self._place.reading() as names:
            version = runs.find(names, self.name, step_or_id)
            saved = Saved(self._place.store(), version, self._topology)
            kept = [part for part in saved.parts if not set(saved.parts[part]["files"]) & set(runs.thinned_of(version))]
            tensors = {part: saved.tensors(part).values() for part in kept}
            described = {
                part: {one.name: {"dtype": dtype_name(one.dtype), "shape": list(one.shape)} for one in found}
                for part, found in tensors.items()
            }
            return {**asdict(runs.info_of(names, version)), "parts": described}

    def stats(self) -> dict[str, Any]:
        """Counts of the run and of its store: `snapshots`, `latest_step`, `bytes` of the snapshots' files,
        `store_bytes` on disk, `ratio` of the two (None for an empty store), `last_queue_wait` in seconds.
        """
        self._wait()
        saved = runs.saved_versions(self._place.names(), self.name)
        size = sum(runs.bytes_of(version) for version in saved)
        packs = self._place.pack_bytes()
        return {
            "store": str(self._place.path),
            "run": self.name,
            "snapshots": len(saved),
            "latest_step": step_of(saved[-1]) if saved else None,
            "bytes": size,
            "store_bytes": packs,
            "ratio": size / packs if packs else None,
            "last_queue_wait": self.last_queue_wait(),
        }

    def print_stats(self) -> None:
        """Print `stats` for a person. Never fails for the console's sake."""
        tell_stats(self.stats(), sys.stdout)

    def list_snapshots(self) -> list[runs.SnapshotInfo]:
        """The snapshots of the run, in the order of saving; those in flight are waited for."""
        self._wait()
        names = self._place.names()
        return [runs.info_of(names, one) for one in runs.saved_versions(names, self.name)]

    def pin(self, step_or_id: int | str) -> None:
        """Keep a snapshot whatever the rules say. Raises NotFoundError."""
        self._pin(step_or_id, pins.pin)

    def unpin(self, step_or_id: int | str) -> None:
        """Let the rules have it back. Raises NotFoundError."""
        self._pin(step_or_id, pins.unpin)

    def pinned_steps(self) -> list[int]:
        """The steps of the pinned snapshots, in order."""
        self._wait()
        names = self._place.names()
        kept = [
            step_of(version)
            for version in runs.saved_versions(names, self.name)
            if pins.PINNED in names.pins().get((version.path, version.number), ())
        ]
        return sorted(step for step in kept if step is not None)

    def _pin(self, step_or_id: int | str, change: Callable[..., object]) -> None:
        self._wait()
        with self._place.reading() as names:
            version = runs.find(names, self.name, step_or_id)
            change(self._place.store(), [(version.path, version.number)])

    # Ending

    def close(self) -> None:
        """Wait for what is in flight, encode the last saves for half a minute at most, and close the store.

        Raises what a save failed with.
        """
        self._wait()
        self._closed = True
        self._tightening.close()
        self._tidying.close()
        if self._ranks is not None:
            self._ranks.close()
        self._workers.shutdown()
        self._place.close()
        self._raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _wait(self) -> None:
        self._check_process()
        self._background.wait()

    def _raise_failure(self) -> None:
        failure = self._background.failure()
        if failure is not None:
            raise failure

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this CheckpointManager belongs to process {self._pid}, and this is a fork of it: make one here"
            )
