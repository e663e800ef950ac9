"""Kernels. Each op has a plain-torch reference, a wrapper that dispatches, and a `.cu` source."""
