"""What `kempner.integrations.transformers` is made of."""
