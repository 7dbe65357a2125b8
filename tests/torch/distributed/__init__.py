"""The backend of torch.distributed, and what stands on it."""
