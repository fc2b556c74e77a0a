"""A normal client of `kvevict serve` beside attackers: how long it waits at most.

    python tests/benchmarks/bench_attack.py [--seconds 8] [--only WORD]

The server has the bundled model with a chat template and a context of 131,072 tokens, so that bodies of 8 MB are taken.
Four attackers send one kind of request again and again. Beside them one client asks /health, and another one for one
token of a chat, 20 times a second at most. Prints for each attack the statuses that the attackers got, and milliseconds
of both clients: median, 99th percentile and largest.
"""

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median

import kvevict

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}Answer:"
WORDS = "The baker counted the boats in the harbour and went home before it rained. "
ONE = dict(messages=[dict(role="user", content="Once")], max_tokens=1)


def folder(into: Path) -> Path:
    """The bundled model with a longer context and a chat template."""
    made = into / "small"
    shutil.copytree(kvevict.small_llama(), made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | dict(max_position_embeddings=131072)))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def started(model: Path):
    """(process, port) of a server that answers."""
    command = [sys.executable, "-m", "kvevict", "serve", str(model), "--port", "0", "--device", "cpu", "--queue", "6"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    )
    for line in process.stderr:
        if '"ready"' in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, json.loads(line)["port"]
    raise SystemExit("kvevict serve did not start")


def sent(port: int, method: str, path: str, body: bytes = b"", **headers) -> int:
    """The status of a response, over a new connection; 0: none came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        more = {"Content-Type": "application/json"} | {name.replace("_", "-"): each for name, each in headers.items()}
        connection.request(method, path, body or None, more)
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def posts(path: str, body: dict | bytes, **headers):
    """An attacker's step: one request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda port: sent(port, "POST", path, data, **headers)


def raw(data: bytes, wait: float = 0.0, most: int = 300):
    """An attacker's step: bytes on a new connection, of which each attacker leaves so many open."""
    kept: list = []

    def step(port) -> int:
        one = socket.create_connection(("127.0.0.1", port), timeout=5)
        one.sendall(data)
        kept.append(one)
        if len(kept) > most:
            kept.pop(0).close()
        time.sleep(wait)
        return -1

    return step


def piped(port) -> int:
    """2,000 requests on one connection, and a client that reads slowly."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        while one.recv(1 << 12):
            time.sleep(0.001)
    return -1


def many(count: int, **more) -> dict:
    return dict(messages=[dict(role="user", content="a")] * count, max_tokens=1) | more


def attacks() -> dict:
    hidden, long = dict(kvevict=dict(question=None)), WORDS * (7_900_000 // len(WORDS))
    one = dict(role="user", content=long)
    open_head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    huge = json.dumps(ONE)[:-1] + ', "temperature": ' + "9" * 400 + "}"
    return {
        "nothing": lambda port: time.sleep(0.1) or -1,
        "a message of 7.9 MB": posts(CHAT, dict(messages=[one])),
        "a message of 7.9 MB, hidden": posts(CHAT, dict(messages=[one]) | hidden),
        "a prompt of 7.9 MB": posts(TEXT, dict(prompt=long)),
        "50,000 messages": posts(CHAT, many(50_000, n=17)),
        "230,000 messages": posts(CHAT, many(230_000)),
        "230,000 messages, hidden": posts(CHAT, many(230_000, **hidden)),
        "a list in 100,000 lists": posts(CHAT, b"[" * 100_000),
        "a number of 400 digits": posts(CHAT, huge.encode()),
        "a text of 8 MB named ../x": posts("/v1/kvevict/texts", dict(name="../x", text=long)),
        "4 stop strings of 200 letters": posts(CHAT, ONE | dict(stop=[f"{at}" * 200 for at in range(4)])),
        "another Host": posts(CHAT, ONE, Host="evil.example"),
        "a body of 100 GB, declared": raw(open_head + b"Content-Length: 107374182400\r\n\r\n{", 0.01),
        "headers that do not end": raw(open_head, 0.01),
        "bodies that do not end": raw(open_head + b"Content-Length: 100\r\n\r\n{", 0.01),
        "2,000 requests piped": piped,
        "paths that there are not": lambda port: sent(port, "GET", "/v1/" + "x" * 2000),
    }


def waits(port: int, path: str, body: bytes, until: float, found: list) -> None:
    """Seconds of each request until then, over one connection; None: another status than 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            connection.request("POST" if body else "GET", path, body or None, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            found.append(time.monotonic() - began if response.status == 200 else None)
        except (OSError, http.client.HTTPException):
            connection.close()
            found.append(None)
        time.sleep(max(0.0, 0.05 - (time.monotonic() - began)))
    connection.close()


def attacked(port: int, step, until: float, told) -> None:
    """Four attackers. told: gets the number of each status."""
    counts: Counter = Counter()

    def attack():
        while time.monotonic() < until:
            try:
                counts[step(port)] += 1
            except OSError:
                counts[0] += 1

    threads = [threading.Thread(target=attack, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    told.put(counts)


def row(port: int, step, seconds: float) -> list:
    until, health, chat = time.monotonic() + seconds, [], []
    forked = multiprocessing.get_context("fork")  # attackers take no time of the clients' process
    told = forked.Queue()
    attackers = forked.Process(target=attacked, args=(port, step, until, told))
    attackers.start()
    threads = [
        threading.Thread(target=waits, args=(port, path, body, until, found))
        for path, body, found in (("/health", b"", health), (CHAT, json.dumps(ONE).encode(), chat))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = " ".join(f"{'-' if status < 0 else status}:{count}" for status, count in sorted(told.get().items()))
    attackers.join()
    return [statuses, *summary(health), *summary(chat)]


def summary(found: list) -> list:
    """Requests, those that failed, and milliseconds of the others: median, 99th percentile, largest."""
    times = sorted(1000 * each for each in found if each is not None)
    if not times:
        return [len(found), len(found), "-", "-", "-"]
    numbers = median(times), times[min(len(times) - 1, int(0.99 * len(times)))], times[-1]
    return [len(found), len(found) - len(times), *(f"{each:.0f}" for each in numbers)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    columns = [f"{who} {what}" for who in ("health", "chat") for what in ("n", "failed", "p50", "p99", "max")]
    print("attack", "statuses of attackers", *columns, sep="\t")
    with tempfile.TemporaryDirectory() as into:
        process, port = started(folder(Path(into)))
        try:
            sent(port, "POST", CHAT, json.dumps(ONE).encode())  # the first one is slow
            for name, step in attacks().items():
                if args.only in name:
                    print(name, *row(port, step, args.seconds), sep="\t", flush=True)
                    time.sleep(2)  # connections that are left open end
        finally:
            process.kill()
            process.wait(60)


if __name__ == "__main__":
    main()
