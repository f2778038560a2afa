"""Routing decides which instances serve a request, by candidates, policies, and the load that those go by."""
