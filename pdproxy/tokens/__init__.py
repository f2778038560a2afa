"""What the client gets: events looked at, relayed, continued where an engine was lost, or refused in OpenAI's words."""
