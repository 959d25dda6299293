"""Trains under a strategy string and saves the weights: a plain script, for torchrun or Lightning's own launcher."""

import sys

import torch

import lightning_tricks  # noqa: F401  (registers the strings)
from tests.models import seeded, weights
from tests.strategy_cases import data_of, strategy_trainer
from tests.strategy_models import TiedModule

if __name__ == "__main__":
    strategy, num_nodes, file = sys.argv[1:]
    torch.set_num_threads(1)
    module = seeded(lambda: TiedModule(optimizer="momentum"))
    run = strategy_trainer(strategy, 2, num_nodes=int(num_nodes))
    run.fit(module, data_of(module, run.global_rank, run.world_size))
    found = weights(module)
    if run.global_rank == 0:
        torch.save({"weights": found, "mesh": str(run.strategy.device_mesh), "world": run.world_size}, file)
