"""Gradient steps in parts and in less than float32, beside those in one pass and in float32."""

import dataclasses

import pytest
import torch

from autoplace.ppo.batch import Batch
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.update import Updater
from autoplace.train import train
from autoplace.workload import Hyperparameters, ImageSpec, NetworkSpec
from tests.train.plans import Listener, make_plan

IMAGE = ImageSpec(key="", height=10, width=10, channels=2)
SPECS = {
    "categorical": NetworkSpec(observation_size=5, hidden_sizes=(16,), action_size=3),
    "gaussian": NetworkSpec(observation_size=5, hidden_sizes=(16,), action_size=2, continuous=True),
    "image": NetworkSpec(
        observation_size=IMAGE.size, hidden_sizes=(8,), action_size=3, images=(IMAGE,)
    ),
}
HYPER = Hyperparameters(
    num_envs=4, rollout_steps=16, entropy_coef=0.01, value_clip=0.5, learning_rate=1e-2
)


def batch_of(spec, rows=64, scale=1.0):
    generator = torch.Generator().manual_seed(1)
    width = 0 if spec.images else spec.observation_size
    values = torch.randn(rows, width + spec.action_columns + 3, generator=generator)
    if not spec.continuous:
        values[:, width] = torch.arange(rows) % spec.action_size
    values[:, -1] *= scale
    images = torch.randint(256, (rows, IMAGE.size), dtype=torch.uint8, generator=generator)
    return Batch(values, spec, images if spec.images else None)


def stepped(name, steps=3, scale=1.0, **options):
    """The updater after a few gradient steps of 33 rows."""
    spec = SPECS[name]
    updater = Updater(ActorCritic(spec, seed=0), HYPER, minibatch_rows=33, **options)
    batch = batch_of(spec, scale=scale)
    for step in range(steps):
        updater.minibatch_step(batch, (torch.arange(33) + step) % 64, measure=True)
    return updater


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("parts", [2, 4])
def test_a_step_in_parts_is_the_step_in_one_pass(name, parts):
    # 33 rows do not divide: the parts have shares of 17 and 16, or 9, 8, 8 and 8.
    whole, cut = stepped(name), stepped(name, accumulation_steps=parts)
    torch.testing.assert_close(cut.network.flat, whole.network.flat, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cut._metrics, whole._metrics, rtol=1e-4, atol=1e-5)


def test_a_rest_smaller_than_the_number_of_parts_is_learned_from():
    updater = Updater(
        ActorCritic(SPECS["categorical"]), HYPER, minibatch_rows=8, accumulation_steps=8
    )
    batch = batch_of(SPECS["categorical"])
    before = updater.network.flat.clone()
    updater.minibatch_step(batch, torch.arange(3), measure=True)
    assert updater.network.flat.isfinite().all()
    assert not torch.equal(updater.network.flat, before)
    assert not updater._metrics.requires_grad  # it would keep every graph alive


def test_parts_of_a_step_hold_less_at_once(monkeypatch):
    seen = []
    both = ActorCritic.both

    def counted(self, rows):
        seen.append(len(rows))
        return both(self, rows)

    monkeypatch.setattr(ActorCritic, "both", counted)
    stepped("categorical", steps=1, accumulation_steps=4)
    assert seen == [9, 8, 8, 8]


@pytest.mark.parametrize("name", SPECS)
def test_a_step_that_memory_is_too_small_for_passes_in_more_parts_from_then_on(
    name, monkeypatch, caplog
):
    # Symptom: a minibatch that does not fit onto the card ends a run of hours.
    whole = stepped(name, steps=3)
    seen = []
    both = ActorCritic.both

    def limited(self, rows):
        seen.append(len(rows))
        # Once more amid a step, when one part has left its gradient already.
        if len(rows) > 20 or len(seen) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return both(self, rows)

    monkeypatch.setattr(ActorCritic, "both", limited)
    cut = stepped(name, steps=3)
    assert seen == [33, 17, 16, *[9, 8, 8, 8] * 3]
    torch.testing.assert_close(cut.network.flat, whole.network.flat, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cut._metrics, whole._metrics, rtol=1e-4, atol=1e-5)
    assert [record.getMessage() for record in caplog.records] == [
        f"cpu ran out of memory in a gradient step: its 33 rows pass in {parts} parts from now on, "
        f"which is slower and learns the same (--accumulation-steps {parts})"
        for parts in (2, 4)
    ]


def test_a_step_that_no_part_of_fits_says_that_memory_ran_out(monkeypatch):
    def full(self, rows):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(ActorCritic, "both", full)
    with pytest.raises(torch.OutOfMemoryError):
        stepped("categorical", steps=1)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.1), ("fp16", 0.0125)])
def test_16_bit_passes_give_nearly_the_same_gradient(name, precision, bound):
    # 8 and 11 significant bits; advantages sum to 0, so that much of a gradient cancels.
    exact, rounded = stepped(name, steps=1), stepped(name, steps=1, precision=precision)
    error = (rounded._gradient - exact._gradient).norm() / exact._gradient.norm()
    assert 0.0 < float(error) < bound
    assert rounded.network.flat.dtype == rounded._gradient.dtype == torch.float32


def test_a_float16_overflow_leaves_the_weights_and_lowers_the_scale():
    # Returns of 1e6 overflow in a gradient scaled by 65,536: the step must not be taken.
    before = stepped("categorical", steps=0).network.flat.clone()
    updater = stepped("categorical", steps=1, scale=1e6, precision="fp16")
    assert torch.equal(updater.network.flat, before)
    assert updater._arithmetic._scaler.get_scale() == 2.0**15
    assert updater._metrics.isfinite().all()
    # Later the scale fits, and the weights move.
    after = stepped("categorical", steps=30, scale=1e6, precision="fp16").network.flat
    assert after.isfinite().all() and not torch.equal(after, before)


def test_tf32_is_on_inside_a_step_only(monkeypatch):
    found = []
    both = ActorCritic.both

    def noted(self, rows):
        found.append(torch.get_float32_matmul_precision())
        return both(self, rows)

    monkeypatch.setattr(ActorCritic, "both", noted)
    stepped("categorical", steps=1, precision="tf32")
    stepped("categorical", steps=1)
    assert found == ["high", "highest"]
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("scheme", ["cpu", "double-buffer"])
def test_a_run_follows_the_precision_and_the_parts_of_its_plan(scheme):
    def weights(**placement):
        listener = Listener()
        plan = make_plan(scheme=scheme)
        placed = dataclasses.replace(plan.placement, **placement)
        chosen = dataclasses.replace(plan.chosen, placement=placed)
        plan = dataclasses.replace(plan, chosen=chosen)
        train(plan, total_steps=64, callbacks=[listener])
        return listener.flat

    exact = weights()
    rounded = weights(precision="bf16")
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.01)
    if scheme == "cpu":  # the learner's process is given both by the same message
        torch.testing.assert_close(weights(accumulation_steps=3), exact, rtol=1e-3, atol=1e-4)
