"""The `moira` command. Modules here import torch, triton and numpy only inside functions that need them."""

__version__ = "0.1.0"
