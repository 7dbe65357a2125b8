"""Trains a classifier: each rank has its part of the data, metrics are averaged, rank 0 saves.

Run it by horovodrun, or by itself with --num-proc, which starts the ranks by ``horovod.run``.
"""

import argparse
import os
import tempfile
from typing import Any

import horovod
import torch
import torch.nn.functional as F  # noqa: N812 - as in all programs
import torch.utils.data.distributed


def parse(arguments: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--num-proc", type=int)
    return parser.parse_args(arguments)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, kernel_size=3)
        self.dropout = torch.nn.Dropout2d(0.1)
        self.full = torch.nn.Linear(4 * 3 * 3, 4)

    def forward(self, images: Any) -> Any:
        images = F.relu(F.max_pool2d(self.dropout(self.conv(images)), 2))
        return F.log_softmax(self.full(images.flatten(1)), dim=1)


def make_data(count: int, seed: int) -> Any:
    """Return images that are bright in the corner that is their class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    images = torch.rand(count, 1, 8, 8, generator=generator)
    for number, label in enumerate(labels.tolist()):
        row, column = 4 * (label // 2), 4 * (label % 2)
        images[number, 0, row : row + 4, column : column + 4] += 1.0
    return torch.utils.data.TensorDataset(images, labels)


def make_loader(dataset: Any, batch_size: int) -> Any:
    import horovod.torch as hvd

    sampler = torch.utils.data.distributed.DistributedSampler(
        dataset, num_replicas=hvd.size(), rank=hvd.rank()
    )
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=sampler), sampler


def metric_average(value: float, name: str) -> float:
    import horovod.torch as hvd

    return float(hvd.allreduce(torch.tensor(value), name=name))


def train(model: Any, optimizer: Any, loader: Any) -> None:
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()


def test(model: Any, loader: Any, sampler: Any) -> tuple[float, float]:
    model.eval()
    loss = right = 0.0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            loss += F.nll_loss(output, labels, reduction="sum").item()
            right += (output.argmax(1) == labels).sum().item()
    # Of this rank's part, not of the whole set.
    return metric_average(loss / len(sampler), "avg_loss"), metric_average(
        right / len(sampler), "avg_accuracy"
    )


def main(args: Any) -> float:
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(42 + hvd.rank())
    train_loader, train_sampler = make_loader(make_data(256, 1), args.batch_size)
    test_loader, test_sampler = make_loader(make_data(64, 2), args.batch_size)
    model = Net()
    factor = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * factor, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    with tempfile.TemporaryDirectory() as own:
        folder = hvd.broadcast_object(own, root_rank=0)
        for epoch in range(args.epochs):
            train_sampler.set_epoch(epoch)
            train(model, optimizer, train_loader)
            if hvd.rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, os.path.join(folder, f"checkpoint-{epoch}.pt"))
        loss, accuracy = test(model, test_loader, test_sampler)
        check_resuming(model, optimizer, args, folder)
        hvd.barrier()
    assert accuracy > 0.9, (loss, accuracy)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, loss {loss:.3f}, accuracy above 90 %")
    return accuracy


def check_resuming(trained: Any, optimizer: Any, args: Any, folder: str) -> None:
    """Resume as a new program would: rank 0 loads, the others get its state."""
    import horovod.torch as hvd

    last = 0
    if hvd.rank() == 0:
        last = max(epoch for epoch in range(9) if os.path.exists(f"{folder}/checkpoint-{epoch}.pt"))
    last = hvd.broadcast(torch.tensor(last), root_rank=0, name="resume_from_epoch").item()
    assert last == args.epochs - 1
    model = Net()
    resumed = torch.optim.SGD(model.parameters(), lr=1.0)
    resumed = hvd.DistributedOptimizer(resumed, named_parameters=model.named_parameters())
    if hvd.rank() == 0:
        checkpoint = torch.load(f"{folder}/checkpoint-{last}.pt", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        resumed.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(resumed, root_rank=0)
    for mine, known in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine, known)
        if hvd.rank() == 0 or not args.use_adasum:  # with Adasum each rank has its own momentum
            buffers = (resumed.state[mine], optimizer.state[known])
            assert torch.equal(*(each["momentum_buffer"] for each in buffers))
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


if __name__ == "__main__":
    args = parse()
    if args.num_proc:
        results = horovod.run(main, args=(args,), np=args.num_proc, hosts=None, use_gloo=False, use_mpi=False)
        assert len(results) == args.num_proc
        assert len(set(results)) == 1
    else:
        for options in ([], ["--fp16-allreduce"], ["--use-adasum"], ["--gradient-predivide-factor", "2"]):
            main(parse([*options, "--epochs", "2"]) if options else args)
