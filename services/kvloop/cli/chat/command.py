"""`kvloop chat`."""

from typing import Annotated

import typer

from kvloop.cli.errors import sentences
from kvloop.cli.places import ROUTER, tokenizer_place


@sentences
def chat(
    *,
    router: Annotated[str, typer.Option(envvar="KVLOOP_ROUTER", help="host:port of a router.")] = ROUTER,
    token: Annotated[
        str | None, typer.Option(envvar="KVLOOP_TOKEN", help="Bearer token, where the router asks for one.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Served model, where there are several; its tokenizer is used.")
    ] = "",
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face name of the tokenizer. [default: the model's]")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: the model's]")] = None,
    top_p: Annotated[float | None, typer.Option(help="[default: the model's]")] = None,
    top_k: Annotated[int | None, typer.Option(help="[default: the model's]")] = None,
    min_p: Annotated[float | None, typer.Option(help="[default: the model's]")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="[default: the model's]")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends an answer; repeatable.")] = None,
) -> None:
    """Talk to a model; after each answer, see what was reused."""
    from rich.console import Console

    from kvloop.cli.chat.rendering import TemplateRenderer, spare_torch
    from kvloop.cli.chat.session import ChatOptions, ChatSession
    from kvloop.v1alpha1 import sampling_pb2

    sampling = sampling_pb2.SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or (),
    )
    spare_torch()
    console = Console()
    place = tokenizer or tokenizer_place(model)
    if console.is_terminal:
        with console.status("reading the tokenizer"):
            renderer = TemplateRenderer.load(place)
        console.print("/help lists the commands", style="dim")
    else:
        renderer = TemplateRenderer.load(place)
    ChatSession(router, token, renderer, ChatOptions(sampling, model, system), console).run()
