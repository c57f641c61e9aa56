"""The pretraining run: its setup, loop, evaluation, checkpoints and metrics."""
