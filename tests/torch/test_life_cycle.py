"""From wrapping to unwrapping: checkpoints, copies, evaluation, buffers, several of everything."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    MODES,
    Case,
    Rows,
    adam,
    batches,
    classify,
    core,
    differences,
    keywords,
    numbered,
    outcome,
    plain_loop,
    rows,
    sgd,
    train_ddp,
    train_ours,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytescheduler.torch as bs
from bytescheduler.exceptions import UsageError
from bytescheduler.transports.torch_distributed import StagedBroadcast, TorchDistributedTransport

pytestmark = pytest.mark.multiprocess
every_mode = pytest.mark.parametrize("mode", MODES)


def wrap(optimizer: Any, model: Any, **ours: Any) -> bs.ScheduledOptimizer:
    return bs.ScheduledOptimizer(optimizer, model, **keywords(**ours))


def train(model: Any, optimizer: Any, data: list[Any]) -> None:
    plain_loop(model, optimizer, data, classify)


class Normalised(nn.Module):
    """Buffers of several dtypes, changed by each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(16, dtype=torch.bool))
        self.register_buffer("last", torch.zeros(3, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        if self.training:
            self.seen |= hidden.max(0).values > 1.5
            self.last.copy_(x[0, :3])
        return self.head(torch.tanh(hidden))


# -- order


def announcements(rank: int, mode: str) -> int:
    """How many this rank makes in five steps, when the first plans and orders are known."""
    model = Rows()
    said: list[Any] = []
    with wrap(sgd(model.parameters()), model, mode=mode) as optimizer:
        transport = optimizer._session.transport
        announce = transport.announce

        def noted(message: Any) -> None:
            said.append(message)
            announce(message)

        train(model, optimizer, batches(rank, 4, rows))
        optimizer.synchronize()
        transport.announce = noted
        train(model, optimizer, batches(rank, 5, rows))
        optimizer.synchronize()
        return len(said)


@every_mode
def test_where_there_is_nothing_to_order_nothing_is_announced(two_ranks, mode):
    mine, others = two_ranks.run(announcements, mode)
    assert others == 0
    assert mine == 0 if mode in ("barrier", "one chunk") else mine >= 5


# -- buffers


def without_buffers(found: Any) -> Any:
    """What remains when buffers are left out: after the last step ours are one broadcast ahead."""
    return {
        name: value
        for name, value in found.items()
        if not ("running" in name or "tracked" in name or name == "seen")
    }


def weights_beside_buffers(rank: int, mode: str, sync: bool) -> Any:
    case = Case(model=Normalised, optimizer=adam, ddp={"broadcast_buffers": sync})
    expected = train_ddp(case, rank)
    found = train_ours(case, rank, mode=mode, sync_buffers=sync)
    return (
        differences(*map(without_buffers, (expected, found)))
        if sync
        else (differences(expected, found))
    )


@every_mode
@pytest.mark.parametrize("sync", [True, False])
def test_weights_beside_buffers_have_the_same_bits(two_ranks, mode, sync):
    assert two_ranks.run(weights_beside_buffers, mode, sync) == [{}, {}]


def staged(transport: TorchDistributedTransport, buffer: torch.Tensor) -> Callable[[], object]:
    return StagedBroadcast(transport._control, buffer, transport.rank).wait


def buffers_as_from_a_gpu(rank: int) -> list[list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchDistributedTransport, "broadcast_async", staged)
        return buffers_before_each_forward(rank, True)


def buffers_before_each_forward(rank: int, ours: bool) -> list[list[float]]:
    """What each training forward, and an evaluation at the end, sees."""
    torch.manual_seed(rank)
    model = Normalised()
    seen = []
    model.register_forward_pre_hook(
        lambda module, _: seen.append([float(b.double().sum()) for b in module.buffers()])
    )
    optimizer: Any = sgd(model.parameters())
    if ours:
        optimizer, trained = wrap(optimizer, model), model
    else:
        trained = DistributedDataParallel(model)
    train(trained, optimizer, batches(rank, 4, Case().batch))
    trained.train()
    trained(torch.ones(6, 8))
    if ours:
        optimizer.unwrap()
    return seen


def test_each_forward_sees_the_buffers_of_rank_0(two_ranks):
    expected, ours = (two_ranks.run(buffers_before_each_forward, way) for way in (False, True))
    assert ours == expected
    assert ours[0] == ours[1]
    assert two_ranks.run(buffers_as_from_a_gpu) == expected


# -- initial values


def initial_values(rank: int, stepped: bool) -> Any:
    """Each rank begins elsewhere; all shall go on from where rank 0 is, without a step."""
    torch.manual_seed(rank)
    model = Normalised()
    inner = adam(model.parameters())
    if stepped and rank == 0:
        train(model, inner, batches(0, 2, Case().batch))
        inner.param_groups[0]["lr"] = 0.5
    before = outcome(model, inner)
    calls = []
    inner.register_step_post_hook(lambda *_: calls.append(1))
    with wrap(inner, model) as optimizer:
        after = outcome(model, optimizer)
        return before, after, len(calls), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "resumed"])
def test_all_ranks_start_from_rank_0_without_a_hidden_step(two_ranks, stepped):
    (before, first, *first_rest), (_, second, *second_rest) = two_ranks.run(initial_values, stepped)
    assert differences(before, first) == {}
    assert differences(first, second) == {}
    assert first_rest == second_rest == [0, 0.5 if stepped else 1e-2]


# -- wrapping, again, and unwrapping


def wrapped_each_epoch(rank: int, mode: str, unwrap: bool) -> Any:
    case = Case(optimizer=adam, steps=9)
    model, data = case.make(), numbered(case, rank)
    inner = adam(model.parameters())
    optimizer: Any = None
    for epoch in range(3):
        if optimizer is not None and unwrap:
            inner = optimizer.unwrap()
        elif optimizer is not None:  # state travels by hand to a new optimizer
            state = optimizer.state_dict()
            inner = adam(model.parameters())
            inner.load_state_dict(state)
        optimizer = wrap(inner, model, mode=mode)
        train(model, optimizer, data[3 * epoch : 3 * epoch + 3])
    found = outcome(model, optimizer)
    optimizer.unwrap()
    return differences(train_ddp(case, rank), found)


@every_mode
@pytest.mark.parametrize("unwrap", [True, False], ids=["unwrapped", "abandoned"])
def test_wrapping_again_each_epoch(two_ranks, mode, unwrap):
    assert two_ranks.run(wrapped_each_epoch, mode, unwrap) == [{}, {}]


def unwrapped_and_gone_on(rank: int, how: str) -> Any:
    """After unwrapping nothing of ours is left: no hook, no class, no thread."""
    case = Case(optimizer=adam)
    model, data = case.make(), numbered(case, rank)
    inner = adam(model.parameters())
    threads = threading.active_count()
    optimizer = wrap(inner, model)
    train(model, optimizer, data)
    if how == "unwrap":
        assert optimizer.unwrap() is inner
        assert optimizer.unwrap() is inner
    elif how == "with":
        with optimizer:
            pass
    else:
        del optimizer
        gc.collect()
    left = [name for name, module in model.named_modules() if module._forward_pre_hooks] + [
        name
        for name, p in model.named_parameters()
        if type(p) is not nn.Parameter or p._post_accumulate_grad_hooks
    ]
    found = differences(train_ddp(case, rank), outcome(model, inner))
    train(model, inner, data[:1])  # by itself now: ranks part
    return left, threading.active_count() - threads, found, float(model.head.bias[0])


@pytest.mark.parametrize("how", ["unwrap", "with", "dropped"])
def test_nothing_is_left_after_unwrapping(two_ranks, how):
    (*first, one), (*second, other) = two_ranks.run(unwrapped_and_gone_on, how)
    assert first == second == [[], 0, {}]
    assert one != other


def used_after_unwrap(rank: int) -> list[str]:
    model = Rows()
    optimizer = wrap(sgd(model.parameters()), model)
    train(model, optimizer, batches(rank, 2, Case().batch))
    optimizer.unwrap()
    errors = []
    for call in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(UsageError) as caught:
            call()
        errors.append(str(caught.value))
    optimizer.synchronize()
    optimizer.state_dict()
    return errors


def test_an_unwrapped_wrapper_says_so(two_ranks):
    for errors in two_ranks.run(used_after_unwrap):
        assert len(errors) == 2
        assert all("unwrap" in text for text in errors)


# -- checkpoints and copies


def checkpointed(rank: int, mode: str, moment: str, way: str) -> Any:
    """Save at ``moment`` of the third step; go on from what was saved in fresh objects."""
    case = Case(optimizer=adam, steps=6)
    model, data = case.make(), numbered(case, rank)
    optimizer: Any = adam(model.parameters())
    if way != "plain to wrapped":
        optimizer = wrap(optimizer, model, mode=mode)
    ddp = DistributedDataParallel(model) if way == "plain to wrapped" else model
    saved = b""
    for step, batch in enumerate(data[:3]):
        optimizer.zero_grad()
        value = classify(ddp, batch)
        value.backward()
        optimizer.step()
        if step == 2 and moment == "after step":
            saved = _save(model, optimizer)
        if step < 2:
            continue
        optimizer.zero_grad()
        value = classify(ddp, data[3])
        if moment == "after forward":
            saved = _save(model, optimizer)
        value.backward()
        if moment == "after backward":
            saved = _save(model, optimizer)
    if way != "plain to wrapped":
        optimizer.unwrap()

    torch.manual_seed(99)
    fresh: Any = Rows()
    resumed: Any = adam(fresh.parameters())
    state = torch.load(io.BytesIO(saved))
    if way == "to wrapped before loading":
        resumed = wrap(resumed, fresh, mode=mode)
    fresh.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    if way in ("wrapped to wrapped", "plain to wrapped"):
        resumed = wrap(resumed, fresh, mode=mode)
    plain = way == "wrapped to plain"
    goes_on = DistributedDataParallel(fresh) if plain else fresh
    train(goes_on, resumed, data[3:])
    found = outcome(fresh, resumed)
    if hasattr(resumed, "unwrap"):
        resumed.unwrap()
    return differences(train_ddp(case, rank), found)


def _save(model: nn.Module, optimizer: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("moment", ["after step", "after forward", "after backward"])
@pytest.mark.parametrize(
    "way",
    [
        "wrapped to wrapped",
        "wrapped to plain",
        "plain to wrapped",
        "to wrapped before loading",
    ],
)
def test_checkpoints_hold_everything_at_any_moment(two_ranks, moment, way):
    assert two_ranks.run(checkpointed, "priority", moment, way) == [{}, {}]


def save_by_all(rank: int) -> bytes:
    model = Case().make()
    with wrap(adam(model.parameters()), model) as optimizer:
        train(model, optimizer, batches(rank, 3, Case().batch))
        return _save(model, optimizer)


def resume_from(rank: int, saved: bytes) -> Any:
    model: Any = Rows()
    inner = adam(model.parameters())
    state = torch.load(io.BytesIO(saved))
    model.load_state_dict(state["model"])
    steps = float(state["optimizer"]["state"][0]["step"])  # before it is shared and counts on
    inner.load_state_dict(state["optimizer"])
    with wrap(inner, model) as optimizer:
        train(model, optimizer, batches(rank, 3, Case().batch))
        return steps, outcome(model, optimizer)


def test_a_job_goes_on_with_another_world_size(two_ranks, three_ranks):
    saved = two_ranks.run(save_by_all)[0]
    results = three_ranks.run(resume_from, saved)
    assert [steps for steps, _ in results] == [3.0] * 3
    assert float(results[0][1]["state of 0: step"]) == 6.0
    assert all(differences(results[0][1], found) == {} for _, found in results)


def saved_on_rank_0_only(rank: int) -> Any:
    case = Case(optimizer=adam)
    model, data = case.make(), numbered(case, rank)
    with wrap(adam(model.parameters()), model) as optimizer:
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            classify(model, batch).backward()
            optimizer.step()
            if rank == 0 and step % 2:
                _save(model, optimizer)
        return differences(train_ddp(case, rank), outcome(model, optimizer))


def test_saving_on_one_rank_hangs_nobody(two_ranks):
    assert two_ranks.run(saved_on_rank_0_only) == [{}, {}]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: _reloaded(value),
}


def _reloaded(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def copied(rank: int, how: str, moment: str) -> Any:
    """Model and optimizer are copied whole; the copies are unwrapped and train by themselves."""
    case = Case(optimizer=adam)
    model, data = case.make(), numbered(case, rank)
    with wrap(adam(model.parameters()), model) as optimizer:
        train(model, optimizer, data[:-1])
        if moment == "after backward":
            optimizer.zero_grad()
            classify(model, data[-1]).backward()
        twin, twin_optimizer = COPIES[how]((model, optimizer))
        if moment == "after step":
            optimizer.zero_grad()
            classify(model, data[-1]).backward()
        own = {name: p.detach().clone() for name, p in twin.named_parameters()}
        optimizer.step()
        found = differences(train_ddp(case, rank), outcome(model, optimizer))
        still = differences(own, {name: p.detach() for name, p in twin.named_parameters()})
    tied = {id(p) for p in twin.parameters()} == {
        id(p) for group in twin_optimizer.param_groups for p in group["params"]
    }
    kinds = {type(p) for p in twin.parameters()} | {type(twin_optimizer)}
    train(twin, twin_optimizer, data[:1])
    return found, still, tied, kinds == {nn.Parameter, torch.optim.AdamW}


@pytest.mark.parametrize("moment", ["after step", "after backward"])
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_plain_and_complete(two_ranks, how, moment):
    assert two_ranks.run(copied, how, moment) == [({}, {}, True, True)] * 2


def model_copied_alone(rank: int, how: str) -> Any:
    case = Case(optimizer=adam)
    model, data = case.make(), numbered(case, rank)
    with wrap(adam(model.parameters()), model) as optimizer:
        train(model, optimizer, data)
        twin = COPIES[how](model)
        found = differences(outcome(twin), outcome(model))
        twin(torch.ones(2, 8)).sum().backward()
        return found, {type(p) for p in twin.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_the_model_alone(two_ranks, how):
    assert two_ranks.run(model_copied_alone, how) == [({}, True)] * 2


# -- evaluation


GUARDS: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "with gradients": torch.enable_grad,
}


def evaluated(rank: int, mode: str, context: str, where: str) -> Any:
    """After each step the model is evaluated whole, and parts of it without the root's forward."""

    def loop(trained: Any, optimizer: Any, data: Any, loss: Any) -> list[torch.Tensor]:
        seen = []
        model = core(trained)
        for batch in data:
            optimizer.zero_grad()
            loss(trained, batch).backward()
            optimizer.step()
            if where == "everywhere" or rank == 0:
                model.eval()
                with GUARDS[context]():
                    seen.append(model.head(torch.tanh(model.first(batch[0]))))
                    model(torch.ones(2, 8))
                model.train()
        return seen

    case = Case(model=Normalised, optimizer=adam, loop=loop)
    expected, found = train_ddp(case, rank), train_ours(case, rank, mode=mode)
    return differences(without_buffers(expected), without_buffers(found))


@every_mode
@pytest.mark.parametrize("where", ["everywhere", "rank 0"])
@pytest.mark.parametrize("context", ["no_grad", "inference_mode", "with gradients"])
def test_evaluation_between_steps(two_ranks, mode, context, where):
    assert two_ranks.run(evaluated, mode, context, where) == [{}, {}]


def last_iteration(rank: int, how: str) -> Any:
    """Nothing of the last step is lost, however the weights are looked at first."""
    case = Case(optimizer=adam)
    model, data = case.make(), numbered(case, rank)
    optimizer = wrap(adam(model.parameters()), model)
    train(model, optimizer, data)
    if how == "synchronize":
        optimizer.synchronize()
    elif how == "unwrap":
        optimizer.unwrap()
    elif how == "dropped":
        del optimizer
        gc.collect()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    if how in ("weights", "synchronize"):
        optimizer.unwrap()
    expected = {k: v for k, v in train_ddp(case, rank).items() if k in found}
    return differences(expected, found)


@pytest.mark.parametrize("how", ["weights", "synchronize", "unwrap", "dropped"])
def test_nothing_of_the_last_iteration_is_lost(two_ranks, how):
    assert two_ranks.run(last_iteration, how) == [{}, {}]


# -- several of everything


def two_models(rank: int, mode: str) -> Any:
    """Adversaries: each has a model and an optimizer, and passes gradients into the other."""
    each = [batches(other, 5, Case().batch) for other in range(2)]

    def run(wrapped: bool, data: list[Any], mean: Any) -> Any:
        torch.manual_seed(0)
        maker, judge = Rows(), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizers: Any = [adam(maker.parameters()), adam(judge.parameters())]

        def against(x: Any, y: Any) -> torch.Tensor:
            return judge(maker(x).detach()).sigmoid().mean() - judge(x[:, :4]).mean()

        if wrapped:
            optimizers = [
                wrap(optimizers[0], maker, mode=mode),
                wrap(optimizers[1], judge, mode=mode),
            ]
        for step, batch in enumerate(data):
            optimizers[1].zero_grad()
            mean(batch, against).backward()
            optimizers[1].step()
            if step % 2:  # some freeze the judge for the maker's turn, some do not
                judge.requires_grad_(False)
            optimizers[0].zero_grad()
            mean(batch, lambda x, y: -judge(maker(x)).sigmoid().mean()).backward()
            optimizers[0].step()
            judge.requires_grad_(True)
        found = [outcome(maker, optimizers[0]), outcome(judge, optimizers[1])]
        for optimizer in optimizers if wrapped else ():
            optimizer.unwrap()
        return found

    expected = run(
        False,
        list(zip(*each, strict=True)),
        lambda pair, loss: sum(loss(*batch) for batch in pair) / 2,
    )
    actual = run(True, each[rank], lambda batch, loss: loss(*batch))
    return [differences(a, b, 1e-6) for a, b in zip(expected, actual, strict=True)]


@every_mode
def test_adversarial_models_in_one_process(two_ranks, mode):
    assert two_ranks.run(two_models, mode) == [[{}, {}]] * 2


def two_optimizers(rank: int, mode: str, lone: bool) -> Any:
    """Trunk and head of one model have an optimizer each, stepped together or by turns."""
    case = Case(optimizer=adam, steps=6)
    each = [numbered(case, other) for other in range(2)]

    def run(wrapped: bool, data: list[Any], loss: Any) -> Any:
        model: Any = case.make()
        trunk = [*model.first.parameters(), *model.second.parameters()]
        optimizers: Any = [adam(trunk), sgd(model.head.parameters())]
        if wrapped:
            optimizers = [wrap(optimizer, model, mode=mode) for optimizer in optimizers]
        for step, batch in enumerate(data):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(model, batch).backward()
            for number, optimizer in enumerate(optimizers):
                if not lone or step % 2 == number:
                    optimizer.step()
        found = [outcome(model, optimizer) for optimizer in optimizers]
        for optimizer in optimizers if wrapped else ():
            optimizer.unwrap()
        return found

    def both(model: Any, pair: Any) -> Any:
        return sum(case.loss(model, batch) for batch in pair) / 2

    expected = run(False, list(zip(*each, strict=True)), both)
    actual = run(True, each[rank], case.loss)
    return [differences(a, b) for a, b in zip(expected, actual, strict=True)]


@every_mode
@pytest.mark.parametrize("lone", [False, True], ids=["together", "by turns"])
def test_two_optimizers_over_one_model(two_ranks, mode, lone):
    assert two_ranks.run(two_optimizers, mode, lone) == [[{}, {}]] * 2


def in_a_group(rank: int, members: list[int]) -> Any:
    """Only the members of a second group exchange; the rest is not even asked."""
    group = dist.new_group(members)
    found: Any = None
    if rank in members:
        case = Case(optimizer=adam)
        model, data = case.make(), numbered(case, members.index(rank))
        with wrap(adam(model.parameters()), model, group=group) as optimizer:
            for batch in data:
                total = torch.ones(1)
                dist.all_reduce(total, group=group)  # the user's own traffic in the same group
                optimizer.zero_grad()
                classify(model, batch).backward()
                optimizer.step()
            found = outcome(model, optimizer)
    dist.barrier()
    return found


def expected_of_two(rank: int) -> Any:
    return train_ddp(Case(optimizer=adam), rank)


@pytest.mark.parametrize("members", [[0, 1], [0, 2], [1, 2]])
def test_a_second_process_group(two_ranks, three_ranks, members):
    expected = two_ranks.run(expected_of_two)[0]
    results = three_ranks.run(in_a_group, members)
    for rank, found in enumerate(results):
        assert (found is None) == (rank not in members)
        assert found is None or differences(expected, found) == {}


def each_alone(rank: int) -> Any:
    """Two jobs of one rank each, side by side."""
    groups = [dist.new_group([member]) for member in range(2)]
    model = Case().make()
    data = numbered(Case(), rank)
    with wrap(sgd(model.parameters()), model, group=groups[rank]) as optimizer:
        train(model, optimizer, data)
        found = outcome(model, optimizer)
    plain = Case().make()
    inner = sgd(plain.parameters())
    train(plain, inner, data)
    return differences(outcome(plain, inner), found)


def test_groups_of_one_rank_side_by_side(two_ranks):
    assert two_ranks.run(each_alone) == [{}, {}]


def another_thread_reads(rank: int) -> Any:
    """A logger's thread looks at weights while training goes on."""
    case = Case(optimizer=adam)
    model, data = case.make(), numbered(case, rank)
    errors: list[str] = []
    seen: list[float] = []
    with wrap(adam(model.parameters()), model) as optimizer:
        for batch in data:
            optimizer.zero_grad()
            classify(model, batch).backward()
            optimizer.step()
            reader = threading.Thread(target=lambda: seen.append(float(model.head.weight.sum())))
            reader.start()
            reader.join(30)
        found = outcome(model, optimizer)
    return errors, len(seen), differences(train_ddp(case, rank), found)


def test_weights_read_by_another_thread(two_ranks):
    assert two_ranks.run(another_thread_reads) == [([], 5, {})] * 2


def seen_by_step_hooks(rank: int, when: str) -> Any:
    """Hooks run once per step, the earlier one before the update and the later one after."""
    case = Case(optimizer=adam)
    calls: list[str] = []
    weights: list[torch.Tensor] = []

    def run(model: Any, trained: Any, optimizer: Any, inner: Any, loss: Any, data: Any) -> Any:
        calls.clear()
        weights.clear()

        def note(kind: str) -> Any:
            def hook(*_: Any) -> None:
                calls.append(kind)
                weights.append(model.head.bias.detach().clone())

            return hook

        owner = {"inner": inner, "wrapper": optimizer}[when] if optimizer is not inner else inner
        handles = [
            owner.register_step_pre_hook(note("pre")),
            owner.register_step_post_hook(note("post")),
        ]
        plain_loop(trained, optimizer, data[:4], loss)
        for handle in handles:
            handle.remove()
        plain_loop(trained, optimizer, data[4:], loss)
        return list(calls), {str(i): w for i, w in enumerate(weights)}, outcome(model, optimizer)

    each = [numbered(case, other) for other in range(2)]
    plain = case.make()
    inner = adam(plain.parameters())
    expected = run(
        plain, plain, inner, inner,
        lambda m, pair: sum(classify(m, batch) for batch in pair) / 2,
        list(zip(*each, strict=True)),
    )  # fmt: skip
    model = case.make()
    inner = adam(model.parameters())
    with wrap(inner, model) as optimizer:
        actual = run(model, model, optimizer, inner, classify, each[rank])
    return (
        actual[0] == expected[0],
        differences(expected[1], actual[1]),
        differences(expected[2], actual[2]),
    )


@pytest.mark.parametrize("when", ["inner", "wrapper"])
def test_step_hooks_run_once_per_step(two_ranks, when):
    assert two_ranks.run(seen_by_step_hooks, when) == [(True, {}, {})] * 2


def global_hooks(rank: int) -> int:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    calls: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    model = Rows()
    try:
        with wrap(sgd(model.parameters()), model) as optimizer:
            train(model, optimizer, batches(rank, 5, Case().batch))
    finally:
        handle.remove()
    return len(calls)


def test_global_step_hooks_run_once_per_step(two_ranks):
    assert two_ranks.run(global_hooks) == [5, 5]


def raised_in_hook(rank: int, when: str) -> Any:
    """An exception inside ``step()`` reaches the user; training can go on after it."""
    case = Case(optimizer=adam, steps=6)
    model, data = case.make(), numbered(case, rank)
    with wrap(adam(model.parameters()), model) as optimizer:
        train(model, optimizer, data[:2])
        optimizer.zero_grad()

        def failing() -> Any:
            raise ZeroDivisionError

        try:
            if when == "closure":
                optimizer.step(failing)
            else:
                classify(model, data[2]).backward()
                handle = optimizer.register_step_pre_hook(lambda *_: failing())
                optimizer.step()
        except ZeroDivisionError:
            caught = True
        if when == "hook":
            handle.remove()
        optimizer.zero_grad()
        train(model, optimizer, data[3:])
        found = outcome(model, optimizer)
    each = [numbered(case, other) for other in range(2)]
    plain = case.make()
    inner = adam(plain.parameters())
    joined = list(zip(*each, strict=True))
    plain_loop(
        plain, inner, joined[:2] + joined[3:],
        lambda m, pair: sum(classify(m, batch) for batch in pair) / 2,
    )  # fmt: skip
    return caught, differences(outcome(plain, inner), found)


@pytest.mark.parametrize("when", ["closure", "hook"])
def test_an_exception_inside_step_reaches_the_user(two_ranks, when):
    assert two_ranks.run(raised_in_hook, when) == [(True, {})] * 2


def moved_by_the_user(rank: int) -> Any:
    """The wrapper is an Optimizer with the inner one's attributes."""
    model = Rows()
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    with wrap(inner, model) as optimizer:
        train(model, optimizer, batches(rank, 3, Case().batch))
        return (
            isinstance(optimizer, torch.optim.Optimizer),
            optimizer.defaults["lr"] == inner.defaults["lr"],
            optimizer.param_groups is inner.param_groups,
            "AdamW" in repr(optimizer),
            len(optimizer.state),
        )


def test_the_wrapper_is_an_optimizer(two_ranks):
    assert two_ranks.run(moved_by_the_user) == [(True, True, True, True, 6)] * 2
