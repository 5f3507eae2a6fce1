"""A fault-tolerant training daemon for PyTorch on shared Slurm clusters."""

__version__ = "0.1.0"
