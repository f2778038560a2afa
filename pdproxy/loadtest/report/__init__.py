"""The package shows a run's figures to people and to programs: tables, files and one page with pictures; it can show
several runs side by side."""
