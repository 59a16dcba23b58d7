"""Operators on symmetric tensors, one to a file: reference, kernel, wrapper. Installed as `pkt.kernels`."""
