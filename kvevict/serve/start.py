"""Makes a server from the options of `kvevict serve`, and runs it."""

import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from ..models import families
from ..models.families import find_decoder
from ..models.loading import load_model, small_llama
from ..patch import in_slots, patch
from . import log
from .app import application
from .connections import Serving
from .errors import Refused
from .metrics import OTHER
from .options import Options
from .policies import Policies
from .prefixes import Prefixes
from .server import Server
from .texts import Texts

# Environment variables that bound how many shapes of matrix products PyTorch's caches hold. With the default, 1,024,
# the caches take 300 MB.
SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
SWITCH = 5e-4  # sys.setswitchinterval in seconds: short, as threads take turns many times for each decoded token
BODY, LETTERS = 1 << 24, 64  # most bytes of a request's body, and most bytes for each token of the model's context


def start(model: str | None, host: str, port: int, options: Options) -> None:
    """Serve until SIGINT or SIGTERM. Raises ValueError or OSError for a model, store or port that cannot be used."""
    log.to_stderr()
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # progress bars would not be lines of JSON
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        server = _apart(lambda: server_of(model, **vars(options)))
        gc.collect()
        gc.freeze()  # else each collection scans all imported objects, and stops every thread for 0.3 s
        sys.setswitchinterval(SWITCH)
        port = listening.getsockname()[1]
        log.note("ready", model=server.name, host=host, port=port, page=page(host, port))

        def note(error: Refused, client: log.Client) -> None:
            server.metrics.refused(OTHER, error.status)
            if error.status != 503:  # 503, too many connections, would fill the log
                log.refused(OTHER, error, client)

        def begins() -> None:
            log.note("stopping", requests=len(server.calls), answers=server.scheduler.running)

        Serving(application(server), note, server.stop, begins).run(sockets=[listening])


def _apart(work: Callable[[], Server]) -> Server:
    """Run work() in a thread that then ends, and return the result. The OpenMP workers that loading starts end with the
    thread: if two threads have workers, the workers sleep after each loop, and a decoded token takes 1.6 times as long,
    so only the thread that owns the model may keep some. The thread is a daemon, unlike an executor's, so that Ctrl-C
    can end the process while a model is loaded."""
    result: Future[Server] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="kvevict loads", daemon=True)
    thread.start()
    thread.join()
    return result.result()


def page(host: str, port: int) -> str:
    """Return the URL of the server's page, for a browser on this machine."""
    name = "localhost" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/"


def server_of(model: str | None = None, **options: Any) -> Server:
    """Load and patch a model (None: the bundled one), and make a server of it. options: values of `Options`' fields."""
    for name, entries in SHAPES.items():
        os.environ.setdefault(name, entries)
    given, where = Options(**options), model or small_llama()
    loaded, tokenizer = load_model(where, given.dtype, given.device)
    decoder = find_decoder(loaded)
    context = families.context_of(decoder.config) or 1 << 20
    # Answers that come and go share the recordings of the pools of slots (`engine/record`).
    records = {*families.layer_kinds(decoder.config)} == {families.FULL_ATTENTION}
    policies = Policies(given, context, lambda policy, run: in_slots(policy, run, loaded), records)
    patch(loaded, policies.built(), tokenizer=tokenizer)
    if not policies.built().policy.recall:
        log.note("no beginning of a prompt is shared", logging.WARNING, reason=f"{given.policy} cannot recall")
    folder = None if given.store is None else Path(given.store)
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    texts = Texts(given.memory if folder is None else given.disk, folder and folder / "texts")
    files = folder and folder / "prefixes"
    prefixes = Prefixes(loaded, given.memory, files, lambda: given.disk - texts.bytes, texts.gone)
    name = given.name or (Path(where).name if Path(where).exists() else where)
    most = min(BODY, LETTERS * context + (1 << 16))
    server = Server(name, loaded, tokenizer, policies, prefixes, texts, given, most)
    if (together := server.manager.reader.together()) < given.batch // 2:
        log.note(
            "few answers to long prompts fit the memory at once",
            logging.WARNING,
            answers=together,
            batch=given.batch,
            reason=f"{given.memory} bytes for answers, a budget of {given.budget}: give more --memory-bytes, or a "
            "smaller --budget",
        )
    return server
