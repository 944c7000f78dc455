"""Samplers: each held against its equations as they are printed, and against what is known of distributions."""

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from headway_server.bundles import DiscreteNoise
from headway_server.diffusion import DiffusionSampler, PreservedArea, Trajectory, TrigonometricSchedule, draw_noise, mix
from headway_server.diffusion.samplers import guide
from headway_server.diffusion.schedules import EVERYWHERE, DiscreteSchedule, num_made_steps

SHAPE = (4, 3, 3)


def signal_and_noise(time):
    """a(t) and s(t); pure noise has no signal at all."""
    return (0.0 if time == 1 else math.cos(math.pi * time / 2)), math.sin(math.pi * time / 2)


def of_gaussian(latent, time, deviation=0.5, mean=0.3):
    """The exact velocity where latents are N(mean, deviation^2): by the posterior mean of image and noise."""
    a, s = signal_and_noise(time)
    variance = (a * deviation) ** 2 + s**2
    image = mean + a * deviation**2 * (latent - a * mean) / variance
    noise = s * (latent - a * mean) / variance
    return a * noise - s * image


def ddim(latent, times, velocity_of):
    """Song et al. 2021, equation 12 with no noise."""
    for now, then in pairwise(times):
        (a, s), (a_then, s_then) = signal_and_noise(now), signal_and_noise(then)
        velocity = velocity_of(latent, now)
        image, noise = a * latent - s * velocity, s * latent + a * velocity
        latent = a_then * image + s_then * noise
    return latent


def euler(latent, times, velocity_of):
    """The velocity is the derivative by the angle."""
    for now, then in pairwise(times):
        latent = latent + (then - now) * math.pi / 2 * velocity_of(latent, now)
    return latent


def dpm_solver_pp_2m(latent, times, velocity_of):
    """Lu et al. 2022, algorithm 2, with a last step of first order."""
    with np.errstate(divide="ignore"):
        ratios = [float(np.log(np.divide(*signal_and_noise(time)))) for time in times]  # lambda
    images = []
    for i, (now, then) in enumerate(pairwise(times)):
        (a, s), (a_then, s_then) = signal_and_noise(now), signal_and_noise(then)
        images.append(a * latent - s * velocity_of(latent, now))
        estimate, h = images[-1], ratios[i + 1] - ratios[i]
        if i > 0 and then > 0:
            r = (ratios[i] - ratios[i - 1]) / h
            estimate = (1 + 1 / (2 * r)) * images[-1] - 1 / (2 * r) * images[-2]
        latent = s_then / s * latent - a_then * (math.exp(-h) - 1) * estimate
    return latent


REFERENCES = {
    DiffusionSampler.DDIM: ddim,
    DiffusionSampler.EULER: euler,
    DiffusionSampler.DPM_SOLVER_PP_2M: dpm_solver_pp_2m,
}


def even_steps(num_steps, sampler=DiffusionSampler.DDIM, strength=1.0):
    return TrigonometricSchedule().steps(num_steps, sampler).last(num_steps - num_made_steps(num_steps, strength))


def times_of(steps):
    return [point.time for point in steps.points]


def sample(latent, steps, velocity_of):
    trajectory = Trajectory(latent, steps)
    while not trajectory.is_finished:
        trajectory.advance(velocity_of(trajectory.latent, trajectory.time).astype(np.float32))
    return trajectory.latent


@pytest.mark.parametrize("sampler", sorted(EVERYWHERE))
@pytest.mark.parametrize(("num_steps", "strength"), [(1, 1.0), (2, 1.0), (7, 1.0), (20, 1.0), (10, 0.4)])
def test_a_sampler_makes_the_steps_of_its_paper(sampler, num_steps, strength):
    steps, noise = even_steps(num_steps, sampler, strength), draw_noise(3, SHAPE)
    expected = REFERENCES[sampler](noise.astype(np.float64), times_of(steps), of_gaussian)
    np.testing.assert_allclose(sample(noise, steps, of_gaussian), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("sampler", "bound"), [(DiffusionSampler.DDIM, 1e-5), (DiffusionSampler.DPM_SOLVER_PP_2M, 1e-5)]
)
def test_where_all_images_are_one_it_is_found_in_any_number_of_steps(sampler, bound):
    def velocity_of(latent, time):
        return of_gaussian(latent, time, deviation=0.0, mean=0.7)

    for num_steps in (1, 2, 5):
        found = sample(draw_noise(1, SHAPE), even_steps(num_steps, sampler), velocity_of)
        np.testing.assert_allclose(found, 0.7, atol=bound)


def test_the_second_order_needs_fewer_steps_than_the_first():
    noise = draw_noise(5, SHAPE)
    exact = 0.3 + 0.5 * noise  # the flow keeps the place of a number in its normal distribution
    errors = {
        sampler: [np.abs(sample(noise, even_steps(count, sampler), of_gaussian) - exact).max() for count in (8, 32)]
        for sampler in EVERYWHERE
    }
    assert errors[DiffusionSampler.DPM_SOLVER_PP_2M][0] < errors[DiffusionSampler.DDIM][0]
    for few, many in errors.values():
        assert many < few / 2.5  # four times the steps: an error a fourth or less, but for rounding


def test_steps_of_an_image_are_the_last_ones_and_at_least_one():
    assert times_of(even_steps(4)) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert times_of(even_steps(4, strength=0.5)) == [0.5, 0.25, 0.0]
    assert times_of(even_steps(4, strength=0.01)) == [0.25, 0.0]


DISCRETE = DiscreteNoise(
    num_train_steps=1000, betas="scaled_linear", beta_start=0.00085, beta_end=0.012, spacing="leading", steps_offset=1
)


@pytest.mark.parametrize("prediction", ["velocity", "noise", "image"])
@pytest.mark.parametrize("sampler", DiffusionSampler)
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_whatever_is_predicted_leads_to_the_one_image_that_there_is(spacing, sampler, prediction):
    if sampler == "pndm" and (spacing != "leading" or prediction == "velocity"):
        return  # its steps are whole strides, and velocities of two times have no common mean
    schedule = DiscreteSchedule(DISCRETE.model_copy(update={"spacing": spacing}))
    steps, noise = schedule.steps(5, sampler), draw_noise(1, SHAPE)
    trajectory = Trajectory(
        noise * np.float32(steps.noise_scale), steps, prediction=prediction, draw=partial(draw_noise, 1, SHAPE)
    )
    while not trajectory.is_finished:
        point = schedule.point(trajectory.time)
        exact = (trajectory.latent - point.signal * 0.7) / point.noise
        predicted = {"velocity": point.signal * exact - point.noise * 0.7, "noise": exact, "image": 0 * exact + 0.7}
        trajectory.advance(predicted[prediction].astype(np.float32))
    np.testing.assert_allclose(trajectory.latent, 0.7, atol=2e-5)


def test_times_of_a_discrete_schedule_are_spaced_as_they_are_called():
    def times(spacing, sampler, count=4):
        return times_of(DiscreteSchedule(DISCRETE.model_copy(update={"spacing": spacing})).steps(count, sampler))

    ddim, euler, solver = DiffusionSampler.DDIM, DiffusionSampler.EULER, DiffusionSampler.DPM_SOLVER_PP_2M
    assert times("leading", ddim) == times("leading", euler) == [751, 501, 251, 1, 0]
    assert times("leading", solver) == [801, 601, 401, 201, 0]
    assert times("trailing", ddim) == times("trailing", euler) == times("trailing", solver) == [999, 749, 499, 249, 0]
    assert times("linspace", euler, 3) == [999, 499.5, 0, 0]
    assert times("linspace", solver, 2) == [999, 500, 0]
    assert times("linspace", ddim, 1) == [999, 0]


def test_a_schedule_without_signal_at_its_end_begins_with_noise():
    schedule = DiscreteSchedule(DISCRETE.model_copy(update={"has_zero_terminal_snr": True, "spacing": "trailing"}))
    first, *_ = schedule.steps(5, DiffusionSampler.DDIM).points
    assert first.signal < 1e-3
    assert DiscreteSchedule(DISCRETE).point(999).signal > 0.05


def test_ddim_ends_where_the_publisher_has_it():
    schedule = DiscreteSchedule(DISCRETE.model_copy(update={"ends_at_image": False}))
    ends = {sampler: schedule.steps(5, sampler).ends[-1].noise for sampler in DiffusionSampler}
    assert ends.pop(DiffusionSampler.DDIM) == ends.pop(DiffusionSampler.PNDM) == pytest.approx(0.00085**0.5)
    assert set(ends.values()) == {0.0}


def test_a_share_of_the_steps_is_rounded_down_but_for_what_float32_lacks():
    assert num_made_steps(10, float(np.float32(0.7))) == 7
    assert [num_made_steps(count, 0.8) for count in (1, 4, 5, 9, 20)] == [1, 3, 4, 7, 16]


def test_times_of_karras_are_even_in_the_seventh_root_of_the_ratio():
    schedule = DiscreteSchedule(DISCRETE.model_copy(update={"has_karras_times": True}))
    points = schedule.steps(6, DiffusionSampler.DPM_SOLVER_PP_2M).points[:-1]
    roots = [(point.noise / point.signal) ** (1 / 7) for point in points]
    np.testing.assert_allclose(np.diff(roots), np.diff(roots)[0])
    assert (points[0].time, points[-1].time) == (999, 0)


def test_noise_follows_from_its_seed_alone():
    first = draw_noise(2**64 - 1, SHAPE)
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, draw_noise(2**64 - 1, SHAPE))
    assert not np.allclose(first, draw_noise(0, SHAPE))
    assert not np.allclose(first, draw_noise(2**64 - 1, SHAPE, 1))
    many = draw_noise(8, (4, 64, 64))
    assert abs(many.mean()) < 0.03
    assert abs(many.std() - 1) < 0.03


def test_guidance_goes_on_from_what_is_not_wanted_to_what_is():
    wanted, other = draw_noise(1, SHAPE), draw_noise(2, SHAPE)
    np.testing.assert_allclose(guide(wanted, other, 1.0), wanted, atol=1e-6)
    np.testing.assert_allclose(guide(wanted, other, 3.0), 3 * wanted - 2 * other, atol=1e-5)


@pytest.mark.parametrize("sampler", DiffusionSampler)
def test_a_kept_area_ends_as_it_was(sampler):
    image, noise = draw_noise(1, SHAPE), draw_noise(2, SHAPE)
    kept = PreservedArea(is_preserved=np.array([[[True, False, True]] * 3]), latent=image, noise=noise)
    steps = DiscreteSchedule(DISCRETE).steps(5, sampler)
    trajectory = Trajectory(mix(image, noise, steps.points[0]), steps, kept, draw=partial(draw_noise, 3, SHAPE))
    while not trajectory.is_finished:
        trajectory.advance(np.tanh(trajectory.latent))
    np.testing.assert_array_equal(trajectory.latent[:, :, ::2], image[:, :, ::2])
    assert not np.allclose(trajectory.latent[:, :, 1], image[:, :, 1])
