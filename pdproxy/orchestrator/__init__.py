"""The orchestrator takes one request through its course: its attempts, their two legs, and the answer that is
relayed."""
