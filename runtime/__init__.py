"""The runtime: a ZeRO engine over torch.distributed that allocates what the ledger says."""
