"""A stand-in for recorded device work: the operations of one run, repeated on the same tensors.

As on a device, a replay runs no Python of the work, only the operations that it issued, on the
memory that they were issued on.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Record(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result


class RecordingGraph:
    """Takes the place of ``autoplace.device.Graph``."""

    made = 0

    def __init__(self, device, work):
        RecordingGraph.made += 1
        for _ in range(3):
            work()
        with _Record() as record:
            work()
        self._inference = torch.is_inference_mode_enabled()
        self._calls = record.calls
        self._undo_last_run = None

    def replay(self):
        with torch.inference_mode(self._inference), torch.no_grad():
            for function, args, kwargs, result in self._calls:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)
