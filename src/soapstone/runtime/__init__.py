"""Running the one task graph on torch.distributed, with the same result as one process."""
