"""The virtual clock charges what the spec says: every expected time is worked out by hand."""

from __future__ import annotations

import contextlib
import math
import queue
import statistics
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from autoplace import device
from tests.emulated import EmulatedMachine
from tests.emulated.spec import AcceleratorSpec, CpuSpec, Efficiency, MachineSpec, NoiseSpec

CPU = CpuSpec(
    cores=4,
    op_s=1e-6,
    flops_per_s=1e9,
    mem_bytes_per_s=1e9,
    thread_efficiency=0.5,
    handoff_s=1e-5,
    worker_start_s=0.25,
)
GPU = AcceleratorSpec(
    host_dispatch_s=1e-6,
    launch_s=2e-6,
    flops_per_s=1e11,
    mem_bytes_per_s=1e10,
    copy_latency_s=5e-6,
    pinned_bytes_per_s=4e9,
    pageable_bytes_per_s=1e9,
    d2h_pinned_bytes_per_s=2e9,
    d2h_pageable_bytes_per_s=5e8,
)
SPEC = MachineSpec(cpu=CPU, accelerators=(GPU, GPU))
D = "emu:0"


@contextlib.contextmanager
def machine(
    spec: MachineSpec = SPEC, *, threads: int = 1, **options: bool
) -> Iterator[EmulatedMachine]:
    with EmulatedMachine(spec, **options) as running:
        torch.set_num_threads(threads)
        yield running


def seconds(call: Callable[[], object]) -> float:
    """Host seconds of ``call``."""
    start_s = device.now()
    call()
    return device.now() - start_s


def us(value: float) -> object:
    return pytest.approx(value * 1e-6, rel=1e-9, abs=1e-13)


# --------------------------------------------------------------------------------------------------
# The host


def test_an_elementwise_operation_costs_its_bytes() -> None:
    with machine():
        x = torch.ones(1000)
        # 1 us + 8000 bytes (4000 read, 4000 written) at 1e9 bytes/s
        assert seconds(lambda: x.tanh()) == us(1 + 8)
        # two operands: 12000 bytes; in place: 4000 more are read
        assert seconds(lambda: x + x) == us(1 + 12)
        assert seconds(lambda: x.add_(1)) == us(1 + 8)


def test_a_matmul_costs_its_operations() -> None:
    with machine():
        a, b, bias = torch.ones(10, 20), torch.ones(20, 30), torch.ones(30)
        # 2 x 10 x 20 x 30 = 12000 operations at 1e9/s; 4400 bytes are less
        assert seconds(lambda: a @ b) == us(1 + 12)
        assert seconds(lambda: torch.addmm(bias, a, b)) == us(1 + 12)
        assert seconds(lambda: torch.bmm(a.expand(3, 10, 20), b.expand(3, 20, 30))) == us(1 + 36)


def test_a_convolution_costs_torchs_own_count() -> None:
    with machine():
        image, weight = torch.ones(1, 2, 10, 10), torch.ones(4, 2, 3, 3)
        # 8 x 8 outputs x 4 channels x (2 x 3 x 3) products x 2 operations
        assert seconds(lambda: torch.conv2d(image, weight)) == us(1 + 64 * 4 * 18 * 2 / 1e3)


def test_few_rows_of_a_matmul_reach_less_of_the_rate() -> None:
    cpu = CpuSpec(op_s=0.0, flops_per_s=1e9, efficiency=Efficiency(half_rate_rows=10))
    with machine(MachineSpec(cpu=cpu)):
        a, b, c = torch.ones(10, 20), torch.ones(20, 30), torch.ones(20, 10)
        assert seconds(lambda: a @ b) == us(24)  # 12000 operations; 10 rows reach half the rate
        assert seconds(lambda: c @ a) == us(12)  # 8000 operations; 20 rows reach 2/3


@pytest.mark.parametrize(("threads", "speedup"), [(1, 1.0), (2, 1.5), (4, 2.5)])
def test_threads_divide_the_work_but_not_the_fixed_cost(threads: int, speedup: float) -> None:
    with machine(threads=threads):
        x = torch.ones(1000)
        assert torch.get_num_threads() == threads
        assert seconds(lambda: x.tanh()) == us(1 + 8 / speedup)
        assert seconds(lambda: device.charge(seconds=1e-3)) == us(1000)  # one core


def test_more_threads_than_cores_slow_down_in_proportion() -> None:
    with machine(threads=8):  # on 4 cores
        x = torch.ones(1000)
        assert seconds(lambda: x.tanh()) == us((1 + 8 / 4.5) * 2)


def test_threads_start_at_the_number_of_cores_and_are_given_back() -> None:
    before = torch.get_num_threads()
    with EmulatedMachine(SPEC):
        assert torch.get_num_threads() == 4
        with device.torch_threads(3):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 4
        with pytest.raises(RuntimeError, match="positive"):
            torch.set_num_threads(0)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "free",
    [
        lambda x: x.view(-1),
        lambda x: x.t(),
        lambda x: x[1:, None],
        lambda x: x.expand(2, 10, 100),
        lambda x: x.detach(),
        lambda x: x.unbind(0),
        lambda x: torch.empty(10, 10, device=x.device),
        lambda x: torch.empty_like(x),
        lambda x: x.requires_grad_(),
        lambda x: (x.shape, x.is_contiguous(), x.is_pinned()),
        lambda x: x.to(x.device),
    ],
)
@pytest.mark.parametrize("place", ["cpu", D])
def test_what_moves_no_data_is_free(free: Callable, place: str) -> None:
    with machine():
        x = torch.ones(10, 100, device=place)
        assert seconds(lambda: free(x)) == 0


def test_gathering_costs_the_rows_that_are_read() -> None:
    with machine():
        table, rows = torch.ones(100000, 10), torch.arange(5)
        # 5 rows of 40 bytes read and written, and 5 indices of 8 bytes
        assert seconds(lambda: table[rows]) == us(1 + (400 + 40) / 1e3)
        assert seconds(lambda: table.index_select(0, rows)) == us(1 + 0.44)
        # rows of the source read, and as much written
        source = torch.ones(5, 10)
        assert seconds(lambda: table.index_copy_(0, rows, source)) == us(1 + 0.44)
        # an assignment to a slice: 400000 bytes read, 400000 written
        assert seconds(lambda: table[:10000].copy_(torch.empty(10000, 10))) == us(1 + 800)


def test_inference_mode_costs_the_same_as_no_grad() -> None:
    with machine():
        layer, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.ones(4, 8)

        def forward(mode: Callable) -> float:
            with mode():
                return seconds(lambda: torch.distributions.Categorical(logits=layer(x)).entropy())

        assert forward(torch.inference_mode) == pytest.approx(forward(torch.no_grad))


def test_a_backward_pass_is_charged() -> None:
    with machine():
        w, x = torch.ones(20, 30, requires_grad=True), torch.ones(10, 20)
        y = x @ w
        gradient = torch.ones(10, 30)
        # d w = x^T (20 x 10) @ g (10 x 30): 12000 operations; the gradient is then w.grad itself
        assert seconds(lambda: y.backward(gradient)) == us(1 + 12)


def test_work_that_torch_does_not_see_is_charged_on_one_core() -> None:
    with machine(threads=4):
        # 3 calls of 1 us, and the longer of 5 us of operations and 2 us of bytes, and 7 us
        times = seconds(lambda: device.charge(calls=3, flops=5e3, nbytes=2e3, seconds=7e-6))
        assert times == us(3 + 5 + 7)


# --------------------------------------------------------------------------------------------------
# The device


def test_a_kernel_is_queued_and_runs_behind_the_host() -> None:
    with machine():
        x = torch.ones(10000, device=D)
        device.synchronize(D)
        # the host: 1 us; the device: launch 2 us, then 80000 bytes at 1e10/s
        assert seconds(lambda: x.tanh()) == us(1)
        assert seconds(lambda: device.synchronize(D)) == us(2 + 8)
        assert seconds(lambda: device.synchronize(D)) == 0


def test_kernels_of_one_stream_follow_each_other() -> None:
    with machine():
        x = torch.ones(10000, device=D)
        device.synchronize(D)
        start_s = device.now()
        for _ in range(10):
            x.tanh()
        assert device.now() - start_s == us(10)
        device.synchronize(D)
        assert device.now() - start_s == us(1 + 10 * (2 + 8))


def test_the_host_is_the_bottleneck_of_tiny_kernels() -> None:
    gpu = AcceleratorSpec(host_dispatch_s=5e-6, launch_s=2e-6, mem_bytes_per_s=1e12)
    with machine(MachineSpec(cpu=CPU, accelerators=(gpu,))):
        x = torch.ones(1, device=D)
        device.synchronize(D)
        start_s = device.now()
        for _ in range(10):
            x.add_(1)
        device.synchronize(D)
        assert device.now() - start_s == pytest.approx(52e-6, rel=1e-4)


def test_a_matmul_on_the_device_has_its_own_efficiency() -> None:
    gpu = AcceleratorSpec(
        host_dispatch_s=0, launch_s=0, flops_per_s=1e9, efficiency=Efficiency(half_rate_rows=30)
    )
    with machine(MachineSpec(accelerators=(gpu,))):
        a, b = torch.ones(10, 20, device=D), torch.ones(20, 30, device=D)
        device.synchronize(D)
        torch.mm(a, b)
        assert seconds(lambda: device.synchronize(D)) == us(12 * 4)  # a quarter of the rate


def test_a_multi_tensor_operation_is_one_kernel() -> None:
    with machine() as running:
        parameters = [nn.Parameter(torch.ones(10, device=D)) for _ in range(5)]
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer = torch.optim.Adam(parameters, fused=True)
        optimizer.step()
        before = running.clock.counts["launch"]
        optimizer.step()
        # one for the five step counters, one for the update
        assert running.clock.counts["launch"] - before == 2


def test_two_streams_overlap_launches_but_not_work() -> None:
    with machine():
        x = torch.ones(10000, device=D)
        side = torch.emu.Stream(device=D)
        device.synchronize(D)
        start_s = device.now()
        x.tanh()
        with torch.emu.stream(side):
            x.tanh()
        device.synchronize(D)
        # first: 1 + 2 + 8 = 11; the second waits for the engine only: 11 + 8
        assert device.now() - start_s == us(19)


def test_two_devices_work_at_the_same_time() -> None:
    with machine():
        x, y = torch.ones(10000, device="emu:0"), torch.ones(10000, device="emu:1")
        device.synchronize("emu:0")
        device.synchronize("emu:1")
        start_s = device.now()
        x.tanh()
        y.tanh()
        device.synchronize("emu:0")
        assert device.now() - start_s == us(1 + 2 + 8)
        device.synchronize("emu:1")
        assert device.now() - start_s == us(2 + 2 + 8)


@pytest.mark.parametrize(
    ("direction", "pinned", "bytes_per_us"),
    [("h2d", True, 4000), ("h2d", False, 1000), ("d2h", True, 2000), ("d2h", False, 500)],
)
def test_a_copy_costs_latency_and_bytes(direction: str, pinned: bool, bytes_per_us: int) -> None:
    with machine():
        host = torch.ones(1000)
        host = host.pin_memory() if pinned else host
        there = torch.ones(1000, device=D)
        device.synchronize(D)
        target, source = (there, host) if direction == "h2d" else (host, there)
        duration = 5 + 4000 / bytes_per_us
        assert seconds(lambda: target.copy_(source)) == us(1 + duration)
        # without blocking, the host goes on at once, but only with page-locked memory
        start_s = device.now()
        target.copy_(source, non_blocking=True)
        assert device.now() - start_s == us(1 if pinned else 1 + duration)
        device.synchronize(D)
        assert device.now() - start_s == us(1 + duration)


def test_unified_memory_needs_no_page_lock_to_copy_in_the_background() -> None:
    gpu = AcceleratorSpec(host_dispatch_s=1e-6, copy_latency_s=5e-6, unified_memory=True)
    with machine(MachineSpec(accelerators=(gpu,))):
        host, there = torch.ones(1000), torch.ones(1000, device=D)
        device.synchronize(D)
        assert seconds(lambda: there.copy_(host, non_blocking=True)) == us(1)
        # 4000 bytes at half the memory's 4e11 bytes/s
        assert seconds(lambda: device.synchronize(D)) == us(5 + 0.02)
        host.copy_(there, non_blocking=True)
        assert host.isnan().all()
        device.synchronize(D)
        assert host.sum() == 1000


def test_copies_in_both_directions_overlap_with_work() -> None:
    with machine():
        up, down = torch.ones(4000).pin_memory(), torch.ones(4000).pin_memory()
        there, x = torch.ones(4000, device=D), torch.ones(10000, device=D)
        streams = [torch.emu.Stream(device=D) for _ in range(2)]
        device.synchronize(D)
        start_s = device.now()
        with torch.emu.stream(streams[0]):
            there.copy_(up, non_blocking=True)  # ends at 1 + 5 + 4 = 10
        with torch.emu.stream(streams[1]):
            down.copy_(x[:4000], non_blocking=True)  # ends at 2 + 5 + 8 = 15
        x.tanh()  # ends at 3 + 2 + 8 = 13
        device.synchronize(D)
        assert device.now() - start_s == us(15)


def test_copies_in_one_direction_share_an_engine() -> None:
    with machine():
        hosts = [torch.ones(4000).pin_memory() for _ in range(2)]
        theres = [torch.ones(4000, device=D) for _ in range(2)]
        device.synchronize(D)
        start_s = device.now()
        for host, there in zip(hosts, theres, strict=True):
            with torch.emu.stream(torch.emu.Stream(device=D)):
                there.copy_(host, non_blocking=True)
        device.synchronize(D)
        assert device.now() - start_s == us(1 + 2 * (5 + 4))


def test_reading_a_value_back_waits_for_the_stream() -> None:
    with machine():
        x = torch.ones(10000, device=D)
        device.synchronize(D)
        start_s = device.now()
        first = x.tanh()[0]
        first.item()
        # the kernel ends at 1 + 2 + 8 = 11; then latency and 8 bytes at 500/us
        assert device.now() - start_s == us(11 + 5 + 0.016)


def test_a_mask_index_waits_for_its_shape_and_an_integer_index_does_not() -> None:
    with machine():
        x = torch.ones(10000, device=D)
        mask, rows = x > 0, torch.arange(10, device=D)
        device.synchronize(D)
        assert seconds(lambda: x[rows]) == us(1)
        assert seconds(lambda: x[mask]) > 10e-6


def test_a_stream_that_waits_for_an_event_does_not_stop_the_host() -> None:
    with machine():
        x = torch.ones(10000, device=D)
        side = torch.emu.Stream(device=D)
        device.synchronize(D)
        start_s = device.now()
        x.tanh()  # ends at 11
        side.wait_stream(torch.emu.current_stream(D))
        with torch.emu.stream(side):
            x.tanh()  # starts at 11
        assert device.now() - start_s == us(2)
        side.synchronize()
        assert device.now() - start_s == us(11 + 2 + 8)


def test_events_time_the_device_and_not_the_host() -> None:
    with machine():
        x = torch.ones(10000, device=D)
        device.synchronize(D)
        timer = device.DeviceTimer(D)
        timer.start()
        for _ in range(4):
            x.tanh()
        timer.stop()
        assert timer.elapsed_s() == us(1 + 4 * 10)


def test_a_copy_between_devices_goes_out_and_in() -> None:
    with machine():
        x = torch.ones(1000, device="emu:0")
        device.synchronize("emu:0")
        start_s = device.now()
        x.to("emu:1")
        assert device.now() - start_s == us(2)
        device.synchronize("emu:1")
        # out: 1 + 5 + 4000 bytes at 2000/us = 8; in: 5 + 4000 at 4000/us
        assert device.now() - start_s == us(8 + 5 + 1)


def test_timing_without_a_synchronise_sees_the_host_only() -> None:
    with machine():
        a = torch.ones(200, 200, device=D)
        device.synchronize(D)
        wrong = seconds(lambda: a @ a)
        device.synchronize(D)
        right = seconds(lambda: (a @ a, device.synchronize(D)))
        # 2 x 200^3 = 1.6e7 operations at 1e11/s = 160 us
        assert wrong == us(1)
        assert right == us(1 + 2 + 160)


# --------------------------------------------------------------------------------------------------
# Noise


def _noisy(**noise: float) -> MachineSpec:
    return MachineSpec(cpu=CPU, accelerators=(GPU,), noise=NoiseSpec(**noise))


@pytest.mark.parametrize("place", ["cpu", D])
@pytest.mark.parametrize("calls", [1, 50])
def test_samples_spread_as_declared_however_many_calls_they_hold(place: str, calls: int) -> None:
    with machine(_noisy(lognormal_sigma=0.05)):
        x = torch.ones(100, device=place)
        times = []
        for _ in range(600 if calls == 1 else 150):
            device.synchronize(place)
            start_s = device.now()
            for _ in range(calls):
                x.tanh()
            device.synchronize(place)
            times.append(device.now() - start_s)
    logs = [math.log(t) for t in times]
    assert statistics.stdev(logs) == pytest.approx(0.05, rel=0.2)
    truth = calls * 1.8e-6 if place == "cpu" else 1e-6 + calls * 2.08e-6
    assert statistics.median(times) == pytest.approx(truth, rel=0.02)


def test_outliers_are_whole_samples() -> None:
    with machine(_noisy(outlier_fraction=0.1, outlier_factor=20)):
        times = [seconds(lambda: device.charge(seconds=1e-3)) for _ in range(2000)]
    assert {round(t, 9) for t in times} == {1e-3, 2e-2}
    assert sum(t > 1e-2 for t in times) / 2000 == pytest.approx(0.1, abs=0.02)


def test_noise_follows_from_the_seed() -> None:
    def times(seed: int) -> list[float]:
        with machine(_noisy(lognormal_sigma=0.05, seed=seed)):
            return [seconds(lambda: device.charge(seconds=1e-3)) for _ in range(5)]

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_drift_grows_with_time() -> None:
    with machine(_noisy(drift_per_s=0.1)):
        assert seconds(lambda: device.charge(seconds=1.0)) == pytest.approx(1.0)
        assert seconds(lambda: device.charge(seconds=1.0)) == pytest.approx(1.1)


def test_a_competing_load_can_be_switched_on_and_off() -> None:
    with machine(threads=2) as running:
        x = torch.ones(1000)
        alone = us(1 + 8 / 1.5)
        assert seconds(lambda: x.tanh()) == alone
        running.clock.competing_load = 4.0  # 2 threads and 4 cores' worth on 4 cores
        assert seconds(lambda: x.tanh()) == us((1 + 8 / 1.5) * 1.5)
        running.clock.competing_load = 0.0
        assert seconds(lambda: x.tanh()) == alone


# --------------------------------------------------------------------------------------------------
# Lanes


def test_lanes_run_at_the_same_virtual_time() -> None:
    with machine() as running:
        ends = {}

        def work(name: str, steps: int) -> None:
            for _ in range(steps):
                device.charge(seconds=1e-3)
            ends[name] = device.now()

        lanes = [running.clock.spawn(lambda n=n: work(str(n), n), name=str(n)) for n in (3, 1)]
        work("main", 2)
        for lane in lanes:
            lane.join()
        assert ends == pytest.approx({"1": 1e-3, "main": 2e-3, "3": 3e-3})
        assert device.now() == pytest.approx(3e-3)


def test_a_worker_starts_late() -> None:
    with machine() as running:
        started = []
        lane = running.clock.spawn(
            lambda: started.append(device.now()), start_s=running.spec.cpu.worker_start_s
        )
        assert device.now() == 0
        lane.join()
        assert started == [0.25]


def test_the_lane_furthest_behind_goes_first() -> None:
    with machine() as running:
        order = []

        def work(name: str, step_s: float) -> None:
            for _ in range(3):
                device.charge(seconds=step_s)
                order.append((round(device.now() * 1e3), name))

        lane = running.clock.spawn(lambda: work("b", 2e-3), name="b")
        work("a", 3e-3)
        lane.join()
        assert order == sorted(order)


def test_busy_lanes_share_the_cores() -> None:
    with machine() as running:  # 4 cores

        def work() -> None:
            for _ in range(10):
                device.charge(seconds=1e-3)

        lanes = [running.clock.spawn(work, name=str(i)) for i in range(8)]
        for lane in lanes:
            lane.join()
        assert device.now() == us(20000)  # 8 busy lanes of one thread on 4 cores: half speed


def test_lanes_within_the_cores_do_not_slow_each_other() -> None:
    with machine() as running:
        lanes = [
            running.clock.spawn(lambda: device.charge(seconds=1e-3), name=str(i)) for i in range(4)
        ]
        for lane in lanes:
            lane.join()
        assert device.now() == us(1000)


def test_a_lane_that_waits_uses_no_core() -> None:
    spec = MachineSpec(cpu=CpuSpec(cores=1), accelerators=(GPU,))
    with machine(spec) as running:
        a = torch.empty(2000, 2000, device=D)
        device.charge(seconds=0.1)

        def wait_for_the_device() -> None:
            torch.mm(a, a, out=a)  # 1.6e10 operations at 1e11/s: 160 ms
            device.synchronize(D)

        start_s = device.now()
        lane = running.clock.spawn(wait_for_the_device)
        for _ in range(100):
            device.charge(seconds=1e-3)
        # but for the first step, before which the new lane is taken to be busy
        assert device.now() - start_s == pytest.approx(0.101, rel=1e-3)
        lane.join()
        assert device.now() - start_s == pytest.approx(0.16, rel=1e-3)


def test_each_lane_has_its_own_threads() -> None:
    with machine(threads=2) as running:
        seen = []

        def work() -> None:
            seen.append(torch.get_num_threads())
            torch.set_num_threads(1)

        running.clock.spawn(work).join()
        assert (seen, torch.get_num_threads()) == ([2], 2)


def test_a_message_arrives_after_the_handoff() -> None:
    with machine() as running:
        there, back = running.clock.channel(), running.clock.channel()

        def echo() -> None:
            while (item := there.get()) is not None:
                device.charge(seconds=1e-3)
                back.put(item * 2)

        lane = running.clock.spawn(echo)
        start_s = device.now()
        there.put(21)
        assert back.empty()
        assert back.get() == 42
        assert device.now() - start_s == us(10 + 1000 + 10)
        there.put(None)
        lane.join()


def test_a_channel_times_out_in_virtual_time() -> None:
    with machine() as running:
        channel = running.clock.channel()
        with pytest.raises(queue.Empty):
            channel.get(timeout=0.5)
        assert device.now() == 0.5


def test_the_first_of_several_channels_wakes_a_lane() -> None:
    with machine() as running:
        channels = [running.clock.channel() for _ in range(3)]

        def send(index: int) -> None:
            device.charge(seconds=(3 - index) * 1e-3)
            channels[index].put(index)

        lanes = [running.clock.spawn(lambda i=i: send(i), name=str(i)) for i in range(3)]
        assert running.clock.wait_any(channels) == [channels[2]]
        assert device.now() == us(1010)
        for lane in lanes:
            lane.join()


def test_lanes_that_wait_for_each_other_are_reported() -> None:
    with machine() as running, pytest.raises(RuntimeError, match="deadlock"):
        running.clock.channel().get()


def test_an_error_in_a_lane_is_raised_where_it_is_joined() -> None:
    def fail() -> None:
        raise ValueError("in the lane")

    with machine() as running, pytest.raises(ValueError, match="in the lane"):
        running.clock.spawn(fail).join()


def test_an_error_that_nobody_joins_is_raised_at_the_end() -> None:
    def fail() -> None:
        device.charge(seconds=1.0)
        raise ValueError("nobody looked")

    with pytest.raises(ValueError, match="nobody looked"), machine() as running:
        running.clock.spawn(fail)
        device.charge(seconds=2.0)


def test_a_lane_left_running_is_reported_and_ended() -> None:
    handles = []
    with pytest.raises(RuntimeError, match=r"lanes still ran .* left: forgotten"), machine() as on:
        handles.append(on.clock.spawn(lambda: on.clock.channel().get(), name="forgotten"))
        device.charge(seconds=1.0)
    assert not handles[0].thread.is_alive()


def _two_learners() -> tuple[float, list[float]]:
    """A sampler on the CPU and two learners on one device, with noise."""
    spec = MachineSpec(
        cpu=CPU, accelerators=(GPU,), noise=NoiseSpec(lognormal_sigma=0.1, outlier_fraction=0.05)
    )
    marks = []
    with machine(spec) as running:

        def learn(seed: int) -> None:
            layer = nn.Linear(8, 8).to(D)
            optimizer = torch.optim.Adam(layer.parameters(), fused=True)
            x = torch.full((4, 8), float(seed), device=D)
            for _ in range(5):
                layer(x).square().sum().backward()
                optimizer.step()
                device.synchronize(D)
                marks.append(device.now())

        lanes = [running.clock.spawn(lambda i=i: learn(i), name=str(i)) for i in range(2)]
        for _ in range(20):
            device.charge(seconds=1e-5)
            torch.ones(100).tanh()
        for lane in lanes:
            lane.join()
        return device.now(), marks


def test_a_run_of_several_lanes_repeats_to_the_bit() -> None:
    first = _two_learners()
    assert len(first[1]) == 10
    assert _two_learners() == first


# --------------------------------------------------------------------------------------------------
# Dry runs, and the black box


@pytest.mark.parametrize("place", ["cpu", D])
def test_a_dry_run_takes_the_same_virtual_time_and_keeps_shapes(place: str) -> None:
    def run(dry: bool) -> tuple[float, torch.Size]:
        with machine(dry=dry):
            a, b = torch.ones(300, 400, device=place), torch.ones(400, 500, device=place)
            big = torch.ones(1200, 1200, device=place)
            start_s = device.now()
            c = torch.addmm(torch.ones(500, device=place), a, b)
            big.tanh().mul_(2).sum()
            torch.cat([big, big]).t().contiguous()
            device.synchronize(place)
            return device.now() - start_s, c.shape

    assert run(dry=True) == run(dry=False)


@pytest.mark.parametrize("place", ["cpu", D])
def test_a_dry_run_leaves_nothing_of_what_an_operation_overwrites(place: str) -> None:
    with machine(dry=True):
        a = torch.ones(1200, 1200, device=place)
        for overwrite in (
            lambda out: torch.mm(a, a, out=out),
            lambda out: torch.tanh(a, out=out),
            lambda out: out.copy_(a),
        ):
            left = torch.full((1200, 1200), 1e30, device=place)
            overwrite(left)
            assert float(left[0, 0]) == float(left[-1, -1]) == 0.0


def _recovered(place: str, call: Callable[[int], object], sizes: list[int]) -> tuple[float, float]:
    """Intercept and slope of the time of ``call(size)``, waited for; relative errors fitted."""
    times = []
    for size in sizes:
        call(size)
        device.synchronize(place)
        start_s = device.now()
        call(size)
        device.synchronize(place)
        times.append(device.now() - start_s)
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, float)], 1) / np.asarray(times)[:, None]
    intercept, slope = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]
    return float(intercept), float(slope)


@pytest.mark.parametrize(
    ("place", "op_s", "flops_per_s", "bytes_per_s"),
    [("cpu", 1e-6, 1e9, 1e9), (D, 3e-6, 1e11, 1e10)],
)
def test_a_black_box_gets_the_constants_of_a_device_back(
    place: str, op_s: float, flops_per_s: float, bytes_per_s: float
) -> None:
    with machine(dry=True):
        a = torch.empty(256, 256, device=place)
        columns = {n: torch.empty(256, n, device=place) for n in (64, 256, 1024)}
        # 2 x 256^2 x n operations, which outweigh their bytes
        fixed_s, slope = _recovered(place, lambda n: a @ columns[n], list(columns))
        assert fixed_s == pytest.approx(op_s, rel=0.02)
        assert 2 * 256**2 / slope == pytest.approx(flops_per_s, rel=0.02)
        vectors = {n: torch.empty(n, device=place) for n in (10**3, 10**5, 10**6)}
        fixed_s, slope = _recovered(place, lambda n: vectors[n].tanh(), list(vectors))
        assert fixed_s == pytest.approx(op_s, rel=0.02)
        assert 8 / slope == pytest.approx(bytes_per_s, rel=0.02)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_black_box_gets_the_constants_of_copies_back(direction: str, pinned: bool) -> None:
    pairs = {}
    with machine(dry=True):
        for n in (10**3, 10**5, 10**7):
            host = torch.empty(n, dtype=torch.uint8)
            host = host.pin_memory() if pinned else host
            pairs[n] = (host, host.to(D)) if direction == "d2h" else (host.to(D), host)

        def copy(n: int) -> None:
            target, source = pairs[n]
            target.copy_(source, non_blocking=True)

        fixed_s, slope = _recovered(D, copy, list(pairs))
    assert fixed_s == pytest.approx(1e-6 + 5e-6, rel=0.02)
    assert 1 / slope == pytest.approx(GPU.bytes_per_s(direction, pinned=pinned), rel=0.02)
