"""The package is a load test that knows of prefill and decode: workload → driver → records → summary → report."""
