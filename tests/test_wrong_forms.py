"""The checks tell wrong forms from right ones: races by pair, wrong values under some starvation, overlap that is lost.

The forms are those that were shipped: what the four public bugs did, and what their fixes still do.
"""

import pytest
import wrong_forms
from streams import Race, Simulator, subsets
from wrong_forms import FORMS

every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def wrong_values(form, starve) -> list[int]:
    """The results that are not what they must be, after a run in which `starve` is held up."""
    sim = Simulator()
    expected = form.issue(sim)
    sim.run(starve)
    return [index for index, (tensor, values) in enumerate(expected) if tensor.tolist() != values]


def streams_of(form):
    sim = Simulator()
    form.issue(sim)
    return list(sim._streams)


@every_form
def test_the_races_of_a_form_are_found_by_pair_whatever_the_timing(form):
    sim = Simulator()
    form.issue(sim)
    assert sorted(race.kernels for race in sim.races) == sorted(form.races)
    if form.races:
        with pytest.raises(Race):
            sim.check()


@every_form
def test_a_form_with_races_goes_wrong_under_some_starvation_and_one_without_under_none(form):
    wrong = [starve for starve in subsets(streams_of(form)) if wrong_values(form, starve)]
    assert bool(wrong) == bool(form.races), wrong


@pytest.mark.parametrize("form", [form for form in FORMS if form.overlap[0]], ids=str)
def test_the_overlap_of_a_form_is_real_or_it_is_flagged(form):
    earlier, later, starve = form.overlap
    sim = Simulator()
    form.issue(sim)
    sim.run(starve=[starve])
    overlapped = sim.log.index(earlier) < sim.log.index(later)
    assert overlapped != form.serialises, sim.log


@pytest.mark.parametrize("system", ["pipeline", "pool", "buckets", "hooks"])
def test_every_system_has_forms_that_race_and_serialise_and_a_right_one_that_is_held_to_both_checks(system):
    forms = [form for form in FORMS if form.system == system]
    assert any(form.races for form in forms) and any(form.serialises for form in forms)
    ours = [form for form in forms if "lease" in form.name or "slot" in form.name]
    assert ours and all(form.right and form.overlap[0] for form in ours)


def test_the_counts_of_races_by_form_of_the_hooks():
    counts = [len(form.races) for form in wrong_forms.HOOK_FORMS if form.right or form.races]
    assert counts[:3] == [2, 1, 0]


def test_a_slow_reduction_reads_the_next_units_gradients_where_the_limiter_waits_on_the_wrong_stream():
    """Of four units, the first two are overwritten by those that took their buffers: 3, 4, 3, 4."""
    values = {}
    for form in wrong_forms.POOLS[:2]:
        sim = Simulator()
        expected = form.issue(sim)
        sim.run(starve=["comm"])
        values[form.name] = [shard[0].item() / 2 for shard, _ in expected]
    assert values == {
        "the reader waits for its own event": [3, 4, 3, 4],
        "the one writer waits": [1, 2, 3, 4],
    }
