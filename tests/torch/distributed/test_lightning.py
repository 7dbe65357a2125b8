"""Trainer(strategy="pyhvd") of Lightning on 2 ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.mpi.harness import on_ranks
from tests.torch.distributed.world import ROWS, batch, check, make_model, place_of

WHY = "Lightning is not installed: make .venv-spark/.torchdist"
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
every_lightning = pytest.mark.parametrize("package", PACKAGES)


def load(package: str) -> Any:
    """Import a Lightning and the strategy; skip where it is not installed."""
    import logging

    found = pytest.importorskip(package, reason=WHY)
    import pyhvd.torch.distributed.lightning as ours

    ours.register()  # the other Lightning may have been imported since
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return found


def data(steps: int = 4) -> Any:
    """Return a data set whose batches, taken by two ranks in turn, are those of ``batch``."""
    inputs, wanted = zip(*(batch(step) for step in range(steps)), strict=True)
    return torch.utils.data.TensorDataset(torch.cat(inputs), torch.cat(wanted))


def loader(size: int) -> Any:
    """Return what yields this rank's share of each batch, once Lightning has added its sampler."""
    return torch.utils.data.DataLoader(data(), ROWS // size, shuffle=False)


def in_order(size: int) -> Any:
    """Return the same for training, where Lightning's own sampler would shuffle."""
    rows = data()
    sampler: Any = torch.utils.data.DistributedSampler(rows, size, place_of()[0], shuffle=False)
    return torch.utils.data.DataLoader(rows, ROWS // size, sampler=sampler)


def module_of(pl: Any, **options: Any) -> Any:
    """Return a module that trains ``make_model()`` and notes what Lightning tells it."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(seed=options.get("seed", 0))
            self.told: list[float] = []
            self.automatic_optimization = options.get("optimizers", 1) == 1

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.net(inputs)

        def training_step(self, pair: Any, index: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self.net(pair[0]), pair[1])
            self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
            if self.automatic_optimization:
                return loss
            first, second = self.optimizers()
            chosen = first if index % 2 else second
            chosen.zero_grad()
            self.manual_backward(loss)
            chosen.step()
            return None

        def validation_step(self, pair: Any, index: int) -> None:
            loss = torch.nn.functional.cross_entropy(self.net(pair[0]), pair[1])
            self.log("val", loss, sync_dist=True)
            self.log("rank", float(self.global_rank), sync_dist=True, reduce_fx="sum")

        def predict_step(self, pair: Any, index: int) -> Any:
            return self.net(pair[0]).argmax(1)

        def configure_optimizers(self) -> Any:
            if options.get("optimizers", 1) == 1:
                return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
            halves = (self.net[:2], self.net[2:])
            return [torch.optim.SGD(half.parameters(), lr=0.1) for half in halves]

    return Module()


def trainer_of(pl: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    chosen = {"strategy": "pyhvd", "enable_checkpointing": False, "max_epochs": 1, **quiet, **options}
    return pl.Trainer(**chosen)


def alone(epochs: int = 1, accumulates: int = 1, clips: float = 0.0, seed: int = 0) -> torch.nn.Module:
    """Return the model that one process trains."""
    model = make_model(seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for step in range(4):
            inputs, wanted = batch(step)
            loss = torch.nn.functional.cross_entropy(model(inputs), wanted) / accumulates
            torch.autograd.backward(loss)
            if (step + 1) % accumulates == 0:
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clips)
                optimizer.step()
                optimizer.zero_grad()
    return model


@every_lightning
@on_ranks(2, timeout=120)
def test_fit_validate_predict(package: str) -> None:
    pl = load(package)
    rank, size = place_of()
    module = module_of(pl, seed=rank)  # DDP takes rank 0's weights
    trainer = trainer_of(pl, max_epochs=2)
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank) == (size, rank, rank)
    trainer.fit(module, in_order(size), loader(size))
    assert dist.get_backend() == "pyhvd"
    check(module.net, alone(epochs=2))
    (results,) = trainer.validate(module, loader(size), verbose=False)
    model, losses = alone(epochs=2), []
    for step in range(4):
        inputs, wanted = batch(step)
        losses.append(torch.nn.functional.cross_entropy(model(inputs), wanted).item())
    assert results["val"] == pytest.approx(sum(losses) / 4, rel=1e-4)
    assert results["rank"] == 4.0  # the sum over ranks and steps
    parts = trainer.predict(module, loader(size))
    wanted = [model(batch(step)[0]).argmax(1)[rank::size].tolist() for step in range(4)]
    assert [part.tolist() for part in parts] == wanted
    dist.destroy_process_group()


@every_lightning
@on_ranks(2, timeout=120)
def test_the_name_horovod_and_options(package: str) -> None:
    pl = load(package)
    module = module_of(pl)
    trainer = trainer_of(pl, strategy="horovod", accumulate_grad_batches=2, gradient_clip_val=0.05)
    trainer.fit(module, in_order(2))
    check(module.net, alone(accumulates=2, clips=0.05))
    elsewhere = type(trainer.strategy)(parallel_devices=[torch.device("meta")])
    with pytest.raises(ValueError, match="trains on CPUs alone"):
        str(elsewhere.root_device)
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "16-true"])
@on_ranks(2, timeout=120)
def test_16_bits(precision: Any) -> None:
    pl = load("lightning.pytorch")
    module = module_of(pl)
    trainer = trainer_of(pl, precision=precision)
    trainer.fit(module, in_order(2))
    check(module.net.float(), alone(), 0.05)
    dist.destroy_process_group()


@on_ranks(2, timeout=120)
def test_checkpoints_and_early_stopping() -> None:
    pl = load("lightning.pytorch")
    folder = Path(os.environ["PYHVD_TEST_JOB"]) / "lightning"
    best = pl.callbacks.ModelCheckpoint(dirpath=folder, monitor="val", save_last=True)
    stops = pl.callbacks.EarlyStopping(monitor="val", patience=1, min_delta=10.0)
    module = module_of(pl)
    trainer = trainer_of(pl, max_epochs=9, callbacks=[best, stops], enable_checkpointing=True)
    trainer.fit(module, in_order(2), loader(2))
    assert trainer.current_epoch == 2
    dist.barrier()
    other = module_of(pl, seed=3)
    again = trainer_of(pl, max_epochs=3)
    again.fit(other, in_order(2), ckpt_path=folder / "last.ckpt")
    check(other.net, alone(epochs=3))
    dist.destroy_process_group()


@on_ranks(2, timeout=120)
def test_several_optimizers() -> None:
    pl = load("lightning.pytorch")
    module, trainer = module_of(pl, optimizers=2), None
    ours = pl.strategies.StrategyRegistry["pyhvd"]["strategy"]
    trainer = trainer_of(pl, strategy=ours(find_unused_parameters=True))
    trainer.fit(module, in_order(2))
    model = make_model()
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in (model[:2], model[2:])]
    for step in range(4):
        chosen = optimizers[0 if step % 2 else 1]
        chosen.zero_grad()
        inputs, wanted = batch(step)
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(inputs), wanted))
        chosen.step()
    check(module.net, model)
    dist.destroy_process_group()
