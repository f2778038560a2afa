"""Discovery finds the instances that come and go: behind a name in DNS, or as pods of a Kubernetes cluster."""
