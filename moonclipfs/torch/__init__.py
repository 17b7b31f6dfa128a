"""State dicts and the store: the checkpoint manager, paged experts."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("moonclipfs.torch needs PyTorch: pip install 'moonclipfs[torch]'") from error

from moonclipfs.torch.experts import ExpertId, ExpertStat, ExpertStore
from moonclipfs.torch.paged import PagedExperts
from moonclipfs.torch.tiers import ExpertTiers

__all__ = ["ExpertId", "ExpertStat", "ExpertStore", "ExpertTiers", "PagedExperts"]
