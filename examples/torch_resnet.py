"""Time the training of a ResNet on made-up images: how many images a second do all ranks train on?

Every rank has a batch of its own, as in Horovod's synthetic benchmark. The lines that pyhvd needs are marked.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import pyhvd.torch as hvd

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""By the number of layers: how many blocks each of the four stages has."""


class Block(torch.nn.Module):
    """Convolutions whose result is added to their input; from 50 layers on a bottleneck of three."""

    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            sizes = [(channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        else:
            sizes = [(channels, width, 3, stride), (width, width, 3, 1)]
        layers: list[torch.nn.Module] = []
        for inputs, outputs, kernel, step in sizes:
            layers += [convolve(inputs, outputs, kernel, step), torch.nn.ReLU(inplace=True)]
        self.body = torch.nn.Sequential(*layers[:-1])
        self.channels = sizes[-1][1]
        is_same = stride == 1 and channels == self.channels
        self.shortcut = torch.nn.Identity() if is_same else convolve(channels, self.channels, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the features of the images."""
        return torch.relu(self.body(images) + self.shortcut(images))


def convolve(inputs: int, outputs: int, kernel: int, stride: int) -> torch.nn.Sequential:
    """Return a convolution and its BatchNorm."""
    convolution = torch.nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(outputs))


def make_model(layers: int, width: int, classes: int) -> torch.nn.Module:
    """Return a ResNet; the first stage has so many channels, 64 in the paper."""
    parts: list[torch.nn.Module] = [
        convolve(3, width, 7, 2),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for stage, count in enumerate(BLOCKS[layers]):
        for number in range(count):
            stride = 2 if stage and not number else 1
            block = Block(channels, width << stage, stride, bottleneck=layers >= 50)
            parts.append(block)
            channels = block.channels
    parts += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, classes)]
    return torch.nn.Sequential(*parts)


def measure(options: argparse.Namespace) -> None:
    """Train, and print the rates."""
    device = torch.device("cpu")
    if torch.cuda.is_available() and not options.cpu:
        device = torch.device("cuda", hvd.local_rank())  # pyhvd: a GPU for each rank of the host
        torch.cuda.set_device(device)
    model = make_model(options.layers, options.width, classes=1000).to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(  # pyhvd
        optimizer,
        model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16 else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # pyhvd
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # pyhvd

    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    labels = torch.randint(1000, (options.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    parameters = sum(parameter.numel() for parameter in model.parameters())
    tell(f"ResNet-{options.layers}, {parameters / 1e6:.1f} million parameters, on {device.type}")
    for _ in range(options.warmup):
        step()
    rates = []
    for number in range(1, options.rounds + 1):
        start = time.perf_counter()
        for _ in range(options.steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(options.batch_size * options.steps / (time.perf_counter() - start))
        tell(f"round {number} of {options.rounds}: {rates[-1]:.1f} images/s on rank 0")
    total = hvd.allreduce(statistics.median(rates), op=hvd.Sum, name="rate")  # pyhvd
    tell(f"{total:.1f} images/s on {hvd.size()} rank{'s' * (hvd.size() > 1)}")


def tell(text: str) -> None:
    """Print on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  pyhvdrun -n 2 examples/torch_resnet.py --layers 18 --batch-size 8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=50, choices=BLOCKS, help="layers (default: 50)")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage (default: 64)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank (default: 16)")
    parser.add_argument("--image-size", type=int, default=224, help="height and width (default: 224)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the measurement (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are timed (default: 3)")
    parser.add_argument("--steps", type=int, default=5, help="steps per round (default: 5)")
    parser.add_argument("--fp16", action="store_true", help="send gradients as float16")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    options = parser.parse_args()
    hvd.init()  # pyhvd
    measure(options)
    hvd.shutdown()


if __name__ == "__main__":
    main()
