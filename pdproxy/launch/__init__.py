"""The package runs engines and proxy as processes of one machine: they are checked before they are started, and gone
whatever ends the launcher."""
