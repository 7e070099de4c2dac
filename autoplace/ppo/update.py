"""Gradient steps: everything that happens between one rollout and the next policy."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.device_names import CPU, is_accelerator
from autoplace.engines import FP32
from autoplace.errors import RunError
from autoplace.ppo.adam import Adam, make_adam
from autoplace.ppo.arithmetic import Arithmetic
from autoplace.ppo.batch import Batch
from autoplace.ppo.distribution import entropy as mean_entropy
from autoplace.ppo.distribution import log_prob
from autoplace.ppo.loss import approximate_kl, clip_fraction, ppo_loss, standardize
from autoplace.ppo.network import ActorCritic
from autoplace.workload import Hyperparameters, minibatch_sizes

log = logging.getLogger(__name__)

Losses = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]  # of minibatch_losses
_KL = 3  # place of the KL divergence among the metrics


class NonFiniteUpdateError(RunError):
    """A loss or gradient that became NaN or infinite, found before the weights are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """Means over the minibatches of the last epoch that ran: where the update ended up.

    Attributes:
        policy_loss: clipped surrogate, to be minimised.
        value_loss: mean squared error of the values, in units of the rewards as they are learned
            from (normalised ones where that is on).
        entropy: of the policy, nats.
        approx_kl: estimated KL divergence from the policy that acted.
        clip_fraction: share of samples whose probability ratio left the clip range.
        grad_norm: gradient norm before clipping.
        learning_rate: Adam's step size in this update.
        num_minibatches: gradient steps taken, over all epochs.
    """

    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    clip_fraction: float
    grad_norm: float
    learning_rate: float
    num_minibatches: int


class Updater:
    """The optimiser and the gradient steps of one network, on whatever device it is.

    Gradients live in one flat buffer beside the network's parameters, so that clipping is one norm
    and Adam sees one parameter; element by element both compute what they would for separate ones.
    """

    def __init__(
        self,
        network: ActorCritic,
        hyperparameters: Hyperparameters,
        *,
        minibatch_rows: int,
        precision: str = FP32,
        accumulation_steps: int = 1,
    ) -> None:
        """Take gradient steps on ``network``.

        Args:
            network: its weights are changed in place.
            hyperparameters: of the loss.
            minibatch_rows: rows of one gradient step.
            precision: of passes and matrix products, a key of :data:`autoplace.engines.PRECISIONS`.
            accumulation_steps: backward passes that a minibatch is cut into, so that only a part
                of its activations is held at once; the gradient is the same to rounding.
        """
        self.network = network
        self.hyperparameters = hyperparameters
        self.minibatch_rows = minibatch_rows
        self._accumulation_steps = accumulation_steps
        self._arithmetic = Arithmetic(precision, network.flat.device.type)
        weights = network.flat[: network.num_trainable]
        if not is_accelerator(weights.device.type):
            devices.reuse_freed_memory()
        self._flat = torch.nn.Parameter(weights)
        self._gradient = torch.zeros_like(weights)
        self._flat.grad = self._gradient
        self._bind_gradients()
        self._metrics = torch.zeros(6, device=weights.device)
        self._optimizer = self._make_optimizer(hyperparameters.learning_rate)

    def _make_optimizer(self, learning_rate: float) -> Adam:
        return make_adam(self._flat, learning_rate)

    def _bind_gradients(self) -> None:
        """Make each parameter's gradient a view of the flat one, at the parameter's own place."""
        origin = self._flat.storage_offset()
        for parameter in self.network.parameters():
            start = parameter.storage_offset() - origin
            view = self._gradient[start : start + parameter.numel()]
            parameter.grad = view.view(parameter.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each minibatch of one epoch."""
        return minibatch_sizes(self.hyperparameters.rollout_rows, self.minibatch_rows)

    def minibatch_step(self, batch: Batch, index: Tensor, *, measure: bool = False) -> None:
        """One gradient step on the rows ``index`` (int64 ``[B]``). Never waits for the device.

        Args:
            batch: the whole rollout.
            index: rows of the minibatch.
            measure: whether its loss terms are added to the metrics.
        """
        self._torch_step(batch, index, measure=measure, losses=minibatch_losses)

    def _torch_step(self, batch: Batch, index: Tensor, *, measure: bool, losses: Losses) -> None:
        hyper = self.hyperparameters
        observations, actions, old_log_probs, advantages, returns = batch.gather(index)
        gathered = [observations, actions, old_log_probs, advantages, returns]
        if hyper.value_clip is not None:
            gathered.append(returns - advantages)  # the values that acted
        if hyper.normalize_advantages:
            gathered[3] = standardize(advantages)
        terms = self._passes_that_fit(gathered, measure=measure, losses=losses)
        self._arithmetic.unscale(self._optimizer)
        norm = torch.linalg.vector_norm(self._gradient)
        if measure:
            with torch.no_grad():
                self._metrics += torch.stack((*terms, self._arithmetic.norm_to_report(norm)))
        self._gradient.mul_((hyper.max_grad_norm / (norm + 1e-6)).clamp_(max=1.0))
        self._arithmetic.step(self._optimizer)

    def _passes_that_fit(
        self, rows: Sequence[Tensor], *, measure: bool, losses: Losses
    ) -> tuple[Tensor, ...]:
        """As :meth:`_passes`, from now on in twice as many parts where memory runs out."""
        while True:
            try:
                return self._passes(rows, measure=measure, losses=losses)
            except torch.OutOfMemoryError:
                if self._accumulation_steps >= len(rows[0]):
                    raise
            # Behind the exception, which holds what was allocated.
            devices.empty_cache(str(self._flat.device))
            self._accumulation_steps *= 2
            log.warning(
                "%s ran out of memory in a gradient step: its %d rows pass in %d parts from now "
                "on, which is slower and learns the same (--accumulation-steps %d)",
                self._flat.device,
                len(rows[0]),
                self._accumulation_steps,
                self._accumulation_steps,
            )

    def _passes(
        self, rows: Sequence[Tensor], *, measure: bool, losses: Losses
    ) -> tuple[Tensor, ...]:
        """The gradient of a minibatch, part by part; its loss terms where they are wanted."""
        self._gradient.zero_()
        terms: tuple[Tensor, ...] = ()
        with self._arithmetic.matmuls():
            for part in _parts(rows, self._accumulation_steps):
                share = len(part[0]) / len(rows[0])
                found = self._backward(part, share, measure=measure, losses=losses)
                terms = tuple(map(torch.add, terms, found)) if terms else found
        return terms

    def _backward(
        self, part: Sequence[Tensor], share: float, *, measure: bool, losses: Losses
    ) -> tuple[Tensor, ...]:
        """Add the gradient of ``share`` of a minibatch; its loss terms where they are wanted."""
        total, terms = losses(
            self.network, self.hyperparameters, self._arithmetic, part, measure=measure
        )
        if share != 1.0:
            total, terms = total * share, tuple(term * share for term in terms)
        self._arithmetic.scale(total).backward()  # type: ignore[no-untyped-call]
        return terms

    def update(
        self, batch: Batch, permutations: Sequence[Tensor], *, learning_rate: float, iteration: int
    ) -> UpdateStats:
        """All epochs over one rollout, then one look at the numbers.

        Args:
            batch: the whole rollout.
            permutations: int64 ``[R]`` on the network's device, one per epoch.
            learning_rate: Adam's step size.
            iteration: for the message where something became non-finite.

        Raises:
            NonFiniteUpdateError: a loss or a gradient was NaN or infinite. The network's weights
                are spoilt then and must not be used.
        """
        sizes = list(minibatch_sizes(batch.num_rows, self.minibatch_rows))
        if batch.num_rows < len(permutations[0]):
            permutations = restrict(torch.stack(tuple(permutations)), batch.num_rows).unbind(0)
        if batch.num_rows < 2:  # a rollout that was all resets: nothing to learn
            sizes, permutations = [], []
        self.set_learning_rate(learning_rate)
        self._metrics.zero_()
        target_kl = self.hyperparameters.target_kl
        epochs = len(permutations)
        for epoch, permutation in enumerate(permutations):
            measure = target_kl is not None or epoch == len(permutations) - 1
            if epoch == 0 or len(sizes) > 1:  # where one holds all rows, their order is no matter
                minibatches = permutation.split_with_sizes(sizes)
            for index in minibatches:
                self.minibatch_step(batch, index, measure=measure)
            if target_kl is not None and epoch < epochs - 1:
                # The one wait for the device in an epoch, and only where it was asked for.
                if self._mean_kl(len(sizes)) > target_kl:
                    epochs = epoch + 1
                    break
                self._metrics.zero_()
        # A NaN in any gradient stays in the weights, so their sum tells for all minibatches.
        seen = torch.cat(
            (self._metrics / max(1, len(sizes)), self._flat.detach().sum().unsqueeze(0))
        )
        policy, value, entropy, kl, clipped, norm, weights = seen.tolist()
        if not math.isfinite(weights) or not math.isfinite(policy + value + norm):
            raise NonFiniteUpdateError(
                f"the loss of iteration {iteration} is not finite (policy {policy:.3g}, value "
                f"{value:.3g}, gradient norm {norm:.3g}): lower --learning-rate, or look at the "
                "environment's rewards; the last checkpoint is untouched"
            )
        return UpdateStats(
            policy_loss=policy,
            value_loss=value,
            entropy=entropy,
            approx_kl=kl,
            clip_fraction=clipped,
            grad_norm=norm,
            learning_rate=learning_rate,
            num_minibatches=len(sizes) * epochs,
        )

    def _mean_kl(self, num_minibatches: int) -> float:
        """Of the epoch that the metrics hold."""
        return float(self._metrics[_KL]) / num_minibatches

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use ``learning_rate`` from the next gradient step on."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def optimizer_state(self) -> dict[str, Tensor]:
        """Adam's moments and step count; empty before the first gradient step."""
        return dict(self._optimizer.state[self._flat])

    def use_moments(self, first: Tensor, second: Tensor, step: int) -> None:
        """Let Adam keep its moments in tensors of the caller's, after ``step`` gradient steps."""
        fused = bool(self._optimizer.param_groups[0]["fused"])
        count = torch.tensor(float(step), device=self._flat.device if fused else "cpu")
        self.load_optimizer_state({"step": count, "exp_avg": first, "exp_avg_sq": second})

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of :meth:`optimizer_state`, from tensors on this network's device."""
        self._optimizer.state[self._flat] = dict(state)


def minibatch_losses(
    network: ActorCritic,
    hyper: Hyperparameters,
    arithmetic: Arithmetic,
    rows: Sequence[Tensor],
    *,
    measure: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss of gathered rows, and where they are wanted its terms without their gradients.

    Args:
        network: that learns.
        hyper: of the loss.
        arithmetic: how the passes compute.
        rows: observations, actions, log-probabilities, advantages, returns and, where values are
            clipped, the values that acted.
        measure: whether the terms are wanted.

    Returns:
        The loss, and policy loss, value loss, entropy, KL divergence and clip fraction.
    """
    heads = network.spec.action_heads
    observations, actions, old_log_probs, advantages, returns, *old_values = rows
    outputs, values = arithmetic.passes(network, observations)
    entropy = mean_entropy(outputs, network.log_std, heads) if hyper.entropy_coef else None
    loss = ppo_loss(
        log_prob(outputs, network.log_std, actions, heads),
        old_log_probs,
        advantages,
        values,
        returns,
        entropy,
        *old_values,
        clip_range=hyper.clip_range,
        value_clip=hyper.value_clip,
        value_coef=hyper.value_coef,
        entropy_coef=hyper.entropy_coef,
    )
    if not measure:
        return loss.total, ()
    with torch.no_grad():
        if entropy is None:
            entropy = mean_entropy(outputs, network.log_std, heads)
        kl = approximate_kl(loss.ratio, loss.log_ratio)
        clipped = clip_fraction(loss.ratio, hyper.clip_range)
        terms = loss.policy, loss.value, entropy, kl, clipped
        return loss.total, tuple(term.detach() for term in terms)


def draw_permutations(num_rows: int, epochs: int, generator: torch.Generator) -> Tensor:
    """Host int64 ``[epochs, num_rows]``: the order of rows in each epoch."""
    orders = torch.empty(epochs, num_rows, dtype=torch.int64)
    for order in orders:
        torch.randperm(num_rows, generator=generator, out=order)
    return orders


def restrict(permutations: Tensor, num_rows: int) -> Tensor:
    """The orders in which longer permutations ``[..., R]`` have the rows below ``num_rows``.

    They are as random as the longer ones, and draws need not know how many rows there will be.
    """
    shape = (*permutations.shape[:-1], num_rows)
    if permutations.device.type == CPU:  # numpy takes a tenth of the time here
        orders = permutations.numpy()
        return torch.from_numpy(orders[orders < num_rows].reshape(shape))
    return permutations[permutations < num_rows].view(shape)


def _parts(tensors: Sequence[Tensor], count: int) -> Iterator[tuple[Tensor, ...]]:
    """The rows of several tensors in ``count`` parts of about the same size, none empty."""
    count = min(count, len(tensors[0]))
    if count == 1:
        yield tuple(tensors)
        return
    yield from zip(*(torch.tensor_split(tensor, count) for tensor in tensors), strict=True)
