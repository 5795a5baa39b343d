"""Tests that need an NVIDIA GPU; docs/nccl.md says how to run them."""
