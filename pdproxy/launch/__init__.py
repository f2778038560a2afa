"""Engines and proxy as processes of one machine: checked before they are started, gone whatever ends the launcher."""
