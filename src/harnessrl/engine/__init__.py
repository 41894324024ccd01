"""Engines: what turns prompt token ids into sampled token ids and log-probabilities.

The names here import torch; `harnessrl.engine` itself does not until one is used.
"""
