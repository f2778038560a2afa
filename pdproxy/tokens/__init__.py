"""The package tells how many tokens a prompt has."""
