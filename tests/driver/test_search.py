"""The search for a mix of precisions: which operations end in which, whatever the machine's times are."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.driver.judge import goal_of
from sashiko.driver.levels import FINE, FLOAT, NARROW, QUANTIZED, Lab, Runnable
from sashiko.driver.measure import Example, HostTimer
from sashiko.driver.model import CompiledModel
from sashiko.driver.quantized import find
from sashiko.quant import FP32, PRESETS, Override, QuantizedModule, calibrate
from tests.driver.searches import FASTER, SLOWER, FakeTimer, Net, capture, data, lab, net, precisions, relative_error, searched


def test_only_the_bad_layer_is_taken_back() -> None:
    model = net(1000.0)
    fast = searched(FakeTimer({**FASTER, FINE: 3.5}), outlier=1000.0)
    assert precisions(fast) == {"first": "int8", "bad": "fp32", "last": "int8"}
    assert fast.search is not None and fast.search.chosen == "mix"
    assert relative_error(model, fast) <= 0.02
    bad = next(site for site in fast.search.sites if site.name == "bad")
    others = [site.error_db for site in fast.search.sites if site.name != "bad"]
    assert bad.error_db is not None and all(db is not None and db > bad.error_db + 20 for db in others)
    assert bad.reason == f"int8 would save 2e+03 ms, and alone leaves {bad.error_db:.0f} dB of the result"


def test_the_module_that_was_compiled_tells_what_was_found() -> None:
    fast = searched(FakeTimer({**FASTER, FINE: 3.5}), outlier=1000.0)
    assert fast.quantized is not None and fast.search is not None
    record = fast.quantized.record
    assert [item.site.name for item in record.sites] == ["first", "last"]
    assert all(item.seconds == {"int8": 1.0, "int8 per row": 3.5, "bf16": 5.0, "fp32": 3.0} for item in record.sites)
    assert all(item.error_db is not None and item.error_db > 30 for item in record.sites)
    assert [(item.name, "would save" in item.reason) for item in record.left_out] == [("bad", True)]
    assert "precision search: relative error of at most 0.02" in fast.explain()
    x = data()[0]
    # The code and the simulation differ in the order of float sums alone.
    torch.testing.assert_close(fast(x), fast.quantized(x), rtol=1e-4, atol=1e-4)


def test_where_int8_is_not_faster_nothing_is_quantized() -> None:
    fast = searched(FakeTimer(SLOWER, whole={"fp32": 1.0}))
    assert set(precisions(fast).values()) == {"fp32"}
    assert fast.search is not None and fast.search.trials == ()
    assert fast.search.notes == ("no operation was measured to be faster quantized",)
    assert fast.search.sites[0].reason == "int8 was not faster here (3e+03 ms against 2e+03 ms)"


def test_one_operation_that_is_not_faster_stays_in_floating_point() -> None:
    fast = searched(FakeTimer(FASTER, own={("last", QUANTIZED): 2.95}))
    assert precisions(fast) == {"first": "int8", "bad": "int8", "last": "fp32"}


def test_a_model_that_is_accurate_enough_is_quantized_throughout_after_one_look() -> None:
    fast = searched(FakeTimer(FASTER))
    assert set(precisions(fast).values()) == {"int8"}
    assert fast.search is not None and len(fast.search.trials) == 1


def test_rows_are_tried_before_floating_point() -> None:
    """One row is a thousand times as large as the others: a scale for each row makes up for that."""
    model = net()
    batches = data()
    for x in batches:
        x[0] *= 1000.0

    def eval_fn(candidate: Callable[..., Any]) -> float:
        with torch.no_grad():
            errors = [(candidate(x) - model(x))[1:].norm() / model(x)[1:].norm() for x in batches]
        return -float(sum(errors))

    calibration = calibrate(model, batches, PRESETS["int8-symmetric"])
    mixes = Lab(calibration, capture(batches[0]), frozenset(("first", "bad", "last")))
    fast = find(mixes, model, goal_of(eval_fn, 0.2, None, math.inf), FakeTimer(FASTER), narrow=False)
    assert set(precisions(fast).values()) == {"int8 per row"}


def test_when_nothing_keeps_the_bound_the_answer_is_fp32_and_says_so() -> None:
    fast = searched(FakeTimer(FASTER), goal_of(None, None, 0.0), narrow=False)
    assert set(precisions(fast).values()) == {"fp32"}
    assert fast.search is not None and fast.search.chosen == "fp32"
    assert "no mix with a quantized operation was found to keep the bound" in fast.search.notes
    assert relative_error(net(), fast) < 1e-6


def test_a_mix_that_is_slower_as_a_whole_is_not_returned() -> None:
    fast = searched(FakeTimer(FASTER, whole={"mix": 4.0}), narrow=False)
    assert fast.search is not None and fast.search.chosen == "fp32"
    assert [(c.name, c.seconds, c.meets) for c in fast.search.candidates] == [("fp32", 3.0, True), ("mix", 4.0, True)]
    assert fast.search.notes == ("the best mix takes 4e+03 ms, fp32 takes 3e+03 ms",)
    assert {site.reason for site in fast.search.sites} == {"the model as a whole was faster in fp32"}


def test_a_mix_that_is_hardly_faster_is_not_returned() -> None:
    fast = searched(FakeTimer(FASTER, whole={"mix": 2.95}), narrow=False)
    assert fast.search is not None and fast.search.chosen == "fp32"
    fast = searched(FakeTimer(FASTER, whole={"mix": 2.9}), narrow=False)
    assert fast.search is not None and fast.search.chosen == "mix"


@pytest.mark.parametrize("preset", ["int8-symmetric", "int8-static"])
def test_bf16_wins_where_it_is_fastest_and_accurate_enough(preset: str) -> None:
    times = {QUANTIZED: 3.0, FINE: 3.0, NARROW: 1.0, FLOAT: 2.0}
    fast = searched(FakeTimer(times, whole={"bf16": 0.5}), preset=preset)
    assert fast.search is not None and fast.search.chosen == "bf16"
    assert set(precisions(fast).values()) == {"bf16"}
    assert len(fast.search.trials) == 1 and 1e-4 < fast.search.trials[0].error < 0.01
    assert 1e-4 < relative_error(net(), fast) < 0.01
    # bf16 has 8 bits: a thousandth is out of its reach, and fp32 is the answer however slow it is.
    strict = searched(FakeTimer(times, whole={"bf16": 0.5}), goal_of(None, None, 1e-4), preset=preset)
    assert strict.search is not None and strict.search.chosen == "fp32"
    assert strict.search.candidates[0].name == "bf16" and strict.search.candidates[0].meets is False


def worse_as_code(module: QuantizedModule) -> Callable[[str, frozenset[str]], CompiledModel]:
    """Code in which the scales of `last` are a tenth too large."""
    other = copy.deepcopy(module)
    for name, value in other.named_buffers():
        if name == "last.weight_scale":
            value.mul_(1.1)
    return capture(data()[0])(other)


@pytest.mark.parametrize("start", ["code", "simulation"])
def test_code_that_loses_more_than_its_simulation_is_not_returned(start: str) -> None:
    """Whether the first mix has its code from the beginning, or is simulated at first."""
    model = net()
    mixes = Lab(lab(1.0).calibration, worse_as_code, lab(1.0).quantized)
    own = {("first", QUANTIZED): 2.95} if start == "simulation" else {}
    fast = find(mixes, model, goal_of(None, None, 0.02, math.inf), FakeTimer({**FASTER, FINE: 3.5}, own), narrow=False)
    assert precisions(fast) == {"first": "fp32" if own else "int8", "bad": "int8", "last": "fp32"}
    assert relative_error(model, fast) <= 0.02
    assert fast.search is not None and fast.search.chosen == "mix"
    same = [t for t in fast.search.trials if t.simulated]
    assert same and all(t.meets for t in same), "the simulation saw nothing"
    assert any(not t.simulated and not t.meets and t.mix in {other.mix for other in same} for t in fast.search.trials)
    assert not fast.search.trials[-1].simulated and re.search(r"int8 +code .* no\n", fast.search.text())


def test_without_time_for_more_code_that_loses_too_much_gives_way_to_fp32() -> None:
    mixes = Lab(lab(1.0).calibration, worse_as_code, lab(1.0).quantized)
    times = FakeTimer(FASTER, {("first", QUANTIZED): 2.95})
    fast = find(mixes, net(), goal_of(None, None, 0.02, 0.0), times, narrow=False)
    assert fast.search is not None and fast.search.chosen == "fp32"
    assert [(t.simulated, t.meets) for t in fast.search.trials] == [(True, True), (False, False)]


class Scores:
    """An eval_fn that counts its calls: a number for how near a candidate is to a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls = model, 0

    def __call__(self, candidate: nn.Module) -> float:
        self.calls += 1
        assert next(candidate.parameters()).device.type == "cpu"
        return 1.0 - relative_error(self.model, candidate)


def test_eval_fn_decides() -> None:
    model = net(1000.0)
    scores = Scores(model)
    fast = searched(FakeTimer({**FASTER, FINE: 3.5}), goal_of(scores, 0.02, None), outlier=1000.0)
    assert precisions(fast) == {"first": "int8", "bad": "fp32", "last": "int8"}
    assert fast.search is not None and fast.search.baseline == 1.0
    assert fast.search.score is not None and 0.98 <= fast.search.score < 1.0
    assert scores.calls == 1 + len(fast.search.trials)
    assert fast.quantized is not None and fast.quantized.record.metric is not None


def test_a_mix_to_be_judged_takes_calls_of_any_form_and_size() -> None:
    mixes, model = lab(1.0), net()
    mix = mixes.all_at(QUANTIZED)
    runnable = mixes.runnable(mix)
    x = data()[0]
    assert torch.equal(runnable(x), mixes.compiled(mix)(x)) and torch.equal(runnable(x=x), runnable(x))
    assert runnable.refused == 0 and not runnable.training
    assert torch.equal(runnable(x[:3]), mixes.simulated(mix)(x[:3])) and runnable.refused == 1
    with pytest.raises(InputError, match="argument 'x'"):
        runnable(x[:, :5])
    assert relative_error(model, runnable) < 0.05


@pytest.mark.parametrize("form", ["code", "simulation"])
def test_a_mix_to_be_judged_has_the_parameters_of_the_model(form: str) -> None:
    """Whose device an eval_fn asks for, though integers have taken their places."""
    mixes, model = lab(1.0), net()
    mix = mixes.all_at(QUANTIZED)
    judged = mixes.runnable(mix) if form == "code" else mixes.judged(mix)
    found = {name.removeprefix("_floating."): value for name, value in judged.named_parameters()}
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], value) for name, value in model.named_parameters())
    assert all(found[f"{name}.weight"] is mixes.calibration.original.attributes[f"{name}.weight"] for name in ("first", "bad", "last"))


@pytest.mark.parametrize(("size", "told"), [(16, False), (3, True)])
def test_an_expensive_eval_fn_judges_code_where_its_calls_fit(size: int, told: bool) -> None:
    seen: list[Any] = []

    def eval_fn(candidate: Callable[..., Any]) -> float:
        time.sleep(0.3)  # as long as a compilation may take
        seen.append(candidate)
        with torch.no_grad():
            return -float((candidate(data()[0][:size]) - net(1000.0)(data()[0][:size])).norm())

    slow = Lab(lab(1000.0).calibration, capture(data()[0]), lab(1000.0).quantized)
    fast = find(slow, net(1000.0), goal_of(eval_fn, 0.1, None, 3.0), FakeTimer({**FASTER, FINE: 3.5}), narrow=False)
    assert isinstance(seen[1], Runnable) and seen[1].refused == told
    assert fast.search is not None and fast.search.chosen in ("mix", "fp32")
    assert [trial.simulated for trial in fast.search.trials] == [isinstance(model, QuantizedModule) for model in seen[1:]]


def test_without_time_there_is_one_look_and_an_answer() -> None:
    model = net(1000.0)
    scores = Scores(model)
    fast = searched(FakeTimer(FASTER), goal_of(scores, 0.02, None), outlier=1000.0, budget=0.0, narrow=False)
    assert scores.calls == 2  # the model itself and the fastest mix
    assert set(precisions(fast).values()) == {"fp32"}
    assert fast.search is not None and any("ran out" in note for note in fast.search.notes)
    good = searched(FakeTimer(FASTER), goal_of(Scores(net()), 0.02, None), budget=0.0)
    assert set(precisions(good).values()) == {"int8"}


@pytest.mark.parametrize(
    ("result", "words"),
    [(math.nan, "returned NaN"), ("good", "returned a str"), (None, "returned a NoneType"), (True, "returned a bool"),
     (torch.zeros(2), "returned a Tensor"), (10**400, "returned a int")],
)
def test_an_eval_fn_that_gives_no_number(result: object, words: str) -> None:
    with pytest.raises(InputError, match=f"eval_fn {words}.*the model itself"):
        searched(FakeTimer(FASTER), goal_of(lambda model: result, None, None))


def test_an_eval_fn_that_raises() -> None:
    def eval_fn(model: Any) -> float:
        if not isinstance(model, Net):
            raise ValueError("no labels")
        return 1.0

    with pytest.raises(InputError, match="eval_fn failed on the mix 3 int8: ValueError: no labels") as caught:
        searched(FakeTimer(FASTER), goal_of(eval_fn, None, None))
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"max_drop": 0.1}, "max_drop is given without eval_fn"), ({"target_error": -1.0}, "target_error is -1.0"),
     ({"eval_fn": lambda model: 1.0, "max_drop": math.nan}, "max_drop is nan"), ({"preset": "auto", "budget_s": -1.0}, "budget_s is -1.0"),
     ({"eval_fn": lambda model: 1.0, "max_drop": "x"}, "max_drop is 'x'"), ({"target_error": torch.tensor(0.1)}, "target_error is tensor"),
     ({"budget_s": 5}, "budget_s is given without a search"), ({"budget_s": -1.0}, "budget_s is -1.0"), ({"budget_s": "x"}, "is 'x'"),
     ({"target_error": 10**400}, "target_error is 1000")],
)
def test_bounds_that_are_none(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        sashiko.quantize_and_compile(net(), data(), **arguments)


def test_the_verb_with_real_times_and_free_shapes() -> None:
    model = net(1000.0)
    shapes = ({0: Dim("B", max=64)},)
    fast = sashiko.quantize_and_compile(model, data(), preset="auto", target_error=0.02, budget_s=10.0, dynamic_shapes=shapes)
    assert fast.search is not None and fast.quantized is not None
    assert relative_error(model, fast) <= 0.02
    seconds = {c.name: c.seconds for c in fast.search.candidates}
    assert seconds[fast.search.chosen] <= min(seconds["fp32"], seconds["bf16"])
    assert fast(torch.randn(7, 32)).shape == (7, 32)


def test_a_scheme_s_own_exceptions_and_left_out_operations_stay() -> None:
    scheme = PRESETS["int8-symmetric"].overriding(Override("first", FP32))
    fast = sashiko.quantize_and_compile(net(), data(), preset=scheme, target_error=1.0, exclude="last", budget_s=0.0)
    assert fast.search is not None and [site.name for site in fast.search.sites] == ["bad"]


def test_products_that_fuse_into_attention_go_together() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (q @ k.transpose(-1, -2)).softmax(-1) @ k

    model = Attention().eval()
    batches = [(torch.randn(2, 8, 16), torch.randn(2, 8, 16)) for _ in range(2)]
    fast = sashiko.quantize_and_compile(model, batches, target_error=1.0, budget_s=0.0)
    assert fast.search is not None and [site.name for site in fast.search.sites] == ["matmul", "matmul_1"]
    assert len({site.precision for site in fast.search.sites}) == 1


def test_times_of_real_products() -> None:
    x = data()[0]
    models = {level: lab(1.0).compiled(lab(1.0).all_at(level)) for level in (FLOAT, QUANTIZED)}
    found = HostTimer(Example((x,), {})).products(models)
    for level, model in models.items():
        assert list(found[level]) == ["first", "bad", "last"]
        assert 0.0 < sum(found[level].values()) <= 3 * sum(t.seconds for t in model.times(x, repeat=1))
