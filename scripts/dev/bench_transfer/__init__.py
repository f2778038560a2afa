"""The benchmark measures how fast the transfer is, beside what the machine can do: ours, bare NIXL and a plain copy, in
turns, in one run."""
