"""Export, quantize, build, measure, gate and score models. Knows nothing of Dagster; usable alone."""
