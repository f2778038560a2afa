"""One engine in several processes. Each process is a tensor-parallel rank and holds a part of every layer.

What must hold, and what a violation would look like:

* Every rank feeds the same tokens into the same cache pages in the same order. Rank 0 alone decides, and tells the
  others each step before it takes it itself. Otherwise a sum would add up parts of different tokens: wrong text.
* Every rank has its own part of the KV, its own PD buffer, and its own ends of the transfer; an attempt is taken, given
  up and finished by all of them or by none. Otherwise pages would stay held at one rank.
* No rank outlives another. A rank that dies, fails in a step, or is silent for `link.TIMEOUT_S` in the middle of one,
  ends all of them, and rank 0 says which one it was and why. Otherwise requests would wait for ever.
* The proxy sees one engine: rank 0 speaks HTTP, and signals of all ranks carry its epoch.

    proxy ── HTTP ──► rank 0 ──┬── steps and sums (`link`, engine threads) ──► rank 1, …
                               └── attempts (`messages`, event loops) ───────►
"""
