"""moonclip's `CheckpointManager` over a store of ours: a program that was written for it changes one import.

    from moonclipfs.compat.moonclip import CheckpointManager

Its arguments, their defaults, and what its methods take and return are those of moonclip 0.3.1. What an argument means
here is in the table of the README; the log says once where our store makes one meaningless. Snapshots are those of
`moonclipfs.CheckpointManager`, of the run `run`.

As with moonclip, a value that nothing but a pickle can hold is saved as one: load only what you trust.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moonclipfs.compat.moonclip_arguments import FURTHER, cast_rules, check_place, rules, tell_meaningless, topology
from moonclipfs.compat.moonclip_import import DEFAULT_NAME
from moonclipfs.errors import CorruptError, MoonclipError
from moonclipfs.store.optimize import optimize
from moonclipfs.store.store import Store
from moonclipfs.store.target import is_store
from moonclipfs.torch.console import tell
from moonclipfs.torch.dtypes import as_bytes, dtype_named
from moonclipfs.torch.manager import CheckpointManager as Manager

log = logging.getLogger(__name__)

_PARTS = ("model", "optimizer", "scheduler", "scaler")
_MERGE_CORES = 0.25


class CheckpointManager:
    """moonclip's manager. One thread uses it; errors are RuntimeError and ValueError, as there."""

    def __init__(
        self,
        storage_root: str = "./checkpoints",
        compression_level: int = 3,
        max_full_snapshots: int = 5,
        max_deltas_per_full: int = 10,
        full_every_steps: int = 5000,
        delta_max_ratio: float = 0.95,
        world_size: int | str | None = None,
        rank: int | str | None = None,
        merge_stride: int = 0,
        merge_max_chain: int = 10,
        save_dtype: str | Mapping[str, str] | None = None,
        max_total_snapshots: int | None = None,
        async_save: bool = True,
        keep_base_in_memory: bool = True,
        pin_device_copies: bool = True,
        **kwargs: Any,
    ) -> None:
        """Raises TypeError for an argument that moonclip does not take, ValueError where the topology is left unsaid,
        RuntimeError for the rest, as moonclip does; for a bucket, too: no copies are kept in one.
        """
        if unknown := kwargs.keys() - FURTHER.keys():
            raise TypeError(f"CheckpointManager() got an unexpected keyword argument {min(unknown)!r}")
        further = {**FURTHER, **kwargs}
        self.world_size, self.rank = topology(world_size, rank)
        self.save_dtype = save_dtype
        self.last_resume_metadata: dict[str, str] = {}
        self._merge_stride = merge_stride
        self._saves = 0
        self._merging: threading.Thread | None = None
        self._root = Path(storage_root)
        tell_meaningless(
            {
                "compression_level": compression_level,
                "full_every_steps": full_every_steps,
                "delta_max_ratio": delta_max_ratio,
                "merge_max_chain": merge_max_chain,
                "keep_base_in_memory": keep_base_in_memory,
                "pin_device_copies": pin_device_copies,
                "sync_every_n_saves": further["sync_every_n_saves"],
            }
        )
        with _as_moonclip():
            check_place(self._root, further)
            self._manager = Manager(
                self._root,
                DEFAULT_NAME,
                retention=rules(max_full_snapshots, max_deltas_per_full, max_total_snapshots, further),
                save_dtype=cast_rules(save_dtype),
                async_save=async_save,
                allow_pickle=True,
                world_size=self.world_size,
                rank=self.rank,
            )

    # Saving

    def save(
        self,
        step: int,
        model: Any | None = None,
        optimizer: Any | None = None,
        scheduler: Any | None = None,
        scaler: Any | None = None,
        extra: dict[str, Any] | None = None,
        metadata: dict[str, str] | None = None,
    ) -> str:
        """Save a checkpoint; returns its id."""
        with _as_moonclip():
            found = self._manager.save(step, model, optimizer, scheduler, scaler, _states(extra), metadata)
        self._saved()
        return found

    def save_raw(self, step: int, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> str:
        """Save tensors by name: each is a tensor, or (shape, dtype, bytes)."""
        with _as_moonclip():
            found = self._manager.save_raw(step, {name: _tensor(one) for name, one in tensors.items()}, metadata)
        self._saved()
        return found

    def save_best(
        self,
        step: int,
        metric: float,
        model: Any | None = None,
        optimizer: Any | None = None,
        scheduler: Any | None = None,
        scaler: Any | None = None,
        metric_name: str = "val_loss",
        lower_is_better: bool = True,
        metadata: dict[str, str] | None = None,
    ) -> str | None:
        """Save if the metric is better than ever, also before a restart; None when it is not."""
        told = {**(metadata or {}), "best": "true", metric_name: f"{metric:.6f}"}
        with _as_moonclip():
            found = self._manager.save_best(
                step, metric, model, optimizer, scheduler, scaler,
                metadata=told, metric_name=metric_name, lower_is_better=lower_is_better,
            )  # fmt: skip
        if found is not None:
            tell(f"[moonclipfs] New best {metric_name}={metric:.6f} at step {step}", sys.stdout)
            self._saved()
        return found

    def save_final(
        self,
        step: int,
        model: Any | None = None,
        optimizer: Any | None = None,
        scheduler: Any | None = None,
        scaler: Any | None = None,
        metadata: dict[str, str] | None = None,
    ) -> str:
        """Save the last checkpoint; when this returns it is durable, and quick to read."""
        found = self.save(step, model, optimizer, scheduler, scaler, None, {**(metadata or {}), "final": "true"})
        self.merge_now()
        tell(f"[moonclipfs] Final checkpoint saved at step {step}", sys.stdout)
        return found

    def save_to_pt(
        self,
        path: str,
        model: Any | None = None,
        optimizer: Any | None = None,
        scheduler: Any | None = None,
        scaler: Any | None = None,
    ) -> str:
        """Write the state as it is to a file for `torch.load`; returns its path."""
        given = zip(_PARTS, (model, optimizer, scheduler, scaler), strict=True)
        torch.save({part: one.state_dict() for part, one in given if one is not None}, path)
        return path

    def save_to_safetensors(self, path: str, model: Any | None = None, metadata: dict[str, str] | None = None) -> str:
        """Write the tensors of a model to a safetensors file; returns its path."""
        from safetensors.torch import save_file

        if model is None:
            raise ValueError("save_to_safetensors needs a model")
        tensors = {name: one for name, one in model.state_dict().items() if torch.is_tensor(one)}
        save_file(tensors, path, metadata=metadata)
        return path

    def flush(self) -> None:
        """Return when every save is durable."""
        with _as_moonclip():
            self._manager.flush()

    def last_queue_wait(self) -> float:
        """Seconds that the last save waited for the one before it."""
        return self._manager.last_queue_wait()

    def merge_now(self) -> None:
        """Make the newest checkpoint quick to read, and free what that leaves. Nothing that can be loaded goes."""
        self.flush()
        self._wait_for_merge()
        if self.rank == 0:
            with _as_moonclip():
                self._merge()

    def sync_now(self) -> None:
        """Return when every save is durable; there is no bucket to copy to."""
        self.flush()

    def restore_from_remote(self) -> bool:
        """False: nothing came from a bucket."""
        return False

    # Loading

    def load(
        self,
        snap_id: str,
        model: Any | None = None,
        optimizer: Any | None = None,
        scheduler: Any | None = None,
        scaler: Any | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint into the objects that are given; returns every state dict, `extra/NAME` of the extras."""
        with _as_moonclip():
            state = dict(self._manager.load(snap_id).state)
        extra = state.pop("extra", None)
        result = {**state, **({f"extra/{name}": one for name, one in extra.items()} if extra else {})}
        given = dict(zip(_PARTS, (model, optimizer, scheduler, scaler), strict=True))
        for part, target in given.items():
            if target is not None and part in result and hasattr(target, "load_state_dict"):
                target.load_state_dict(result[part])
        return result

    def load_latest(
        self,
        model: Any | None = None,
        optimizer: Any | None = None,
        scheduler: Any | None = None,
        scaler: Any | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Load the checkpoint that was saved last; returns its id, and what `load` returns."""
        found = self._latest()["id"]
        return found, self.load(found, model, optimizer, scheduler, scaler)

    def resume(
        self,
        model: Any | None = None,
        optimizer: Any | None = None,
        scheduler: Any | None = None,
        scaler: Any | None = None,
    ) -> int:
        """Load the newest checkpoint that is intact, and return the step after it; 0 when there is none."""
        given = dict(zip(_PARTS, (model, optimizer, scheduler, scaler), strict=True))
        with _as_moonclip():
            step = self._manager.resume(**self._saved_ones(given))
            saved = [one for one in self._manager.list_snapshots() if one.step == step - 1]
        self.last_resume_metadata = dict(saved[-1].metadata) if saved else {}
        return step

    def _saved_ones(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those of the parts that the newest checkpoint was saved with: what it never had is passed over, as there."""
        found = self._manager.list_snapshots()
        if not found:
            return given
        try:
            about = self._manager.describe(found[-1].id)
        except CorruptError:
            return given  # an earlier one is resumed, or the error is told
        return given if about["thinned"] else {part: one for part, one in given.items() if part in about["parts"]}

    def load_tensors(self, snap_id: str, names: Iterable[str]) -> dict[str, bytearray]:
        """The bytes of tensors by name, as `describe` calls them."""
        wanted = {name: name.replace("/", ":", 1) for name in names}
        with _as_moonclip():
            found = self._manager.load_tensors(snap_id, wanted.values())
        return {name: bytearray(as_bytes(found[inner].contiguous()).numpy()) for name, inner in wanted.items()}

    # Looking

    def list_snapshots(self) -> list[dict[str, Any]]:
        """The checkpoints in the order of saving. Each is whole; sizes are those of its files."""
        with _as_moonclip():
            found = self._manager.list_snapshots()
        return [
            {
                "step": one.step,
                "id": one.id.rpartition("@")[0],
                "is_delta": False,
                "total_compressed": one.bytes,
                "total_raw": one.bytes,
                "skipped_tensors": 0,
                "delta_tensors": 0,
                "full_tensors": 0,
                "ranks": self.world_size,
                "metadata": dict(one.metadata),
            }
            for one in found
        ]

    def describe(self, snap_id: str) -> dict[str, Any]:
        """What a checkpoint holds, without reading it."""
        with _as_moonclip():
            about = self._manager.describe(snap_id)
        tensors = [
            _described(f"{part}/{name}", one["dtype"], one["shape"])
            for part, found in about["parts"].items()
            for name, one in found.items()
        ]
        return {
            "id": about["id"].rpartition("@")[0],
            "step": about["step"],
            "created_at": about["created"].isoformat(),
            "is_delta": False,
            "base_snapshot_id": None,
            "rank": self.rank,
            "ranks": self.world_size,
            "metadata": dict(about["metadata"]),
            "tensors": tensors,
        }

    def describe_latest(self) -> dict[str, Any]:
        """`describe` of the checkpoint that was saved last."""
        return self.describe(self._latest()["id"])

    def pin(self, step: int) -> bool:
        """Keep the checkpoint of a step whatever the rules say; False when there is none."""
        return self._change_pin(step, self._manager.pin)

    def unpin(self, step: int) -> bool:
        """Let the rules have it back; False when there is none."""
        return self._change_pin(step, self._manager.unpin)

    def pinned_steps(self) -> list[int]:
        """The pinned steps, in order."""
        with _as_moonclip():
            return self._manager.pinned_steps()

    def stats(self) -> dict[str, Any]:
        """Counts and sizes; what moonclip estimates of a save in full is known here: the files of all checkpoints."""
        with _as_moonclip():
            found = self._manager.stats()
        if not found["snapshots"]:
            return {"total_snapshots": 0}
        raw, stored = found["bytes"], found["store_bytes"]
        return {
            "total_snapshots": found["snapshots"],
            "full_snapshots": found["snapshots"],
            "delta_snapshots": 0,
            "total_tensors_saved": 0,
            "skipped_tensors": 0,
            "delta_tensors": 0,
            "full_tensors": 0,
            "total_raw_bytes": raw,
            "total_compressed_bytes": stored,
            "compression_ratio": stored / raw if raw else 1.0,
            "estimated_naive_bytes": raw,
            "total_saved_bytes": raw - stored,
            "savings_percent": (raw - stored) / raw * 100 if raw else 0.0,
        }

    def print_stats(self) -> None:
        """Print `stats` for a person."""
        self._manager.print_stats()

    def _latest(self) -> dict[str, Any]:
        found = self.list_snapshots()
        if not found:
            raise RuntimeError("Checkpoint not found: there is no snapshot")
        return found[-1]

    def _change_pin(self, step: int, change: Any) -> bool:
        if all(one["step"] != step for one in self.list_snapshots()):
            return False
        with _as_moonclip():
            change(step)
        return True

    # Merging

    def _saved(self) -> None:
        """After each save: begin to merge when it is time to, unless that is at work still."""
        self._saves += 1
        due = self.rank == 0 and self._merge_stride > 0 and self._saves % self._merge_stride == 0
        if due and (self._merging is None or not self._merging.is_alive()):
            self._merging = threading.Thread(target=self._merge_aside, name="merge")
            self._merging.start()

    def _merge_aside(self) -> None:
        try:
            self._merge()
        except MoonclipError as error:
            log.warning("merging of the newest checkpoint failed, it is tried again later: %s", error)

    def _merge(self) -> None:
        if not is_store(self._root):
            return
        with Store.open(self._root, write=True, purpose="merging checkpoints") as store:
            if store.names().bound():
                optimize(store, core_share=_MERGE_CORES, wait_seconds=0)

    def _wait_for_merge(self) -> None:
        if self._merging is not None:
            self._merging.join()


@contextmanager
def _as_moonclip() -> Iterator[None]:
    """Raise what moonclip's callers expect."""
    try:
        yield
    except MoonclipError as error:
        raise RuntimeError(str(error)) from error


def _states(extra: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The states of extras that have one, as moonclip takes them."""
    if extra is None:
        return None
    return {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in extra.items()}


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    shape, word, data = value
    dtype = dtype_named(word)
    if dtype is None:
        raise ValueError(f"there is no dtype {word!r}")
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return flat.reshape(shape) if math.prod(shape) == flat.numel() else flat


def _described(name: str, word: str, shape: list[int]) -> dict[str, Any]:
    dtype = dtype_named(word)
    size = math.prod(shape) * (dtype.itemsize if dtype is not None else 1)
    return {
        "name": name,
        "shape": list(shape),
        "dtype": word,
        "stored_dtype": word,
        "storage": "full",
        "alias_of": None,
        "raw_size": size,
        "compressed_size": size,
    }
