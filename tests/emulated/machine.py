"""An emulated machine, switched on and off."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

import torch

from autoplace import device as boundary
from tests.emulated import device, runtime, streams
from tests.emulated.clock import VirtualClock
from tests.emulated.memory import DEVICE_TYPE, DeviceMemory
from tests.emulated.spec import MachineSpec

if TYPE_CHECKING:
    from autoplace.machine import Machine


class EmulatedMachine:
    """A context in which torch and autoplace see the machine of a spec.

    The thread that enters it becomes its main lane. Virtual time starts at 0, every random state of
    a device at seed 0, and torch's threads at the number of cores.

    Args:
        spec: the machine.
        dry: charge heavy operations without computing them, for calibrations in a fraction of the
            time. Their results are zeros.
    """

    def __init__(self, spec: MachineSpec | None = None, *, dry: bool = False) -> None:
        self.spec = spec or MachineSpec()
        self.dry = dry
        self._clock: VirtualClock | None = None
        self._stack = contextlib.ExitStack()

    @property
    def clock(self) -> VirtualClock:
        """The machine's clock, also after it was switched off."""
        assert self._clock is not None, "the machine has not been switched on"
        return self._clock

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of its accelerators."""
        return tuple(f"{DEVICE_TYPE}:{i}" for i in range(len(self.spec.accelerators)))

    def __enter__(self) -> EmulatedMachine:
        if runtime.is_switched_on():
            raise RuntimeError("one emulated machine is on already: leave it before the next")
        device.register()
        self._clock = VirtualClock(self.spec, dry=self.dry)
        runtime.set_runtime(
            runtime.Runtime(
                clock=self._clock,
                memories=[
                    DeviceMemory(name, int(accelerator.memory_bytes))
                    for name, accelerator in zip(self.devices, self.spec.accelerators, strict=True)
                ],
                generators=[torch.Generator().manual_seed(0) for _ in self.devices],
                current_stream=streams.current_stream_number,
                generator_devices=weakref.WeakValueDictionary(),
            )
        )
        self._stack.callback(runtime.set_runtime, None)
        self._stack.callback(streams.forget_streams)
        self._stack.enter_context(device.patched_torch())
        self._stack.enter_context(boundary.use_clock(self._clock))
        self._stack.enter_context(self._clock.charging())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        unfinished, failures = self.clock.lanes.stop()
        self._stack.close()
        if error is None and failures:
            raise failures[0]
        if error is None and unfinished:
            raise RuntimeError(
                f"lanes still ran when the machine was left: {', '.join(unfinished)}"
            )

    def machine(self) -> Machine:
        """What autoplace would detect on this machine."""
        from autoplace.machine import Accelerator, Machine

        cpu = self.spec.cpu
        return Machine(
            usable_cpus=cpu.cores,
            logical_cpus=cpu.cores,
            physical_cores=cpu.cores,
            cpu_quota=None,
            cpu_model=f"emulated: {self.spec.name}",
            memory_bytes=int(cpu.memory_bytes),
            platform="emulated",
            arch="emulated",
            accelerators=tuple(
                Accelerator(
                    device=name,
                    name=accelerator.name,
                    uuid=f"EMU-{self.spec.name}-{index}",
                    memory_bytes=int(accelerator.memory_bytes),
                    usable=True,
                    reason="",
                )
                for index, (name, accelerator) in enumerate(
                    zip(self.devices, self.spec.accelerators, strict=True)
                )
            ),
            versions=(("torch", torch.__version__),),
        )
