"""The search tries the orders of events around one receiver and its senders, in the transfer's own code, and checks
each state."""
