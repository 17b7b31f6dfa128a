"""The checkpoint manager beside torch.save, safetensors and moonclip, which all save the same training in turn.

    python -m tests.bench.save_bench [--scenarios dense lora bf16] [--saves 10] [--steps 4]

A GPT is trained on the processor. After every few steps each contestant saves the state, one after the other and in
another order each time, so that whatever else the machine does meets all of them. Of each save: how long the loop is
held, when it is durable, and the time of the processor that it takes; what is left to be done in the background then is
waited for, so that nobody pays for another. At the end: how long the newest takes to load into a model, both at once
and when the contestant was closed and opened again; and the bytes on disk when all are closed. Peak memory is measured
in a process for each contestant.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tests.bench.common import SCRATCH, machine, print_table, timed
from tests.demo.gpt import GPT, batches, corpus, train

LAYERS, WIDTH, CONTEXT, BATCH = 12, 520, 128, 4
SCENARIOS = ("dense", "lora", "bf16")
TARGETS = {"held": 1.0, "durable": 0.5, "load": 0.2, "bytes": {"dense": 0.90, "lora": 0.9, "bf16": 0.6}}
"""Of moonclip's figure, at most."""
LOAD_OF_SAFETENSORS = 1.5
PEAK = 1.4
"""Of the state, at most."""
RANK = 8


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank part that learns."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return result


@dataclass
class Training:
    """A model and its optimizer, as one scenario trains them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Iterator[tuple[Tensor, Tensor]]

    def advance(self, steps: int) -> None:
        """Take some steps."""
        train(self.model, self.optimizer, self.data, steps)

    def state_bytes(self) -> int:
        """Bytes of all tensors of model and optimizer."""
        return sum(one.numel() * one.element_size() for one in tensors_of(self.model, self.optimizer).values())


def training(scenario: str, layers: int, width: int) -> Training:
    """Dense pre-training, adapters on a frozen model, or a fine-tune whose weights and moments are bf16."""
    torch.manual_seed(0)
    model: nn.Module = GPT(layers, width, CONTEXT)
    rate = 3e-4
    if scenario == "lora":
        model.requires_grad_(False)
        for block in model.blocks:  # type: ignore[union-attr]
            block.qkv, block.out = Adapter(block.qkv), Adapter(block.out)  # type: ignore[union-attr]
    if scenario == "bf16":
        model, rate = model.to(torch.bfloat16), 1e-5
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=rate)
    return Training(model, optimizer, batches(corpus(1 << 20), CONTEXT, BATCH, 0))


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of both by flat names."""
    found = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
    return found


class Contestant(Protocol):
    """Saves into a directory of its own."""

    name = ""

    def __init__(self, place: Path) -> None:
        self.place = place

    @abstractmethod
    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Training goes on when this returns."""

    def flush(self) -> None:
        """Return when it is durable."""

    def settle(self) -> None:
        """Return when nothing is left to be done in the background."""

    @abstractmethod
    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The newest into a model and an optimizer."""

    def close(self) -> None:
        """Let go of everything."""

    def open_again(self) -> None:
        """As another program would."""


class TorchSave(Contestant):
    """torch.save, and an fsync."""

    name = "torch.save"

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        path = self.place / f"{step}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        self._last = path

    def flush(self) -> None:
        fd = os.open(self._last, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = torch.load(self._last, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class Safetensors(Contestant):
    """safetensors.torch, and an fsync; the optimizer's structure is made of the optimizer at hand."""

    name = "safetensors"

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from safetensors.torch import save_file

        self._last = self.place / f"{step}.safetensors"
        save_file({name: one.contiguous() for name, one in tensors_of(model, optimizer).items()}, self._last)

    flush = TorchSave.flush

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from safetensors.torch import load_file

        found = load_file(self._last)
        model.load_state_dict({name: one for name, one in found.items() if not name.startswith("optimizer.")})
        state: dict[int, dict[str, Tensor]] = {}
        for name, one in found.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                # Not the mapped file, which may be deleted, and of which nothing has been read yet.
                state.setdefault(int(number), {})[key] = one.clone()
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class Moonclip(Contestant):
    """The newest moonclip from PyPI, with its defaults."""

    name = "moonclip"

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        from moonclip import CheckpointManager

        self._manager: Any = CheckpointManager(str(place))

    def open_again(self) -> None:
        self.__init__(self.place)  # type: ignore[misc]

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._manager.save(step=step, model=model, optimizer=optimizer)

    def flush(self) -> None:
        self._manager.flush()

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._manager.load_latest(model=model, optimizer=optimizer)


class Moonclipfs(Contestant):
    """Ours, with its defaults."""

    name = "moonclipfs"

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        from moonclipfs import CheckpointManager

        self._manager = CheckpointManager(place / "store")

    def open_again(self) -> None:
        self.__init__(self.place)  # type: ignore[misc]

    def settle(self) -> None:
        self._manager._tightening.wait()
        self._manager._tidying.wait()

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._manager.save(step, model, optimizer)

    def flush(self) -> None:
        self._manager.flush()

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._manager.load_latest(model, optimizer)

    def close(self) -> None:
        self._manager.close()


CONTESTANTS: Mapping[str, type[Contestant]] = {one.name: one for one in (TorchSave, Safetensors, Moonclip, Moonclipfs)}


@dataclass
class Figures:
    """What was measured of one contestant: seconds and bytes."""

    held: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    load_again: list[float] = field(default_factory=list)
    bytes: int = 0
    peak: float = 0.0


def bench(scenario: str, names: list[str], options: argparse.Namespace) -> dict[str, Figures]:
    """One training, saved by all."""
    figures = {name: Figures() for name in names}
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="save-") as scratch:
        contestants = {}
        for name in names:
            (place := Path(scratch) / name).mkdir()
            contestants[name] = CONTESTANTS[name](place)
        run = training(scenario, options.layers, options.width)
        for number in range(options.saves):
            run.advance(options.steps)
            for name in rotated(names, number):
                began, cpu = time.perf_counter(), time.process_time()
                contestants[name].save(number, run.model, run.optimizer)
                held = time.perf_counter()
                contestants[name].flush()
                figures[name].held.append(held - began)
                figures[name].durable.append(time.perf_counter() - began)
                contestants[name].settle()
                figures[name].cpu.append(time.process_time() - cpu)
        for number in range(options.loads):
            for name in rotated(names, number):
                figures[name].load.append(load(contestants[name], scenario, run, options))
        for name in names:
            contestants[name].close()
            contestants[name].open_again()
        for number in range(options.loads):
            for name in rotated(names, number):
                figures[name].load_again.append(load(contestants[name], scenario, run, options))
        for name in names:
            contestants[name].close()
            figures[name].bytes = bytes_below(Path(scratch) / name)
    return figures


def load(contestant: Contestant, scenario: str, run: Training, options: argparse.Namespace) -> float:
    """Seconds that loading into a new model takes; what comes is compared."""
    fresh = training(scenario, options.layers, options.width)
    _, seconds = timed(lambda: contestant.load(fresh.model, fresh.optimizer))
    expected = tensors_of(run.model, run.optimizer)
    for name, one in tensors_of(fresh.model, fresh.optimizer).items():
        if not torch.equal(one, expected[name]):
            raise ArithmeticError(f"{contestant.name}: {name} came back with other values")
    return seconds


def rotated(names: list[str], number: int) -> list[str]:
    """The names, begun with another one each time."""
    at = number % len(names)
    return names[at:] + names[:at]


def bytes_below(place: Path) -> int:
    """Bytes that files take on the disk, but for the reserve of a store, which is the same 16 MiB for any."""
    return sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file() and path.name != "reserve")


def peak_of(name: str, scenario: str, options: argparse.Namespace) -> float:
    """Peak memory over that of training without saves, as a share of the state; measured in a process of its own."""
    words = [
        sys.executable, "-m", "tests.bench.save_bench", "--peak-of", name, "--scenarios", scenario,
        "--layers", str(options.layers), "--width", str(options.width),
    ]  # fmt: skip
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_peak(name: str, scenario: str, options: argparse.Namespace) -> float:
    """The same in this process."""
    run = training(scenario, options.layers, options.width)
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="peak-") as scratch:
        contestant = CONTESTANTS[name](Path(scratch))
        run.advance(3)
        alone = peak_while(lambda: run.advance(2))

        def saving() -> None:
            for step in range(3):
                contestant.save(step, run.model, run.optimizer)
                run.advance(1)
            contestant.flush()

        saved = peak_while(saving)
        contestant.close()
    return (saved - alone) / run.state_bytes()


def peak_while(work: Callable[[], object]) -> int:
    """Peak of the resident memory in bytes while `work` is done."""
    Path("/proc/self/clear_refs").write_text("5")
    work()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def report(scenario: str, figures: Mapping[str, Figures], state_bytes: int) -> None:
    """Tables of one scenario."""
    print(f"\n{scenario}: {state_bytes / 1e6:.0f} MB a checkpoint\n")
    rows = [
        [
            name, 1000 * statistics.median(one.held), 1000 * max(one.held), statistics.median(one.durable),
            statistics.median(one.cpu), one.bytes / 1e6, statistics.median(one.load),
            statistics.median(one.load_again), one.peak,
        ]
        for name, one in figures.items()
    ]  # fmt: skip
    print_table(
        ("", "held ms", "at most", "durable s", "cpu s", "MB in all", "load s", "load again s", "peak / state"), rows
    )
    if "moonclip" not in figures or "moonclipfs" not in figures:
        return
    ours, theirs = figures["moonclipfs"], figures["moonclip"]

    def share(pick: Callable[[Figures], float]) -> float:
        return pick(ours) / pick(theirs)

    checks = [
        ["held, of moonclip", share(lambda one: statistics.median(one.held)), TARGETS["held"]],
        ["durable, of moonclip", share(lambda one: statistics.median(one.durable)), TARGETS["durable"]],
        ["bytes, of moonclip", share(lambda one: one.bytes), TARGETS["bytes"][scenario]],  # type: ignore[index]
        ["load, of moonclip", share(lambda one: statistics.median(one.load)), TARGETS["load"]],
        ["load again, of moonclip", share(lambda one: statistics.median(one.load_again)), TARGETS["load"]],
    ]
    if "safetensors" in figures:
        plain = figures["safetensors"]
        now = statistics.median(ours.load) / statistics.median(plain.load)
        again = statistics.median(ours.load_again) / statistics.median(plain.load_again)
        checks.append(["load, of safetensors", now, LOAD_OF_SAFETENSORS])
        checks.append(["load again, of safetensors", again, LOAD_OF_SAFETENSORS])
    if ours.peak:
        checks.append(["peak, of the state", ours.peak, PEAK])
    print()
    print_table(("measured", "share", "at most"), checks)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="of training between two saves")
    parser.add_argument("--loads", type=int, default=3)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--no-peak", action="store_true", help="leave out peak memory")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("medium")
    if options.peak_of:
        print(measure_peak(options.peak_of, options.scenarios[0], options))
        return
    print(machine(), f"load {os.getloadavg()[0]:.1f},", f"{shutil.disk_usage(SCRATCH).free / 1e9:.0f} GB free")
    for scenario in options.scenarios:
        figures = bench(scenario, options.contestants, options)
        if not options.no_peak:
            for name, one in figures.items():
                one.peak = peak_of(name, scenario, options)
        probe = training(scenario, options.layers, options.width)
        probe.advance(1)
        report(scenario, figures, probe.state_bytes())


if __name__ == "__main__":
    main()
