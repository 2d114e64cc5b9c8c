"""Gradients are counted where they are produced, buckets are reported in order, and no graph node is kept."""

import gc
import warnings

import pytest
import torch
from streams import Simulator
from torch.utils.checkpoint import checkpoint

from tkernels.comm import LeaseError
from tkernels.layers import grad_hooks
from tkernels.layers.grad_hooks import GradReadyHooks, grad_ready_hooks
from tkernels.layers.lease import Slot


class Bucket:
    """A bucket whose gradients may always be written."""

    def __init__(self, name, dev=None):
        self.name = name
        self.lease = Slot(torch.zeros(1), dev=dev, name=name).acquire()

    def __repr__(self):
        return self.name


class Model:
    """Parameters named by letters, in buckets; `seen` lists the buckets as they are reported."""

    def __init__(self, letters, bucket_of_letter, passes=None):
        self.seen = []
        self.params = {letter: torch.nn.Parameter(torch.full((2,), 2.0)) for letter in letters}
        for param in self.params.values():
            param.main_grad = torch.zeros(2)
        made = {name: Bucket(name) for name in dict.fromkeys(bucket_of_letter)}
        self.hooks = GradReadyHooks(
            self.params.values(),
            lambda bucket: self.seen.append(bucket.name),
            buckets=[made[name] for name in bucket_of_letter],
            names=list(letters),
            passes=passes,
        )

    def __getattr__(self, letter):
        return self.params[letter]

    def run_pass(self, *losses):
        """What has been reported before the end of the pass, and in all."""
        for loss in losses:
            loss.sum().backward()
        early = list(self.seen)
        self.hooks.flush()
        seen, self.seen = self.seen, []
        self.hooks.reset()
        return "".join(early), "".join(seen)


def written(hooks) -> list:
    """The gradients that have been written in this pass."""
    return [gradient for gradient in hooks._gradients.values() if gradient.written]


def test_grad_ready_hooks_the_first_pass_counts_and_later_ones_report_in_the_order_of_the_buckets():
    model = Model("abc", "112")
    assert model.hooks.expected is None
    assert model.run_pass(model.a * model.b * model.c) == ("", "12")
    assert model.hooks.expected == {"a": 1, "b": 1, "c": 1}
    assert model.run_pass(model.a * model.b * model.c) == ("12", "12")
    # the second bucket is complete first, and waits for its turn
    model.c.sum().backward()
    assert model.seen == []
    assert model.run_pass(model.a * model.b) == ("12", "12")
    assert model.a.main_grad.tolist() == [4.0 + 4.0 + 2.0] * 2 and model.a.grad is None


def test_grad_ready_hooks_wait_for_a_parameter_without_a_gradient_so_far_and_warn_once():
    model = Model("abc", "123")
    assert model.run_pass(model.a * model.c) == ("", "123")
    assert model.hooks.expected == {"a": 1, "b": 0, "c": 1}
    with pytest.warns(UserWarning, match="b and 0 more had no gradient in this pass.* Freeze"):
        assert model.run_pass(model.a * model.c) == ("1", "123")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.run_pass(model.a * model.c) == ("1", "123")
    # the first that it has, after all others of its pass
    (model.a * model.c).sum().backward()
    assert model.run_pass(model.b * 1.0) == ("123", "123")
    assert model.hooks.expected == {"a": 1, "b": 1, "c": 1} and model.b.main_grad.tolist() == [1.0] * 2


def test_grad_ready_hooks_uses_in_one_graph_are_one_gradient_and_uses_in_two_are_two():
    model = Model("ab", "12")
    twice = lambda: model.a * model.b * model.a  # noqa: E731
    model.run_pass(twice())
    assert model.hooks.expected == {"a": 1, "b": 1}
    model = Model("ab", "12")
    for early in ("", "12"):
        assert model.run_pass(model.a * 1, model.a * model.b) == (early, "12")
        assert model.hooks.expected == {"a": 2, "b": 1}
    assert model.a.main_grad.tolist() == [6.0] * 2
    model.a.sum().backward()
    assert model.seen == []  # one of two


def test_grad_ready_hooks_a_checkpoint_produces_inside_a_nested_backward():
    model = Model("ab", "12")

    def layer(x):
        return x * model.a

    def loss():
        x = torch.ones(2, requires_grad=True)
        return checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True) * model.b

    assert model.run_pass(loss()) == ("", "12")
    assert model.hooks.expected == {"a": 2, "b": 1}  # the nested graphs each have their own node
    assert model.run_pass(loss()) == ("12", "12")
    assert model.a.main_grad.tolist() == [2 * (2 * 2 * 2.0)] * 2


def test_grad_ready_hooks_a_graph_that_lost_a_parameter_waits_for_the_end_and_warns_once():
    model = Model("abc", "123")
    model.run_pass(model.a * model.b * model.c)
    with pytest.warns(UserWarning, match=r"b and 0 more .* or fewer than in earlier .* relearn\(\)"):
        assert model.run_pass(model.a * model.c) == ("1", "123")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.run_pass(model.a * model.c) == ("1", "123")
    assert model.run_pass(model.a * model.b * model.c) == ("123", "123")  # it is back, at its place
    model.hooks.relearn()
    assert model.run_pass(model.a * model.c) == ("", "123")
    assert model.hooks.expected == {"a": 1, "b": 0, "c": 1}
    assert model.run_pass(model.a * model.c) == ("1", "123")


def test_grad_ready_hooks_a_pass_without_a_gradient_teaches_nothing():
    model = Model("ab", "12")
    assert model.run_pass() == ("", "12") and model.hooks.expected is None
    model.run_pass(model.a * model.b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.run_pass() == ("", "12")
    assert model.hooks.expected == {"a": 1, "b": 1}


def test_grad_ready_hooks_a_gradient_after_its_bucket_was_handed_on_is_refused():
    model = Model("abc", "112")
    model.run_pass(model.a * model.b * model.c)
    (model.a * model.b * model.c).sum().backward()
    with pytest.raises(LeaseError, match=r"^a: .* after its bucket had been handed on; 1 were expected.* relearn\(\)"):
        model.a.sum().backward()
    model.hooks.flush()
    with pytest.raises(LeaseError, match=r"^c: .* after the end of the pass.*\.defer\(param\)"):
        model.c.sum().backward()


def test_grad_ready_hooks_accumulated_passes_are_not_counted():
    model = Model("ab", "12")
    for early in ("", "12"):
        model.hooks.counting = False
        (model.a * model.b).sum().backward()
        model.hooks.counting = True
        assert model.run_pass(model.a * model.b) == (early, "12")
    assert model.hooks.expected == {"a": 1, "b": 1}
    assert model.a.main_grad.tolist() == [8.0] * 2


def test_grad_ready_hooks_retain_graph_is_two_gradients():
    model = Model("a", "1")
    for early in ("", "1"):
        loss = (model.a * 3).sum()
        loss.backward(retain_graph=True)
        assert model.run_pass(loss) == (early, "1")
    assert model.hooks.expected == {"a": 2}
    assert model.a.main_grad.tolist() == [12.0] * 2


class NoGradient(torch.autograd.Function):
    """The identity, whose backward says nothing about `param`; `then(param)` is called there."""

    @staticmethod
    def forward(ctx, x, param, then):
        ctx.param, ctx.then = param, then
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.then(ctx.param)
        return grad, None, None


def test_grad_ready_hooks_a_hook_without_a_gradient_is_no_production():
    model = Model("ab", "12")
    fired = []
    model.a.register_post_accumulate_grad_hook(lambda param: fired.append(param.grad))
    for _ in range(2):
        assert model.run_pass(NoGradient.apply(model.b, model.a, lambda param: None)) == ("", "12")
        assert model.hooks.expected == {"a": 0, "b": 1}
    assert fired == [None, None]


def fused(param):
    with grad_ready_hooks(param).writing(param) as main_grad:
        main_grad.add_(1.0)


def fused_and_marked(param):
    param.main_grad.add_(1.0)
    grad_ready_hooks(param).produced(param)
    param.grad_added_to_main_grad = True


def only_marked(param):
    param.main_grad.add_(1.0)
    param.grad_added_to_main_grad = True


def fused_with_a_placeholder(param):
    fused_and_marked(param)
    param.grad = torch.full((2,), float("nan"))  # as layers do whose hooks would otherwise not fire


@pytest.mark.parametrize("kernel", [fused, fused_and_marked, only_marked, fused_with_a_placeholder])
def test_grad_ready_hooks_a_fused_gradient_counts_once_where_it_is_launched(kernel):
    model = Model("ab", "12")
    for early in ("", "12"):
        assert model.run_pass(NoGradient.apply(model.b, model.a, kernel)) == (early, "12")
        assert model.hooks.expected == {"a": 1, "b": 1}
    assert model.a.main_grad.tolist() == [2.0] * 2
    assert model.a.grad is None and not getattr(model.a, "grad_added_to_main_grad", False)


def by_autograd(param):
    return param * 1.0


@pytest.mark.parametrize("first", [by_autograd, fused_and_marked, only_marked])
def test_grad_ready_hooks_a_mark_after_another_gradient_of_the_pass_is_a_gradient_too(first):
    model = Model("ab", "12")
    for early in ("", "12"):
        (by_autograd(model.a) if first is by_autograd else NoGradient.apply(model.b, model.a, first)).sum().backward()
        assert model.run_pass(NoGradient.apply(model.b, model.a, only_marked), model.b * 1.0) == (early, "12")
        assert model.hooks.expected["a"] == 2


def test_grad_ready_hooks_what_an_abandoned_pass_announced_is_forgotten():
    model = Model("ab", "12")
    fused_and_marked(model.a)
    assert written(model.hooks)
    model.hooks.reset()
    assert not written(model.hooks)
    assert model.run_pass(NoGradient.apply(model.b, model.a, only_marked)) == ("", "12")
    assert model.hooks.expected == {"a": 1, "b": 1}


@pytest.mark.parametrize("second", ["writing", "produced", "hook"])
def test_grad_ready_hooks_gradients_of_one_parameter_are_in_order_whatever_streams_they_are_on(second):
    sim = Simulator()
    one, two = sim.Stream("one"), sim.Stream("two")
    param = torch.nn.Parameter(torch.full((2,), 2.0))
    param.main_grad = torch.zeros(2)
    bucket = Bucket("1", dev=sim)
    hooks = GradReadyHooks([param], lambda bucket: None, buckets=[bucket])
    with sim:
        with hooks.writing(param, one) as main_grad, sim.stream(one):
            main_grad.add_(1.0)
        if second == "writing":
            with hooks.writing(param, two) as main_grad, sim.stream(two):
                main_grad.add_(2.0)
        elif second == "hook":
            with sim.stream(two):
                (param * 2.0).sum().backward()
        else:
            with bucket.lease.write(two, ordered=True), sim.stream(two):
                pass
            with sim.stream(two):
                param.main_grad.add_(2.0)
            hooks.produced(param, two)
        with bucket.lease.read():
            total = param.main_grad.clone()
    sim.check()
    sim.run(starve=["one", "two"])
    assert total.tolist() == [3.0] * 2 and written(hooks)


def test_grad_ready_hooks_add_what_they_hold_behind_a_kernel_that_has_added_to_the_same(monkeypatch):
    monkeypatch.setattr(grad_hooks, "_has_own_memory", lambda grad: True)  # which a simulator keeps
    sim, passes = Simulator(), Passes()
    with sim:
        bucket, params = Bucket("1", sim), [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        for param in params:
            param.main_grad = torch.zeros(2)
        hooks = GradReadyHooks(params, lambda bucket: None, buckets=[bucket] * 2, passes=passes)
        side = sim.Stream("side")
        (params[0] * 2.0).sum().backward()  # is held
        side.wait_event(sim.current_stream().record_event())
        with sim.stream(side):
            params[0].main_grad.add_(1.0)
        hooks.produced(params[0], side)
        (params[1] * 2.0).sum().backward()
        hooks.flush()
        with bucket.lease.read():
            total = params[0].main_grad.clone()
    sim.check()
    sim.run(starve=["side"])
    assert total.tolist() == [3.0] * 2


def test_grad_ready_hooks_a_deferred_gradient_is_ready_when_it_is_launched_not_when_the_hook_fires():
    model = Model("ab", "12")
    for early in ("", "12"):
        NoGradient.apply(model.b, model.a, lambda param: None).sum().backward()
        assert model.seen == []
        fused_and_marked(model.a)
        assert model.run_pass() == (early, "12")
        assert model.hooks.expected == {"a": 1, "b": 1}


def test_grad_ready_hooks_a_hook_that_raises_leaves_the_pass_to_be_begun_again():
    model = Model("ab", "12")
    model.run_pass(model.a * model.b)
    handle = model.b.register_post_accumulate_grad_hook(lambda param: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (model.a * model.b).sum().backward()
    handle.remove()
    model.hooks.reset()
    model.seen.clear()
    assert model.run_pass(model.a * model.b) == ("12", "12")


def accumulate_grad(param):
    return param.expand_as(param).grad_fn.next_functions[0][0]


class Passes:
    """What begins and ends passes, as far as hooks know it."""

    def enter_backward(self, param):
        pass

    def begin(self, written):
        pass


@pytest.mark.parametrize("retained", [False, True])
def test_grad_ready_hooks_no_accumulate_grad_node_is_kept(retained):
    """A node that survives would keep the stream it was made on: the tag shows whether the next one is the same."""
    passes = Passes()
    model = Model("a", "1", passes)
    kept = [accumulate_grad(model.a)] if retained else []  # the wrong form: hooks on a node have to hold it
    accumulate_grad(model.a).metadata["tag"] = True
    for _ in range(2):
        model.run_pass(model.a * 3)
    gc.collect()
    assert ("tag" in accumulate_grad(model.a).metadata) == bool(kept)


def test_grad_ready_hooks_a_parameter_belongs_to_the_newest_hooks():
    model = Model("a", "1")
    newer = []
    hooks = GradReadyHooks([model.a], newer.append, buckets=[Bucket("2")])
    assert grad_ready_hooks(model.a) is hooks
    model.hooks.remove()  # again: nothing of the newer ones is lost
    (model.a * 3).sum().backward()
    hooks.flush()
    assert model.a.main_grad.tolist() == [3.0] * 2
    assert model.seen == [] and [bucket.name for bucket in newer] == ["2"]
    hooks.remove()
    assert grad_ready_hooks(model.a) is None
    model.a.sum().backward()
    assert model.a.grad.tolist() == [1.0] * 2  # plain autograd again


def test_grad_ready_hooks_take_a_parameter_from_older_ones_at_once():
    model = Model("ab", "12")
    newer = []
    hooks = GradReadyHooks([model.a], newer.append, buckets=[Bucket("3")])
    (model.a * model.b).sum().backward()
    assert written(hooks) and not written(model.hooks)
    assert model.a.main_grad.tolist() == [2.0] * 2 and model.b.grad.tolist() == [2.0] * 2


def test_grad_ready_hooks_refuse_what_they_cannot_add_to_before_anything_has_changed():
    param = torch.nn.Parameter(torch.ones(3))
    for params, options, error, message in (
        ([3], {}, TypeError, r"params\[0\]=3 must be a tensor"),
        ([param], {}, ValueError, r"params\[0\] has no main_grad; set it"),
        ([param], {"buckets": []}, ValueError, "0 buckets for 1 parameters; pass one each"),
        ([param], {"names": ["a", "b"]}, ValueError, "2 names for 1 parameters; pass one each"),
        ([param], {"on_ready": None}, TypeError, "on_ready=None must be a function of a bucket"),
    ):
        with pytest.raises(error, match=f"GradReadyHooks: {message}"):
            GradReadyHooks(params, **{"on_ready": print, "buckets": [None]} | options)
    param.sum().backward()
    assert param.grad.tolist() == [1.0] * 3


def test_grad_ready_hooks_that_nobody_keeps_do_nothing():
    param = torch.nn.Parameter(torch.ones(2))
    param.main_grad = torch.zeros(2)
    GradReadyHooks([param], pytest.fail, buckets=[Bucket("1")])
    gc.collect()
    assert grad_ready_hooks(param) is None
    param.sum().backward()
    assert param.grad.tolist() == [1.0] * 2
