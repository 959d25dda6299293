"""What a parameter is, how deep it lies, and splits of groups that lose nothing."""

import pytest
import torch
import transformers
from torch import nn
from torch.optim import lr_scheduler

from lightning_tricks.functional.parameter_groups import (
    depth_scales,
    parameter_categories,
    rescale_rates_,
    split_groups_,
)


class RMSNorm(nn.Module):
    """As written by hand, its weight under another name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))


class Norm2d(nn.Module):
    """Of four dimensions: neither rank nor name would tell."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.mix = nn.Parameter(torch.ones(4, 4))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 4, 2)
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, 4))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))


class ConvEmbedding(nn.Conv2d):
    pass


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.bag = nn.EmbeddingBag(8, 4)
        self.patches = PatchEmbed()
        self.stem = ConvEmbedding(3, 4, 2)
        self.bn = nn.BatchNorm1d(4)
        self.ln = nn.LayerNorm((2, 4))
        self.gn = nn.GroupNorm(2, 4)
        self.inorm = nn.InstanceNorm1d(4, affine=True)
        self.rms = nn.RMSNorm(4)
        self.own = RMSNorm(4)
        self.flat = Norm2d()
        self.pre = PreNorm()
        self.lstm = nn.LSTM(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.prelu = nn.PReLU()
        self.layer_scale = nn.Parameter(torch.ones(4))
        self.experts_bias = nn.Parameter(torch.zeros(2, 4))
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.head = nn.Linear(4, 8)
        self.head.weight = self.words.weight
        self.temperature = nn.Parameter(torch.tensor(1.0))


def test_categories() -> None:
    found = {name: sorted(kinds) for name, kinds in parameter_categories(Everything()).items()}
    norm, norm_bias, embedding, bias, weight = ["norm"], ["bias", "norm"], ["embedding"], ["bias"], []
    assert found == {
        "layer_scale": norm,
        "experts_bias": bias,
        "relative_position_bias_table": bias,
        "temperature": norm,
        "words.weight": embedding,  # and the head's
        "bag.weight": embedding,
        "patches.pos_embed": embedding,
        "patches.cls_token": embedding,
        "patches.proj.weight": weight,
        "patches.proj.bias": bias,
        "stem.weight": weight,
        "stem.bias": bias,
        **{f"{one}.weight": norm for one in ("bn", "ln", "gn", "inorm", "rms")},
        **{f"{one}.bias": norm_bias for one in ("bn", "ln", "gn", "inorm")},
        "own.scale": norm,
        "flat.scale": norm,
        "pre.mix": weight,
        "pre.inner.weight": weight,
        "pre.inner.bias": bias,
        "lstm.weight_ih_l0": weight,
        "lstm.weight_hh_l0": weight,
        "lstm.bias_ih_l0": bias,
        "lstm.bias_hh_l0": bias,
        "attention.in_proj_weight": weight,
        "attention.in_proj_bias": bias,
        "attention.out_proj.weight": weight,
        "attention.out_proj.bias": bias,
        "prelu.weight": norm,
        "head.bias": bias,
    }


CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8),
    "llama": lambda: transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=8, intermediate_size=8, num_attention_heads=2, vocab_size=16
    ),
    "bert": lambda: transformers.BertConfig(
        num_hidden_layers=2, hidden_size=8, intermediate_size=8, num_attention_heads=2, vocab_size=16
    ),
    "t5": lambda: transformers.T5Config(num_layers=2, d_model=8, d_ff=8, d_kv=4, num_heads=2, vocab_size=16),
    "vit": lambda: transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=8, intermediate_size=8, num_attention_heads=2, image_size=8, patch_size=4
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_of_transformers_the_matrices_are_left(name: str) -> None:
    """What has two or more dimensions and is no table is a weight, all else is not."""
    model = transformers.AutoModel.from_config(CONFIGS[name]())
    tables = ("wte", "wpe", "embed", "shared", "relative_attention_bias", "cls_token")
    for parameter, kinds in parameter_categories(model).items():
        is_matrix = dict(model.named_parameters())[parameter].ndim > 1
        is_table = any(one in parameter for one in tables) and "projection" not in parameter
        assert (kinds == set()) == (is_matrix and not is_table), (parameter, kinds)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "llama"])
def test_depth_of_transformers(name: str) -> None:
    model = transformers.AutoModel.from_config(CONFIGS[name]())
    scales = depth_scales(model, 0.5)
    by_block = {"gpt2": "h.{}.", "bert": "encoder.layer.{}.", "vit": "layers.{}.", "llama": "layers.{}."}[name]
    for parameter, scale in scales.items():
        block = next((i for i in range(2) if by_block.format(i) in parameter), None)
        if block is not None:
            assert scale == 0.5 ** (2 - block)
        elif any(one in parameter for one in ("wte", "wpe", "embed")):
            assert scale == 0.125
        else:
            assert scale == 1.0, parameter
    assert len(set(scales.values())) == 4


def test_depth_follows_the_formula_and_its_floor() -> None:
    block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())  # noqa: E731
    model = nn.ModuleDict({"head": nn.Linear(2, 1), "stem": nn.Linear(2, 2)})
    model["blocks"] = nn.ModuleList(block() for _ in range(3))
    model["last"] = nn.LayerNorm(2)
    scales = depth_scales(model, 0.5, min_scale=0.2)
    found = {name: scale for name, scale in scales.items() if "weight" in name}
    assert found == {
        "head.weight": 1.0,
        "stem.weight": 0.2,
        "blocks.0.0.weight": 0.2,
        "blocks.1.0.weight": 0.25,
        "blocks.2.0.weight": 0.5,
        "last.weight": 1.0,
    }
    with pytest.raises(ValueError, match="found no"):
        depth_scales(nn.Linear(2, 2), 0.5)


def test_stages_that_follow_one_another_count_on() -> None:
    block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())  # noqa: E731
    model = nn.Sequential(
        nn.Linear(2, 2),
        nn.Sequential(block(), block()),
        nn.Linear(2, 2),
        nn.Sequential(block(), block()),
        nn.Linear(2, 1),
    )
    scales = depth_scales(model, 0.5, blocks=lambda name, one: name.count(".") == 1 and isinstance(one, nn.Sequential))
    found = [scales[f"{name}.weight"] for name in ("0", "1.0.0", "1.1.0", "2", "3.0.0", "3.1.0", "4")]
    assert found == [0.5**5, 0.5**4, 0.5**3, 0.5**3, 0.5**2, 0.5, 1.0]


def by_rank(optimizer):
    return split_groups_(optimizer, lambda one, _: one.ndim, lambda group, ndim: rescale_rates_(group, 1.0 / ndim))


def two_groups() -> tuple[nn.Module, list[dict]]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    return model, [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}]


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda k: 0.5**k, lambda k: 0.9**k]),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, [lambda k: 0.5, lambda k: 0.9]),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[1.0, 2.0], total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, [0.1, 0.2], [1.0, 2.0], step_size_up=3, cycle_momentum=True),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=[0.02, 0.01]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LambdaLR(o, lambda k: 0.5), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.LambdaLR(o, lambda k: 0.9**k)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_schedulers_go_on_with_the_ratios_kept(name: str, steps_before: int) -> None:
    """Whether it is split at the start, or a scheduler's and an optimizer's state of before are loaded after."""

    def build():
        optimizer = torch.optim.SGD(two_groups()[1], lr=1.0, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def step(optimizer, scheduler) -> None:
        optimizer.step()
        scheduler.step(*([1.0] if name == "plateau" else []))

    whole, own = build()
    for _ in range(steps_before):
        step(whole, own)
    parts, adapted = build()
    split = by_rank(parts)
    split.adapt_scheduler_(adapted)
    if steps_before:
        state = own.state_dict()
        split.adapt_scheduler_(state)
        parts.load_state_dict(split.adapt_state(whole.state_dict()))
        adapted.load_state_dict(state)
    for _ in range(8):
        expected = [group["lr"] / ndim for group in whole.param_groups for ndim in (1, 2)]
        assert [group["lr"] for group in parts.param_groups] == pytest.approx(expected, rel=1e-12)
        step(whole, own)
        step(parts, adapted)
    assert adapted.get_last_lr() == pytest.approx([group["lr"] for group in parts.param_groups])


def test_every_parameter_is_in_one_group_with_its_name_and_its_own_tensors() -> None:
    model, groups = two_groups()
    groups[0] |= {"name": "first", "params": model[0].named_parameters(), "lr": torch.tensor(0.1)}
    groups[1] |= {"name": "second", "params": model[1].named_parameters(), "lr": torch.tensor(0.2)}
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(1.0), foreach=False)
    split = by_rank(optimizer)
    found = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(found) == sorted(id(one) for one in model.parameters())
    assert [group["param_names"] for group in optimizer.param_groups] == [["bias"], ["weight"]] * 2
    assert [group["name"] for group in optimizer.param_groups] == ["first/1", "first/2", "second/1", "second/2"]
    assert len({id(group["lr"]) for group in optimizer.param_groups}) == 4
    assert (split.before, split.after) == ([2, 2], [1, 1, 1, 1])


def test_the_state_of_an_older_optimizer_goes_to_the_same_parameters() -> None:
    torch.manual_seed(0)
    model, groups = two_groups()
    old = torch.optim.AdamW(groups, lr=1.0)
    model(torch.randn(4, 2)).sum().backward()
    old.step()
    new = torch.optim.AdamW(two_groups()[1], lr=1.0)
    split = by_rank(new)
    new.load_state_dict(split.adapt_state(old.state_dict()))
    order = [1, 0, 3, 2]  # each bias before its weight
    olds = [one for group in old.param_groups for one in group["params"]]
    for place, parameter in zip(order, [one for group in new.param_groups for one in group["params"]], strict=True):
        assert torch.equal(new.state[parameter]["exp_avg"], old.state[olds[place]]["exp_avg"])


def test_a_rate_that_is_a_tensor_is_not_shared_between_the_parts() -> None:
    _, groups = two_groups()
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(1.0), foreach=False)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    split_groups_(optimizer, lambda one, _: one.ndim, lambda group, ndim: None)
    first, second = optimizer.param_groups[:2]
    first["lr"].fill_(0.1)
    assert second["lr"] == 0.5


def test_split_again_nothing_is_scaled_twice() -> None:
    optimizer = torch.optim.SGD(two_groups()[1], lr=1.0)
    by_rank(optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    again = by_rank(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert [part.factor for part in again.parts] == [1.0] * 4
