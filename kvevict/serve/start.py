"""From a command's arguments to a server that runs."""

import contextlib
import fcntl
import shutil
import socket
from pathlib import Path

import uvicorn
from transformers.utils import logging as transformers_logging

from ..analysis.run import load_model
from ..commands import number
from ..models import small_llama
from ..patch import patch
from . import log
from .app import application
from .policies import Policies
from .prefixes import Prefixes
from .server import Server
from .texts import Texts

BODY, LETTERS = 1 << 24, 64  # bytes of a request at most, in all and for each token of the context
STOP = 30  # seconds that running requests have to end when the server stops


def start(args, memory: int, disk: int, keys: tuple) -> None:
    """Serve until a signal stops the process (SIGINT, SIGTERM). Raises ValueError or OSError for what cannot be had:
    the model, the store's folder, the port."""
    log.to_stderr()
    transformers_logging.set_verbosity_error()
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with own(args.store), socket.create_server((args.host, args.port), family=family) as listening:
        names = ("policy", "unasked", "chunk_size", "share", "dtype", "device", "name", "store", "queue", "timeout")
        options = {name: getattr(args, name) for name in names}
        server = server_of(args.model, number(args.budget), memory=memory, disk=disk, keys=keys, **options)
        config = uvicorn.Config(application(server), log_level="warning", timeout_graceful_shutdown=STOP)
        facts = dict(model=server.name, host=args.host, port=listening.getsockname()[1])
        log.LOG.info("ready", extra={"facts": facts})
        uvicorn.Server(config).run(sockets=[listening])


def server_of(
    model=None, budget=512, *, policy="take+edie", unasked="read-twice", chunk_size=512, share=False, dtype="auto",
    device=None, name=None, memory=1 << 30, store=None, disk=4 << 30, keys=(), queue=64, timeout=600.0,
) -> Server:  # fmt: skip
    """The model is loaded and patched. The options are those of `kvevict serve`; memory and disk: bytes."""
    where = model or small_llama()
    loaded, tokenizer = load_model(where, dtype, device)
    context = getattr(loaded.config, "max_position_embeddings", None)
    policies = Policies(policy, unasked, budget, chunk_size, share, context or 1 << 20)
    patch(loaded, policies.built(policy), tokenizer=tokenizer)
    folder = None if store is None else Path(store)
    texts = Texts(memory if folder is None else disk, folder and folder / "texts")
    prefixes = Prefixes(loaded, memory, folder and folder / "prefixes", lambda: disk - texts.bytes)
    name = name or (Path(where).name if Path(where).exists() else where)
    most = min(BODY, LETTERS * policies.context + (1 << 16))
    limits = dict(queue=queue, timeout=timeout, most=most)
    return Server(name, loaded, tokenizer, policies, prefixes, texts, keys=keys, **limits)


@contextlib.contextmanager
def own(folder):
    """Inside, no other server has the folder. What a killed one was writing is removed."""
    if folder is None:
        yield
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"--store {folder}: another server has it; give each a folder of its own") from None
        for left in (*Path(folder).glob("prefixes/.kvevict-*"), *Path(folder).glob("texts/*/.kvevict-*")):
            shutil.rmtree(left, ignore_errors=True)
        yield
