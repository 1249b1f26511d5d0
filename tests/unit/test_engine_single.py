"""The engine on one rank: every kind of model against plain PyTorch, in this process."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import ranks
import small_models
import torch
import zoo
from torch import nn

import zerobench
from zerobench.errors import ConfigError, StateError

RANK = ranks.Rank(0, 1, "alone")
NAMES = [name for name, case in zoo.CASES.items() if name != "fp16"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_trains_what_plain_pytorch_trains(name):
    case = zoo.CASES[name]
    results = [zoo.train_engine(case, RANK, stage=stage) for stage in (0, 3)]
    assert results[0]["digest"] == results[1]["digest"] and results[0]["norms"] == results[1]["norms"]
    expected = zoo.train_plainly(case, world_size=1)
    low = case.config.get("precision") == "bf16"
    origin = {key: p.detach() for key, p in zoo.make(case).named_parameters()}
    assert zoo.relative(results[0]["exp_avg"], expected["exp_avg"]) <= (0.03 if low else 2e-4)
    assert zoo.relative(results[0]["parameters"], expected["parameters"], origin) <= (0.15 if low else 5e-3)
    assert results[0]["losses"] == pytest.approx(expected["losses"][0], rel=0.1 if low else 2e-3, abs=1e-5)


def test_an_engine_looks_like_its_model():
    model = small_models.Chain(2)
    engine = zerobench.initialize(model, config={"world_size": 1})
    assert engine.module is model and engine.blocks is model.blocks
    assert engine.train() is engine and model.training
    assert engine.eval() is engine and not model.training
    assert engine.get_global_grad_norm() is None and engine.global_steps == 0 and engine.loss_scale == 1.0
    assert engine.dtypes()["master"] == "float32"
    with pytest.raises(AttributeError):
        _ = engine.no_such_thing
    assert engine.communication_bytes() == 0
    engine.close()
    engine.close()
    with pytest.raises(StateError, match="closed"):
        engine.units()


@pytest.mark.parametrize("lose", [torch.Tensor.detach, lambda loss: torch.tensor(1.0)])
def test_backward_of_a_loss_without_gradients_is_refused_and_keeps_the_window(lose):
    engine = zerobench.initialize(
        small_models.Bare(), config={"world_size": 1, "gradient_accumulation_steps": 2}
    )
    engine.backward(engine(**zoo.points(0, 0)))
    loss = engine(**zoo.points(0, 1))
    with pytest.raises(StateError, match=r"gradients flow through.*outside torch\.no_grad"):
        engine.backward(lose(loss))
    engine.backward(loss)
    engine.step()
    assert engine.global_steps == 1
    engine.close()


def test_arguments_of_deepspeed_are_refused_with_what_to_do_instead():
    model = small_models.Bare()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="initialize takes no optimizer: the engine has its own AdamW"):
        zerobench.initialize(model, optimizer=optimizer, config={"world_size": 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'modle'"):
        zerobench.initialize(model, modle=model)
    zerobench.initialize(model, config={"world_size": 1}, lr_scheduler=None).close()


def test_low_precision_parameters_and_inputs():
    model = small_models.Bare()
    engine = zerobench.initialize(model, config={"world_size": 1, "precision": "bf16"})
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    seen = []
    model.first.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    engine(**zoo.points(0, 0))
    assert seen == [torch.bfloat16]
    assert all(p.dtype == torch.float32 for p in engine.full_parameters().values())
    engine.close()


@dataclasses.dataclass(frozen=True)
class Given:
    x: torch.Tensor
    label: str


Pair = collections.namedtuple("Pair", "x y")


def test_inputs_are_cast_where_they_are_and_other_containers_stay():
    x, ids = torch.ones(2, 3), torch.arange(2)
    low = torch.ones(2, dtype=torch.bfloat16)
    out, facts, same = [], {"ids": ids, "n": 1}, [low, (ids, None)]
    encoding = collections.UserDict(x=x, ids=ids)
    given = Given(x, "a")
    containers = [
        {"x": x, "out": out},
        [x, out],
        (x, ids),
        Pair(x, ids),
        collections.deque([x]),
        encoding,
        given,
    ]
    seen = []

    class Taking(small_models.Bare):
        def forward(self, *args, **kwargs):
            kwargs["out"].append(1)
            seen.append((args, kwargs))
            return self.first.weight.sum()

    engine = zerobench.initialize(Taking(), config={"world_size": 1, "precision": "bf16"})
    engine(*containers, out=out, facts=facts, same=same, label="b", kept=torch.Size([2]))
    engine.close()
    (mapping, listed, pair, named, queue, encoded, held), kwargs = seen[0]
    for tensor in (mapping["x"], listed[0], pair[0], named.x, queue[0], encoded["x"], held.x):
        assert tensor.dtype == torch.bfloat16
    assert [type(each) for each in seen[0][0]] == [type(each) for each in containers]
    assert x.dtype == encoding["x"].dtype == given.x.dtype == containers[0]["x"].dtype == torch.float32
    assert pair[1] is ids and encoded["ids"] is ids and held.label == "a"
    assert out == [1] and mapping["out"] is listed[1] is kwargs["out"] is out
    assert kwargs["facts"] is facts and kwargs["same"] is same


def test_a_late_change_in_place_is_seen_at_the_next_hundredth_step():
    model = small_models.Bare()
    engine = zerobench.initialize(model, config={"world_size": 1})
    with pytest.raises(StateError, match=r"'second\.bias' was changed in place"):
        for step in range(200):
            engine.backward(engine(**zoo.points(0, 0)))
            engine.step()
            if step == 5:
                with torch.no_grad():
                    model.second.bias.add_(1.0)
    assert engine.global_steps == 100
    engine.close()


def test_integer_parameters_stay_as_they_are():
    model = small_models.Bare()
    model.table = torch.nn.Parameter(torch.arange(5), requires_grad=False)
    engine = zerobench.initialize(model, config={"world_size": 1, "precision": "bf16"})
    assert torch.equal(model.table, torch.arange(5))
    assert "table" in engine.state_dict() and "table" not in engine.full_parameters()
    engine.close()


def test_complex_parameters_are_refused():
    model = small_models.Bare()
    model.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"'phase' is complex64.*view_as_real"):
        zerobench.initialize(model, config={"world_size": 1})
    model.phase.requires_grad_(False)
    zerobench.initialize(model, config={"world_size": 1}).close()


@pytest.mark.parametrize(
    ("model", "what"), [(None, "NoneType"), (small_models.Bare, "the class Bare"), ("gpt2", "str")]
)
def test_what_is_no_model_is_refused(model, what):
    with pytest.raises(ConfigError, match=rf"model must be a torch\.nn\.Module, not {what}; "):
        zerobench.initialize(model)


def test_what_spreads_training_itself_is_refused(own_process_group):
    """Gradients that DistributedDataParallel averages, too, end as others."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for wrap in (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel):
        for model in (wrap(small_models.Bare()), torch.nn.Sequential(wrap(small_models.Bare()))):
            with pytest.raises(
                ConfigError, match=rf"a {wrap.__name__} distributes training.*\(its \.module\)"
            ):
                zerobench.initialize(model, config={"world_size": 1})
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    model = torch.distributed.fsdp.fully_shard(small_models.Bare(), mesh=mesh)
    with pytest.raises(ConfigError, match=r"is a DTensor.*before fully_shard"):
        zerobench.initialize(model, config={"world_size": 1})


@pytest.mark.parametrize("stage", [0, 3])
def test_tensors_that_lie_in_one_memory_are_refused(stage):
    """Plain PyTorch trains both of them at once; what only lies between others' values is trained as usual."""
    config = {"world_size": 1, "stage": stage}

    def by_data(model):
        model.second.weight.data = model.first.weight.data[:3]

    def by_rows(model):
        model.first.bias.data = model.first.weight.data.view(-1)[1:10]

    def by_buffer(model):
        model.register_buffer("table", model.first.weight.detach().t())

    def by_frozen(model):
        model.first.requires_grad_(False)
        by_data(model)

    names = {
        by_data: ("second.weight", "first.weight"),
        by_rows: ("first.weight", "first.bias"),
        by_buffer: ("first.weight", "table"),
        by_frozen: ("first.weight", "second.weight"),
    }
    for share, (one, other) in names.items():
        model = small_models.Bare()
        model.first.weight = nn.Parameter(torch.randn(9, 9))
        share(model)
        with pytest.raises(
            ConfigError, match=rf"'({one}' and '{other}|{other}' and '{one})' are two tensors in"
        ):
            zerobench.initialize(model, config=config)
    model = small_models.Bare()
    both = torch.randn(9, 6)
    model.first.weight.data, model.first.bias.data = both[:, :5], both[:, 5]
    model.second.weight.requires_grad_(False)
    model.register_buffer("table", model.second.weight.data)  # neither is trained
    zerobench.initialize(model, config=config).close()


def test_what_is_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        model = small_models.Bare()
    with pytest.raises(ConfigError, match=r"'first\.weight' was made in torch\.inference_mode\(\)"):
        zerobench.initialize(model, config={"world_size": 1})
    model = small_models.Bare()
    with torch.inference_mode(), pytest.raises(ConfigError, match="call it outside"):
        zerobench.initialize(model, config={"world_size": 1})


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # Deprecation or, since 2.14, FutureWarning; still in use
def test_scripted_modules_are_refused():
    for name in ("outlet", "blocks.1"):
        model = small_models.Chain(2)
        model.set_submodule(name, torch.jit.script(model.get_submodule(name)))
        with pytest.raises(ConfigError, match=rf"module '{name}' is scripted.*torch\.compile"):
            zerobench.initialize(model, config={"world_size": 1})


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_model_passes_on_belongs_to_no_step(stage):
    """A discriminator that returns what it was given, whose graph is the generator's."""
    model = nn.Sequential(small_models.Block(5), small_models.Block(5))
    model.register_forward_hook(lambda _, args, output: (output.mean(), *args))
    engine = zerobench.initialize(model, config={"world_size": 1, "stage": stage})
    made = nn.Linear(5, 5)(torch.ones(2, 5))
    assert engine(made)[1] is made
    engine.backward(engine(made.detach())[0])
    engine.step()
    made.sum().backward()
    engine.close()


def test_parts_that_are_wrapped_later_keep_their_parameters_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    engine = zerobench.initialize(model, config={"world_size": 1, "stage": 3})
    model[0] = torch.compile(model[0], backend="eager")
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    with engine.gather(model[0]):
        state = engine.full_parameters()
        assert torch.equal(model[0].weight, state["0.weight"])
    engine.load_full_state(**engine.full_state())
    engine.close()


def test_what_needs_a_module_is_told_that_an_engine_is_none():
    engine = zerobench.initialize(small_models.Bare(), config={"world_size": 1})
    with pytest.raises(AttributeError, match=r"no attribute '_modules'.*engine\.module"):
        list(torch.nn.Module.named_modules(engine))
    engine.close()


def test_what_materialises_is_a_function():
    with pytest.raises(ConfigError, match="materialise must be a function, not str"):
        zerobench.initialize(small_models.Bare(), config={"world_size": 1}, materialise="meta")


def test_cpus_that_the_process_may_not_use_are_refused():
    with pytest.raises(ConfigError, match="cpus names CPU 100000"):
        zerobench.initialize(small_models.Bare(), config={"world_size": 1, "cpus": [100000], "threads": 1})


def test_a_threaded_update_equals_a_single_one():
    digests = set()
    for threads in (1, 2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))
        engine = zerobench.initialize(
            model, config={"world_size": 1, "threads": threads, "pin_threads": False}
        )
        for step in range(3):
            torch.manual_seed(step)
            engine.backward(engine(torch.randn(4, 300)).square().mean())
            engine.step()
        digests.add(zoo.state_of(engine)["digest"])
        engine.close()
    assert len(digests) == 1


def test_a_model_without_memory_is_built_unit_by_unit() -> None:
    from zerobench import models
    from zerobench.models.materialise import materialise

    config = models.resolve("tiny", {})
    whole = zerobench.initialize(models.build(config, seed=3))
    model = models.build(config, seed=3, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    held: list[int] = []

    def counted(model: nn.Module, names: list[str], *, device: str) -> None:
        materialise(model, names, device=device)
        held.append(sum(p.numel() for p in model.parameters() if not p.is_meta and p.data_ptr()))

    engine = zerobench.initialize(model, materialise=counted)
    expected, found = whole.full_parameters(), engine.full_parameters()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(held) == len(engine.units())
    for each in (whole, engine):
        ids = torch.arange(32).view(2, 16)
        each.backward(each(input_ids=ids, labels=ids).loss)
        each.step()
    expected, found = whole.full_parameters(), engine.full_parameters()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    whole.close()
    engine.close()


def test_a_model_without_memory_needs_a_function_that_gives_it_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="materialise="):
        zerobench.initialize(model, config={"device": "cpu"})


def test_buffers_without_memory_need_values_too() -> None:
    def parameters_alone(model: nn.Module, names: list[str], *, device: str) -> None:
        for name in names:
            module = model.get_submodule(name.rpartition(".")[0])
            setattr(module, name.rpartition(".")[2], nn.Parameter(torch.ones(3, device=device)))

    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(ConfigError, match=r"buffer '0\.running_mean' is on the meta device"):
        zerobench.initialize(model, config={"device": "cpu"}, materialise=parameters_alone)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (lambda: nn.Parameter(torch.ones(3, 4)), r"shape \(3, 4\), torch.float32"),
        (lambda: nn.Parameter(torch.ones(300_000)), r"shape \(300000,\)"),  # more than there is room for
        (lambda: nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False), "torch.int8"),
        (lambda: nn.Parameter(torch.ones(3, 3, device="meta")), "on meta"),
        (lambda: None, "left none"),
    ],
)
def test_values_that_do_not_fit_are_refused(left, said) -> None:
    from zerobench.models.materialise import materialise

    def wrong(model: nn.Module, names: list[str], *, device: str) -> None:
        materialise(model, names, device=device)
        model[0].weight = left()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(
        ConfigError, match=rf"values to '0\.weight', of shape \(3, 3\).*{said}.*name and shape"
    ):
        zerobench.initialize(model, config={"device": "cpu"}, materialise=wrong)


def test_values_that_were_swapped_in_must_fit_too() -> None:
    def swapped(model: nn.Module, names: list[str], *, device: str) -> None:
        for parameter in model[0].weight, model[0].bias:
            torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(300_000)))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"'0\.weight', of shape \(3, 3\).*left one of shape \(300000,\)"):
        zerobench.initialize(model, config={"device": "cpu"}, materialise=swapped)


@pytest.mark.parametrize("stage", [0, 3])
def test_any_buffer_that_torch_takes_will_do(stage: int) -> None:
    model = small_models.Bare()
    model.register_buffer("learned", torch.full((2,), 3.0, requires_grad=True))
    with torch.inference_mode():
        model.register_buffer("made", torch.full((2,), 4.0))
    engine = zerobench.initialize(model, config={"world_size": 1, "stage": stage})
    engine.load_full_state(**engine.full_state())
    assert model.learned.tolist() == [3.0] * 2 and model.learned.requires_grad
    assert model.made.tolist() == [4.0] * 2
    engine.close()


def test_in_low_precision_statistics_of_norms_alone_change_their_dtype() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    frequencies = torch.rand(3)
    model.register_buffer("frequencies", frequencies.clone())
    zerobench.initialize(model, config={"device": "cpu", "precision": "bf16"}).close()
    assert torch.equal(model.frequencies, frequencies)
    dtypes = {name: buffer.dtype for name, buffer in model[1].named_buffers()}
    assert dtypes == {
        "running_mean": torch.bfloat16,
        "running_var": torch.bfloat16,
        "num_batches_tracked": torch.int64,
    }
