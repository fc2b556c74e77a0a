"""From a command's arguments to a server that runs."""

from pathlib import Path

import uvicorn
from transformers.utils import logging as transformers_logging

from ..analysis.run import load_model
from ..commands import number
from ..models import small_llama
from ..patch import patch
from . import log
from .app import Server, application
from .policies import Policies
from .prefixes import Prefixes
from .texts import Texts

STOP = 30  # seconds that running requests have to end when the server stops


def server_of(args, memory: int, disk: int, keys: tuple) -> Server:
    """The model is loaded and patched. Raises ValueError or OSError for what cannot be."""
    where = args.model or small_llama()
    model, tokenizer = load_model(where, args.dtype, args.device)
    budget, context = number(args.budget), getattr(model.config, "max_position_embeddings", None)
    policies = Policies(args.policy, args.unasked, budget, args.chunk_size, args.share, context or 1 << 20)
    patch(model, policies.built(args.policy), tokenizer=tokenizer)
    folder = None if args.store is None else Path(args.store)
    texts = Texts(memory if folder is None else disk, folder and folder / "texts")
    prefixes = Prefixes(model, memory, folder and folder / "prefixes", lambda: disk - texts.bytes)
    name = args.name or Path(where).name
    return Server(name, model, tokenizer, policies, prefixes, texts, keys=keys, queue=args.queue, timeout=args.timeout)


def start(args, memory: int, disk: int, keys: tuple) -> None:
    """Serve until the process is told to stop (SIGINT, SIGTERM)."""
    log.to_stderr()
    transformers_logging.set_verbosity_error()
    server = server_of(args, memory, disk, keys)
    config = uvicorn.Config(
        application(server), host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=STOP
    )
    own = uvicorn.Server(config)
    log.LOG.info("ready", extra={"facts": {"model": server.name, "host": args.host, "port": args.port}})
    own.run()
