"""The virtual clock: what everything costs on an emulated machine.

How each time follows from the spec, so that a calibration from outside can give back every number
(``flops``, ``bytes`` and ``rows`` of an operation are those of :mod:`tests.emulated.costs`):

==================== ==========================================================================
CPU operation         ``op_s + max(flops / (flops_per_s * eff * s), bytes / (mem_bytes_per_s * s))``
                      with ``s = 1 + (p - 1) * thread_efficiency`` for the lane's p intra-op
                      threads, and ``eff = rows / (rows + half_rate_rows)`` for matmuls
device kernel         the host moves on by ``host_dispatch_s``; the kernel starts ``launch_s``
                      after the later of that moment and the end of its stream's work; it holds
                      the device's one compute engine for ``max(flops / (flops_per_s * eff),
                      bytes / mem_bytes_per_s)``: of two streams the launch gaps overlap, the
                      work does not
copy host <-> device  the host moves on by ``host_dispatch_s``; the copy starts when its stream
                      and the copy engine of its direction are free, and takes
                      ``copy_latency_s + bytes / bandwidth(direction, pinned)``; unless it is
                      non-blocking and the host side page-locked (or memory unified), the host
                      waits for its end
copy device -> device on one device a kernel; between two, a copy out and then a copy in, at
                      page-locked rates, which the host does not wait for
``.item()``, shapes   a blocking copy of the value's (8) bytes at the pageable rate
that depend on data
synchronise           the host waits until the stream, or all streams of the device, are done;
                      nothing else
``charge``            ``seconds + calls * op_s + max(flops / flops_per_s, bytes /
                      mem_bytes_per_s)`` on one core
message               arrives ``handoff_s`` after it was sent
==================== ==========================================================================

Host times are stretched where the threads of all busy lanes exceed the cores, waits are not.

Noise multiplies everything that is charged, on host and device, by one factor for a *timed
stretch*: the factor is drawn anew whenever the lane reads the clock, so it is constant between two
readings. A sample of a timing, however many operations it averages over, therefore has the declared
spread, and an outlier is a whole sample. (Independent noise per operation would average out.) The
factor's median is 1. Drift multiplies by ``1 + drift_per_s * time`` on top.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.emulated.costs import Work, dry_result, op_info, work_of
from tests.emulated.lanes import Lane, LaneChannel, Lanes, LaneThread, first_ready
from tests.emulated.memory import DEVICE_TYPE, is_on_device
from tests.emulated.spec import AcceleratorSpec, MachineSpec

_VALUE_BYTES = 8  # of a number that the host reads back to know a shape


@dataclass
class _Pending:
    """A non-blocking copy that the host has not yet waited for.

    ``address`` is that of the device memory it writes, 0 for a copy to the host; ``finish`` is
    called when the host has waited.
    """

    end_s: float
    stream: int
    address: int
    finish: Callable[[], None]


@dataclass
class DeviceState:
    """When the parts of one device are free."""

    spec: AcceleratorSpec
    stream_free_s: dict[int, float] = field(default_factory=dict)
    engine_free_s: dict[str, float] = field(
        default_factory=lambda: {"compute": 0.0, "h2d": 0.0, "d2h": 0.0}
    )
    pending: list[_Pending] = field(default_factory=list)
    waited_s: dict[int, float] = field(default_factory=dict)  # what each stream has waited for

    def free_s(self, stream: int | None) -> float:
        """When a stream's queued work ends; ``None`` for all streams."""
        if stream is not None:
            return self.stream_free_s.get(stream, 0.0)
        return max(self.stream_free_s.values(), default=0.0)


class VirtualClock:
    """The time of an emulated machine. Implements ``autoplace.device.Clock``.

    Attributes:
        spec: the machine.
        dry: whether heavy operations are charged but not computed.
        counts: what has been charged so far, by kind.
        processes: what is spawned is a lane, which shares all memory.
    """

    processes = False

    def __init__(self, spec: MachineSpec, *, dry: bool = False) -> None:
        self.spec = spec
        self.dry = dry
        self.counts = {"cpu_op": 0, "launch": 0, "copy": 0, "wait": 0}
        self._noise = spec.noise
        self._is_noisy = bool(spec.noise.lognormal_sigma or spec.noise.outlier_fraction)
        self.lanes = Lanes(cores=spec.cpu.cores, threads=spec.cpu.cores, seed=spec.noise.seed)
        self.lanes.competing_load = spec.noise.competing_load
        self.devices = [DeviceState(accelerator) for accelerator in spec.accelerators]

    # ------------------------------------------------------------------------------ Clock protocol

    def now(self) -> float:
        """Seconds since the machine was switched on, as the calling lane sees them."""
        lane = self.lanes.current()
        if self._is_noisy:
            self._redraw(lane)
        return lane.time_s

    def charge(
        self, *, calls: int = 0, flops: float = 0.0, nbytes: float = 0.0, seconds: float = 0.0
    ) -> None:
        """Add host work that torch's dispatcher cannot see, done on one core."""
        cpu = self.spec.cpu
        seconds += calls * cpu.op_s + max(flops / cpu.flops_per_s, nbytes / cpu.mem_bytes_per_s)
        self._host_work(self.lanes.current(), seconds, threads=1)

    # ---------------------------------------------------------------------- control by the program

    def spawn(
        self,
        target: Callable[[], Any],
        *,
        name: str = "lane",
        start_s: float = 0.0,
        host_only: bool = False,
        at_once: bool = True,
    ) -> LaneThread:
        """Run ``target`` on a lane of its own, ``start_s`` from now.

        What is not to run ``at_once`` starts after ``worker_start_s`` of the spec.
        """
        del host_only  # a lane starts no library
        start_s += 0.0 if at_once else self.spec.cpu.worker_start_s
        return self.lanes.spawn(target, name=name, start_s=start_s, around=self.charging())

    def channel(self, *, handoff_s: float | None = None) -> LaneChannel:
        """A queue between lanes; what is put arrives ``handoff_s`` (default: the spec's) later."""
        if handoff_s is None:
            handoff_s = self.spec.cpu.handoff_s
        return LaneChannel(self.lanes, handoff_s)

    def wait_any(
        self,
        channels: Sequence[LaneChannel],
        spawned: Sequence[LaneThread] = (),
        *,
        timeout_s: float | None = None,
    ) -> list[LaneChannel]:
        """Wait for an item on any channel or the end of any lane; the channels that have one."""
        self.lanes.wait(first_ready(channels, spawned), timeout_s=timeout_s)
        return [channel for channel in channels if not channel.empty()]

    @property
    def competing_load(self) -> float:
        """Cores' worth of work by other programs; may be set at any time."""
        return self.lanes.competing_load

    @competing_load.setter
    def competing_load(self, cores: float) -> None:
        self.lanes.competing_load = cores

    @property
    def threads(self) -> int:
        """Intra-op threads of the calling lane, as ``torch.get_num_threads`` reports them."""
        lane = self.lanes.current() if self.lanes.owns_thread() else self.lanes.main
        return lane.threads

    @threads.setter
    def threads(self, count: int) -> None:
        if count < 1:
            raise RuntimeError("set_num_threads expects a positive integer")
        self.lanes.current().threads = int(count)

    # --------------------------------------------------------------------------------------- noise

    def _redraw(self, lane: Lane) -> None:
        noise = self._noise
        lane.factor = math.exp(lane.random.gauss(0.0, noise.lognormal_sigma))
        if lane.random.random() < noise.outlier_fraction:
            lane.factor *= noise.outlier_factor

    def _noise_factor(self, lane: Lane) -> float:
        return lane.factor * (1.0 + self._noise.drift_per_s * lane.time_s)

    # ---------------------------------------------------------------------------------------- host

    def _host_work(self, lane: Lane, seconds: float, threads: int) -> None:
        if seconds:
            self.lanes.work(lane, seconds * self._noise_factor(lane), threads)
            self.lanes.yield_turn()

    def cpu_op(self, work: Work) -> None:
        """Charge one operation on the CPU to the calling lane."""
        cpu, lane = self.spec.cpu, self.lanes.current()
        speedup = cpu.speedup(lane.threads)
        rate = cpu.flops_per_s * speedup * cpu.efficiency.factor(work.rows)
        seconds = max(work.flops / rate, work.nbytes / (cpu.mem_bytes_per_s * speedup))
        self.counts["cpu_op"] += 1
        self._host_work(lane, cpu.op_s + seconds, lane.threads)

    @contextlib.contextmanager
    def charging(self) -> Iterator[None]:
        """Charge the calling thread's CPU operations inside the block.

        Backward passes run on the thread that asked for them: torch's own worker thread belongs to
        no lane, and would know the first device only.
        """
        multithreaded = torch.autograd.set_multithreading_enabled(False)
        with multithreaded, _HostOps(self):
            yield

    # -------------------------------------------------------------------------------------- device

    def launch(self, index: int, stream: int, work: Work) -> None:
        """Charge one kernel."""
        state, lane = self.devices[index], self.lanes.current()
        spec = state.spec
        self.counts["launch"] += 1
        self._host_work(lane, spec.host_dispatch_s, threads=1)
        noise = self._noise_factor(lane)
        rate = spec.flops_per_s * spec.efficiency.factor(work.rows)
        seconds = max(work.flops / rate, work.nbytes / spec.mem_bytes_per_s)
        start = max(state.free_s(stream), lane.time_s) + spec.launch_s * noise
        end = max(start, state.engine_free_s["compute"]) + seconds * noise
        state.stream_free_s[stream] = state.engine_free_s["compute"] = end

    def copy(
        self, index: int, stream: int, nbytes: int, direction: str, *, pinned: bool, blocking: bool
    ) -> float:
        """Charge one copy between host and device, and return when it ends."""
        state, lane = self.devices[index], self.lanes.current()
        spec = state.spec
        self.counts["copy"] += 1
        self._host_work(lane, spec.host_dispatch_s, threads=1)
        seconds = spec.copy_latency_s + nbytes / spec.bytes_per_s(direction, pinned=pinned)
        start = max(state.free_s(stream), state.engine_free_s[direction], lane.time_s)
        end = start + seconds * self._noise_factor(lane)
        state.stream_free_s[stream] = state.engine_free_s[direction] = end
        if blocking:
            self.wait_until(index, end)
        return end

    def copy_between(self, source: int, target: int, streams: tuple[int, int], nbytes: int) -> None:
        """Charge one copy from a device to another, which waits for both streams."""
        end = self.copy(source, streams[0], nbytes, "d2h", pinned=True, blocking=False)
        self.stream_waits(target, streams[1], end)
        end = self.copy(target, streams[1], nbytes, "h2d", pinned=True, blocking=False)
        self.stream_waits(source, streams[0], end)

    def read_back(self, index: int, stream: int) -> None:
        """Charge the host's reading of one value, for which it waits."""
        self.copy(index, stream, _VALUE_BYTES, "d2h", pinned=False, blocking=True)

    def stream_waits(self, index: int, stream: int, until_s: float) -> None:
        """Let a stream go on no sooner than ``until_s``; the host does not wait."""
        state = self.devices[index]
        state.stream_free_s[stream] = max(state.free_s(stream), until_s)
        state.waited_s[stream] = max(state.waited_s.get(stream, 0.0), until_s)

    def stream_mark(self, index: int, stream: int) -> float:
        """When all that is queued on a stream by now will be done."""
        return max(self.devices[index].free_s(stream), self.lanes.current().time_s)

    def synchronize(self, index: int, stream: int | None = None) -> None:
        """Let the host wait for a stream, or for all of a device."""
        self.wait_until(index, self.devices[index].free_s(stream))

    def wait_until(self, index: int, time_s: float) -> None:
        """Let the host wait for something on a device that is done at ``time_s``."""
        lane = self.lanes.current()
        lane.time_s = max(lane.time_s, time_s)
        self.counts["wait"] += 1
        self.lanes.yield_turn()
        self._finish_copies(self.devices[index], lane.time_s)

    def poll(self, index: int, time_s: float) -> bool:
        """Whether something on a device is done by now, as an event's query asks."""
        lane = self.lanes.current()
        if time_s > lane.time_s:
            return False
        self._finish_copies(self.devices[index], lane.time_s)
        return True

    def add_pending(
        self,
        index: int,
        stream: int,
        end_s: float,
        finish: Callable[[], None],
        *,
        address: int = 0,
    ) -> None:
        """Call ``finish`` at the first wait of the host by which a copy has ended."""
        self.devices[index].pending.append(_Pending(end_s, stream, address, finish))

    def finish_sends(self, index: int, stream: int) -> None:
        """Finish the stream's copies to the device, since a later one of it may reuse their source.

        A stream works in order, so what it brings to the host next cannot disturb them.
        """
        state = self.devices[index]
        sends = [copy for copy in state.pending if copy.stream == stream and copy.address]
        state.pending = [copy for copy in state.pending if copy not in sends]
        for copy in sends:
            copy.finish()

    def check_arrived(self, index: int, stream: int, addresses: Iterable[int]) -> None:
        """Check that work on ``stream`` may use the memory at ``addresses``.

        Raises:
            RuntimeError: another stream is still copying to it, and ``stream`` has not waited.
        """
        state = self.devices[index]
        waited_s = state.waited_s.get(stream, 0.0)
        addresses = set(addresses)
        for copy in state.pending:
            if copy.address in addresses and copy.stream != stream and copy.end_s > waited_s:
                raise RuntimeError(
                    f"stream {stream} of {DEVICE_TYPE}:{index} uses memory that stream "
                    f"{copy.stream} is still copying to: let it wait for that stream first"
                )

    def _finish_copies(self, state: DeviceState, time_s: float) -> None:
        if not state.pending:
            return
        done = [copy for copy in state.pending if copy.end_s <= time_s]
        state.pending = [copy for copy in state.pending if copy.end_s > time_s]
        # What the emulator does to make bytes arrive is not the program's work.
        with _disable_current_modes():
            for copy in done:
                copy.finish()


class _HostOps(TorchDispatchMode):
    """Charges every operation that runs on the CPU."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def __torch_dispatch__(
        self,
        op: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        info = op_info(op)
        # Inference mode hands composite operations over whole: charge what they are made of.
        if info.is_composite and torch.is_inference_mode_enabled():
            with self:
                return op.decompose(*args, **kwargs)
        if info.is_free or _touches_device(info, args, kwargs):
            return op(*args, **kwargs)
        skipped, out = dry_result(op, args, kwargs) if self._clock.dry else (False, None)
        if not skipped:
            out = op(*args, **kwargs)
        self._clock.cpu_op(work_of(op, args, kwargs, out))
        return out


def _touches_device(info: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == DEVICE_TYPE:
        return True
    return any(is_on_device(tensor) for _, tensor in info.tensor_arguments(args, kwargs))
