"""The course of one request: its attempts, their two legs, and the answer that is relayed."""
