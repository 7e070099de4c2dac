"""The numbers of plain perceptrons on flat spaces, as they were before other networks came."""

import pytest

from autoplace.train import train
from tests.train.plans import Listener, make_plan

# Sum and norm of each weight after 3 iterations of seed 7, recorded from the first version.
PINNED = {
    "CartPole-v1": {
        "actor.0.weight": (-2.6783085940405726, 2.8283732040442557),
        "actor.2.weight": (-9.481806409545243, 5.656739158696352),
        "actor.4.weight": (0.0035204996092943475, 0.014086109079328057),
        "critic.0.weight": (-0.9111113753169775, 2.8273178007515476),
        "critic.2.weight": (-2.1966194725828245, 5.654306004214345),
        "critic.4.weight": (-1.661175824701786, 1.0013332716249708),
    },
    "Pendulum-v1": {
        "actor.0.weight": (-1.4600102361291647, 2.449495687956086),
        "actor.2.weight": (-11.13511552871205, 5.65698379688087),
        "actor.4.weight": (0.010301185175194405, 0.01024409566239202),
        "critic.0.weight": (-0.8908326212549582, 2.4503218151390587),
        "critic.2.weight": (-4.8575967839569785, 5.656597301432995),
        "critic.4.weight": (-0.0916483998298645, 1.000472320180212),
    },
}
# value loss and entropy of the last update
LOSSES = {
    "CartPole-v1": (1.2986325025558472, 0.6931260824203491),
    "Pendulum-v1": (0.10376910865306854, 1.420562982559204),
}


@pytest.mark.parametrize("env", PINNED)
def test_the_same_seed_gives_the_numbers_that_it_always_gave(env):
    listener = Listener()
    plan = make_plan(env, hidden_sizes=(16, 16), entropy_coef=0.01)
    train(plan, total_steps=96, seed=7, callbacks=[listener])
    for name, weight in listener.policy.network.named_parameters():
        if name in PINNED[env]:
            got = (weight.double().sum().item(), weight.double().norm().item())
            # Other processors round differently; another algorithm differs by far more.
            assert got == pytest.approx(PINNED[env][name], abs=2e-4), name
    update = listener.reports[-1].update
    assert (update.value_loss, update.entropy) == pytest.approx(LOSSES[env], rel=1e-3)
