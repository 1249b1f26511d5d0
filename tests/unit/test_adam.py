"""Every form of Adam against the scalar form, bit for bit, and against torch.optim.AdamW within derived bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobench import _native

core = _native.load()
OTHER_ISAS = [isa for isa in core.available_isas() if isa != "scalar"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNIT_ROUNDOFF = 2.0**-24

any_float = st.one_of(
    st.floats(width=32),  # every kind, NaN and infinities too
    st.floats(width=32, min_value=-(2.0**-126), max_value=2.0**-126),  # denormals
    st.sampled_from([0.0, -0.0, 3.4e38, -3.4e38, 1e19, 2.0**-149, 2.0**-75, math.inf, -math.inf, math.nan]),
)
small_float = st.floats(width=32, min_value=-8.0, max_value=8.0)
beta = st.floats(min_value=0.0, max_value=0.9999)


def hyperparameters(**changes: float | bool):
    values = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "decoupled": True}
    return core.AdamHyperparameters(**{**values, **changes})


def unaligned(values: list[float], dtype: torch.dtype, shift: int) -> torch.Tensor:
    """A tensor that begins ``shift`` elements past where torch aligns."""
    return torch.tensor([0.0] * shift + values, dtype=torch.float32).to(dtype)[shift:]


class State:
    """The tensors of one step, at addresses of its own."""

    def __init__(self, columns, gradient_dtype: torch.dtype, low_dtype: torch.dtype | None, shifts) -> None:
        master, exp_avg, exp_avg_sq, gradient = columns
        self.master = unaligned(master, torch.float32, shifts[0])
        self.exp_avg = unaligned(exp_avg, torch.float32, shifts[1])
        self.exp_avg_sq = unaligned(exp_avg_sq, torch.float32, shifts[2])
        self.gradient = unaligned(gradient, gradient_dtype, shifts[3])
        self.low = None if low_dtype is None else unaligned([0.0] * len(master), low_dtype, shifts[4])

    def runner(self, hyper):
        return core.AdamRunner(
            master=self.master, exp_avg=self.exp_avg, exp_avg_sq=self.exp_avg_sq, gradient=self.gradient,
            low_precision=self.low, hyperparameters=hyper,
        )  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {
            "master": self.master,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "gradient": self.gradient,
        }
        return found if self.low is None else {**found, "low": self.low}


def assert_same_bits(actual: State, expected: State) -> None:
    for name, wanted in expected.tensors().items():
        got = actual.tensors()[name]
        words = torch.int32 if wanted.dtype == torch.float32 else torch.int16
        same = (got.view(words) == wanted.view(words)) | (got.isnan() & wanted.isnan())
        index = int((~same).nonzero()[0]) if not same.all() else -1
        assert index == -1, f"{name}[{index}] is {got[index].item()!r}, should be {wanted[index].item()!r}"


# Lengths up to several AVX-512 registers and strips; four columns of that length.
columns = st.integers(min_value=0, max_value=200).flatmap(
    lambda numel: st.tuples(
        *(
            st.lists(any_float, min_size=min(numel, 7), max_size=min(numel, 7)).map(
                lambda base, numel=numel, stride=stride: [
                    base[(i * stride + i // 7) % len(base)] for i in range(numel)
                ]
            )
            for stride in (1, 2, 3, 4)
        )
    )
)


@pytest.mark.parametrize("isa", OTHER_ISAS)
@settings(max_examples=300, deadline=None)
@given(
    columns=columns,
    gradient_dtype=st.sampled_from(DTYPES),
    low_dtype=st.sampled_from((None, *DTYPES)),
    shifts=st.tuples(*(st.integers(0, 17) for _ in range(5))),
    step=st.integers(1, 10_000),
    grad_factor=st.sampled_from([1.0, 0.5, 1 / 3, 2.0**-16, 0.0]),
    hyper=st.builds(
        hyperparameters,
        lr=st.floats(0.0, 1.0),
        beta1=beta,
        beta2=beta,
        eps=st.sampled_from([0.0, 1e-8, 1e-45, 1.0]),
        weight_decay=st.sampled_from([0.0, 0.01, 1.0]),
        decoupled=st.booleans(),
    ),
)
def test_every_form_equals_the_scalar_form(
    isa, columns, gradient_dtype, low_dtype, shifts, step, grad_factor, hyper
) -> None:
    expected = State(columns, gradient_dtype, low_dtype, (0, 0, 0, 0, 0))
    actual = State(columns, gradient_dtype, low_dtype, shifts)
    expected.runner(hyper).step_as("scalar", step=step, grad_factor=grad_factor)
    actual.runner(hyper).step_as(isa, step=step, grad_factor=grad_factor)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("isa", OTHER_ISAS)
@pytest.mark.parametrize("low_dtype", [None, torch.bfloat16], ids=str)
def test_every_tail_length_equals_the_scalar_form(isa, low_dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hyper = hyperparameters()
    for numel in [*range(131), 32768 + 77]:
        columns = [torch.randn(numel, generator=generator).tolist() for _ in range(4)]
        columns[2] = [abs(value) for value in columns[2]]
        expected = State(columns, torch.bfloat16, low_dtype, (0, 0, 0, 0, 0))
        actual = State(columns, torch.bfloat16, low_dtype, (1, 2, 3, 5, 7))
        expected.runner(hyper).step_as("scalar", step=3)
        actual.runner(hyper).step_as(isa, step=3)
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("thread_num", [1, 2, 3])
def test_the_split_over_threads_changes_nothing(thread_num) -> None:
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(20_001, generator=generator).tolist() for _ in range(4)]
    expected = State(columns, torch.float32, torch.bfloat16, (0, 0, 0, 0, 0))
    actual = State(columns, torch.float32, torch.bfloat16, (0, 0, 0, 0, 0))
    hyper, pool = hyperparameters(), core.ThreadPool(thread_num)
    for step in (1, 2):
        expected.runner(hyper).step_as("scalar", step=step, grad_factor=0.25)
        actual.runner(hyper).step(pool, step=step, grad_factor=0.25)
    assert_same_bits(actual, expected)


def assert_within_torch_bounds(
    before: State, ours: State, theirs: dict[str, torch.Tensor], hyper: dict, step: int
):
    """The bounds of docs/decisions/0001-one-sequence-for-adam.md, around what torch gives."""
    u = UNIT_ROUNDOFF
    g, m_before = before.gradient.double(), before.exp_avg.double()
    m, v, p = (tensor.double() for tensor in (ours.exp_avg, ours.exp_avg_sq, ours.master))
    step_size = hyper["lr"] / (1 - hyper["beta1"] ** step)
    d = (v / (1 - hyper["beta2"] ** step)).sqrt() + hyper["eps"]
    tiny = 2.0**-148  # below the normal range roundings are absolute
    scale = m_before.abs() + g.abs()
    assert ((theirs["exp_avg"] - m).abs() <= 4 * u * scale + tiny).all()
    assert ((theirs["exp_avg_sq"] - v).abs() <= 4 * u * v + tiny).all()
    assert ((theirs["parameter"] - p).abs() <= 8 * u * (p.abs() + step_size * scale / d) + tiny).all()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    numel=st.integers(1, 100),
    gradient_exponent=st.integers(-12, 6),
    steps=st.integers(1, 5),
    values=st.lists(small_float, max_size=8),
    fused=st.booleans(),
    hyper=st.fixed_dictionaries(
        {
            "lr": st.sampled_from([1e-4, 1e-3, 0.1]),
            "beta1": st.sampled_from([0.0, 0.5, 0.9]),
            "beta2": st.sampled_from([0.9, 0.95, 0.999]),
            "eps": st.sampled_from([1e-8, 1e-5]),
            "weight_decay": st.sampled_from([0.0, 0.01, 0.1]),
        }
    ),
)
def test_a_step_stays_within_the_bounds_of_torch(
    seed, numel, gradient_exponent, steps, values, fused, hyper
) -> None:
    """Each step starts from our state, so that bounds of one step apply."""
    generator = torch.Generator().manual_seed(seed)
    numel = max(numel, len(values))
    master = torch.randn(numel, generator=generator)
    master[: len(values)] = torch.tensor(values)
    ours = State(
        [master.tolist(), [0.0] * numel, [0.0] * numel, [0.0] * numel], torch.float32, None, (0,) * 5
    )
    runner = ours.runner(hyperparameters(**hyper))
    for step in range(1, steps + 1):
        ours.gradient.copy_(torch.randn(numel, generator=generator) * 2.0**gradient_exponent)
        before = State([tensor.tolist() for tensor in ours.tensors().values()], torch.float32, None, (0,) * 5)
        theirs = torch_step(before, hyper, step, fused=fused)
        runner.step_as(core.best_isa(), step=step)
        assert_within_torch_bounds(before, ours, theirs, hyper, step)


def torch_step(state: State, hyper: dict, step: int, *, fused: bool) -> dict[str, torch.Tensor]:
    parameter = torch.nn.Parameter(state.master.clone())
    parameter.grad = state.gradient.clone()
    optimizer = torch.optim.AdamW(
        [parameter], lr=hyper["lr"], betas=(hyper["beta1"], hyper["beta2"]), eps=hyper["eps"],
        weight_decay=hyper["weight_decay"], fused=fused, foreach=False,
    )  # fmt: skip
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step - 1)),
        "exp_avg": state.exp_avg.clone(),
        "exp_avg_sq": state.exp_avg_sq.clone(),
    }
    optimizer.step()
    found = optimizer.state[parameter]
    return {
        "parameter": parameter.detach().double(),
        "exp_avg": found["exp_avg"].double(),
        "exp_avg_sq": found["exp_avg_sq"].double(),
    }


def test_what_is_no_flat_shard_is_refused() -> None:
    flat = torch.zeros(4)
    good = {"master": flat, "exp_avg": flat, "exp_avg_sq": flat, "gradient": flat, "low_precision": None}
    wrong = {
        "master": torch.zeros(4, dtype=torch.float64),
        "exp_avg": torch.zeros(5),
        "exp_avg_sq": torch.zeros(8)[::2],
        "gradient": torch.zeros(4, dtype=torch.int32),
        "low_precision": torch.zeros(3, dtype=torch.bfloat16),
    }
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match=r"must be a|must have 4 elements"):
            core.AdamRunner(**{**good, name: tensor}, hyperparameters=hyperparameters())
    runner = core.AdamRunner(**good, hyperparameters=hyperparameters())
    with pytest.raises(ValueError, match="choose one of"):
        runner.step_as("mmx", step=1)
    with pytest.raises(ValueError, match="counts from 1"):
        runner.step_as("scalar", step=0)
    with pytest.raises(ValueError, match="beta1"):
        core.AdamRunner(**good, hyperparameters=hyperparameters(beta1=1.0))


def test_streams_and_memcpy_move_what_they_say() -> None:
    numel, pool = 10_001, core.ThreadPool(2)
    a, b, destination = torch.arange(numel).float(), torch.ones(numel), torch.zeros(numel)
    core.stream_triad(destination, a, b, factor=2.0, pool=pool)
    assert torch.equal(destination, a + 2.0)
    core.memcpy_each([destination], [b])
    assert torch.equal(destination, b)
    core.memcpy_each([destination, b], [b, a], calls=2)  # the second time b holds a
    assert torch.equal(destination, a)
    with pytest.raises(ValueError, match="elements"):
        core.memcpy_each([destination], [torch.zeros(3)])
    columns = [[1.0] * numel] * 4
    for low_dtype, per_element in ((None, 26), (torch.bfloat16, 28)):
        runner = State(columns, torch.bfloat16, low_dtype, (0,) * 5).runner(hyperparameters())
        runner.stream_mix(pool)
        assert runner.bytes_per_step == per_element * numel
