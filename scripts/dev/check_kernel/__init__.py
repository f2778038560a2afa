"""Tries every order of events in a small world of engines, requests and one kernel, and checks each state."""
