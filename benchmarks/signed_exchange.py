"""What signing costs a replica: one exchange over the plain and over the signed transport, in turns, and SHA-256 alone.

    python benchmarks/signed_exchange.py --replicas 4 --payload-bytes 1000000 --out results/signed

The replicas are those of `thinwire.exchange.loopback`, which copies bytes within one process, so nothing waits for a
network. All work in one thread: the others have sent when replica 0 begins, and only replica 0 is timed.
"""

import argparse
import hmac
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from thinwire.bench.environment import environment
from thinwire.exchange.loopback import LoopbackHub
from thinwire.exchange.signed import SignedTransport
from thinwire.exchange.transport import Transport

KEY = b"a key for a benchmark, no secret"


def transports(num_replicas: int, is_signed: bool) -> list[Transport]:
    """One end of the wire for each replica."""
    hub = LoopbackHub(num_replicas)
    plain = [hub.transport(replica) for replica in range(num_replicas)]
    if not is_signed:
        return list(plain)
    with ThreadPoolExecutor(num_replicas) as pool:
        return list(pool.map(lambda transport: SignedTransport(transport, KEY), plain))


def exchange_seconds(ends: list[Transport], payload_bytes: int) -> float:
    """How long replica 0 takes to send its payload, and to have everyone's."""
    rows = [torch.randint(256, (len(ends), payload_bytes), dtype=torch.uint8) for _ in ends]
    others = [end.start_all_gather_(own, "exchange") for end, own in zip(ends[1:], rows[1:], strict=True)]
    began = time.perf_counter()
    ends[0].start_all_gather_(rows[0], "exchange").wait()
    seconds = time.perf_counter() - began
    for exchange in others:
        exchange.wait()
    assert all(torch.equal(rows[0][replica], rows[replica][replica]) for replica in range(len(ends)))
    return seconds


def tag_seconds(payload_bytes: int) -> float:
    """How long one tag takes, with nothing around it."""
    payload = torch.randint(256, (payload_bytes,), dtype=torch.uint8).numpy().tobytes()
    began = time.perf_counter()
    hmac.digest(KEY, payload, "sha256")
    return time.perf_counter() - began


def main() -> None:
    """Measure, print, write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--payload-bytes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ends = {"plain": transports(options.replicas, False), "signed": transports(options.replicas, True)}
    rows: list[dict[str, object]] = []
    times: dict[str, list[float]] = {"plain": [], "signed": [], "one tag": []}
    for number in range(options.rounds + 3):  # the first three warm up
        for name in times:
            seconds = (
                tag_seconds(options.payload_bytes)
                if name == "one tag"
                else exchange_seconds(ends[name], options.payload_bytes)
            )
            if number >= 3:
                times[name].append(seconds)
                rows.append({"what": name, "round": number - 3, "seconds": seconds})
    print(f"{options.replicas} replicas, payloads of {options.payload_bytes:,} bytes, {options.rounds} rounds")
    for name, found in times.items():
        print(f"{name}: median {1e3 * statistics.median(found):.2f} ms ({1e3 * min(found):.2f} to {1e3 * max(found):.2f})")
    print(f"SHA-256: {options.payload_bytes / statistics.median(times['one tag']) / 1e9:.2f} GB/s")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        facts = {"replicas": options.replicas, "payload_bytes": options.payload_bytes}
        (options.out / "environment.json").write_text(json.dumps({**environment(), **facts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
