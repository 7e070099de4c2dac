"""The emulated device does what a real accelerator of torch does, compared with the CPU."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplace import device as boundary
from tests.emulated import EmulatedMachine

pytestmark = pytest.mark.usefixtures("machine")

DEVICES = ("emu:0", "emu:1")
D = "emu:0"


class Policy(nn.Module):
    def __init__(self, inputs: int = 4, width: int = 16, actions: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.ReLU()
        )
        self.actor = nn.Linear(width, actions)
        self.critic = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.body(x)
        return self.actor(z), self.critic(z).squeeze(-1)


def ppo_losses(device: str, steps: int = 3, **adam: object) -> tuple[list[float], nn.Module]:
    """Losses of a few PPO-like gradient steps, from the same start on any device."""
    torch.manual_seed(0)
    policy = Policy()
    observations, returns = torch.randn(32, 4), torch.randn(32)
    actions = torch.randint(0, 3, (32,))
    policy.to(device)
    observations, returns, actions = (t.to(device) for t in (observations, returns, actions))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2, **adam)
    losses = []
    for _ in range(steps):
        logits, values = policy(observations)
        distribution = torch.distributions.Categorical(logits=logits)
        log_prob = distribution.log_prob(actions)
        ratio = (log_prob - log_prob.detach()).exp()
        gain = torch.min(ratio * returns, ratio.clamp(0.8, 1.2) * returns).mean()
        loss = F.mse_loss(values, returns) - gain - 0.01 * distribution.entropy().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, policy


# --------------------------------------------------------------------------------------------------
# Tensors


@pytest.mark.parametrize("device", DEVICES)
def test_a_round_trip_keeps_values_strides_and_device(device: str) -> None:
    x = torch.arange(12.0).view(3, 4)
    y = x.to(device)
    assert str(y.device) == device
    assert type(y) is torch.Tensor
    assert not y.t().is_contiguous()
    assert torch.equal(y.t().cpu(), x.t())
    assert torch.equal((y[1:, ::2] * 2).cpu(), x[1:, ::2] * 2)


def test_a_copy_on_the_device_does_not_share_memory_with_the_host() -> None:
    x = torch.zeros(3)
    y = x.to(D)
    y.add_(1)
    assert x.sum() == 0
    assert y.cpu().sum() == 3


def test_a_name_without_index_means_the_first_device() -> None:
    assert str(torch.ones(2, device="emu").device) == "emu:0"
    assert str(torch.ones(2).to("emu").device) == "emu:0"


def test_tensors_move_between_two_devices() -> None:
    x = torch.arange(4.0, device="emu:0").to("emu:1")
    assert str(x.device) == "emu:1"
    assert x.cpu().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(2, 3, device=d),
        lambda d: torch.ones(2, 3, device=d),
        lambda d: torch.full((2,), 7.0, device=d),
        lambda d: torch.arange(5, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
        lambda d: torch.tensor(3.0, device=d),
        lambda d: torch.as_tensor(np.arange(3.0), device=d),
        lambda d: torch.ones(2, device=d).new_zeros(3),
        lambda d: torch.zeros_like(torch.ones(2, device=d)),
    ],
)
def test_a_factory_makes_on_the_device_what_it_makes_on_the_cpu(make: Callable) -> None:
    made = make("emu:1")
    assert str(made.device) == "emu:1"
    assert torch.equal(made.cpu(), make("cpu"))


def test_a_default_device_applies_to_factories_and_modules() -> None:
    with torch.device("emu:1"):
        assert str(torch.zeros(2).device) == "emu:1"
        assert str(nn.Linear(2, 2).weight.device) == "emu:1"


SWEEP: dict[str, Callable[..., object]] = {
    "matmul": lambda x, y, i: x @ y.t(),
    "addmm": lambda x, y, i: torch.addmm(x[0, :3], x, y.t()),
    "bmm": lambda x, y, i: torch.bmm(x.expand(2, 3, 4), y.t().expand(2, 4, 3)),
    "einsum": lambda x, y, i: torch.einsum("ij,kj->ik", x, y),
    "linear": lambda x, y, i: F.linear(x, y),
    "arithmetic": lambda x, y, i: (x + y * 2 - 1) / (y.abs() + 1),
    "scalar on the left": lambda x, y, i: 1 - x,
    "power": lambda x, y, i: x**2,
    "tanh": lambda x, y, i: x.tanh(),
    "comparison": lambda x, y, i: (x > y) & (x != 0),
    "clamp": lambda x, y, i: x.clamp(-0.5, 0.5),
    "minimum": lambda x, y, i: torch.min(x, y),
    "where": lambda x, y, i: torch.where(x > 0, x, y),
    "sum": lambda x, y, i: (x.sum(), x.sum(1), x.mean(0, keepdim=True)),
    "std": lambda x, y, i: (x.std(), torch.var_mean(x, 1)),
    "extremes": lambda x, y, i: (x.max(), x.max(1), x.amin(0), x.argmax(-1)),
    "cumulative": lambda x, y, i: (x.cumsum(0), x.cumprod(1)),
    "logsumexp": lambda x, y, i: (x.logsumexp(-1), x.log_softmax(-1), x.softmax(0)),
    "norm": lambda x, y, i: (x.norm(), torch.linalg.vector_norm(x, dim=1)),
    "all and any": lambda x, y, i: ((x > 0).any(), torch.isfinite(x).all(1)),
    "index": lambda x, y, i: (x[i], x[i, 1], x[1], x[..., None, 1:], x[:, [0, 2]]),
    "mask": lambda x, y, i: (x[x > 0], x.masked_fill(x > 0, 0), x.masked_select(y > 0)),
    "gather": lambda x, y, i: (x.gather(1, i[:, None]), x.index_select(0, i), x.take(i)),
    "scatter": lambda x, y, i: x.scatter(1, i[:, None], 5.0),
    "index copy": lambda x, y, i: torch.zeros_like(x).index_copy_(0, i, y),
    "index add": lambda x, y, i: torch.zeros_like(x).index_add_(0, i, y),
    "nonzero": lambda x, y, i: ((x > 0).nonzero(), torch.unique(i)),
    "sort": lambda x, y, i: (x.sort(1), x.topk(2), x.flip(0)),
    "views": lambda x, y, i: (x.t(), x.view(-1), x.reshape(2, 6), x[1:], x.expand(2, 3, 4)),
    "split": lambda x, y, i: (x.chunk(2, 1), x.split([1, 2]), x.unbind(0)),
    "join": lambda x, y, i: (torch.cat([x, y]), torch.stack([x, y]), x.repeat(2, 1)),
    "dtype": lambda x, y, i: (x.double(), x.to(torch.bfloat16).float(), x.long(), x.bool()),
    "in place": lambda x, y, i: x.clone().mul_(2).add_(y, alpha=0.5).clamp_(max=1).neg_(),
    "in place on a view": lambda x, y, i: _in_place_on_views(x.clone()),
    "assignment": lambda x, y, i: _assignments(x.clone(), y, i),
    "lerp": lambda x, y, i: x.lerp(y, 0.3),
    "addcmul": lambda x, y, i: (x.addcmul(y, y, value=0.1), x.addcdiv(y, y.abs() + 1)),
    "foreach": lambda x, y, i: (torch._foreach_add([x, y], 1.0), torch._foreach_norm([x, y])),
    "losses": lambda x, y, i: (F.mse_loss(x, y), F.cross_entropy(x, i), F.smooth_l1_loss(x, y)),
    "layers": lambda x, y, i: (F.layer_norm(x, (4,)), F.gelu(x), F.one_hot(i), F.embedding(i, x)),
    "complex": lambda x, y, i: ((x + 1j * y).conj() * 2, torch.fft.ifft(x), (x + 1j).conj().imag),
    "convolution": lambda x, y, i: F.conv1d(x[None], torch.ones(2, 3, 2, device=x.device)),
    "normal": lambda x, y, i: torch.distributions.Normal(x, y.exp()).log_prob(y).sum(-1),
    "categorical": lambda x, y, i: (
        torch.distributions.Categorical(logits=x).log_prob(i),
        torch.distributions.Categorical(logits=x).entropy(),
    ),
}


def _in_place_on_views(x: torch.Tensor) -> torch.Tensor:
    x[1:].mul_(2)
    x.t()[0].add_(1)
    x.view(-1)[::5].zero_()
    return x


def _assignments(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x[0] = y[1]
    x[i, 1] = 5.0
    x[y > 0.5] = 0.0
    x[:, 2:] = y[:, :2]
    return x


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


@pytest.mark.parametrize("name", SWEEP)
def test_an_operation_gives_the_cpus_result_and_gradient(name: str) -> None:
    torch.manual_seed(0)
    x, y, i = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([2, 0, 1])
    results = {}
    for device in ("cpu", "emu:1"):
        inputs = [t.clone().to(device).requires_grad_() for t in (x, y)]
        outputs = _tensors(SWEEP[name](*inputs, i.to(device)))
        assert all(str(t.device) == device for t in outputs)
        differentiable = [t for t in outputs if t.requires_grad and not t.is_complex()]
        gradients: list[torch.Tensor | None] = []
        if differentiable:
            total = sum(t.float().sum() for t in differentiable)
            gradients = list(torch.autograd.grad(total, inputs, allow_unused=True))
        results[device] = [None if t is None else t.detach().cpu() for t in (*outputs, *gradients)]
    for expected, got in zip(results["cpu"], results["emu:1"], strict=True):
        if expected is None:
            assert got is None
        else:
            torch.testing.assert_close(got, expected)


def test_out_arguments_are_filled_and_empty_ones_grow() -> None:
    a = torch.ones(2, 3, device=D)
    empty, right, wide = (torch.empty(s, device=D) for s in ((0,), (2, 3), (4, 4)))
    assert torch.add(a, a, out=empty) is empty
    assert empty.cpu().tolist() == [[2.0] * 3] * 2
    torch.mul(a, 3, out=right)
    assert right.sum().item() == 18
    wide.zero_()
    torch.add(a[:, :2], 1, out=wide[:2, 1:3])  # into a view that is not contiguous
    assert wide.sum().item() == 8


def test_values_reach_python() -> None:
    x = torch.tensor([3.0], device=D)
    assert x.item() == 3.0
    assert bool(x > 2)
    assert x.tolist() == [3.0]
    assert int(torch.tensor(4, device=D)) == 4
    assert f"{x}".startswith("tensor([3.]")


def test_numpy_refuses_a_device_tensor() -> None:
    with pytest.raises(TypeError, match="emu"):
        torch.ones(2, device=D).numpy()


# --------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    "mistake",
    [
        lambda a, b: a + b,
        lambda a, b: b + a,
        lambda a, b: a @ b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: b.add_(a),
        lambda a, b: a.add_(b),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: torch.stack([b, a]),
        lambda a, b: F.linear(b, a),
        lambda a, b: F.mse_loss(a, b),
        lambda a, b: torch.add(a, a, out=b),
        lambda a, b: torch.add(b, b, out=a),
        lambda a, b: b[a.long()],
        lambda a, b: a.index_select(0, b[0].long()),
        lambda a, b: b.index_copy_(0, torch.tensor([0, 1]), a),
        lambda a, b: torch._foreach_add_([a], [b]),
        lambda a, b: a[0, 0] + b,  # one number of a device does not join a CPU tensor
        lambda a, b: b[0, 0].add_(a[0, 0]),
        lambda a, b: a.index_put_((torch.tensor([0]),), b[0]),
        lambda a, b: b.copy_(a).add_(a),
    ],
)
@pytest.mark.parametrize("other", ["cpu", "emu:1"])
def test_mixing_devices_is_an_error(mistake: Callable, other: str) -> None:
    a, b = torch.ones(2, 2, device=D), torch.ones(2, 2, device=other)
    with pytest.raises(RuntimeError, match="device"):
        mistake(a, b)


def test_one_number_on_the_cpu_may_join_in() -> None:
    a = torch.ones(2, 2, device=D)
    assert (a * torch.tensor(2.0)).sum().item() == 8
    assert (torch.tensor(2.0) - a).sum().item() == 4
    assert torch.where(a > 0, a, torch.tensor(0.0)).sum().item() == 4


def test_indices_on_the_cpu_may_index_a_device_tensor() -> None:
    a = torch.arange(6.0, device=D).view(3, 2)
    assert a[torch.tensor([2])].cpu().tolist() == [[4.0, 5.0]]
    a[torch.tensor([0])] = 9.0
    assert a[0].cpu().tolist() == [9.0, 9.0]


def test_a_module_and_its_input_must_be_on_one_device() -> None:
    with pytest.raises(RuntimeError, match="device"):
        nn.Linear(2, 2).to(D)(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="device"):
        nn.Linear(2, 2)(torch.ones(1, 2, device=D))


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="emu:2"):
        torch.ones(2, device="emu:2")


def test_using_the_device_after_the_machine_is_an_error() -> None:
    # The fixture's machine is on; another process-global one is refused.
    with pytest.raises(RuntimeError, match="already"), EmulatedMachine():
        pass


def test_in_place_changes_that_break_a_gradient_are_noticed() -> None:
    w = torch.ones(2, device=D, requires_grad=True)
    e = (w * 2).exp()
    e.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        e.sum().backward()


@pytest.mark.parametrize(
    ("unsupported", "error", "message"),
    [
        (lambda: torch.UntypedStorage(8, device=D), NotImplementedError, "torch.empty"),
        (lambda: torch.empty(3, pin_memory=True), RuntimeError, "[Pp]inned|allocator|hook"),
        (lambda: torch.emu.set_device(1), NotImplementedError, "emu:1"),
        (lambda: torch.emu.Event(interprocess=True), NotImplementedError, "processes"),
        (lambda: torch.ones(2, device=D).pin_memory(), RuntimeError, "pin"),
        (lambda: torch.ones(2, 2, device=D).to_sparse().sum(), NotImplementedError, "parse"),
        (lambda: setattr(nn.Parameter(torch.ones(2)), "data", torch.ones(2, device=D)),
         RuntimeError, "incompatible tensor type"),
    ],
)  # fmt: skip
def test_what_is_not_supported_fails_with_a_clear_error(
    unsupported: Callable, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        unsupported()


# --------------------------------------------------------------------------------------------------
# Training


@pytest.mark.parametrize(
    "adam",
    [
        {},
        {"foreach": True},
        {"foreach": False},
        {"fused": True},
        {"capturable": True, "foreach": True},
        {"weight_decay": 0.1, "amsgrad": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_ppo_steps_with_adam_give_the_cpus_losses(adam: dict[str, object], device: str) -> None:
    on_cpu = {key: value for key, value in adam.items() if key in ("weight_decay", "amsgrad")}
    expected, _ = ppo_losses("cpu", **on_cpu)
    got, policy = ppo_losses(device, **adam)
    assert {str(p.device) for p in policy.parameters()} == {device}
    assert {str(p.grad.device) for p in policy.parameters()} == {device}
    assert got == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.AdamW])
def test_other_optimisers_step_as_on_the_cpu(optimizer: type[torch.optim.Optimizer]) -> None:
    weights = {}
    for device in ("cpu", D):
        torch.manual_seed(0)
        layer, x = nn.Linear(3, 2), torch.randn(5, 3)
        layer.to(device)
        optimize = optimizer(layer.parameters(), lr=0.1)
        for _ in range(2):
            optimize.zero_grad()
            layer(x.to(device)).square().sum().backward()
            optimize.step()
        weights[device] = layer.weight.detach().cpu()
    torch.testing.assert_close(weights[D], weights["cpu"])


@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_are_clipped_to_the_norm(foreach: bool) -> None:
    p = [nn.Parameter(torch.ones(2, device=D)), nn.Parameter(torch.ones(3, device=D))]
    for parameter in p:
        parameter.grad = torch.full_like(parameter, 2.0)
    total = nn.utils.clip_grad_norm_(p, 1.0, foreach=foreach)
    assert total.item() == pytest.approx(20**0.5)  # five entries of 2
    after = sum(float(q.grad.square().sum()) for q in p) ** 0.5
    assert after == pytest.approx(1.0, abs=1e-4)


def test_a_convolutional_policy_trains_as_on_the_cpu() -> None:
    gradients = {}
    for device in ("cpu", D):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(72, 2)
        )
        images = torch.randn(2, 3, 11, 11)
        network.to(device)(images.to(device)).square().sum().backward()
        gradients[device] = [p.grad.cpu() for p in network.parameters()]
    for expected, got in zip(gradients["cpu"], gradients[D], strict=True):
        torch.testing.assert_close(got, expected)


def test_moving_a_module_keeps_its_parameters_and_its_optimiser() -> None:
    policy = Policy()
    before = list(policy.parameters())
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    policy.to(D)
    assert all(a is b for a, b in zip(before, policy.parameters(), strict=True))
    weight = before[0].detach().cpu().clone()
    policy(torch.randn(3, 4, device=D))[0].sum().backward()
    optimizer.step()
    assert not torch.equal(weight, before[0].detach().cpu())
    policy.zero_grad()
    policy.to("cpu")
    policy(torch.randn(3, 4))


def test_parameters_are_copied_to_a_host_twin_and_back() -> None:
    policy, twin = Policy().to(D), Policy()
    with torch.no_grad():
        for mine, theirs in zip(policy.parameters(), twin.parameters(), strict=True):
            theirs.copy_(mine)
        torch._foreach_add_(list(twin.parameters()), 1.0)
        torch._foreach_copy_(list(policy.parameters()), list(twin.parameters()))
    for mine, theirs in zip(policy.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs)
    vector = nn.utils.parameters_to_vector(policy.parameters())
    nn.utils.vector_to_parameters(vector * 0, policy.parameters())
    assert not any(p.any() for p in policy.parameters())


def test_inference_mode_gives_inference_tensors_and_the_same_actions() -> None:
    torch.manual_seed(0)
    policy, x = Policy(), torch.randn(5, 4)
    with torch.inference_mode():
        expected, _ = policy(x)
        logits, values = policy.to(D)(x.to(D))
        assert values.is_inference()
        assert torch.equal(logits.argmax(-1).cpu(), expected.argmax(-1))


def test_double_backward_hooks_and_checkpointing_work() -> None:
    x = torch.ones(3, device=D, requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    first.sum().backward()
    assert x.grad.cpu().tolist() == [6.0, 6.0, 6.0]
    layer, calls = nn.Linear(3, 3).to(D), []
    layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.device.type))
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert calls == ["emu"]


def test_functional_transforms_work() -> None:
    policy = Policy().to(D)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(policy, parameters, (x,))[1].sum()

    parameters = {name: p.detach() for name, p in policy.named_parameters()}
    gradients = torch.func.grad(loss)(parameters, torch.randn(3, 4, device=D))
    assert {g.device.type for g in gradients.values()} == {"emu"}
    assert torch.vmap(lambda row: row.sum())(torch.ones(3, 4, device=D)).cpu().tolist() == [4.0] * 3


def test_autocast_lowers_matmuls_and_keeps_softmax_in_full_precision() -> None:
    policy, x = Policy().to(D), torch.randn(5, 4, device=D)
    with torch.autocast("emu", dtype=torch.bfloat16):
        logits, _ = policy(x)
        log_prob = torch.log_softmax(logits, -1)
    assert (logits.dtype, log_prob.dtype) == (torch.bfloat16, torch.float32)
    log_prob.square().sum().backward()
    assert policy.actor.weight.grad.dtype == torch.float32


def test_a_grad_scaler_scales_unscales_and_skips_infinite_gradients() -> None:
    scaler = torch.amp.GradScaler("emu", init_scale=128.0)
    policy = Policy().to(D)
    optimizer = torch.optim.Adam(policy.parameters())
    loss = policy(torch.randn(5, 4, device=D))[1].mean()
    assert scaler.scale(loss).item() == pytest.approx(128 * loss.item())
    scaler.scale(loss).backward()
    policy.critic.bias.grad.fill_(float("inf"))
    before = policy.critic.weight.detach().cpu().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, policy.critic.weight.detach().cpu())
    assert scaler.get_scale() == 64.0


# --------------------------------------------------------------------------------------------------
# Random numbers


def test_each_device_has_a_random_state_of_its_own() -> None:
    boundary.seed_device("emu:0", 5)
    first = torch.randn(4, device="emu:0").cpu()
    torch.manual_seed(99)  # seeds every device, as on CUDA
    torch.emu.manual_seed(5)
    host = torch.get_rng_state()
    assert torch.equal(torch.randn(4, device="emu:0").cpu(), first)
    assert torch.equal(torch.get_rng_state(), host)  # the host's state was left alone
    torch.randn(4)
    torch.emu.manual_seed(5)
    assert torch.equal(torch.randn(4, device="emu:0").cpu(), first)


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.randn(4, device=D, generator=g),
        lambda g: torch.rand(4, device=D, generator=g),
        lambda g: torch.randperm(8, device=D, generator=g),
        lambda g: torch.randint(0, 9, (4,), device=D, generator=g),
        lambda g: torch.empty(4, device=D).normal_(generator=g),
        lambda g: torch.multinomial(torch.ones(9, device=D), 3, generator=g),
    ],
)
def test_a_generator_on_the_device_repeats_its_draws(draw: Callable) -> None:
    generator = torch.Generator(device=D)
    assert isinstance(generator, torch.Generator)
    assert str(generator.device) == D
    first = draw(generator.manual_seed(3)).cpu()
    assert torch.equal(draw(generator.manual_seed(3)).cpu(), first)


@pytest.mark.parametrize("wrong", ["cpu", "emu:1"])
def test_a_generator_of_another_device_is_refused(wrong: str) -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, device=D, generator=torch.Generator(device=wrong))


def test_random_states_are_saved_and_restored() -> None:
    state = torch.emu.get_rng_state("emu:1")
    first = F.dropout(torch.ones(64, device="emu:1")).cpu()
    torch.emu.set_rng_state(state, "emu:1")
    assert torch.equal(F.dropout(torch.ones(64, device="emu:1")).cpu(), first)
    with torch.random.fork_rng(devices=[0, 1], device_type="emu"):
        torch.rand(3, device=D)


def test_distributions_sample_on_the_device() -> None:
    logits = torch.tensor([[0.0, 100.0, 0.0]], device=D).expand(6, 3)
    assert torch.distributions.Categorical(logits=logits).sample().cpu().tolist() == [1] * 6
    normal = torch.distributions.Normal(torch.zeros(6, 2, device=D), torch.ones(6, 2, device=D))
    assert normal.rsample().device.type == "emu"


# --------------------------------------------------------------------------------------------------
# Saving


def test_a_checkpoint_is_loaded_where_map_location_says() -> None:
    policy = Policy().to("emu:1")
    optimizer = torch.optim.Adam(policy.parameters())
    policy(torch.randn(2, 4, device="emu:1"))[1].sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for location, expected in ((None, "emu:1"), ("cpu", "cpu"), ("emu:0", "emu:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert {str(v.device) for v in loaded["policy"].values()} == {expected}
        for name, value in policy.state_dict().items():
            assert torch.equal(loaded["policy"][name].cpu(), value.cpu())
    policy.load_state_dict(loaded["policy"])
    optimizer.load_state_dict(loaded["optimizer"])
    moments = optimizer.state[next(policy.parameters())]["exp_avg"]
    assert str(moments.device) == "emu:1"


def test_a_checkpoint_of_the_cpu_is_loaded_onto_the_device() -> None:
    file = io.BytesIO()
    torch.save(Policy().state_dict(), file)
    file.seek(0)
    assert {v.device.type for v in torch.load(file, map_location=D).values()} == {"emu"}


def test_modules_and_tensors_are_deep_copied_and_pickled() -> None:
    policy = Policy().to(D)
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        policy.actor.weight.zero_()
    assert twin.actor.weight.device.type == "emu"
    assert twin.actor.weight.abs().sum().item() > 0
    x = pickle.loads(pickle.dumps(torch.arange(3.0, device="emu:1")))
    assert str(x.device) == "emu:1"
    assert x.sum().item() == 3


# --------------------------------------------------------------------------------------------------
# Page-locked memory, streams, events


def test_page_locked_memory_is_known_by_its_address() -> None:
    x = torch.randn(4, 4)
    p = x.pin_memory()
    assert torch.equal(p, x)
    assert p.is_pinned()
    assert p[1:].is_pinned()
    assert torch.from_numpy(p.numpy()).is_pinned()
    assert p.pin_memory() is p
    assert not x.is_pinned()
    assert not p.clone().is_pinned()


def test_a_copy_read_before_a_synchronise_is_garbage() -> None:
    for dtype in (torch.float32, torch.int64, torch.bool):
        here, ones = torch.zeros(4, dtype=dtype).pin_memory(), torch.ones(4, dtype=dtype)
        here.copy_(ones.to(D), non_blocking=True)
        assert not torch.equal(here, ones)
        boundary.synchronize(D)
        assert torch.equal(here, ones)


@pytest.mark.parametrize("wait", ["device", "stream", "event", "query"])
def test_a_non_blocking_copy_arrives_with_any_way_of_waiting(wait: str) -> None:
    here = torch.zeros(4).pin_memory()
    here.copy_(torch.ones(4, device=D), non_blocking=True)
    event = torch.emu.Event()
    event.record()
    assert here.isnan().all()
    if wait == "device":
        torch.accelerator.synchronize()
    elif wait == "stream":
        torch.emu.current_stream().synchronize()
    elif wait == "event":
        event.synchronize()
    else:
        assert not event.query()
        boundary.charge(seconds=1.0)
        assert event.query()
    assert here.tolist() == [1.0] * 4


def test_an_event_before_the_copy_does_not_make_it_arrive() -> None:
    event = torch.emu.Event()
    event.record()
    here = torch.zeros(4).pin_memory()
    here.copy_(torch.ones(4, device=D), non_blocking=True)
    event.synchronize()
    assert here.isnan().all()
    torch.emu.synchronize()


def test_waiting_for_another_device_does_not_make_a_copy_arrive() -> None:
    here = torch.zeros(4).pin_memory()
    here.copy_(torch.ones(4, device="emu:1"), non_blocking=True)
    boundary.synchronize("emu:0")
    assert here.isnan().all()
    boundary.synchronize("emu:1")
    assert not here.isnan().any()


def test_a_blocking_copy_and_one_to_pageable_memory_are_there_at_once() -> None:
    there = torch.ones(4, device=D)
    pinned, pageable = torch.zeros(4).pin_memory(), torch.zeros(4)
    pinned.copy_(there)
    pageable.copy_(there, non_blocking=True)
    assert pinned.tolist() == pageable.tolist() == [1.0] * 4


def test_overwriting_the_source_of_a_copy_under_way_is_noticed() -> None:
    source = torch.ones(4).pin_memory()
    target = source.to(D, non_blocking=True)
    source.fill_(2.0)
    with pytest.raises(RuntimeError, match="overwritten"):
        boundary.synchronize(D)
    assert target.cpu().tolist() == [1.0] * 4


def test_a_source_may_be_reused_after_a_wait() -> None:
    source = torch.ones(4).pin_memory()
    target = source.to(D, non_blocking=True)
    target.sum().item()  # waits for the stream
    source.fill_(2.0)
    boundary.synchronize(D)
    assert target.cpu().tolist() == [1.0] * 4


def test_work_on_a_copy_that_another_stream_still_brings_is_noticed() -> None:
    side = torch.emu.Stream(device=D)
    there, source = torch.zeros(1024, device=D), torch.ones(1024).pin_memory()
    for wait in (False, True):
        side.wait_stream(torch.emu.current_stream(D))
        with torch.emu.stream(side):
            there.copy_(source, non_blocking=True)
            there.add(1)  # its own stream is in order
        if wait:
            torch.emu.current_stream(D).wait_stream(side)
            assert there.sum().item() == 1024
        else:
            with pytest.raises(RuntimeError, match="wait for that stream"):
                there.sum()
            with pytest.raises(RuntimeError, match="wait for that stream"):
                there.cpu()
            boundary.synchronize(D)
            there.sum()


def test_streams_wait_for_each_other_and_events_time_them() -> None:
    module = torch.get_device_module("emu")
    side = module.Stream(device="emu:1")
    start, stop = module.Event(enable_timing=True), module.Event(enable_timing=True)
    with module.stream(side):
        assert module.current_stream("emu:1") == side
        start.record(side)
        x = torch.ones(64, 64, device="emu:1")
        y = x @ x
        stop.record(side)
    assert module.current_stream("emu:1") != side
    module.current_stream("emu:1").wait_stream(side)
    y.record_stream(side)
    with pytest.raises(RuntimeError, match="completed"):
        start.elapsed_time(stop)
    stop.synchronize()
    assert stop.query()
    assert start.elapsed_time(stop) > 0


def test_streams_and_events_of_torch_itself_reach_the_device() -> None:
    stream, event = torch.Stream(device=D), torch.Event(device=D, enable_timing=True)
    assert isinstance(stream, torch.Stream)
    with stream:
        torch.ones(2, device=D)
    event.record(stream)
    event.synchronize()
    assert stream.query()
    assert torch.accelerator.current_stream().stream_id == 0


def test_the_boundarys_streams_and_timers_work() -> None:
    stream = boundary.CopyStream(D)
    timer = boundary.DeviceTimer(D)
    pinned = torch.zeros(1024).pin_memory()
    timer.start()
    source = torch.full((1024,), 3.0, device=D)
    timer.stop()
    with stream.after_current():
        pinned.copy_(source, non_blocking=True)
    assert pinned.isnan().all()
    stream.synchronize()
    assert pinned.unique().tolist() == [3.0]
    stream.join()
    assert timer.elapsed_s() > 0


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
def test_the_boundarys_channel_carries_arrays_both_ways(device: str) -> None:
    channel = boundary.Channel((2, 3), torch.float32, device)
    for step in range(3):
        sent = channel.send(np.full((2, 3), float(step)))
        assert str(sent.device) == device
        assert channel.receive(sent * 2).tolist() == [[2.0 * step] * 3] * 2


# --------------------------------------------------------------------------------------------------
# The machine as torch and autoplace report it


def test_torch_and_the_boundary_report_the_accelerators() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("emu")
    assert torch.accelerator.device_count() == 2
    assert boundary.accelerator_devices() == DEVICES
    assert boundary.require_device("EMU") == "emu:0"
    assert boundary.require_device("gpu") == "emu:0"
    assert boundary.require_device("emu:1") == "emu:1"
    assert torch.emu.get_device_name(1) == "slow"


def test_memory_is_counted_by_storage_and_given_back() -> None:
    total = 64_000_000
    assert boundary.memory_bytes("emu:1") == (total, total)
    x = torch.empty(1000, 1000, device="emu:1")
    view = x[1:]
    assert boundary.memory_bytes("emu:1") == (total - 4_000_000, total)
    assert boundary.memory_bytes("emu:0") == (total, total)
    del x
    assert torch.emu.memory_allocated(1) == 4_000_000
    del view
    assert torch.emu.memory_allocated(1) == 0
    assert torch.emu.max_memory_allocated(1) == 4_000_000


def test_more_than_the_memory_is_an_out_of_memory_error() -> None:
    x = torch.zeros(3000, 3000, device=D)  # 36 MB of 64
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        x + 1
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, device=D)
    del x
    torch.zeros(3000, 3000, device=D)


def test_a_thread_that_is_no_lane_is_refused() -> None:
    errors = []

    def work() -> None:
        try:
            torch.ones(2, device=D)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work, name="stray")
    thread.start()
    thread.join()
    assert "stray" in errors[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_cannot_use_the_device() -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        message = "no error"
        try:
            torch.ones(2, device=D)
        except RuntimeError as error:
            message = str(error)
        os.write(write, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "forked subprocess" in os.read(read, 4096).decode()
    torch.ones(2, device=D)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_functions_run(compiler: str) -> None:
    policy, x = Policy().to(D), torch.randn(3, 4, device=D)
    compiled = torch.compile(policy, backend=compiler)
    torch.testing.assert_close(compiled(x)[0], policy(x)[0])
    compiled(x)[1].sum().backward()
    assert policy.critic.weight.grad.device.type == "emu"
