"""The parts of `kempner.integrations.transformers`."""
