"""Which tasks a calibration times, most useful first.

The order matters: when the budget ends early, what is left out is at the end. Sizes cover what PPO
uses and a margin beyond, spaced by factors of two to four, since costs are smooth in the logarithm
of a size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from autoplace.device_names import CPU
from autoplace.engines import EAGER, NUMPY, passes_engine
from autoplace.measurement import Task
from autoplace.workload import NetworkSpec

# Closer to each other where several threads or an accelerator begin to pay.
SQUARES = (16, 64, 256, 1024, 32, 128, 512, 2048, 48, 96, 24, 192, 384)
QUICK_SQUARES = (16, 64, 256, 512)
# (rows, inputs, outputs) of layers as PPO meets them.
SKINNY = (
    (8, 64, 64),
    (256, 64, 64),
    (1024, 256, 256),
    (256, 64, 8),
    (8, 512, 512),
    (64, 4, 64),
    (2048, 64, 256),
    (1024, 256, 17),
    (32, 376, 256),
    # Heads: of a few actions, so few columns that libraries compute them in another way.
    (32, 256, 4),
    (1024, 512, 6),
    (128, 512, 8),
    (256, 384, 3),
)
QUICK_SKINNY = ((8, 64, 64), (1024, 256, 256), (256, 64, 8))
# Closer to each other where they leave one cache after the other.
STREAMED = tuple(1 << power for power in (12, 14, 16, 17, 18, 19, 20, 21, 22, 24))
QUICK_STREAMED = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 23)
ACTIVATED = (1 << 9, 1 << 14, 1 << 19)
COPIED_BYTES = (256, 4096, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 14, 1 << 18)
CROWDED, QUICK_CROWDED = 1 << 14, 1 << 11  # most stretches of Python, some 0.1 s and 10 ms
QUICK_COPIED_BYTES = (256, 1 << 16, 1 << 22)


def _spec(observation: int, hidden: tuple[int, ...], action: int, continuous: bool) -> NetworkSpec:
    return NetworkSpec(
        observation_size=observation,
        hidden_sizes=hidden,
        action_size=action,
        continuous=continuous,
    )


# (network, rows of a policy step, rows of a minibatch). Each row of the table varies several sizes
# at once, so that few timings span the space.
STEPS: tuple[tuple[NetworkSpec, tuple[int, ...], tuple[int, ...]], ...] = (
    (_spec(4, (64, 64), 2, False), (8, 64), (64, 256, 1024, 128)),
    (_spec(17, (64, 64), 6, True), (8, 1, 32), (64, 512, 256, 128)),
    (_spec(17, (256, 256), 6, True), (8, 64), (64, 512, 4096)),
    (_spec(64, (128, 128), 8, False), (16, 256), (128, 1024)),
    (_spec(128, (512, 512), 16, True), (8, 128), (64, 1024)),
    (_spec(8, (32, 32), 4, False), (4, 512), (32, 4096)),
    (_spec(376, (256, 256, 256), 17, True), (32, 1), (256, 2048)),
    (_spec(1024, (64, 64), 6, False), (16,), (512, 64)),
    (_spec(17, (32, 32), 6, True), (16,), (256,)),
    (_spec(32, (1024, 1024), 4, False), (64, 4), (256, 1024)),
)
# How many more networks, and shapes of products, fill the space between these.
_SPREAD, _SPREAD_PRODUCTS, _QUICK_SPREAD_PRODUCTS = 8, 80, 40
_CANDIDATES = 48  # networks after those, of which the model picks
_LARGEST_SPREAD = 2**26  # multiplications
_QUICK_WORK = 6e7  # rows x parameters of a gradient step in a quick calibration
_DEPTHS = (1, 2, 2, 2, 3)  # hidden layers, as often as networks have them


def _halton(index: int, base: int) -> float:
    """Term ``index`` of the van der Corput sequence, in (0, 1) (Halton 1960)."""
    value, scale = 0.0, 1.0
    while index:
        index, digit = divmod(index, base)
        scale /= base
        value += digit * scale
    return value


def _spread(
    numbers: range,
) -> Iterator[tuple[NetworkSpec, tuple[int, ...], tuple[int, ...]]]:
    """Networks and rows that fill the space between those of the table evenly, by their numbers."""
    for index in numbers:
        observation, width, rows, batch = (_halton(index, base) for base in (2, 3, 5, 7))
        depth = _DEPTHS[7 * index % 11 * len(_DEPTHS) // 11]
        spec = _spec(
            round(2 ** (2 + 7 * observation)),
            (round(2 ** (5 + 4.5 * width)),) * depth,
            2 + index % 16,
            index % 2 == 0,
        )
        yield spec, (round(2 ** (8 * rows)),), (round(2 ** (5.5 + 5.5 * batch)),)


def _spread_products(count: int) -> Iterator[tuple[int, int, int]]:
    """Shapes of products that fill the space of layers and rows evenly, ragged ones among them."""
    found, index = 0, 0
    while found < count:
        index += 1
        rows, inputs, outputs = (_halton(index, base) for base in (2, 3, 5))
        m, k, n = (
            round(2 ** (11 * rows)),
            round(2 ** (2 + 8 * inputs)),
            round(2 ** (2 + 8 * outputs)),
        )
        if m * k * n <= _LARGEST_SPREAD:
            found += 1
            yield m, k, n


# Of products by numpy.
QUICK_OWN_PRODUCTS = ((1, 64, 64), (1, 512, 512), *QUICK_SKINNY, (4, 256, 256), (256, 256, 256))
OWN_PRODUCTS = (*QUICK_OWN_PRODUCTS, *SKINNY[3:], (4, 1024, 1024))


# (rollout steps, envs) beside the networks of the table, in turn.
ROLLOUTS = ((128, 8), (256, 8), (2048, 1), (64, 64), (512, 4))
# Which networks of the table take a first step of an update, with the first of their minibatches.
FIRSTS, QUICK_FIRSTS = (0, 2, 4, 7, 8), (0, 4)
# (rollout steps, envs, numbers of noise for an action, epochs) of what is drawn and counted.
BOOKS = ((128, 8, 2, 4), (2048, 1, 3, 10), (64, 64, 4, 4), (512, 4, 17, 10), (32, 16, 2, 1))
QUICK_BOOKS = BOOKS[:3]
# Which networks of the table pass over a rollout in a quick calibration, and the rollouts.
QUICK_PASSES, QUICK_ROLLOUTS = (0, 4, 7), ((128, 8), (512, 4), (256, 2))
SPREAD_ROLLOUTS = ((40, 50), (400, 12), (32, 6), (256, 60), (96, 24), (512, 32), (64, 10))


def thread_counts(usable_cpus: int) -> tuple[int, ...]:
    """1, the powers of two, and all usable CPUs."""
    counts = {1, usable_cpus}
    count = 2
    while count < usable_cpus:
        counts.add(count)
        count *= 2
    return tuple(sorted(counts))


def calibration_tasks(
    devices: Sequence[str],
    usable_cpus: int,
    *,
    engines: Mapping[str, Sequence[str]] | None = None,
    quick: bool = False,
) -> list[Task]:
    """Every task of a calibration of ``devices`` (the CPU among them), most useful first.

    ``engines`` are those of steps on each device, the one to know best last; eager if not given.
    """
    threads = thread_counts(usable_cpus)
    if quick and len(threads) > 2:
        threads = (threads[0], threads[len(threads) // 2], threads[-1])
    # A device's timings are interleaved with those of the others, family by family.
    queues = [
        list(_device_tasks(on, threads, (engines or {}).get(on, (EAGER,)), quick)) for on in devices
    ]
    merged = [t for group in itertools.zip_longest(*queues) for t in group if t is not None]
    first_beside = next((index for index, task in enumerate(merged) if task.beside), None)
    if first_beside is not None:
        longest = (QUICK_CROWDED if quick else CROWDED,)
        merged.insert(first_beside, Task(op="crowd", shape=longest, workers=usable_cpus + 1))
    return list(dict.fromkeys(merged))


def candidate_tasks(
    devices: Sequence[str],
    usable_cpus: int,
    *,
    engines: Mapping[str, Sequence[str]] | None = None,
) -> list[Task]:
    """More of the trainer's steps, of which those are worth a timing that are known worst."""
    found = []
    numbers = range(_SPREAD + 1, _SPREAD + 1 + _CANDIDATES)
    for on in devices:
        counts = (1, usable_cpus) if on == CPU else (1,)
        for network, rows, batches in _spread(numbers):
            for count in dict.fromkeys(counts):
                for engine in (engines or {}).get(on, (EAGER,)):
                    found += [
                        _update(on, count, network, batches[0], engine),
                        _policy(on, count, network, rows[0], engine),
                    ]
    return list(dict.fromkeys(found))


def _device_tasks(
    on: str, threads: Sequence[int], engines: Sequence[str], quick: bool
) -> Iterator[Task]:
    """The tasks of one device: basics first, then real steps, then what refines both."""
    counts = tuple(threads) if on == CPU else (1,)
    *others, main = engines
    products = (EAGER, *(engine for engine in engines if engine == NUMPY))  # numpy has its own
    squares = QUICK_SQUARES if quick else SQUARES
    skinny = QUICK_SKINNY if quick else SKINNY
    steps = STEPS
    if quick:  # the widest network takes longer to draw than to time
        steps = tuple((n, rows, _affordable(n, batches)) for n, rows, batches in STEPS[:-1])
    yield Task(op="dispatch", device=on)
    yield Task(op="launch", device=on)
    if on == CPU and max(threads) > 1:
        yield from (Task(op="handoff"), Task(op="hand_over"))
    for count in counts:
        for size in squares[:4]:
            yield Task(op="matmul", device=on, threads=count, shape=(size, size, size))
        for shape in skinny[:3]:
            yield Task(op="matmul", device=on, threads=count, shape=shape)
        for engine in products[1:]:
            for shape in QUICK_OWN_PRODUCTS if quick else OWN_PRODUCTS:
                yield Task(op="matmul", device=on, threads=count, shape=shape, engine=engine)
        for numbers in QUICK_STREAMED if quick else STREAMED:
            yield Task(op="elementwise", device=on, threads=count, shape=(numbers,))
        for numbers in ACTIVATED:
            yield Task(op="activation", device=on, threads=count, shape=(numbers,))
    if on != CPU:
        yield from _copies(on, QUICK_COPIED_BYTES if quick else COPIED_BYTES)
    passes = dict.fromkeys(passes_engine(e, on) for e in (main, *others))
    rounds = max(max(len(rows), len(batches)) for _, rows, batches in steps)
    for index in range(rounds):
        for count in counts:
            for network, rows, batches in steps:
                for engine in (main, *others):
                    if index < len(batches):
                        yield _update(on, count, network, batches[index], engine)
                    if index < len(rows):
                        yield _policy(on, count, network, rows[index], engine)
        if index == 0:
            if on == CPU and max(counts) > 1:
                yield from _contended(counts, steps[:1] if quick else steps[:3:2], main)
            networks = [network for network, _, _ in steps]
            passing = [networks[i] for i in QUICK_PASSES] if quick else networks
            for engine in passes:
                rollouts = QUICK_ROLLOUTS if quick else ROLLOUTS
                yield from _gaes(on, counts, passing, rollouts, engine)
            if on == CPU:
                for sizes in QUICK_BOOKS if quick else BOOKS:
                    yield Task(op="bookkeeping", shape=sizes)
            firsts = [steps[i] for i in (QUICK_FIRSTS if quick else FIRSTS)]
            for engine in (main,) if quick else (main, *others):
                for network, _, batches in firsts:
                    for count in dict.fromkeys((counts[0], counts[-1])):
                        step = _update(on, count, network, batches[0], engine)
                        yield dataclasses.replace(step, op="first_update")
            if on != CPU:
                for network in networks:
                    yield Task(op="weights_to_host", device=on, network=network)
            for engine in (main, *others):
                yield from _unscaled(on, *steps[0], engine)
    ends = tuple(dict.fromkeys((counts[0], counts[-1])))
    spread = [] if quick else list(_spread(range(1, _SPREAD + 1)))
    for network, rows, batches in spread:
        for count in ends:
            for engine in (main, *others):
                yield _update(on, count, network, batches[0], engine)
                yield _policy(on, count, network, rows[0], engine)
    for engine in passes:
        yield from _gaes(on, ends, [network for network, _, _ in spread], SPREAD_ROLLOUTS, engine)
    for shape in _spread_products(_QUICK_SPREAD_PRODUCTS if quick else _SPREAD_PRODUCTS):
        for count, engine in itertools.product(ends, products):
            yield Task(op="matmul", device=on, threads=count, shape=shape, engine=engine)
    for count in counts:
        for size in squares[4:]:
            yield Task(op="matmul", device=on, threads=count, shape=(size, size, size))
        for shape in skinny[3:]:
            yield Task(op="matmul", device=on, threads=count, shape=shape)
    if on != CPU:
        for size in squares:
            yield Task(op="matmul", device=on, shape=(size, size, size), residency="copied")


def _affordable(network: NetworkSpec, batches: Sequence[int]) -> tuple[int, ...]:
    """Those of a quick calibration."""
    return tuple(rows for rows in batches if rows * network.num_parameters <= _QUICK_WORK)


def _contended(
    counts: Sequence[int],
    steps: Sequence[tuple[NetworkSpec, tuple[int, ...], tuple[int, ...]]],
    engine: str,
) -> Iterator[Task]:
    """The first of the steps beside one busy core and beside all others, a message beside all."""
    cores = max(counts)
    yield Task(op="hand_over", beside=cores)
    alone = [Task(op="interpreter")]
    for network, rows, batches in steps:
        alone += [
            _policy(CPU, 1, network, rows[0], engine),
            _update(CPU, 1, network, batches[0], engine),
        ]
    yield alone[0]
    for busy in dict.fromkeys((1, cores - 1)):
        yield from (dataclasses.replace(task, beside=busy) for task in alone)
    network, _, batches = steps[0]
    for count in counts:
        if 1 < count < cores:
            task = _update(CPU, count, network, batches[0], engine)
            yield dataclasses.replace(task, beside=cores - count)


def _policy(on: str, threads: int, network: NetworkSpec, rows: int, engine: str) -> Task:
    return Task(
        op="policy_step", device=on, threads=threads, network=network, rows=rows, engine=engine
    )


def _update(on: str, threads: int, network: NetworkSpec, rows: int, engine: str) -> Task:
    return Task(op="update", device=on, threads=threads, network=network, rows=rows, engine=engine)


def _gaes(
    on: str,
    counts: Sequence[int],
    networks: Sequence[NetworkSpec],
    shapes: Sequence[tuple[int, int]],
    engine: str,
) -> Iterator[Task]:
    """Of each network with the next of the shapes."""
    for network, shape in zip(networks, itertools.cycle(shapes), strict=False):
        for count in counts:
            yield Task(
                op="gae", device=on, threads=count, shape=shape, network=network, engine=engine
            )


def _unscaled(
    on: str, network: NetworkSpec, rows: Sequence[int], _: object, engine: str
) -> Iterator[Task]:
    """Steps that standardise no observations and scale no rewards."""
    if on == CPU:  # elsewhere what is left out is a few operations, each as long as any
        yield dataclasses.replace(_policy(on, 1, network, rows[0], engine), standardized=False)
    yield Task(
        op="gae",
        device=on,
        shape=ROLLOUTS[0],
        network=network,
        engine=passes_engine(engine, on),
        standardized=False,
        scaled_rewards=False,
    )


def _copies(on: str, sizes: Sequence[int]) -> Iterator[Task]:
    for nbytes in sizes:
        for direction in ("h2d", "d2h"):
            for pinned in (True, False):
                yield Task(
                    op="copy", device=on, direction=direction, pinned=pinned, shape=(nbytes,)
                )
