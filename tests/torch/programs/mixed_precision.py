"""Trains with autocast and a GradScaler, and clips: an infinity on one rank skips the step on all ranks."""

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
losses = []
for step in range(8):
    rows = torch.rand(16, 4, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.mse_loss(model(rows).float(), rows.sum(1, keepdim=True))
    if step == 4 and hvd.rank() == hvd.size() - 1:
        loss = loss * float("inf")
    before = [each.detach().clone() for each in model.parameters()]
    scale = scaler.get_scale()
    scaler.scale(loss).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    kept = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert kept == (step == 4)
    assert scaler.get_scale() == (scale / 2 if step == 4 else scale)
    if step != 4:
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        norms = hvd.allgather(norm.reshape(1))
        assert (norms == norms[0]).all()
assert losses[-1] < losses[0]
for parameter in model.parameters():
    rows = hvd.allgather(parameter.detach().reshape(1, -1))
    assert all(torch.equal(row, rows[0]) for row in rows)
