"""The package reads and measures the client's body, writes bodies for engines, and shapes their answers for the
client.
"""
