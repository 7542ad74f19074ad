"""What the machine and the engines are doing: readings, one sampler, Prometheus metrics. Knows no tenant's data."""
