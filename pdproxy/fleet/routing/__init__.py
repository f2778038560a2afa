"""Which instances serve a request: candidates, policies, and the load they go by."""
