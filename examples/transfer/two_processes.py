"""Two processes, one KV cache each: what the prefiller computes, the decoder reads. Needs torch and NIXL, no GPU."""

import asyncio
import multiprocessing
import uuid

import transfer

KV = transfer.KvLayout.uniform(
    num_layers=4, num_kv_heads=2, head_dim=64, chunk_size=16, dtype="float32", element_bytes=4
)
ME = transfer.Identity("any text that is equal where the weights are", KV.of_rank())


async def decode(pipe):
    cache = transfer.PagedBuffer(64, ME.layout.page_bytes)
    agent = transfer.NixlAgent(uuid.uuid4().hex, receives=True)
    receiver = transfer.Receiver(agent, cache, ME, transfer.ReceiverConfig(host="127.0.0.1"))
    await receiver.start()
    pipe.send(receiver.endpoint)
    await receiver.wait_ready(await asyncio.to_thread(pipe.recv))  # the decode request names the attempt
    pages = receiver.take("attempt-1")  # ours to read from here on, in order of the prompt
    last = transfer.layer_views(cache.pages, ME.layout)[-1]  # keys and values: [pages, heads, tokens, head_dim]
    pipe.send([last.keys[page].sum().item() for page in pages])
    receiver.consumed("attempt-1")  # … to here: now they may be given to somebody else
    await receiver.aclose()


async def prefill(pipe):
    cache = transfer.PagedBuffer(64, ME.layout.page_bytes)
    agent = transfer.NixlAgent(uuid.uuid4().hex, receives=False)
    await asyncio.wrap_future(agent.register(cache.region))
    sender = transfer.Sender(agent, ME)
    params = transfer.PushParams(attempt="attempt-1", receivers=[pipe.recv()], timeout_s=30)
    push = await sender.open(params, num_tokens=100)  # waits for pages at the decoder: all of them, or none
    for ordinal in range(len(push.table)):
        for layer, view in enumerate(transfer.layer_views(cache.pages, ME.layout)):
            view.keys[ordinal] = ordinal + layer  # "computed" into local page `ordinal`
            push.layers_filled(ordinal, ordinal, layer, layer + 1)  # travels while the next layer is computed
    num_bytes, seconds = await push.finish()
    pipe.send("attempt-1")
    print(f"{num_bytes:,} bytes in {seconds * 1e3:.1f} ms, at the decoder: {pipe.recv()}")
    await sender.aclose()


def run(end, pipe):
    asyncio.run(end(pipe))


if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=run, args=(decode, there), daemon=True).start()
    run(prefill, here)
