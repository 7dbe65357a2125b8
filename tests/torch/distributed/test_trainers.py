"""accelerate and transformers' Trainer on 2 ranks, in a default group that the program has made before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torch.distributed.world import ROWS, STEPS, batch, check, expected, in_group, make_model, sgd

WHY = "not installed: make .venv-spark/.torchdist"


def data() -> Any:
    """Return the batches of all steps, one after the other."""
    inputs, wanted = zip(*(batch(step) for step in range(STEPS)), strict=True)
    return torch.utils.data.TensorDataset(torch.cat(inputs), torch.cat(wanted))


@pytest.mark.parametrize("accumulates", [1, 2])
@in_group(2, timeout=120)
def test_accelerate(accumulates: int) -> None:
    accelerate = pytest.importorskip("accelerate", reason=WHY)

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulates)
    assert (accelerator.num_processes, accelerator.process_index) == (2, dist.get_rank())
    assert dist.get_backend() == "pyhvd"
    model = make_model(seed=dist.get_rank())
    batches = torch.utils.data.DataLoader(data(), ROWS // 2)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), batches)
    steps = 0
    for inputs, wanted in batches:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), wanted)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
    assert steps == STEPS
    if accumulates == 1:  # both halves of each batch, in whatever order
        check(model, expected())
    found = accelerator.gather(torch.tensor([float(dist.get_rank())]))
    assert found.tolist() == [0.0, 1.0]
    assert accelerator.reduce(torch.ones(2), reduction="sum").tolist() == [2.0, 2.0]
    assert accelerator.gather_for_metrics([dist.get_rank()], use_gather_object=True) == [0, 1]
    accelerator.wait_for_everyone()
    folder = Path(os.environ["PYHVD_TEST_JOB"]) / f"accelerate{accumulates}"
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    before = [each.detach().clone() for each in model.parameters()]
    with torch.no_grad():
        torch._foreach_zero_(list(model.parameters()))
    accelerator.load_state(str(folder))
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    _forget_accelerate()


def _forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make_bert(transformers: Any) -> Any:
    """Return a tiny model, always the same."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


@in_group(2, timeout=120)
def test_transformers_trainer() -> None:
    transformers = pytest.importorskip("transformers", reason=WHY)
    pytest.importorskip("accelerate", reason=WHY)

    made = torch.Generator().manual_seed(0)
    rows = [
        {
            "input_ids": torch.randint(32, (6,), generator=made),
            "attention_mask": torch.ones(6, dtype=torch.long),
            "labels": torch.randint(3, (), generator=made),
        }
        for _ in range(32)
    ]
    folder = Path(os.environ["PYHVD_TEST_JOB"]) / "transformers"
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        average_tokens_across_devices=False,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        report_to="none",
        logging_steps=2,
        save_steps=2,
        disable_tqdm=True,
    )
    assert (arguments.world_size, arguments.process_index) == (2, dist.get_rank())
    trainer = transformers.Trainer(
        make_bert(transformers), arguments, train_dataset=rows, eval_dataset=rows[:8]
    )
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.evaluate()["eval_loss"] > 0
    alone = make_bert(transformers)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for start in range(0, 32, 8):
        part = rows[start : start + 8]
        whole = {name: torch.stack([row[name] for row in part]) for name in part[0]}
        optimizer.zero_grad()
        alone(**whole).loss.backward()
        optimizer.step()
    check(trainer.model, alone, 1e-4)
    dist.barrier()
    again = transformers.Trainer(make_bert(transformers), arguments, train_dataset=rows)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    check(again.model, alone, 1e-4)
    _forget_accelerate()
