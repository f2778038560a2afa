"""The package tells what a fleet would do, without the fleet: it runs the proxy's own code under simulated time, in
front of simulated engines.

Orchestrator, admission, routing, KV board and health are those that serve; only the clock, the engines and the clients
are made up. So what is found out here about a policy or a size is found out about the code that will run.
"""
