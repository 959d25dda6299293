"""Activation checkpointing in a Trainer: cases 18 to 22, and Hugging Face's models."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import lightning_tricks as lt
from examples.train_language_model import ByteGPT
from tests.distributed_cases import checkpointed_under_ddp
from tests.models import Block, Net, assert_same, fit, loader, seeded, trainer, weights

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 50, (2, 6))
    return {"input_ids": ids, "labels": ids}


def labelled_tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 50, (2, 6)), "labels": torch.tensor([0, 1])}


def two_lengths() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(50, (2, 8)), "labels": torch.randint(50, (2, 5))}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}


HUGGING_FACE = {
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=3, n_head=2)),
        tokens,
        "model.transformer.h.{}",
    ),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(vocab_size=50, **SMALL)), tokens, "model.model.layers.{}"),
    "bert": (
        lambda: BertForSequenceClassification(BertConfig(vocab_size=50, **SMALL)),
        labelled_tokens,
        "model.bert.encoder.layer.{}",
    ),
    "vit": (
        lambda: ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **SMALL)),
        images,
        None,
    ),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, decoder_start_token_id=0)
        ),
        two_lengths,
        None,
    ),
}


class HuggingFace(pl.LightningModule):
    """A transformers model as its users wrap it; keeps the gradients of its first step."""

    def __init__(self, name: str) -> None:
        super().__init__()
        build, self.batch, _ = HUGGING_FACE[name]
        self.model = build()
        self.gradients: dict[str, torch.Tensor] = {}

    def training_step(self, batch, batch_idx):
        torch.manual_seed(5)
        return self.model(**self.batch()).loss

    def on_after_backward(self) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


MODES = {
    "blocks": {},
    "segments": {"mode": "segments", "segment_length": 2},
    "selective": {"mode": "selective"},
    "budget": {"budget": 0.8},
}


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("mode", MODES)
def test_hugging_face_layers_are_found_and_gradients_equal(mode: str, name: str) -> None:
    plain = seeded(lambda: HuggingFace(name))
    model = copy.deepcopy(plain)
    assert plain.model.training
    checkpointing = lt.ActivationCheckpointing("auto", **MODES[mode])
    fit(plain, data=torch.zeros(3, 1))
    run = trainer(checkpointing)
    run.fit(model, torch.zeros(3, 1))
    layers = [
        found
        for found, module in model.named_modules()
        if type(module).__name__ in ("GPT2Block", "LlamaDecoderLayer", "BertLayer", "ViTLayer", "T5Block")
    ]
    assert checkpointing._handle.wrapped == layers
    assert len(layers) == (6 if name == "t5" else 3)
    assert_same(model.gradients, plain.gradients)
    assert_same(weights(model), weights(plain))
    pattern = HUGGING_FACE[name][2]
    assert pattern is None or layers == [pattern.format(index) for index in range(3)]


class ResidualBlock(nn.Module):
    """As in a ResNet: two convolutions with BatchNorm, and ReLUs that write in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu_(self.body(x) + x)


class ResNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*stem, *(ResidualBlock(8) for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, 10)
        self.gradients: dict[str, torch.Tensor] = {}

    def training_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)
        return nn.functional.cross_entropy(self.head(self.layers(torch.randn(4, 3, 8, 8))), torch.arange(4))

    def on_after_backward(self) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.named_parameters()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ExampleGPT(ByteGPT):
    def __init__(self) -> None:
        super().__init__(width=32)
        self.gradients: dict[str, torch.Tensor] = {}

    def training_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)
        return self.loss(torch.randint(256, (2, 33)))

    def on_after_backward(self) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.named_parameters()}


@pytest.mark.parametrize("make", [ResNet, ExampleGPT])
@pytest.mark.parametrize("mode", MODES)
def test_a_resnet_and_the_gpt_of_the_example_equal_bit_for_bit(mode: str, make) -> None:
    plain = seeded(make)
    module = copy.deepcopy(plain)
    checkpointing = lt.ActivationCheckpointing("auto", **MODES[mode])
    fit(plain, data=torch.zeros(3, 1))
    fit(module, checkpointing, data=torch.zeros(3, 1))
    assert len(checkpointing._handle.wrapped) == (4 if make is ResNet else 3)
    assert_same(module.gradients, plain.gradients)
    assert_same(weights(module), weights(plain))


def test_blocks_are_recomputed_in_training_only() -> None:
    module = seeded(Net)
    calls = []
    module.net[0].linear.register_forward_hook(lambda *args: calls.append(torch.is_grad_enabled()))
    fit(module, lt.ActivationCheckpointing(), limit_train_batches=1)
    assert len(calls) == 2
    calls.clear()
    trainer(lt.ActivationCheckpointing()).validate(module, loader(), verbose=False)
    assert len(calls) == 7


def test_case_18_batchnorm_counts_a_step_once() -> None:
    plain, module = (seeded(lambda: Net(batchnorm=True)) for _ in range(2))
    fit(plain, limit_train_batches=1)
    fit(module, lt.ActivationCheckpointing(), limit_train_batches=1)
    assert module.net[0].norm.num_batches_tracked == 1
    assert_same(weights(module), weights(plain))


def test_case_19_a_pattern_that_matches_nothing_lists_the_types() -> None:
    with pytest.raises(ValueError, match=r"'encoder\.\*' in Net.*Sequential \(1\), Block \(3\), Linear \(4\)"):
        fit(Net(), lt.ActivationCheckpointing("encoder.*"))


class FrozenFront(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


def test_case_20_frozen_blocks_in_front() -> None:
    plain, module = (seeded(FrozenFront) for _ in range(2))
    fit(plain)
    fit(module, lt.ActivationCheckpointing())
    assert_same(weights(module), weights(plain))
    assert any(
        (first != second).any() for first, second in zip(FrozenFront().parameters(), module.parameters(), strict=True)
    )


def test_case_21_a_checkpoint_loads_into_the_plain_module(tmp_path) -> None:
    module = seeded(Net)
    keys = []
    module.on_train_batch_end = lambda *args: keys.append(list(module.state_dict()))
    run = fit(module, lt.ActivationCheckpointing())
    assert keys[0] == list(Net().state_dict())
    run.save_checkpoint(tmp_path / "a.ckpt")
    plain = Net.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert_same(weights(plain), weights(module))


def test_case_22_static_graph_with_accumulation_is_refused() -> None:
    """Lightning 2.6 ends in an internal assert of torch's there (PL#20395)."""
    with pytest.raises(MisconfigurationException, match=r"static_graph=True.*accumulate_grad_batches=2"):
        fit(Net(), lt.ActivationCheckpointing(), strategy=DDPStrategy(static_graph=True), accumulate_grad_batches=2)


def test_case_22_an_accumulation_schedule_counts_too() -> None:
    schedule = GradientAccumulationScheduler({0: 1, 3: 4})
    with pytest.raises(MisconfigurationException, match=r"static_graph=True.*accumulate_grad_batches=4"):
        fit(Net(), lt.ActivationCheckpointing(), schedule, strategy=DDPStrategy(static_graph=True))


def test_a_cache_that_other_layers_filled_is_no_reason_to_refuse() -> None:
    plain, model = (seeded(lambda: HuggingFace("llama")) for _ in range(2))
    fit(plain, data=torch.zeros(1, 1))
    fit(model, lt.ActivationCheckpointing("model.model.layers.1"), data=torch.zeros(1, 1))
    assert_same(model.gradients, plain.gradients)


def test_ddp_in_its_variants(two_processes) -> None:
    for found in two_processes.run(checkpointed_under_ddp):
        for variant, (plain, checkpointed) in found.items():
            assert plain.keys() == checkpointed.keys(), variant
            assert_same(plain, checkpointed)


class BuiltInConfigureModel(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(Block(), Block(), nn.Linear(8, 1))


class BuiltInSetup(BuiltInConfigureModel):
    configure_model = pl.LightningModule.configure_model

    def setup(self, stage: str) -> None:
        super().configure_model()
        BuiltInConfigureModel.configure_model(self)


@pytest.mark.parametrize("build", [BuiltInConfigureModel, BuiltInSetup])
def test_modules_that_are_built_late(build) -> None:
    checkpointing = lt.ActivationCheckpointing()
    module = seeded(build)
    fit(module, checkpointing)
    assert checkpointing._handle.wrapped == ["net.0", "net.1"]
    assert not {"setup", "configure_model"} & vars(module).keys()
    plain = seeded(build)
    fit(plain)
    assert_same(weights(module), weights(plain))


def test_already_checkpointed_blocks_are_reported() -> None:
    from lightning_tricks.functional.checkpointing import apply_activation_checkpointing

    module = Net()
    apply_activation_checkpointing(module, "net.1")
    checkpointing = lt.ActivationCheckpointing()
    run = fit(module, checkpointing)
    assert checkpointing._handle.wrapped == ["net.0", "net.2"]
    assert "left 1 alone" in checkpointing.summary(run).found

    module = Net()
    apply_activation_checkpointing(module)
    with pytest.warns(UserWarning, match="changed nothing: all 3"):
        fit(module, lt.ActivationCheckpointing())


def test_compiled_module_trains_alike() -> None:
    results = []
    for callbacks in ([], [lt.ActivationCheckpointing()]):
        module = seeded(Net)
        fit(torch.compile(module, backend="aot_eager"), *callbacks, limit_train_batches=3)
        results.append(weights(module))
    assert_same(*results, rtol=0, atol=1e-6)


class Deep(Net):
    """Enough blocks and samples that activations are more than the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block(dropout=0.1) for _ in range(8)), nn.Linear(8, 1))


class Fixed(Deep):
    def training_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("budget", [0.75, 0.6])
def test_a_budget_is_kept_and_printed(budget: float, capsys) -> None:
    plain, module = seeded(Fixed), seeded(Fixed)
    fit(plain)
    checkpointing = lt.ActivationCheckpointing(budget=budget)
    fit(module, checkpointing)
    choice = checkpointing.choice
    assert 0 < len(choice.blocks) < 8
    assert choice.measured <= choice.predicted <= choice.budget
    assert choice.measured > 0.5 * choice.budget
    printed = capsys.readouterr().out
    assert f"checkpoints {len(choice.blocks)} of 8 blocks" in printed
    assert f"predicted {choice.predicted} bytes" in printed
    assert f"measured {choice.measured} bytes" in printed
    assert_same(weights(module), weights(plain))
    assert not {"training_step"} & vars(module).keys()


def test_a_budget_of_all_checkpoints_nothing_and_bytes_are_as_good_as_a_share() -> None:
    whole, share, same = (lt.ActivationCheckpointing(budget=budget) for budget in (1.0, 0.6, 1))
    fit(Deep(), whole)
    assert whole.choice.blocks == ()
    fit(Deep(), share)
    same.budget = share.choice.budget
    fit(Deep(), same)
    assert same.choice.predicted <= share.choice.budget == same.choice.budget


def test_a_budget_out_of_reach_is_an_error_with_both_figures() -> None:
    module = seeded(Deep)
    before = weights(module)
    with pytest.raises(ValueError, match=r"at least the \d+ bytes .* got 100 bytes: 100 of \d+ bytes"):
        fit(module, lt.ActivationCheckpointing(budget=100))
    assert_same(weights(module), before)
    assert not any("forward" in vars(part) for part in module.modules())


def test_a_larger_batch_is_measured_again_and_a_smaller_one_is_not() -> None:
    begun = []
    checkpointing = lt.ActivationCheckpointing(budget=0.7)

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            begun.append(len(checkpointing._shapes))

    data = [[torch.randn(size, 8), torch.randn(size, 1)] for size in (4, 2, 4, 8, 8, 6)]
    trainer(checkpointing, Watch(), max_epochs=1).fit(Deep(), DataLoader(data, batch_size=None))
    assert begun == [1, 1, 1, 2, 2, 2]
    assert checkpointing.choice.measured <= checkpointing.choice.budget


def test_a_second_fit_measures_again() -> None:
    checkpointing = lt.ActivationCheckpointing(budget=0.7)
    module = Deep()
    fit(module, checkpointing)
    first = checkpointing.choice
    fit(module, checkpointing)
    assert checkpointing.choice is not first
    assert checkpointing.choice.budget == first.budget


def test_micro_batches_are_measured_one_by_one() -> None:
    whole, cut = lt.ActivationCheckpointing(budget=1.0), lt.ActivationCheckpointing(budget=1.0)
    fit(Deep(), whole)
    fit(Deep(), cut, lt.MicroBatching(2))
    assert cut.choice.predicted < whole.choice.predicted


@pytest.mark.parametrize("options", [{"mode": "segments"}, {"budget": 0.5}])
def test_a_module_compiled_as_a_whole_is_refused(options: dict) -> None:
    with pytest.raises(MisconfigurationException, match="compiled as a whole sees no"):
        fit(torch.compile(Net(), backend="eager"), lt.ActivationCheckpointing(**options))


@pytest.mark.parametrize("mode", MODES)
def test_batchnorm_dropout_and_fp16_in_every_mode(mode: str) -> None:
    plain, module = (seeded(lambda: Net(dropout=0.3, batchnorm=True)) for _ in range(2))
    for one, callbacks in ((plain, []), (module, [lt.ActivationCheckpointing(**MODES[mode])])):
        torch.manual_seed(1)
        fit(one, *callbacks, plugins=[lt.FP16Precision(init_scale=2.0**8)])
    assert_same(weights(module), weights(plain))
    assert module.net[0].norm.num_batches_tracked == plain.net[0].norm.num_batches_tracked
