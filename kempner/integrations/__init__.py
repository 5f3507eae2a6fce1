"""Training programs of other libraries under kempner; each module needs the extra of its name."""
