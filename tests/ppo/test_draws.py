"""What chance contributes to an iteration follows from the seed and the iteration's number."""

import torch

from autoplace.envs import describe
from autoplace.ppo.draws import Draws


def draws_of(seed, **options):
    workload = describe("CartPole-v1", num_envs=2, rollout_steps=8, epochs=3)
    return Draws(workload, seed, **options)


def test_iterations_and_seeds_draw_different_numbers_and_again_the_same():
    draws = draws_of(1)
    noises = [draws.noise(k) for k in (0, 1, 63, 64, 1000)] + [draws_of(2).noise(0)]
    for i, noise in enumerate(noises):
        assert all(not torch.equal(noise, other) for other in noises[:i])
    assert torch.equal(draws_of(1).noise(1000), noises[4])
    assert torch.equal(draws.noise(64), noises[3])


def test_every_epoch_has_its_own_order_unless_one_minibatch_holds_all_rows():
    apart = draws_of(1, minibatch_rows=15).permutations(5)
    one = draws_of(1, minibatch_rows=16).permutations(5)
    for orders in (apart, one):
        assert orders.shape == (3, 16)
        assert all(sorted(order.tolist()) == list(range(16)) for order in orders)
    assert not torch.equal(apart[0], apart[1])
    assert torch.equal(one, apart[:1].expand(3, -1))
