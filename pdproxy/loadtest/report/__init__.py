"""A run's figures for people and for programs: tables, files and one page with pictures; several runs side by side."""
