"""An emulated machine: a second torch device of known cost, under a virtual clock.

    from tests.emulated import EmulatedMachine, load_spec

    with EmulatedMachine(load_spec("desktop_fast_gpu")) as machine:
        start = device.now()
        torch.ones(512, 512, device="emu:0") @ torch.ones(512, 512, device="emu:0")
        device.synchronize("emu:0")
        seconds = device.now() - start        # virtual, the same on every run

The modules, each importing only from those above it:

``spec``       machines as data: dataclasses and their JSON
``costs``      what one operation has to do: floating-point operations and bytes
``lanes``      concurrent threads of the program, in the order of virtual time
``memory``     host memory seen as device memory, page-locked memory, what is allocated
``clock``      the virtual time: host, launches, copies, waits, noise
``runtime``    the machine that is switched on
``copies``     copies between host and devices, and what goes wrong with them
``dispatch``   how torch's operations run on the device (``autocast``: in mixed precision)
``streams``    streams and events
``device``     the module ``torch.emu``, and what is patched in torch
``machine``    all of it together, switched on and off
``env``        environments of declared cost

What it emulates is logic and declared costs. It has no caching allocator, no graph capture and no
TF32, and it says nothing about the numbers of a real device.
"""

from tests.emulated.machine import EmulatedMachine
from tests.emulated.spec import MachineSpec, load_spec, spec_names

__all__ = ["EmulatedMachine", "MachineSpec", "load_spec", "spec_names"]
