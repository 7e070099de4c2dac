"""A task as physics: parts in seconds, from the basic rates of a machine.

======================  ===========================================================================
symbol                  meaning
======================  ===========================================================================
a                       fixed seconds of a call (dispatch, launch and wait)
R, B                    floating-point operations and bytes per second
h, g                    rows and columns of its result at which a matmul reaches half of R
======================  ===========================================================================
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from autoplace.engines import EAGER, NUMPY
from autoplace.errors import CalibrationError
from autoplace.measurement import Measurement, Task
from autoplace.products import Regimes
from autoplace.workload import FLOAT_BYTES

# --------------------------------------------------------------------------------------------------
# Primitives: one line of physics each


@dataclass(frozen=True, slots=True)
class Matmul:
    """Seconds of an (m, k) @ (k, n): a + max(flops / R (1 + h / m)(1 + g / n), bytes / B).

    Columns are computed in blocks (vector registers, tiles): so many count as make up whole ones.
    A single row is another algorithm, which streams the matrix: a + bytes / V, where V was timed.
    """

    fixed_s: float
    flops_per_s: float
    bytes_per_s: float
    half_rows: float
    half_columns: float
    block: float = 1.0
    vector_bytes_per_s: float = 0.0

    def work_s(self, m: float, k: float, n: float) -> float:
        """Seconds without the fixed part."""
        flops = 2.0 * m * k * self.block * math.ceil(n / self.block)
        nbytes = FLOAT_BYTES * (m * k + k * n + m * n)
        if m == 1 and self.vector_bytes_per_s:
            return nbytes / self.vector_bytes_per_s
        shape = (1 + self.half_rows / m) * (1 + self.half_columns / n)
        return max(flops / self.flops_per_s * shape, nbytes / self.bytes_per_s)

    def call_s(self, m: float, k: float, n: float) -> float:
        """Seconds of a call of such a product, apart from its work."""
        return self.fixed_s

    def slopes_s(self, m: float, k: float, n: float) -> tuple[float, float, float]:
        """Derivatives of that by the logarithms of 1 + h, 1 + g and B."""
        work_s = self.work_s(m, k, n)
        nbytes = FLOAT_BYTES * (m * k + k * n + m * n)
        if m == 1 and self.vector_bytes_per_s:
            return 0.0, 0.0, 0.0
        if work_s <= nbytes / self.bytes_per_s:
            return 0.0, 0.0, -work_s
        rows, columns = self.half_rows, self.half_columns
        return work_s * (1 + rows) / (m + rows), work_s * (1 + columns) / (n + columns), 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of something whose time grows with its bytes: a + bytes / B."""

    fixed_s: float
    bytes_per_s: float

    def __call__(self, nbytes: float) -> float:
        """Seconds for so many bytes (or other units)."""
        return self.fixed_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size where every level of caches has a rate of its own.

    Where larger sizes are the slower ones, the time between two sizes that were timed lies below
    the chord and above the straight line through the two before it.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, rows: Iterable[Measurement]) -> Curve:
        """The curve through timed sizes, at least two."""
        points = sorted((float(m.task.shape[0]), m.median_s) for m in rows)
        return cls(tuple(size for size, _ in points), tuple(seconds for _, seconds in points))

    def __call__(self, size: float) -> tuple[float, float]:
        """Seconds for that size, and by what factor they may be off either way."""
        sizes, seconds = self.sizes, self.seconds
        right = min(max(bisect.bisect_left(sizes, size), 1), len(sizes) - 1)
        chord_s = self._line(right - 1, size)
        low_s = chord_s
        if right > 1 and sizes[right - 1] < size < sizes[right]:
            low_s = min(max(self._line(right - 2, size), seconds[right - 1]), chord_s)
        low_s, chord_s = max(low_s, 0.5 * seconds[0]), max(chord_s, 0.5 * seconds[0])
        return math.sqrt(low_s * chord_s), math.sqrt(chord_s / low_s)

    def _line(self, left: int, size: float) -> float:
        """Seconds of ``size`` on the line through two neighbours."""
        slope = (self.seconds[left + 1] - self.seconds[left]) / (
            self.sizes[left + 1] - self.sizes[left]
        )
        return self.seconds[left] + slope * (size - self.sizes[left])


_Fit = TypeVar("_Fit")


def _around(
    fits: Mapping[tuple[str, int], _Fit], device: str, threads: int
) -> tuple[_Fit, _Fit, float] | None:
    """A device's fits at the timed thread counts around one, and where it is between (0 to 1)."""
    counts = [count for name, count in fits if name == device]
    if not counts:
        return None
    lower = max((c for c in counts if c <= threads), default=min(counts))
    upper = min((c for c in counts if c >= threads), default=max(counts))
    share = math.log(threads / lower) / math.log(upper / lower) if lower < upper else 0.0
    return fits[device, lower], fits[device, upper], share


def _at_threads(fits: Mapping[tuple[str, int], Line], device: str, threads: int) -> Line | None:
    """A device's line at a thread count: geometric between timed counts."""
    found = _around(fits, device, threads)
    if found is None or not found[2]:
        return found and found[0]
    first, second, share = found
    values = zip(dataclasses.astuple(first), dataclasses.astuple(second), strict=True)
    return Line(*(a * (b / a) ** share if a and b else max(a, b) for a, b in values))


@dataclass(frozen=True, slots=True)
class Between:
    """Products at a thread count between two that were timed: geometric between their seconds."""

    first: Matmul | Regimes
    second: Matmul | Regimes
    share: float

    @property
    def fixed_s(self) -> float:
        """Seconds of a call, whatever its sizes."""
        return self._mean(self.first.fixed_s, self.second.fixed_s)

    def call_s(self, m: float, k: float, n: float) -> float:
        """Seconds of a call of such a product, apart from its work."""
        return self._mean(self.first.call_s(m, k, n), self.second.call_s(m, k, n))

    def work_s(self, m: float, k: float, n: float) -> float:
        """Seconds without those of the call."""
        return self._mean(self.first.work_s(m, k, n), self.second.work_s(m, k, n))

    def slopes_s(self, m: float, k: float, n: float) -> tuple[float, float, float]:
        """Derivatives as of the first."""
        return self.first.slopes_s(m, k, n)

    def _mean(self, first: float, second: float) -> float:
        if first <= 0 or second <= 0:
            return max(first, second)
        return math.exp(math.log(first) + self.share * math.log(second / first))


Products = Matmul | Regimes | Between


@dataclass(slots=True, kw_only=True)
class Primitives:
    """The machine's basic rates, per device, and on the CPU per thread count.

    Attributes:
        devices: that have rates, the CPU first.
        dispatch_s: host time to issue an operation, by device.
        launch_s: of an operation that is issued and waited for, by device.
        matmul: by device and threads.
        numpy_matmul: the same of numpy's products.
        regimes: where they tell more than ``matmul``.
        numpy_regimes: where they tell more than ``numpy_matmul``.
        elementwise: seconds by bytes streamed, by device and threads.
        activation: seconds by numbers, by device and threads.
        copy: seconds by bytes, by device, direction, and whether the host's side is pinned.
    """

    devices: tuple[str, ...]
    dispatch_s: dict[str, float] = field(default_factory=dict)
    launch_s: dict[str, float] = field(default_factory=dict)
    matmul: dict[tuple[str, int], Matmul] = field(default_factory=dict)
    numpy_matmul: dict[tuple[str, int], Matmul] = field(default_factory=dict)
    regimes: dict[tuple[str, int], Regimes] = field(default_factory=dict)
    numpy_regimes: dict[tuple[str, int], Regimes] = field(default_factory=dict)
    elementwise: dict[tuple[str, int], Line] = field(default_factory=dict)
    activation: dict[tuple[str, int], Line] = field(default_factory=dict)
    copy: dict[tuple[str, str, bool], Line] = field(default_factory=dict)

    def matmul_for(self, device: str, threads: int, engine: str = EAGER) -> Products:
        """The matmul rates of a device with so many threads; numpy's are its own."""
        fits: dict[tuple[str, int], Matmul | Regimes]
        if engine == NUMPY and self.numpy_matmul:
            fits = {**self.numpy_matmul, **self.numpy_regimes}
        else:
            fits = {**self.matmul, **self.regimes}
        found = _around(fits, device, threads)
        assert found is not None, device  # the calibration was refused otherwise
        first, second, share = found
        return Between(first, second, share) if share else first

    def memory_s(self, device: str, threads: int, nbytes: float) -> float:
        """Seconds to stream ``nbytes`` through the device's memory."""
        line = _at_threads(self.elementwise, device, threads)
        if line is None:
            found = _around(self.matmul, device, threads)
            assert found is not None, device
            return nbytes / found[0].bytes_per_s
        return nbytes / line.bytes_per_s

    def activation_s(self, device: str, threads: int, numbers: float) -> float:
        """Seconds of a tanh over so many numbers, its fixed part left out."""
        line = _at_threads(self.activation, device, threads)
        if line is None:
            return self.memory_s(device, threads, 2.0 * FLOAT_BYTES * numbers)
        return numbers / line.bytes_per_s

    def launch_only_s(self, device: str) -> float:
        """Seconds between the issue of one tiny operation and its end, the issue left out."""
        latency_s = self.launch_s.get(device, self.dispatch_s[device])
        return max(latency_s - self.dispatch_s[device], 0.0)

    def copy_s(self, device: str, direction: str, pinned: bool, nbytes: float) -> float:
        """Seconds of one copy between host and device, issued and waited for."""
        line = self.copy.get((device, direction, pinned)) or self.copy.get(
            (device, direction, not pinned)
        )
        if line is None:
            raise CalibrationError(
                f"the calibration has no copies ({direction}) for {device}: "
                "run `autoplace calibrate` again with a larger --budget"
            )
        return line(nbytes)


# --------------------------------------------------------------------------------------------------
# Physics: a task as parts, in seconds


@dataclass(frozen=True, slots=True)
class Parts:
    """What a task's time is made of.

    Attributes:
        host_s: parts that the host does one after the other.
        device_s: parts that the device does meanwhile; empty on the CPU.
        tail_s: parts that start when both are done.
        wait_only: whether what counts is how long the host waits for the device after having done
            its own part.
        slopes_s: how the whole changes with rates whose effect is not that of a factor on a part,
            per unit of their logarithms.
    """

    host_s: tuple[float, ...]
    device_s: tuple[float, ...] = ()
    tail_s: tuple[float, ...] = ()
    wait_only: bool = False
    slopes_s: tuple[float, ...] = ()

    @property
    def flat(self) -> tuple[float, ...]:
        """All parts in order."""
        return (*self.host_s, *self.device_s, *self.tail_s)

    @property
    def unscaled_s(self) -> float:
        """Seconds of the parts as they stand."""
        return self.total_s([1.0] * len(self.flat))

    def total_s(self, factors: Iterable[float]) -> float:
        """Seconds with each part scaled by its factor, a nanosecond at least."""
        host, device, tail = self._sums(factors)
        if self.wait_only:
            return max(max(device - host, 0.0) + tail, LEAST_S)
        return max(max(host, device) + tail, LEAST_S)

    def gradient(self, factors: Iterable[float]) -> tuple[float, ...]:
        """Derivatives of log(:meth:`total_s`) by the logarithm of each factor, then by slopes."""
        factors = tuple(factors)
        host, device, _ = self._sums(factors)
        device_counts = device > host
        host_sign = (-1.0 if device_counts else 0.0) if self.wait_only else 1.0 - device_counts
        signs = (
            *(host_sign for _ in self.host_s),
            *(float(device_counts) for _ in self.device_s),
            *(1.0 for _ in self.tail_s),
        )
        parts = (p * f * sign for p, f, sign in zip(self.flat, factors, signs, strict=True))
        total_s = self.total_s(factors)
        return tuple(slope / total_s for slope in (*parts, *self.slopes_s))

    def _sums(self, factors: Iterable[float]) -> tuple[float, float, float]:
        scaled = [part * factor for part, factor in zip(self.flat, factors, strict=True)]
        num_host, num_device = len(self.host_s), len(self.device_s)
        return (
            sum(scaled[:num_host]),
            sum(scaled[num_host : num_host + num_device]),
            sum(scaled[num_host + num_device :]),
        )


LEAST_S = 1e-9

# Operations that the eager engine issues, counted from its code: (fixed, per hidden layer).
_MESSAGE_OPS = {"handoff": 40, "hand_over": 160}  # with cold caches
_POLICY_OPS = (8, 2)
_UPDATE_OPS = (70, 20)
_ONCE_OPS = 21  # once per update: the orders cut up, loss terms added up and looked at
# Of a rollout made ready (and per round of the scan): all of them, those that statistics of
# observations take, and those that scaling rewards takes. On the CPU numpy scans, for less.
_GAE_OPS = {True: (65, 8, 6), False: (50, 8, 4)}  # by whether it is on an accelerator
_STATISTICS_OPS = {True: 24, False: 20}
_REWARD_OPS = {True: (34, 3), False: (12, 2)}
_STANDARDIZE_OPS = 3
_BOOK_OPS = 8  # and one for every epoch


_Layers = Sequence[tuple[int, int]]


def _product_s(model: Products, m: float, k: float, n: float) -> float:
    """Seconds of a product in a step beyond those of any call, such as to wake other threads."""
    return max(model.call_s(m, k, n) - model.fixed_s, 0.0) + model.work_s(m, k, n)


def physics(primitives: Primitives, task: Task) -> Parts:
    """What a task's time is made of on a machine with these basic rates."""
    device, threads = task.device, task.threads
    dispatch_s = primitives.dispatch_s[device]
    on_device = device != "cpu"
    launch_s = primitives.launch_only_s(device) if on_device else 0.0

    def step(ops: float, layers: _Layers, rows: float, passes: float, *nbytes: float) -> Parts:
        """A step of the trainer: so many operations, and passes through layers."""
        assert task.network is not None
        hidden, trunk = task.network.hidden_sizes, task.network.trunk
        perceptrons = len(layers) // (len(hidden) + 1)
        model = primitives.matmul_for(device, threads, task.engine)
        streams = 1 if task.engine == NUMPY else threads  # all but numpy's products is one thread's
        # What actor and critic share: a convolution is a product with a row per output position.
        shared_s = sum(_product_s(model, rows * n, i, o) for n, i, o in trunk)
        activated = perceptrons * sum(hidden) + sum(n * outputs for n, _, outputs in trunk)
        layers_s = sum(_product_s(model, rows, inputs, outputs) for inputs, outputs in layers)
        if passes > 1:
            for index, (inputs, outputs) in enumerate(layers):
                layers_s += _product_s(model, outputs, rows, inputs)  # the gradient by weights
                if trunk or index % (len(hidden) + 1):  # and by the layer before, if there is one
                    layers_s += _product_s(model, rows, outputs, inputs)
        work = (
            layers_s + passes * shared_s,
            primitives.activation_s(device, streams, rows * activated),
            *(primitives.memory_s(device, streams, n) for n in nbytes),
        )
        if on_device:
            return Parts((ops * dispatch_s,), (ops * launch_s, *work))
        return Parts((ops * dispatch_s, *work))

    if task.op in _MESSAGE_OPS:
        # Pickling, two writes, two reads and a wake-up on either side, where it was never timed.
        return Parts((_MESSAGE_OPS[task.op] * dispatch_s,))
    if task.op in ("dispatch", "launch"):
        source = primitives.dispatch_s if task.op == "dispatch" else primitives.launch_s
        return Parts((source.get(device, dispatch_s),))
    if task.op == "matmul":
        model = primitives.matmul_for(device, threads, task.engine)
        m, k, n = task.shape
        if task.residency == "resident":
            on_device_s = (model.call_s(m, k, n), model.work_s(m, k, n))
            return Parts(on_device_s, slopes_s=model.slopes_s(m, k, n))
        # Both operands go there and are waited for; the way back is issued during the product.
        copied_s = (
            primitives.copy_s(device, "h2d", False, FLOAT_BYTES * m * k)
            + primitives.copy_s(device, "h2d", False, FLOAT_BYTES * k * n)
            + primitives.copy_s(device, "d2h", False, FLOAT_BYTES * m * n)
        )
        on_device_s = (max(model.call_s(m, k, n) - dispatch_s, 0.0), model.work_s(m, k, n))
        return Parts((dispatch_s,), on_device_s, (copied_s,))
    if task.op == "elementwise":
        nbytes = 2.0 * FLOAT_BYTES * task.shape[0]
        return Parts((dispatch_s + launch_s, primitives.memory_s(device, threads, nbytes)))
    if task.op == "activation":
        numbers = float(task.shape[0])
        return Parts((dispatch_s + launch_s, primitives.activation_s(device, threads, numbers)))
    if task.op == "copy":
        assert task.direction is not None
        return Parts(
            (primitives.copy_s(device, task.direction, bool(task.pinned), float(task.shape[0])),)
        )
    if task.op == "bookkeeping":
        steps, envs, actions, epochs = task.shape
        # Every number that is drawn, and what is counted over, takes about as long as a tanh.
        numbers = float(steps * envs * (actions + epochs + 4))
        ops_s = (_BOOK_OPS + epochs) * dispatch_s
        return Parts((ops_s, primitives.activation_s(device, 1, numbers)))
    if task.op == "gae":
        assert task.network is not None
        steps, envs = task.shape
        layers = task.network.layers
        rounds = math.ceil(math.log2(max(steps, 2)))
        fixed, per_layer, per_round = _GAE_OPS[on_device]
        depth = len(task.network.trunk) + len(layers) / 2
        ops = fixed + per_layer * depth + per_round * rounds
        # The whole rollout passes the network once; the scan streams it a few times per round.
        rows = float(steps * envs)
        streams, numbers = 4.0, 16 + 8 * rounds
        if not task.standardized:
            ops -= _STANDARDIZE_OPS + _STATISTICS_OPS[on_device]
            streams -= 3.0
        if not task.scaled_rewards:
            fixed, per_round = _REWARD_OPS[on_device]
            ops -= fixed + per_round * rounds
            numbers -= 6 + 4 * rounds
        nbytes = rows * (streams * task.network.observation_bytes + FLOAT_BYTES * numbers)
        return step(ops, layers, rows, 1.0, nbytes)

    network = task.network
    assert network is not None, task
    depth = len(network.hidden_sizes) + len(network.trunk)
    rows = task.rows
    if task.op in ("update", "first_update"):
        fixed, per_layer = _UPDATE_OPS
        ops = fixed + per_layer * depth + (_ONCE_OPS if task.op == "first_update" else 0)
        # Weights, gradients and both moments of Adam, read and written; and the rows: gathered, and
        # every activation with its gradient.
        nbytes = rows * (network.observation_bytes + FLOAT_BYTES * network.activation_size)
        return step(
            ops,
            network.layers,
            rows,
            3.0,
            FLOAT_BYTES * 8.0 * network.num_parameters,
            4.0 * nbytes,
        )
    fixed, per_layer = _POLICY_OPS
    ops = fixed + per_layer * depth - (0 if task.standardized else _STANDARDIZE_OPS)
    # Recorded, centred, scaled and clamped: each time read and written.
    observed_bytes = (8.0 if task.standardized else 2.0) * rows * network.observation_bytes
    if task.op == "policy_step":
        parts = step(ops, network.actor_layers, rows, 1.0, observed_bytes)
        # On an accelerator the step is issued, and the wait belongs to the action that comes back.
        return Parts(parts.host_s) if on_device else parts
    if task.op == "obs_to_device":
        nbytes = rows * network.observation_bytes
        host_copy_s = primitives.memory_s("cpu", 1, 2.0 * nbytes)
        return Parts((dispatch_s, host_copy_s))
    if task.op == "action_to_host":
        to_device_s = primitives.copy_s(device, "h2d", True, rows * network.observation_bytes)
        policy = step(ops, network.actor_layers, rows, 1.0, observed_bytes)
        action_numbers = rows * network.action_columns * (1 if network.continuous else 2)
        to_host_s = primitives.copy_s(device, "d2h", True, FLOAT_BYTES * action_numbers)
        return Parts(
            ((ops + 1) * dispatch_s,),
            (to_device_s, *policy.device_s),
            (to_host_s,),
            wait_only=True,
        )
    if task.op == "weights_to_host":
        # The network is one buffer: its weights, and mean, variance and scale of observations.
        nbytes = FLOAT_BYTES * (network.num_parameters + 3.0 * network.vector_size)
        to_host_s = primitives.copy_s(device, "d2h", True, nbytes)
        return Parts((to_host_s, primitives.memory_s("cpu", 1, 2.0 * nbytes)))
    raise AssertionError(f"no physics for {task.op}")
