"""Tensors between RAM and the device of a model: plain copies on a CPU; on a GPU by pinned memory and a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


class Transfer:
    """Copies to and from one device. On a GPU all copies of a call are in flight together, beside the computing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def pinned(self) -> bool:
        """Whether what is to be copied to the device should lie in pinned memory."""
        return self._stream is not None

    def to_device(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies on the device; those given, where that is the CPU."""
        if self._stream is None:
            return dict(tensors)
        targets = {name: torch.empty_like(tensor, device=self.device) for name, tensor in tensors.items()}
        self.fill((targets[name], tensor) for name, tensor in tensors.items())
        return targets

    def fill(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the second tensor of each pair into the first, which is on the device.

        What is computed with them after this call waits for the copies; the caller does not.
        """
        with torch.no_grad():
            if self._stream is None:
                for target, source in pairs:
                    target.copy_(source)
                return
            current = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(current)  # what still computes with the old contents
            with torch.cuda.stream(self._stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                    target.record_stream(self._stream)
            current.wait_stream(self._stream)

    def to_ram(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies in RAM, complete when this returns, that share nothing with the tensors given."""
        if self._stream is None:
            with torch.inference_mode(False):
                return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            copies = {}
            for name, tensor in tensors.items():
                on_device = tensor.is_cuda
                copies[name] = torch.empty_like(tensor.detach(), device="cpu", pin_memory=on_device)
                copies[name].copy_(tensor.detach(), non_blocking=on_device)
        self._stream.synchronize()
        return copies
