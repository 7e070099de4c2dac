"""What of spaces becomes rows and heads, and what is refused."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from autoplace.envs import describe, inspect_env, make_vector_env
from autoplace.envs.spaces import action_codec, describe_images, observation_codec
from autoplace.errors import EnvError, UsageError
from autoplace.workload import EnvSpec
from tests.envs.toys import Recorder, Spaces, register


def box(*shape, dtype=np.float32, high=1.0):
    return spaces.Box(0, high, shape, dtype)


def image(*shape):
    return spaces.Box(0, 255, shape, np.uint8)


class Fixed(Spaces):
    """Gives the same observation at every step, whatever its space says."""

    def __init__(self, space, first, later=None):
        super().__init__(space, spaces.Discrete(2))
        self.first, self.later = first, first if later is None else later

    def reset(self, *, seed=None, options=None):
        return self.first, {}

    def step(self, action):
        return self.later, 0.0, False, False, {}


def vector(factory, num_envs=2, **spec):
    env_id = register("Spaces", factory)
    return make_vector_env(inspect_env(EnvSpec(id=env_id, **spec)), num_envs=num_envs)


# --------------------------------------------------------------------------------------------------
# Observations


def test_multi_discrete_observations_are_one_hot_choice_by_choice():
    codec = observation_codec(spaces.MultiDiscrete([2, 3], start=[0, 5]), "E")
    row = np.zeros(codec.size, np.float32)
    codec.write(row, np.array([1, 5]))
    assert row.tolist() == [0, 1, 1, 0, 0]
    codec.write(row, np.array([0, 7]))
    assert row.tolist() == [1, 0, 0, 0, 1]


def test_a_two_dimensional_multi_discrete_in_a_dict_is_flattened():
    # Symptom: passes the checker, then fails deep inside the set-up.
    space = spaces.Dict(hand=box(6), cards=spaces.MultiDiscrete([[1, 2], [3, 1]]))
    codec = observation_codec(space, "E")
    assert codec.size == 6 + 1 + 2 + 3 + 1
    row = np.zeros(codec.size, np.float32)
    codec.write(row, {"hand": np.arange(6), "cards": np.array([[0, 1], [2, 0]])})
    assert row.tolist() == [0, 1, 2, 3, 4, 5, 1, 0, 1, 0, 0, 1, 1]


def test_a_tuple_of_choices_is_one_hot_side_by_side():
    # Symptom: Blackjack-v1, a Tuple of Discrete, rejected deep inside.
    description = inspect_env(EnvSpec(id="Blackjack-v1"))
    assert description.observation_size == 32 + 11 + 2
    row = description.observations.encode_one((14, 10, 1))[0]
    assert np.flatnonzero(row).tolist() == [14, 32 + 10, 32 + 11 + 1]


def test_nested_dicts_and_multi_binary_and_any_number_type_become_one_float32_row():
    space = spaces.Dict(
        a=spaces.Dict(b=spaces.MultiBinary(3), c=box(2, dtype=np.float64)),
        d=spaces.Tuple((spaces.Discrete(2), spaces.Box(-9, 9, (2, 2), np.int64))),
    )
    codec = observation_codec(space, "E")
    observation = {
        "d": (1, np.array([[1, 2], [3, 4]])),
        "a": {"c": np.array([0.5, 0.25]), "b": np.array([1, 0, 1], np.int8)},
    }
    row = codec.encode_one(observation)
    assert row.dtype == np.float32
    assert row.tolist() == [[1, 0, 1, 0.5, 0.25, 0, 1, 1, 2, 3, 4]]
    assert [leaf.key for leaf in codec.leaves] == ["a.b", "a.c", "d.0", "d.1"]


def test_float64_observations_are_float32_before_they_reach_a_device():
    # Symptom: a device without float64 crashes on environments that observe it.
    env = register("Doubles", lambda: Spaces(box(3, dtype=np.float64), spaces.Discrete(2)))
    envs = make_vector_env(inspect_env(EnvSpec(id=env)), num_envs=2)
    assert envs.reset([0, 1]).dtype == np.float32
    step = envs.step(np.zeros(2, np.int64))
    assert step.observations.dtype == step.rewards.dtype == np.float32


def test_a_stack_encodes_as_its_single_observations_do():
    space = spaces.Dict(
        pixels=image(6, 6, 3), speed=box(2), gear=spaces.Discrete(4), seats=spaces.MultiBinary(2)
    )
    space.seed(0)
    codec = observation_codec(space, "E")
    singles = [space.sample() for _ in range(4)]
    stack = {key: np.stack([one[key] for one in singles]) for key in space.spaces}
    expected = np.concatenate([codec.encode_one(one) for one in singles])
    np.testing.assert_array_equal(codec.encode(stack), expected)
    assert codec.is_single(singles[0]) and not codec.is_single(stack)


def test_images_are_a_byte_per_number_and_numbers_come_first_as_four():
    space = spaces.Dict(pixels=image(5, 5, 1), speed=box(2))
    codec = observation_codec(space, "E")
    assert (codec.dtype, codec.size) == ("uint8", 2 * 4 + 25)
    pixels = np.arange(25, dtype=np.uint8).reshape(5, 5, 1)
    row = codec.encode_one({"pixels": pixels, "speed": np.array([0.5, -2.0])})[0]
    assert codec.numbers(row).tolist() == [0.5, -2.0]
    assert row[8:].tolist() == list(range(25))


@pytest.mark.parametrize(
    ("shape", "images", "read"),
    [
        ((3, 84, 84), "auto", (84, 84, 3, True)),
        ((84, 84, 3), "auto", (84, 84, 3, False)),
        ((4, 40, 60), "auto", (40, 60, 4, True)),
        ((10, 10, 4), "auto", (10, 10, 4, False)),
        ((10, 10, 10), "auto", (10, 10, 10, False)),
        ((10, 12, 12), "hwc", (10, 12, 12, False)),
        ((12, 12, 10), "chw", (12, 10, 12, True)),
        ((40, 40), "auto", (40, 40, 1, False)),
    ],
)
def test_the_channel_axis_is_the_smallest_one_unless_it_is_forced(shape, images, read):
    # Symptom: channel-first images were transposed anyway.
    codec = observation_codec(image(*shape), "E", images=images)
    (found,) = codec.images
    assert (found.height, found.width, found.channels, found.channels_first) == read
    assert codec.dtype == "uint8" and codec.size == np.prod(shape)


def test_how_an_image_was_understood_is_said_in_one_line(caplog):
    env = register("Pictures", lambda: Spaces(image(3, 40, 40), spaces.Discrete(2)))
    workload = describe(env)
    (record,) = caplog.records
    line = record.getMessage()
    assert "(3, 40, 40) taken as 40 x 40 pixels of 3 channel(s) (channels first" in line
    assert "--images hwc" in line and "NatureCNN that actor and critic share" in line
    assert "\n" not in line
    assert workload.network.images[0].channels == 3
    assert describe(EnvSpec(id=env, images="flat")).network.is_plain


def test_an_image_without_channel_axis_has_one_channel_and_the_line_says_so():
    (line,) = describe_images(observation_codec(image(40, 40), "E"), "E")
    assert "no channel axis, so one channel" in line


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.Box(0, 255, (40, 40)), "of float32, which has no channel axis"),
        (spaces.Box(0, 255, (40, 40, 3)), "of float32, which looks like one"),
    ],
)
def test_what_looks_like_an_image_but_is_no_uint8_is_named_and_passes_flat_on_request(space, named):
    # Symptom: a (40, 40) image without dtype or channel axis ends in an assertion about a CNN.
    with pytest.raises(EnvError, match=named) as error:
        observation_codec(space, "E")
    assert "--images flat" in str(error.value) and "dtype=numpy.uint8" in str(error.value)
    flat = observation_codec(space, "E", images="flat")
    assert (flat.dtype, flat.size) == ("float32", np.prod(space.shape))


def test_depth_in_floats_beside_colours_is_numbers_of_four_bytes_and_said_so(caplog):
    # Symptom: a Dict of images and vectors, of which nobody says what becomes of each part.
    space = spaces.Dict(
        rgb=image(256, 256, 3),
        depth=spaces.Box(0.0, 1.0, (256, 256, 1)),
        compass=spaces.Box(-np.pi, np.pi, (1,)),
        map=spaces.Box(-1.0, 1.0, (5, 5)),
    )
    env = register("Navigation", lambda: Spaces(space, spaces.Discrete(4)))
    network = describe(env).network
    assert [picture.key for picture in network.images] == ["rgb"]
    assert network.observation_bytes == 256 * 256 * (3 + 4) + 4 + 25 * 4
    depth, rgb = sorted(record.getMessage() for record in caplog.records)
    assert "observes (256, 256, 1) at 'depth', taken as 65,536 plain numbers of 4 bytes" in depth
    assert "--images flat" in depth and "an image at 'rgb'" in rgb
    caplog.clear()
    describe(EnvSpec(id=env, images="flat"))
    assert not caplog.records


def test_small_boxes_of_uint8_and_boxes_of_other_ranges_are_plain_numbers():
    for space in (image(2, 3), image(8), box(40, 40), spaces.Box(-1, 1, (64, 64, 3))):
        assert observation_codec(space, "E").dtype == "float32"


def test_a_stack_of_images_with_four_axes_is_refused():
    with pytest.raises(EnvError, match=r"two or three axes, but E observes \(4, 84, 84, 3\)"):
        observation_codec(image(4, 84, 84, 3), "E")


def test_an_unknown_way_to_read_images_is_refused():
    with pytest.raises(UsageError, match="--images is one of auto, hwc, chw, flat, got 'nhwc'"):
        EnvSpec(id="E", images="nhwc")


@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (
            box(2739),
            np.zeros((1, 2739)),
            r"an observation has the shape \(2739,\) of its space, got \(1, 2739\)",
        ),
        (
            # Symptom: declared (1, n), returned (n,).
            box(1, 2739),
            np.zeros(2739),
            r"an observation has the shape \(1, 2739\) of its space, got \(2739,\)",
        ),
        (
            spaces.Dict(a=box(2), b=box(3)),
            {"a": np.zeros(2), "b": np.zeros(4)},
            r"the part 'b' of an observation has the shape \(3,\) of its space, got \(4,\)",
        ),
        (
            spaces.Dict(a=box(2), b=box(3)),
            {"a": np.zeros(2)},
            "the part 'b' of an observation has a value there of its space, got none",
        ),
        (image(8, 8, 3), np.zeros((8, 8, 3)), "has uint8 of its space, got float64"),
        (spaces.MultiDiscrete([2, 2]), np.array([0.5, 1.0]), "has whole numbers of its space"),
        (box(2), np.array(["a", "b"]), "has numbers of its space, got <U1"),
    ],
)
def test_a_first_observation_that_is_not_in_its_space_is_named_with_key(
    space, observation, message
):
    # Symptom: "could not broadcast input array from shape (102,) into shape (20,)" far inside.
    envs = vector(lambda: Fixed(space, observation))
    with pytest.raises(EnvError, match=message + r".*environment 0, vector step 0"):
        envs.reset([0, 1])


def test_a_first_step_of_another_shape_than_the_reset_is_named():
    envs = vector(lambda: Fixed(spaces.Dict(a=box(2)), {"a": np.zeros(2)}, {"a": np.zeros(3)}))
    envs.reset([0, 1])
    with pytest.raises(EnvError, match=r"the part 'a' .*got \(3,\) .*environment 0, vector step 1"):
        envs.step(np.zeros(2, np.int64))


def test_a_choice_outside_of_its_space_is_named():
    envs = vector(lambda: Fixed(spaces.Discrete(3), 0, -1))
    envs.reset([0, 1])
    with pytest.raises(EnvError, match="environment 0, vector step 1: -1 is outside of the obs"):
        envs.step(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("space", "bad"),
    [
        (spaces.Dict(a=box(2), b=box(3)), {"a": np.zeros(2), "b": np.array([0, np.nan, 0])}),
        (
            spaces.Dict(a=image(6, 6, 3), b=box(3)),
            {"a": np.zeros((6, 6, 3), np.uint8), "b": np.array([0, np.nan, 0])},
        ),
    ],
)
def test_a_number_that_is_not_finite_is_named_with_its_key(space, bad):
    # Symptom: a NaN in an observation ends as an error about a Normal distribution's mean.
    good = {key: np.zeros_like(value) for key, value in bad.items()}
    envs = vector(lambda: Fixed(space, good, bad))
    envs.reset([0, 1])
    with pytest.raises(EnvError, match=r"'b' of an observation .*nan .*environment 0.* step 1"):
        envs.step(np.zeros(2, np.int64))


# --------------------------------------------------------------------------------------------------
# Actions


def test_multi_discrete_actions_have_a_head_per_choice_and_come_back_in_their_shape():
    codec = action_codec(spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [0, -1]]), "E")
    assert codec.heads == (2, 3, 4, 2) and codec.size == 11 and codec.num_bytes == 32
    actions = codec.decode(np.array([[1, 2, 3, 0]]))
    assert actions.tolist() == [[[1, 3], [3, -1]]] and actions.dtype == np.int64


def test_multi_binary_actions_have_a_head_of_two_per_coin():
    codec = action_codec(spaces.MultiBinary([2, 2]), "E")
    assert codec.heads == (2, 2, 2, 2) and codec.size == 8
    actions = codec.decode(np.array([[0, 1, 1, 0]]))
    assert actions.tolist() == [[[0, 1], [1, 0]]] and actions.dtype == np.int8


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([3, 4, 2]),
        spaces.MultiDiscrete([[3, 4], [2, 5]], start=[[1, 0], [0, 2]]),
        spaces.MultiBinary(5),
        spaces.MultiBinary([2, 3]),
        spaces.Discrete(3, start=2),
        spaces.Box(np.array([-2, 0], np.float32), np.array([0, 5], np.float32)),
        spaces.Box(-np.inf, np.inf, (2, 1), np.float64),
    ],
)
def test_random_actions_are_in_their_space_once_decoded(space):
    codec = action_codec(space, "E")
    decoded = codec.decode(codec.random(np.random.default_rng(0), 50))
    for action in decoded:
        assert space.contains(action), action


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple((spaces.Discrete(2), box(1))),
        spaces.Dict(move=spaces.Discrete(2), aim=box(1)),
    ],
)
def test_dict_and_tuple_actions_are_refused_by_name_before_anything_is_stepped(space):
    # Symptom: Dict and Tuple action spaces fail only when the model is built.
    stepped = []

    class Never(Spaces):
        def reset(self, **kwargs):
            stepped.append("reset")

    env = register("Compound", lambda: Never(box(3), space))
    with pytest.raises(
        EnvError, match=f"acts in .*{type(space).__name__}.*must be Discrete, Multi"
    ):
        describe(env)
    assert stepped == []


def test_a_box_of_any_shape_is_flattened_for_the_policy_and_restored_for_the_environment():
    # Symptom: actions outside of Box(-2, 0) or Box(0, 5) crash the environment.
    made = []

    def factory():
        made.append(Recorder(low=0.0, high=5.0, shape=(2, 1, 2)))
        return made[-1]

    envs = vector(factory, num_envs=1)
    envs.reset([0])
    raw = np.array([[-1.0, 6.0, 2.0, 5.5]], np.float32)
    envs.step(raw)
    assert made[-1].actions[0].tolist() == [[[0.0, 5.0]], [[2.0, 5.0]]]
    assert raw.tolist() == [[-1.0, 6.0, 2.0, 5.5]]  # what the log-probabilities are of


def test_every_transition_of_a_dict_environment_is_the_environments_own():
    space = spaces.Dict(gear=spaces.Discrete(3), pixels=image(6, 6, 3), speed=box(2))
    envs = vector(lambda: Spaces(space, spaces.Discrete(2)))
    rows = envs.reset([3, 4]).copy()
    codec = observation_codec(space, "E")
    single = Spaces(space, spaces.Discrete(2))
    expected, _ = single.reset(seed=4)
    np.testing.assert_array_equal(rows[1], codec.encode_one(expected)[0])
    assert isinstance(single, gym.Env)
