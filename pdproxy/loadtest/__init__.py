"""A load test that knows of prefill and decode: workload → driver → records → summary → report."""
