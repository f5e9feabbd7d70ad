"""`pallas-attn serve`: load, compile, listen."""

import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from pallas_attn.models import default_model_path
from pallas_attn.models.hub import is_name
from pallas_attn.serve import App, Limits, Served, Server, bound
from pallas_attn.serve.server import is_local

from .model import ModelOptions, engine_of, load


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions):
    """The command's options, by their names on the command line."""

    served_name: str | None
    host: str
    port: int
    api_key: str | None
    max_len: int
    num_rows: int
    num_pages: int | None
    step_tokens: int
    burst: int
    limits: Limits
    access_log: bool


def run_serve(options: ServeOptions) -> int:
    """Runs the command until it is stopped; all output goes to stderr.

    Raises:
        ValueError, OSError, ImportError: what the user has to change, in one line.
    """
    err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    # First, so that nobody waits for the model only to learn that the port is taken.
    listener = bound(options.host, options.port)
    if not is_local(listener) and options.api_key is None:
        err.print(f"warning: whoever reaches {options.host} may use the model: --api-key asks them for a key")
    err.print("loading the model")
    loaded = load(err, options)
    engine = engine_of(
        loaded,
        options,
        max_len=options.max_len,
        num_rows=options.num_rows,
        num_pages=options.num_pages,
        step_tokens=max(options.step_tokens, options.num_rows),
        burst=options.burst,
    )
    served = Served(
        options.served_name or _name(options.model),
        engine,
        loaded.tokenizer,
        loaded.sampling,
        options.template,
    )
    err.print("compiling")
    # For greedy requests and for defaults; other programs are compiled when needed.
    with ThreadPoolExecutor() as pool:
        list(pool.map(engine.compile, (None, served.usual)))
    app = App(served, options.limits, num_rows=options.num_rows, api_key=options.api_key)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    if options.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    server = Server(app, options.limits, listener, access_log=options.access_log)
    server.run(
        lambda: err.print(_ready(server.url, served.name, options)),
        lambda left: err.print(f"stopping: {left} answers are finished first; a second signal ends at once"),
    )
    return 0


def _name(model: Path | None) -> str:
    """The name of the repository, folder or file."""
    if model is not None and is_name(model):
        return str(model)
    path = (model or default_model_path()).resolve()
    return path.name if path.is_dir() else path.stem


def _ready(url: str, name: str, options: ServeOptions) -> str:
    key = "" if options.api_key is None else ' -H "Authorization: Bearer $PALLAS_ATTN_API_KEY"'
    body = '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'
    return f"""ready: {url}/v1 serves {name}; Ctrl-C stops. For example:
    curl -N {url}/v1/chat/completions{key} -H "Content-Type: application/json" -d '{body}'"""
