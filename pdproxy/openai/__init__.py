"""The package reads the client's body, rewrites it for engines, and shapes the engines' answers for the client."""
