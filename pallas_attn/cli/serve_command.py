"""Options and help of `pallas-attn serve`.

What it does is in a module of its own, imported when it runs.
"""

from typing import Annotated

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="every command of pallas-attn but doctor"):
    import typer

from .help import PlainCommand
from .options import (
    Attending,
    AttentionOption,
    BatchInvariantOption,
    CacheDtypeOption,
    Dtype,
    DtypeOption,
    ImplementationOption,
    ModelOption,
    PageSizeOption,
    TemplateOption,
    collected,
    switch,
    template_variables,
)

serving = typer.Typer()
_LIMITS = "Limits"
_API_KEY = "PALLAS_ATTN_API_KEY"


def _limit(help: str, **options):
    return typer.Option(help=help, rich_help_panel=_LIMITS, **options)


@serving.command(
    cls=PlainCommand,
    epilog="""
**Examples**

SmolLM2 from its wheel, on this machine alone:

    pallas-attn serve

and an answer of it, in another terminal:

    curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "The sky is"}'

64 conversations of up to 8192 tokens at once, for whoever has the key:

    export PALLAS_ATTN_API_KEY=secret
    pallas-attn serve --model ~/qwen3 --dtype bfloat16 --num-rows 64 --max-len 8192 --host 0.0.0.0

TLS is for a proxy in front of it. SIGTERM or Ctrl-C: no new requests, accepted ones are finished; a second one ends it
at once.
""",
)
def serve(
    model: ModelOption = None,
    served_name: Annotated[
        str | None,
        typer.Option(help="What requests call the model.", show_default="its file, its folder or ORG/NAME"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=_API_KEY,
            show_envvar=True,
            help="What requests have to show as `Authorization: Bearer KEY`. Better by the environment: everybody on a "
            "machine sees command lines.",
            show_default="none is asked for",
        ),
    ] = None,
    template: TemplateOption = None,
    max_len: Annotated[
        int, typer.Option(min=2, help="Most tokens of a prompt and its answer, up to the model's context.")
    ] = 2048,
    num_rows: Annotated[int, typer.Option(min=1, help="Answers that are made at once.")] = 16,
    num_pages: Annotated[
        int | None,
        typer.Option(
            help="Pages of the KV cache per layer. With fewer than all rows can fill, answers wait for each other.",
            show_default="enough for all rows",
        ),
    ] = None,
    page_size: PageSizeOption = 16,
    step_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Most tokens of a step: more read prompts faster, fewer let answers wait less."
        ),
    ] = 256,
    burst: Annotated[
        int,
        typer.Option(
            min=1, help="Most tokens of an answer in a step: more are faster, fewer stream smoother."
        ),
    ] = 8,
    dtype: DtypeOption = Dtype.float32,
    cache_dtype: CacheDtypeOption = None,
    attention: AttentionOption = Attending.gqa,
    implementation: ImplementationOption = None,
    batch_invariant: BatchInvariantOption = False,
    access_log: Annotated[bool, switch("--access-log", "Log each request.")] = False,
    max_waiting: Annotated[
        int, _limit("Answers that wait while all rows are taken; more are refused (503).", min=0)
    ] = 256,
    max_choices: Annotated[int, _limit("Answers of one request: its prompts times n.", min=1)] = 16,
    max_tokens: Annotated[
        int | None, _limit("New tokens of an answer.", min=1, show_default="as many as fit")
    ] = None,
    max_body: Annotated[int, _limit("Bytes of a request's body (413).", min=1)] = 4 * 2**20,
    max_connections: Annotated[int, _limit("Connections at once, idle ones too (503).", min=1)] = 4096,
    request_timeout: Annotated[
        float, _limit("Seconds from a request to the end of its answer (504).", min=0.001)
    ] = 600,
    header_timeout: Annotated[float, _limit("Seconds for a request's headers (408).", min=0.001)] = 10,
    body_timeout: Annotated[float, _limit("Seconds for its body (408).", min=0.001)] = 30,
    write_timeout: Annotated[
        float, _limit("Seconds in which a client reads nothing of a waiting answer.", min=0.001)
    ] = 30,
    idle_timeout: Annotated[float, _limit("Seconds of a connection without a request.", min=0.001)] = 75,
    stop_timeout: Annotated[
        float, _limit("Seconds to finish accepted requests once told to stop.", min=0)
    ] = 60,
) -> int:
    """Serve a model to OpenAI's clients: completions, chats, tools, streams and metrics, many requests at once.

    /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics.
    """
    given = locals()
    from pallas_attn.cli.serve import ServeOptions, run_serve
    from pallas_attn.serve import Limits

    if api_key is not None and not api_key.strip():
        fail("serve", "--api-key", "a key, or none at all", repr(api_key))
    variables = template_variables("serve", template)
    return run_serve(collected(ServeOptions, given, template=variables, limits=collected(Limits, given)))
