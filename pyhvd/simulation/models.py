"""Gradients of known models: the number of elements of each, in the order of the backward pass.

Computed from the models' architectures; no framework is needed.
"""

from __future__ import annotations

from collections.abc import Callable


def resnet50() -> list[int]:
    """Return the sizes of ResNet-50's 161 gradients (25 557 032 elements), in the backward pass's order.

    He et al., "Deep Residual Learning for Image Recognition", 2015, in the layout of torchvision.
    """
    counts: list[int] = []

    def convolution(inputs: int, outputs: int, kernel: int) -> None:
        counts.extend((inputs * outputs * kernel * kernel, outputs, outputs))  # and its batch norm

    convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(inputs, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if block == 0:
                convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    counts.extend((inputs * 1000, 1000))
    return counts[::-1]


def vgg16() -> list[int]:
    """Return the sizes of VGG-16's 32 gradients (138 357 544 elements), in the backward pass's order.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2014.
    """
    counts: list[int] = []
    inputs = 3
    for width, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            counts.extend((inputs * width * 9, width))
            inputs = width
    for rows, columns in ((512 * 49, 4096), (4096, 4096), (4096, 1000)):
        counts.extend((rows * columns, columns))
    return counts[::-1]


def bert_large() -> list[int]:
    """Return the sizes of BERT-large's 391 gradients (335 141 888 elements), in the backward pass's order.

    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", 2018;
    uncased, with the pooler and without the heads of pre-training.
    """
    width = 1024
    linear, norm = (width * width, width), (width, width)
    layer = (*linear * 4, *norm, 4 * width * width, 4 * width, 4 * width * width, width, *norm)
    embeddings = (30522 * width, 512 * width, 2 * width, *norm)
    return [*embeddings, *layer * 24, *linear][::-1]


def gpt2(width: int = 768, layers: int = 12) -> list[int]:
    """Return the sizes of GPT-2's gradients, in the backward pass's order.

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; the last layer shares the
    embedding's weights. The default has 148 gradients (124 439 808 elements).
    """
    norm = (width, width)
    attention = (3 * width * width, 3 * width, width * width, width)
    perceptron = (4 * width * width, 4 * width, 4 * width * width, width)
    layer = (*norm, *attention, *norm, *perceptron)
    return [50257 * width, 1024 * width, *layer * layers, *norm][::-1]


MODELS: dict[str, Callable[[], list[int]]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "bert-large": bert_large,
    "gpt2": gpt2,
    "gpt2-xl": lambda: gpt2(1600, 48),
}
"""By name: a function that returns the elements of each gradient."""
