"""The dashboard shows the fleet at a glance: a page at ``/ui``, and the events that keep it true while somebody
looks."""
