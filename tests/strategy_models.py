"""Modules for the tests of the strategies. None of them knows of lightning_tricks."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.models import Block, Net, RankBatches, make_optimizer

VOCABULARY, LENGTH = 32, 8


class LanguageModule(pl.LightningModule):
    """Next-token prediction with decay and no-decay groups, whose order is not that of the model."""

    lr = 0.02

    def __init__(self, *, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.model = self.build()

    def build(self) -> nn.Module:
        raise NotImplementedError

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        return F.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        vectors = [p for p in self.parameters() if p.ndim < 2]
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        optimizer = make_optimizer(vectors, self.optimizer, fused=False, lr=self.lr)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        optimizer.add_param_group({"params": matrices, "weight_decay": 0.1})
        return optimizer


class Tied(nn.Module):
    """An embedding, blocks, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor(1.0))  # without a dimension to split
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


class TiedModule(LanguageModule):
    def build(self) -> nn.Module:
        return Tied()


class FrozenModule(LanguageModule):
    """A frozen embedding and first block under trained ones."""

    def build(self) -> nn.Module:
        model = Tied()
        model.embedding.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model


class GPT2Module(LanguageModule):
    def build(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel  # seconds to import, which not every script needs

        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=3, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


class LlamaModule(GPT2Module):
    lr = 0.005

    def build(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        )  # fmt: skip
        return LlamaForCausalLM(config)


class PlainModule(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(lr=0.02, **options)


def tokens(num_samples: int = 80) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(VOCABULARY, (num_samples, LENGTH), generator=generator))


def token_loader(rank: int, world_size: int, global_batch: int = 8) -> DataLoader:
    data = tokens()
    return DataLoader(data, batch_sampler=RankBatches(len(data), global_batch, rank, world_size))
