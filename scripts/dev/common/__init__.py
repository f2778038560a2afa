"""The tools that measure and soak share what is in here: child processes, facts about the machine, and how they end."""
