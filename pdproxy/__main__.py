"""``python -m pdproxy``: the same as the `pdproxy` command."""

from pdproxy.cli import main

main()
