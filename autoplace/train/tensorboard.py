"""TensorBoard events of a run.

| tag | meaning |
|---|---|
| ``return/mean`` | mean return of the last 100 episodes (absent while none has ended) |
| ``return/length`` | mean length of the last 100 episodes |
| ``speed/env_steps_per_s`` | of this call, warm-up excluded |
| ``time/<stage>``, ``time/<stage>@<lane>`` | seconds of a stage in the iteration |
| ``loss/policy``, ``loss/value``, ``loss/entropy`` | means over the last epoch |
| ``update/approx_kl``, ``update/clip_fraction``, ``update/grad_norm`` | likewise |
| ``update/learning_rate`` | Adam's step size |

The horizontal axis is env steps of the whole run.
"""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from autoplace.results import RunResult, stage_seconds
from autoplace.train.callbacks import Callback, IterationReport


class TensorBoard(Callback):
    """Writes events into a run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._writer = SummaryWriter(str(run_dir))

    def on_iteration(self, report: IterationReport) -> None:
        """Write one point of every curve."""
        update = report.update
        scalars = {
            "return/mean": report.mean_return,
            "return/length": report.mean_length,
            "speed/env_steps_per_s": report.env_steps_per_s,
            "loss/policy": update.policy_loss,
            "loss/value": update.value_loss,
            "loss/entropy": update.entropy,
            "update/approx_kl": update.approx_kl,
            "update/clip_fraction": update.clip_fraction,
            "update/grad_norm": update.grad_norm,
            "update/learning_rate": update.learning_rate,
            **{f"time/{name}": s for name, s in stage_seconds(report.stage_s).items()},
        }
        for tag, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(tag, value, report.env_steps)

    def on_end(self, result: RunResult) -> None:
        """Flush."""
        self.close()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
