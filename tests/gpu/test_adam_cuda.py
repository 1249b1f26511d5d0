"""Adam on CUDA devices against the scalar form, bit for bit."""

from __future__ import annotations

import struct

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from device_arrays import DTYPES, SIZES, Array, dtype_of, hard_values

from zerobench import _native
from zerobench.bench.rank.intervals import is_update
from zerobench.bench.rank.meters import device_activities, device_profiler

core, cuda = _native.load(), _native.load_cuda()
FACTOR = struct.unpack("<f", struct.pack("<f", 1 / 3))[0]
NO_LOW = "float32"  # of a copy that is not there


@pytest.fixture(scope="module")
def device():
    return cuda.make_device(0, on_out_of_memory=torch.cuda.empty_cache)


class Run:
    """One run on the device, and the same on the CPU for the scalar form."""

    def __init__(
        self, numel: int, gradient_dtype: str, low_dtype: str | None, *, seed: int, shifts=(0, 0, 0, 0, 0)
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        columns = {
            "master": hard_values(numel, "float32", generator),
            "exp_avg": hard_values(numel, "float32", generator),
            "exp_avg_sq": hard_values(numel, "float32", generator),
            "gradient": hard_values(numel, gradient_dtype, generator),
        }
        columns["exp_avg_sq"][: numel * 9 // 10].abs_()  # some stay negative: their root is NaN
        if low_dtype is not None:
            columns["low_precision"] = torch.ones(numel, dtype=dtype_of(low_dtype))
        self.host = columns
        self.arrays = {
            name: Array(values, shift) for (name, values), shift in zip(columns.items(), shifts, strict=False)
        }
        self.decoupled = seed % 2 == 0
        self.weight_decay = (0.0, 0.01, 0.3)[seed % 3]
        self.eps = (1e-8, 0.0, 1e-45)[seed % 5 % 3]
        self.step = 1 + seed % 7

    def hyperparameters(self) -> dict[str, float | bool]:
        return {
            "lr": 1e-3,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "decoupled": self.decoupled,
        }

    def masters(self) -> dict[str, int | None]:
        return {"master": self.arrays["master"].address}

    def on_device(self):
        low = self.arrays.get("low_precision")
        return cuda.AdamRun(
            **self.masters(),
            exp_avg=self.arrays["exp_avg"].address,
            exp_avg_sq=self.arrays["exp_avg_sq"].address,
            gradient=self.arrays["gradient"].address,
            gradient_dtype=self.arrays["gradient"].dtype,
            low_precision=None if low is None else low.address,
            low_precision_dtype=NO_LOW if low is None else low.dtype,
            numel=self.arrays["exp_avg"].numel,
            step=self.step,
            **self.hyperparameters(),
        )

    def step_on_host(self) -> None:
        runner = core.AdamRunner(
            **{"low_precision": None, **self.host},
            hyperparameters=core.AdamHyperparameters(**self.hyperparameters()),
        )
        runner.step_as("scalar", step=self.step, grad_factor=FACTOR)

    def assert_equal(self, what: str) -> None:
        for name, wanted in self.host.items():
            self.arrays[name].assert_holds(wanted, f"{name} of {what}")


class RemainderRun(Run):
    """The same beside bf16 parameters with remainders for masters, which the columns of the host have whole."""

    def __init__(
        self, device, numel: int, gradient_dtype: str, *, seed: int, shifts=(0, 0, 0, 0, 0, 0), masters=None
    ) -> None:
        super().__init__(numel, gradient_dtype, "bfloat16", seed=seed, shifts=shifts)
        self._device = device
        if masters is not None:
            self.host["master"] = masters
        self.host["exp_avg_sq"].abs_()
        self.host["low_precision"] = self.host["master"].bfloat16()
        self.arrays["exp_avg_sq"] = Array(self.host["exp_avg_sq"], shifts[2])
        self.arrays["low_precision"] = Array(self.host["low_precision"], shifts[4])
        self.remainder = Array(torch.zeros(numel, dtype=torch.bfloat16), shifts[5])
        source = Array(self.host["master"])
        device.write_masters("compute", self.on_device(), source=source.address)
        device.synchronize()

    def masters(self) -> dict[str, int | None]:
        return {"master": None, "remainder": self.remainder.address}

    def assert_equal(self, what: str) -> None:
        numel = self.remainder.numel
        masters, squares = (Array(torch.zeros(numel)) for _ in range(2))
        self._device.read_masters("compute", self.on_device(), destination=masters.address)
        self._device.copy_magnitudes(
            "compute", squares.address, self.arrays["exp_avg_sq"].address, signs=None, numel=numel
        )
        self._device.synchronize()
        masters.assert_holds(self.host["master"], f"master of {what}")
        squares.assert_holds(self.host["exp_avg_sq"], f"exp_avg_sq of {what}")
        for name in ("exp_avg", "gradient", "low_precision"):
            self.arrays[name].assert_holds(self.host[name], f"{name} of {what}")
        for array in (self.arrays["exp_avg_sq"], self.remainder):
            array.assert_guarded()


def update(device, runs: list[Run], *, is_skipped: bool = False, lane: str = "compute") -> None:
    scalars = device.allocate(16, what="the scalars of a test")
    device.upload(scalars.address, struct.pack("<dfI", 1.0, FACTOR, int(is_skipped)))
    device.adam(lane, [run.on_device() for run in runs], scalars=scalars.address)
    device.synchronize()


def expect_a_step(device, runs: list[Run], *, lane: str = "compute") -> None:
    update(device, runs, lane=lane)
    for index, run in enumerate(runs):
        run.step_on_host()
        run.assert_equal(f"run {index} of {run.arrays['exp_avg'].numel} elements")


@pytest.mark.parametrize("low_dtype", [None, *DTYPES])
@pytest.mark.parametrize("gradient_dtype", DTYPES)
def test_every_length_equals_the_scalar_form(device, gradient_dtype: str, low_dtype: str | None) -> None:
    lengths = [*range(40), *SIZES]
    runs = [
        Run(numel, gradient_dtype, low_dtype, seed=index, shifts=(index % 5,) * 5)
        for index, numel in enumerate(lengths)
    ]
    expect_a_step(device, runs)


@pytest.mark.parametrize(
    "shifts", [(0, 1, 2, 3, 4), (4, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 0, 0, 2, 0)], ids=str
)
def test_arrays_that_cannot_be_aligned_together(device, shifts) -> None:
    for gradient_dtype in DTYPES:
        for numel in (1, 5, 129, 4097):
            run = Run(numel, gradient_dtype, "bfloat16", seed=numel, shifts=shifts)
            expect_a_step(device, [run])


def test_one_call_takes_runs_of_all_dtypes(device) -> None:
    kinds = [(gradient, low) for gradient in DTYPES for low in (None, *DTYPES)]
    runs = [
        Run(1 + 37 * index % 5000, *kinds[index // 3 % len(kinds)], seed=index, shifts=(index % 4,) * 5)
        for index in range(100)
    ]
    expect_a_step(device, runs, lane="reduce")


def test_many_steps_stay_equal(device) -> None:
    run = Run(4099, "bfloat16", "bfloat16", seed=6)
    for step in range(1, 6):
        run.step = step
        update(device, [run])
        run.step_on_host()
    run.assert_equal("5 steps")


@pytest.mark.parametrize("low_dtype", [None, "bfloat16"])
def test_a_skipped_step_leaves_everything_as_it_was(device, low_dtype: str | None) -> None:
    runs = [
        Run(numel, "float16", low_dtype, seed=numel, shifts=(numel % 4,) * 5) for numel in (1, 7, 9, 4097)
    ]
    update(device, runs, is_skipped=True)
    for run in runs:
        run.assert_equal("a skipped step")


def test_nothing_to_update_is_nothing_to_do(device) -> None:
    update(device, [])
    run = Run(0, "float32", None, seed=0)
    update(device, [run, run])
    run.assert_equal("no element")


@pytest.mark.parametrize("gradient_dtype", DTYPES)
def test_remainders_end_as_whole_masters_do(device, gradient_dtype: str) -> None:
    runs = [
        RemainderRun(device, numel, gradient_dtype, seed=index, shifts=(index % 5,) * 6)
        for index, numel in enumerate([*range(40), *SIZES])
    ]
    for _ in range(3):
        update(device, runs)
        for run in runs:
            run.step_on_host()
            run.step += 1
    for run in runs:
        run.assert_equal(f"{run.remainder.numel} elements")


@pytest.mark.parametrize(
    "shifts", [(0, 1, 2, 3, 4, 1), (4, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 2, 0)], ids=str
)
def test_remainders_that_cannot_be_aligned_together(device, shifts) -> None:
    for numel in (1, 5, 129, 4097):
        run = RemainderRun(device, numel, "bfloat16", seed=numel, shifts=shifts)
        expect_a_step(device, [run])


def test_one_call_takes_remainders_and_whole_masters(device) -> None:
    runs = [
        RemainderRun(device, 1 + 91 * index, "bfloat16", seed=index)
        if index % 2
        else Run(1 + 91 * index, "bfloat16", "bfloat16", seed=index)
        for index in range(80)
    ]
    expect_a_step(device, runs, lane="reduce")


def test_a_skipped_step_leaves_remainders_as_they_were(device) -> None:
    runs = [RemainderRun(device, numel, "bfloat16", seed=numel) for numel in (1, 7, 9, 4097)]
    update(device, runs, is_skipped=True)
    for run in runs:
        run.assert_equal("a skipped step")


def test_a_profile_tells_updates_from_other_work(device) -> None:
    run = Run(4099, "bfloat16", "bfloat16", seed=1)
    with device_profiler() as profiler:
        update(device, [run])
        torch.zeros(5, device="cuda").add_(1)
        torch.cuda.synchronize()
    names = [activity.name for activity in device_activities(profiler)]
    assert [is_update(name) for name in names].count(True) == 1 < len(names), names


def test_every_master_comes_back(device) -> None:
    """All upper halves, beside lower ones at which rounding turns."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = upper | lower
        masters = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
        run = RemainderRun(device, masters.numel(), "bfloat16", seed=lower, masters=masters)
        run.assert_equal(f"masters that end in {lower:#06x}")
