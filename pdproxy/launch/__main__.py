"""``python -m pdproxy.launch``."""

import signal

# Until the supervisor takes over there is nothing to stop, and a Ctrl-C needs no traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)

if __name__ == "__main__":
    from pdproxy.launch.command import app

    app(prog_name="python -m pdproxy.launch")
